"""`negchain export`: a trained encoder for other libraries, with a card that loads it.

| format | writes | loaded by |
|---|---|---|
| timm | the backbone under timm's names | `timm.create_model`, `load_state_dict` |
| torchvision | the backbone under torchvision's names (ResNets) | `torchvision.models`, the same |
| onnx | a graph from pixels to features | onnxruntime and whatever reads ONNX |
| safetensors | backbone and projector | negchain, also as `--pretrained` |

Beside it go `config.json` (encoder and training) and `README.md`, the card, whose code block loads
the file. Absolute paths are not written: of data and other runs only the last name is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torchvision.transforms import v2  # type: ignore[import-untyped]

from negchain.encoders import Encoder, timm_arguments
from negchain.files import replacing
from negchain.printable import reason
from negchain.tasks.images import recipe_for
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.loggers import for_others
from negchain.train.presets import choose

FORMATS = ("timm", "torchvision", "onnx", "safetensors")

_RESNETS = {"resnet18": 512, "resnet50": 2048}
_LOAD = 'model.load_state_dict(load_file("model.safetensors"))\nmodel.eval()'


def export_encoder(
    folder: Path, encoder: Encoder, config: TrainConfig, results: Mapping[str, Any], form: str
) -> None:
    """Write an encoder of the CPU in eval mode, and a card with `results`, into a new folder."""
    choose("--format", form, FORMATS)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--out {folder} is not empty; name a new folder")
    described = encoder.encoder_config
    normalize = recipe_for(config.recipe, described["image_size"], described["channels"]).normalize
    scaled = ""
    if form == "onnx":
        file_name, model, code = "model.onnx", _onnx(encoder, normalize), _ONNX_CODE
    else:
        weights, code = _WEIGHTS[form](encoder)
        file_name, model = "model.safetensors", save(weights, metadata={"format": "pt"})
        if normalize is not None:
            scaled = f", less the mean {normalize[0]}, over {normalize[1]}"
    record = {"encoder": dict(described), "training": for_others(config)}
    card = _card(encoder, record["training"], results, code, scaled)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (
        (file_name, model),
        ("config.json", json.dumps(record, indent=2).encode() + b"\n"),
        ("README.md", card.encode("utf-8", "backslashreplace")),
    ):
        with replacing(folder / name) as file:
            file.write(data)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    layout = torch.contiguous_format  # a copy: safetensors refuses tensors that share memory
    return {k: v.cpu().clone(memory_format=layout) for k, v in module.state_dict().items()}


def _negchain(encoder: Encoder) -> tuple[dict[str, Tensor], str]:
    arguments = {k: v for k, v in encoder.encoder_config.items() if k != "name"}
    call = "".join(f",\n    {key}={value!r}" for key, value in arguments.items())
    return _weights(encoder), (
        "import torch\n"
        "from negchain.encoders import build_encoder\n"
        "from safetensors.torch import load_file\n\n"
        f"model = build_encoder({encoder.encoder_config['name']!r}{call})\n{_LOAD}\n"
        "features = model.features(images)"
    )


def _resnet(
    encoder: Encoder, head: str, create: str, group_norm: str
) -> tuple[dict[str, Tensor], str]:
    """One of our ResNets as a library's, `create` up to its norm layer; names are shared."""
    described = encoder.encoder_config
    norm = {"none": "nn.Identity", "group": group_norm}.get(described["norm"])
    channels = described["channels"]
    lines = [
        f"import torch\n{head}\nfrom safetensors.torch import load_file\nfrom torch import nn\n",
        f"model = {create}{f', norm_layer={norm}' if norm else ''})",
    ]
    if described["small_stem"]:
        lines.append(f"model.conv1 = nn.Conv2d({channels}, 64, 3, padding=1, bias=False)")
        lines.append("model.maxpool = nn.Identity()")
    elif channels != 3:
        lines.append(f"model.conv1 = nn.Conv2d({channels}, 64, 7, 2, 3, bias=False)")
    weights = {k.replace("fc.0.", "fc."): v for k, v in _weights(encoder.backbone).items()}
    return weights, "\n".join([*lines, _LOAD, "features = model(images).relu()"])


def _torchvision(encoder: Encoder) -> tuple[dict[str, Tensor], str]:
    name = encoder.encoder_config["name"]
    if name not in _RESNETS:
        raise ConfigError(
            f"--format torchvision is for {' and '.join(_RESNETS)}, and this encoder is {name}; "
            f"use --format {'onnx' if name == 'small-cnn' else 'timm'}"
        )
    create = f"{name}(num_classes={_RESNETS[name]}"
    group_norm = "lambda width: nn.GroupNorm(32, width)"
    return _resnet(encoder, f"from torchvision.models import {name}", create, group_norm)


def _timm(encoder: Encoder) -> tuple[dict[str, Tensor], str]:
    described = encoder.encoder_config
    name = described["name"]
    if name == "small-cnn":
        raise ConfigError("timm has no small-cnn; use --format onnx or safetensors")
    if name in _RESNETS:
        create = f"timm.create_model({name!r}, num_classes={_RESNETS[name]}"
        return _resnet(encoder, "import timm", create, "timm.layers.GroupNorm")
    arguments = timm_arguments(described)
    weights = _weights(encoder.backbone)
    if timm.create_model(name, **arguments).state_dict().keys() != weights.keys():
        raise ConfigError(
            f"--norm {described['norm']} took BatchNorm out of {name}, which timm's own model "
            "has; use --format onnx or safetensors"
        )
    given = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return weights, (
        "import timm\nimport torch\nfrom safetensors.torch import load_file\n\n"
        f"model = timm.create_model({name!r}, {given})\n{_LOAD}\n"
        "features = model(images)"
    )


_WEIGHTS = {"timm": _timm, "torchvision": _torchvision, "safetensors": _negchain}

_ONNX_CODE = """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(features,) = session.run(["features"], {"images": images.numpy()})"""


def _onnx(encoder: Encoder, normalize: Any) -> bytes:
    try:
        import onnxscript  # noqa: F401 - what torch's exporter is made of
    except ImportError as error:
        raise ConfigError("--format onnx needs: pip install onnx onnxscript") from error
    described = encoder.encoder_config
    side = described["image_size"]
    model = encoder.backbone
    if normalize is not None:
        model = nn.Sequential(v2.Normalize(*normalize), model)
    try:
        program = torch.onnx.export(
            model.eval(),
            (torch.zeros(2, described["channels"], side, side),),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["features"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
        )
    except Exception as error:  # torch, onnxscript and onnx-ir of different years do not fit
        raise ConfigError(
            f"torch {torch.__version__} could not export {described['name']} to ONNX "
            f"({reason(error)}); upgrade torch and onnxscript together, or use another --format"
        ) from error
    assert program is not None
    graph = program.model_proto
    for node in graph.graph.node:  # the exporter notes where in our files each one came from
        del node.metadata_props[:]
    return bytes(graph.SerializeToString())


def _card(
    encoder: Encoder, training: dict[str, Any], results: Mapping[str, Any], code: str, scaled: str
) -> str:
    described = encoder.encoder_config
    side, channels = described["image_size"], described["channels"]
    scores = "\n".join(f"| {k} | {v:.4f} |" for k, v in results.items() if isinstance(v, float))
    return f"""# {described["name"]} trained with {training["method"]}

Features of size {encoder.feature_dim} for `images`, a float32 tensor
[N, {channels}, {side}, {side}] of pixels in [0, 1]{scaled}.
Trained by negchain on `{training["data"]}`: method {training["method"]}, batch size
{training["batch_size"]}, beta {training["beta"]:g}, {training["optimizer"]}, \
seed {training["seed"]}.

## Load

```python
{code}
```

## Results

| number | value |
|---|---|
{scores or "| none yet | |"}
"""
