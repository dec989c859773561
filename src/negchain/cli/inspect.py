"""`negchain evaluate`, `embed`, `report`: looking at finished runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import torch
import typer
from rich.console import Console
from rich.table import Table

from negchain.report import write_report
from negchain.train import checkpoint, trainer
from negchain.train.config import ConfigError
from negchain.train.export import (
    check_embedding_file,
    export_encoder,
    load_run_config,
    load_trained,
    write_embeddings,
)
from negchain.train.judge import Judge

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


def evaluate(
    run: RunFolderArgument,
    data: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Option(help="Other data, with labelled train/ and test/."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to encode.")] = "auto",
) -> int:
    """Probe a run's newest checkpoint: 1-NN, linear probes, exact global loss.

    Prints a table and writes `evaluation.json` into the run folder.

        negchain evaluate runs/photos --data ./other-photos
    """
    judge, encoder, step = _judge(run, data, device)
    if data is not None and not judge.data.labelled:
        raise ConfigError(
            f"{data} has no labelled train/ and test/ folders, so there is nothing to probe"
        )
    numbers: dict[str, Any] = {"step": step, "data": judge.config.data}
    numbers |= judge.thorough(encoder)[0]
    table = Table("number", "value", box=None)
    for name, value in numbers.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console(highlight=False).print(table)
    with checkpoint.replacing(run / "evaluation.json") as file:
        file.write(json.dumps(numbers, indent=2).encode() + b"\n")
    return 0


def embed(
    run: RunFolderArgument,
    data: Annotated[str, typer.Option(help="Images to embed: a folder, or a data set's name.")],
    out: Annotated[Path, typer.Option(help="File to write: .npz or .parquet.")],
    export: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it
        typer.Option(help="Also write the encoder (safetensors, model card) into this folder."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to encode.")] = "auto",
) -> int:
    """Write embeddings of all images of a folder, and optionally export the encoder.

    negchain embed runs/photos --data ./photos --out photos.npz --export model/
    """
    check_embedding_file(out)
    judge, encoder, _ = _judge(run, data, device)
    parts = [judge.data.pretrain, *([judge.data.test] if judge.data.test is not None else [])]
    if export is not None:
        summary = run / "summary.json"
        results = json.loads(summary.read_text()) if summary.exists() else {}
        export_encoder(export, encoder, load_run_config(run), results)
    features = torch.cat([judge.embed(encoder, part) for part in parts])
    names = tuple(name for part in parts for name in part.names)
    labels = [part.labels for part in parts if part.labels is not None]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_embeddings(out, names, features, torch.cat(labels) if labels else None)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{len(names):,} embeddings of size {features.shape[1]}: {out}")
    for name, reason in judge.data.skipped:
        console.print(f"left out: {name} ({reason})", markup=False)
    if export is not None:
        console.print(f"encoder: {export}")
    return 0


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run folders.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
) -> int:
    """Write one HTML page about a run, or comparing several; it needs no network.

    negchain report runs/a runs/b --out compare.html
    """
    print(f"report: {write_report(runs, out)}")
    return 0


def _judge(run: Path, data: str | None, device: str) -> tuple[Judge, Any, int]:
    config = load_run_config(run)
    encoder, state = load_trained(run)
    described = encoder.encoder_config
    changed = replace(config, device=device, data=data or config.data)  # type: ignore[arg-type]
    where = trainer.choose_device(changed)
    subset = config.subset if data is None else None  # a part of the run's own data, not of others
    changed = replace(changed, image_size=described["image_size"], subset=subset)
    bundle = trainer.load_images(changed, progress=False)
    if bundle.pretrain.channels != described["channels"]:
        raise ConfigError(
            f"the encoder takes images of {described['channels']} channels and {changed.data} has "
            f"{bundle.pretrain.channels}"
        )
    augment = trainer.run_augmentation(replace(config, image_size=described["image_size"]), bundle)
    autocast = trainer.autocast_dtype(config, where)
    judge = Judge(changed, bundle, augment, where, autocast)
    return judge, encoder.to(where), int(state["step"])
