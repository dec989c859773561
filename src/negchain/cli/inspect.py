"""`negchain evaluate`, `embed`, `export`, `report`, `duplicates`: what finished runs hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from negchain import tasks
from negchain.cli.options import Import
from negchain.files import read_object, replacing, table_columns
from negchain.printable import counted
from negchain.progress import result, say
from negchain.train.config import ConfigError
from negchain.train.run_folder import load_run_config

if TYPE_CHECKING:  # what brings torch is imported by the commands, so that --help is quick
    from negchain.tasks.task import Task

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Device = Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to encode.")]
Root = Annotated[str, typer.Option(help="Folder of downloaded data sets.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        metavar="kept|latest|best|STEP",
        help="Which of the run's checkpoints; kept: with --patience the best, else the latest.",
    ),
]


def evaluate(
    run: RunFolderArgument,
    data: Annotated[
        str | None,
        typer.Option(help="Other data of the run's kind; images need labelled train/ and test/."),
    ] = None,
    checkpoint: Checkpoint = "kept",
    root: Root = "data",
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Judge a run's encoder, or another checkpoint, beside the encoder it started from.

    Prints a table and writes `evaluation.json` into the run folder.

        negchain evaluate runs/photos --data ./other-photos
    """
    from negchain.report import load_run, summary_table
    from negchain.report.advice import against_baselines
    from negchain.tasks.task import at_start

    task, encoder, step = _judge(run, data, device, root, checkpoint)
    if data is not None and task.unjudged is not None:
        raise ConfigError(f"{data} cannot be probed: {task.unjudged}; give data with labels")
    judge, numbers = task.judge(), {"step": step, "data": task.config.data}
    kind, known = tasks.named(task.config.task), load_run(run)
    start = kind.rebuild(encoder.encoder_config)
    first, answers = judge.before(start.to(task.device))
    numbers, before = numbers | judge.baselines(first), at_start(answers)
    if task.config.pretrained is not None:  # the run began with other weights than these
        numbers = {n: v for n, v in numbers.items() if not n.startswith("untrained_")}
        before = {}
        if data is None:
            summary = known.summary or {}
            numbers |= {n: v for n, v in summary.items() if n.startswith("untrained_")}
            before = {n: a for n, a in known.artifacts.items() if n.startswith("before_")}
    found, answers = judge.thorough(encoder)
    numbers |= found
    count = task.info().get("test")
    try:
        on = f", judged on {count:,} {kind.noun}" if count else ""
        result(f"step {step:,}, {task.config.data}{on}")
        judged = replace(known, metrics=[], summary=numbers, artifacts={**answers, **before})
        Console(highlight=False).print(summary_table(judged))
        for sentence in against_baselines(judged):
            result(sentence)
    finally:  # a reader who left (`| head`) loses no file, a read-only folder no numbers
        with replacing(run / "evaluation.json") as file:
            file.write(json.dumps(numbers, indent=2).encode() + b"\n")


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
    checkpoint: Checkpoint = "kept",
    root: Root = "data",
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Write embeddings of images with file and class names.

    negchain embed runs/photos --data ./photos --out photos.csv
    """
    from negchain.train.trained import check_embedding_file, load_run_encoder

    check_embedding_file(out)
    if out.resolve() in (Path(name).resolve() for name in data):
        raise ConfigError(f"--out must not be what --data reads, got {out}; choose another name")
    trained = load_run_encoder(run, device, root, checkpoint)
    _note(trained.notes)
    found = trained.read(data[0] if len(data) == 1 else data)
    _note(found.notes)
    embedded = trained.embed_found(found)
    embedded.save(out)
    count, size = embedded.features.shape
    result(f"{counted(count, 'embedding', 'embeddings')} of size {size}: {out}")
    for name, reason in found.skipped:
        result(f"left out: {name} ({reason})")


def export(
    run: RunFolderArgument,
    out: Annotated[Path, typer.Option(help="A new folder for the file and its card.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="timm|torchvision|onnx|safetensors",
            help="The library that is to load it.",
        ),
    ] = "safetensors",
    checkpoint: Checkpoint = "kept",
    import_: Import = None,
) -> None:
    """Write a run's encoder for other libraries, with a card whose code loads it.

    negchain export runs/photos --format onnx --out model/
    """
    from negchain.encoders import Encoder
    from negchain.export import export_encoder
    from negchain.train.pretrained import load_trained, used_by

    config = load_run_config(run)
    encoder, loaded = load_trained(run, checkpoint)
    if not isinstance(encoder, Encoder):
        raise ConfigError(
            f"only encoders of --task images are exported, and {run} is of --task {config.task}; "
            + used_by(run, encoder)
        )
    _note(loaded.warnings)
    summary = run / "summary.json"
    last = "latest" if config.patience is None else "best"
    ended = summary.exists() and checkpoint in ("kept", last)  # what its numbers are of
    export_encoder(out, encoder, config, read_object(summary) if ended else {}, form)
    result(f"encoder: {out}")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or more run folders.")],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
    import_: Import = None,
) -> None:
    """Write one HTML page about a run, or comparing several; it needs no network.

    negchain report runs/a runs/b --out compare.html
    """
    from negchain.report import write_report

    _require_page(out)
    result(f"report: {write_report(runs, out)}")


def _require_page(out: Path) -> None:
    if out.suffix != ".html":
        raise ConfigError(f"--out must end in .html, got {out.name!r}; rename it")


def _note(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def _judge(
    run: Path, data: str | None, device: str, root: str, which: str
) -> tuple[Task, Any, int]:
    from negchain.train.pretrained import load_trained
    from negchain.train.resolve import choose_device

    config = load_run_config(run)
    encoder, loaded = load_trained(run, which)
    _note(loaded.warnings)
    changed = replace(config, device=device, data=data or config.data, root=root)  # type: ignore[arg-type]
    if data is not None:
        changed = replace(changed, subset=None)  # a part of the run's own data, not of others
    task = tasks.load(changed, encoder_config=encoder.encoder_config)
    task.place(choose_device(device))
    return task, encoder.to(task.device), loaded.step


def duplicates(
    run: RunFolderArgument,
    out: Annotated[Path, typer.Option(help="The page to write; a .csv goes beside it.")],
    data: Annotated[
        str | None,
        typer.Option(help="Images to look at: a folder, or a list; the run's own by default."),
    ] = None,
    above: Annotated[float, typer.Option(help="Least cosine similarity of a pair.")] = 0.98,
    checkpoint: Checkpoint = "kept",
    root: Root = "data",
    device: Device = "auto",
    import_: Import = None,
) -> None:
    """Find near-duplicates: pairs of images whose embeddings are more similar than --above.

    A pair across train/ and test/ makes accuracies look better than they are; a pair in train/ is
    trained on as two negatives of each other.

        negchain duplicates runs/photos --out duplicates.html --above 0.99
    """
    from negchain.neighbours import similar_pairs
    from negchain.report.duplicates import COLUMNS, Pair, crowded, write_duplicates
    from negchain.train.trained import load_run_encoder

    _require_page(out)
    table = out.with_suffix(".csv")
    if table.exists() and table_columns(table) != list(COLUMNS):
        raise ConfigError(
            f"{table} would be overwritten, and it is no table of duplicates; choose another --out"
        )
    trained = load_run_encoder(run, device, root, checkpoint)
    _note(trained.notes)
    found = trained.read(data or trained.config.data)
    _note(found.notes)
    embedded = trained.embed_found(found)
    count = len(embedded.names)
    positions, cosines, total = similar_pairs(
        embedded.features, above, chunk=max(1, 2**25 // max(1, count))
    )
    names, kinds = embedded.names, embedded.class_names
    pairs = [
        Pair(score, (names[a], names[b]), (kinds[a], kinds[b]), (a, b), a < found.trained <= b)
        for (a, b), score in zip(positions.tolist(), cosines.tolist(), strict=True)
    ]
    write_duplicates(
        out, Path(data or trained.config.data).name, pairs, lambda i: found.picture(i).numpy(),
        total=total, images=count, above=above,
    )  # fmt: skip
    of = f"{counted(total, 'pair', 'pairs')} of {counted(count, 'image', 'images')}"
    result(f"{of} with a similarity of at least {above:g}")
    for name, reason in found.skipped:
        result(f"left out: {name} ({reason})")
    if crowded(total, count):
        result("so many pairs mean that the encoder hardly tells images apart: raise --above")
    result(f"page: {out}")
    result(f"table: {table}")
