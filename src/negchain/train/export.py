"""What leaves a run: a trained encoder others can load.

The export is a folder with `model.safetensors` (the backbone's weights under the names its own
library uses), `config.json` and `README.md`, a model card whose code block loads the weights with
plain torch, torchvision or timm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save_file

from negchain import tasks
from negchain.encoders import Encoder, EncoderConfig, refuse_larger
from negchain.train import checkpoint
from negchain.train.config import ConfigError, TrainConfig, to_json
from negchain.train.run_folder import load_run_config


def load_trained(path: Path, which: str = "latest") -> tuple[Any, checkpoint.Loaded]:
    """The encoder of a run's checkpoint, on the CPU in eval mode, and the checkpoint.

    Args:
        path: the run folder.
        which: "latest", "best", or the step of one that was kept. Where "latest" had to step back
            from a damaged file, `Loaded.warnings` says so.
    """
    folder = path / "checkpoints"
    loaded = checkpoint.load_latest(folder) if which == "latest" else None
    if which != "latest":
        loaded = checkpoint.load_named(folder, which)
    if loaded is None:
        raise ConfigError(f"{path} has no checkpoint yet; let it train, or use --resume")
    return _encoder_of(loaded, folder, tasks.named(load_run_config(path).task)), loaded


def _encoder_of(loaded: checkpoint.Loaded, source: Path, kind: tasks.Kind) -> Any:
    """The encoder that a checkpoint holds."""
    described, weights = loaded.state.get("encoder_config"), loaded.state.get("encoder")
    try:
        if not isinstance(described, dict) or not isinstance(weights, dict):
            raise ValueError("it holds no encoder")
        if kind.name == "images":  # its names are timm's, of any size
            refuse_larger(described, loaded.num_bytes)
        encoder = kind.rebuild(described)
        encoder.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"the newest checkpoint in {source} does not fit the encoder it describes ({reason}); "
            "choose another one"
        ) from error
    return encoder.eval()


def export_encoder(
    folder: Path, encoder: Encoder, config: TrainConfig, results: dict[str, Any]
) -> None:
    """Write the backbone with a model card into a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--export {folder} is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().cpu().contiguous() for k, v in encoder.backbone.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    record = {"encoder": dict(encoder.encoder_config), "training": json.loads(to_json(config))}
    (folder / "config.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    card = _card(encoder, config, results).encode("utf-8", "backslashreplace")
    (folder / "README.md").write_bytes(card)


def _card(encoder: Encoder, config: TrainConfig, results: dict[str, Any]) -> str:
    described = encoder.encoder_config
    scores = "\n".join(f"| {k} | {v:.4f} |" for k, v in results.items() if isinstance(v, float))
    return f"""# {described["name"]} trained with {config.method}

Features of size {encoder.feature_dim} for {described["channels"]}-channel images of
{described["image_size"]} x {described["image_size"]} pixels, values in [0, 1]\
{" after the recipe's normalisation" if config.recipe == "cifar" else ""}.
Trained by negchain on `{Path(config.data).name}`: method {config.method}, batch size
{config.batch_size}, beta {config.beta:g}, {config.optimizer}, seed {config.seed}.

## Load

```python
{loading_code(described)}
```

## Results

| number | value |
|---|---|
{scores or "| none yet | |"}
"""


def loading_code(config: EncoderConfig) -> str:
    """A few lines of plain torch that rebuild the backbone and load `model.safetensors`."""
    load = 'model.load_state_dict(load_file("model.safetensors"))\nmodel.eval()'
    name, norm, channels = config["name"], config["norm"], config["channels"]
    head = "import torch\nfrom torch import nn\nfrom safetensors.torch import load_file\n"
    if name in ("resnet18", "resnet50") and norm != "group":
        width = 512 if name == "resnet18" else 2048
        layer = ", norm_layer=lambda width: nn.Identity()" if norm == "none" else ""
        lines = [
            "from torchvision.models import " + name,
            f"model = {name}(weights=None{layer})",
            f"model.fc = nn.Sequential(nn.Linear({width}, {width}), nn.ReLU())",
        ]
        if config["small_stem"]:
            lines.append(f"model.conv1 = nn.Conv2d({channels}, 64, 3, padding=1, bias=False)")
            lines.append("model.maxpool = nn.Identity()")
        elif channels != 3:
            lines.append(f"model.conv1 = nn.Conv2d({channels}, 64, 7, 2, 3, bias=False)")
        return head + "\n".join(lines) + "\n" + load
    if name not in ("resnet18", "resnet50", "small-cnn") and norm == "batch":
        published = timm.get_pretrained_cfg(name)
        fixed = published is not None and published.fixed_input_size  # as in build_encoder
        size = f", img_size={config['image_size']}" if fixed else ""
        create = f'model = timm.create_model("{name}", num_classes=0, in_chans={channels}{size})'
        return head + "import timm\n" + create + "\n" + load
    arguments = {k: v for k, v in config.items() if k != "name"}
    call = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
    return (
        "from negchain.encoders import build_encoder\n"
        "from safetensors.torch import load_file\n"
        f"model = build_encoder({name!r}, {call}).backbone\n" + load
    )
