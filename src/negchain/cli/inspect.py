"""`negchain evaluate`, `embed`, `report`: looking at finished runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from negchain.data.printable import printable
from negchain.encoders import rebuild_encoder
from negchain.report import summary_table, write_report
from negchain.train import checkpoint, trainer
from negchain.train.config import ConfigError
from negchain.train.export import export_encoder, load_run_config, load_trained
from negchain.train.judge import Judge, baselines
from negchain.train.trained import check_embedding_file, load_run_encoder

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
        raise ConfigError(f"{printable(data)} cannot be probed: {judge.data.unprobed}")
    numbers: dict[str, Any] = {"step": step, "data": judge.config.data}
    fresh = rebuild_encoder(encoder.encoder_config).to(judge.device)
    numbers |= baselines(judge.before(fresh)) | judge.thorough(encoder)[0]
    console = Console(highlight=False)
    console.print(f"step {step:,}, {judge.config.data}", markup=False)
    console.print(summary_table(numbers))
    with checkpoint.replacing(run / "evaluation.json") as file:
        file.write(json.dumps(numbers, indent=2).encode() + b"\n")
    return 0


def embed(
    run: RunFolderArgument,
    data: Annotated[
        list[str],
        typer.Option(
            help="Images: a folder, a data set's name, a file, a .txt with a path per line; "
            "several times for several files."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write: .npz, .csv or .parquet.")],
    export: Annotated[
        Optional[Path],  # noqa: UP045 - typer reads it
        typer.Option(help="Also write the encoder (safetensors, model card) into this folder."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to encode.")] = "auto",
) -> int:
    """Write embeddings of images with file and class names, and optionally export the encoder.

    negchain embed runs/photos --data ./photos --out photos.csv --export model/
    """
    check_embedding_file(out)
    trained = load_run_encoder(run, device)
    found = trained.read(data[0] if len(data) == 1 else data)
    if export is not None:
        summary = run / "summary.json"
        results = json.loads(summary.read_text()) if summary.exists() else {}
        export_encoder(export, trained.encoder, load_run_config(run), results)
    embedded = trained.embed_found(found)
    embedded.save(out)
    console = Console(highlight=False, soft_wrap=True)
    count, size = embedded.features.shape
    console.print(f"{count:,} embeddings of size {size}: {out}", markup=False)
    for name, reason in found.skipped:
        console.print(f"left out: {name} ({reason})", markup=False)
    if export is not None:
        console.print(f"encoder: {export}", markup=False)
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
