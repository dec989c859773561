"""Weights from files: the encoder of a run's checkpoint, and what `--pretrained` starts from.

Tensors are matched by name and shape; what does not match keeps its fresh weights and is named.
Nothing is unpickled but tensors.
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import load_file
from torch import Tensor

from negchain import tasks
from negchain.encoders import Encoder, timm_arguments
from negchain.files import open_plain
from negchain.printable import reason
from negchain.train import checkpoint
from negchain.train.config import ConfigError
from negchain.train.run_folder import is_run, load_run_config

# Keys under which other people's checkpoints hold a state dict, and prefixes of its names.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "encoder", "state")
_PREFIXES = ("", "backbone.", "encoder.", "model.", "net.", "model.backbone.", "encoder_q.",
             "image.backbone.")  # fmt: skip


KEPT = "kept"
"""The checkpoint a run's results are of: with --patience, once it has ended, the best."""


def load_trained(path: Path, which: str = KEPT) -> tuple[Any, checkpoint.Loaded]:
    """The encoder of a run's checkpoint, on the CPU in eval mode, and the checkpoint.

    `which`: "kept", "latest", "best", or the step of one that is there. Where "latest" had to step
    back from a damaged file, `Loaded.warnings` says so.
    """
    folder, config = path / "checkpoints", load_run_config(path)
    if which == KEPT:
        ended = (path / "summary.json").exists() and config.patience is not None
        which = "best" if ended else "latest"
    latest = which == "latest"
    loaded = checkpoint.load_latest(folder) if latest else checkpoint.load_named(folder, which)
    if loaded is None:
        raise ConfigError(f"{path} has no checkpoint yet; let it train, or use --resume")
    kind = tasks.named(config.task)
    described, weights = loaded.state.get("encoder_config"), loaded.state.get("encoder")
    try:
        if not isinstance(described, dict) or not isinstance(weights, dict):
            raise ValueError("it holds no encoder")
        kind.fits(described, loaded.num_bytes)
        encoder = kind.rebuild(described)
        encoder.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"a checkpoint in {folder} does not fit the encoder it describes ({reason(error)}); "
            "choose another one"
        ) from error
    return encoder.eval(), loaded


def start_from(encoder: Encoder, source: str) -> str:
    """Load weights into a fresh encoder on the CPU; returns a sentence about what was found.

    `source`: "timm" (the weights timm publishes for the encoder's name; may download), a run
    folder, one that `negchain export` wrote, a .safetensors file, or what `torch.save` wrote.
    """
    exported = Path(source) / "model.safetensors"
    if source == "timm":
        weights = _from_timm(encoder)
    elif exported.is_file():
        weights = read_weights(exported)
    elif is_run(source):
        weights = dict(load_trained(Path(source))[0].state_dict())
    else:
        weights = read_weights(Path(source))
    own, unwrapped = encoder.backbone.state_dict(), without_wrapper(weights)
    # as they are first: an encoder may have a part that is called "module"
    matches = [_matching(own, w, prefix) for w in (weights, unwrapped) for prefix in _PREFIXES]
    found = max(matches, key=len)
    fresh = [name for name in own if name not in found]
    have, need = (sum(t.numel() for t in tensors.values()) for tensors in (found, own))
    if have < need / 2:
        raise ConfigError(
            f"--pretrained {source} holds {len(found)} of the {len(own)} tensors of "
            f"{encoder.encoder_config['name']} with norm={encoder.encoder_config['norm']!r}; the "
            f"first it lacks is {fresh[0]!r}: choose the encoder, --norm and --stem the weights "
            "were made with"
        )
    spoiled = [n for n, t in found.items() if t.is_floating_point() and not t.isfinite().all()]
    if spoiled:
        raise ConfigError(
            f"--pretrained {source} must hold finite weights, and {spoiled[0]!r} has NaN or "
            "infinities; the file is damaged or of a run that diverged: give another one"
        )
    encoder.backbone.load_state_dict(found, strict=False)
    head = encoder.projector.state_dict()
    matches = [_matching(head, named, "projector.") for named in (weights, unwrapped)]
    if len(head_found := max(matches, key=len)) == len(head):
        encoder.projector.load_state_dict(head_found)
    rest = f"; fresh: {', '.join(fresh[:4])}{', ...' * (len(fresh) > 4)}" if fresh else ""
    return f"weights from {source}: {len(found)} of {len(own)} tensors of the backbone{rest}"


def _matching(own: Mapping[str, Tensor], weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    found = {name: weights.get(prefix + name) for name in own}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and value.shape == own[name].shape
    }


def _from_timm(encoder: Encoder) -> dict[str, Any]:
    name = encoder.encoder_config["name"]
    published = timm.get_pretrained_cfg(name)
    if published is None or not published.has_weights:
        raise ConfigError(f"timm has no weights for {name!r}; leave out --pretrained")
    try:
        model = timm.create_model(name, pretrained=True, **timm_arguments(encoder.encoder_config))
    except Exception as error:  # no network, mostly; each library in between has errors of its own
        raise ConfigError(
            f"timm's weights for {name!r} could not be fetched ({reason(error)}); try again with a "
            "network, or give a file of weights"
        ) from error
    return dict(model.state_dict())


def read_weights(path: Path) -> dict[str, Any]:
    """The tensors of a file by name, without what `torch.compile` put into names."""
    try:
        with open_plain(path.resolve()) as file:  # the user named it: a link of a cache is fine
            if path.suffix == ".safetensors":
                return _as_written(load_file(path))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as archive:
                content = checkpoint.load_tensors(archive, old=True)
    except Exception as error:  # half a file, or not a file of weights at all
        raise ConfigError(
            f"--pretrained {path} is no file of weights ({reason(error)}); give a state dict saved "
            "by torch.save or as .safetensors"
        ) from error
    while isinstance(content, dict):
        inner = next((content[k] for k in _WRAPPERS if isinstance(content.get(k), dict)), None)
        if inner is None:
            return _as_written(content)
        content = inner
    raise ConfigError(f"--pretrained {path} holds no state dict, but {type(content).__name__}")


def _as_written(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Without the parts of names that `torch.compile` of the model or of a part added.

    Example:
        >>> _as_written({"_orig_mod.module.fc.weight": 1, "net._orig_mod.0.my_orig_mod.bias": 2})
        {'module.fc.weight': 1, 'net.0.my_orig_mod.bias': 2}
    """
    return {
        ".".join(part for part in str(name).split(".") if part != "_orig_mod"): value
        for name, value in weights.items()
    }


def without_wrapper(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Names as they are outside `DataParallel` or DDP, which put "module." before all of them."""
    return {name.removeprefix("module."): value for name, value in weights.items()}


def used_by(run: Path, encoder: Any) -> str:
    """What to use an encoder with that is no encoder of images alone, in words."""
    if (run / "model").is_dir():
        return f"sentence-transformers loads it: SentenceTransformer('{run}/model')"
    images = "image_size" in encoder.encoder_config
    return "use negchain.load" if images else "negchain.train.pretrained.load_trained gives it"
