"""`negchain duplicates`: pairs of images that a trained encoder can hardly tell apart."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Optional

import typer

from negchain.cli.terminal import result
from negchain.files import replacing
from negchain.train.config import ConfigError

SHOWN = 200  # pairs on the page; the CSV has them all
TOO_MANY = 0.05  # share of all pairs above the similarity, from which the encoder is to blame


def duplicates(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The page to write; a .csv goes beside it.")],
    data: Annotated[
        Optional[str],  # noqa: UP045 - typer reads it
        typer.Option(help="Images to look at: a folder, or a list; the run's own by default."),
    ] = None,
    above: Annotated[float, typer.Option(help="Least cosine similarity of a pair.")] = 0.98,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where to encode.")] = "auto",
) -> int:
    """Find near-duplicates: pairs of images whose embeddings are more similar than --above.

    Pairs across train/ and test/ flatter every accuracy; pairs in train/ are no negatives.

        negchain duplicates runs/photos --out duplicates.html --above 0.99
    """
    from negchain.neighbours import similar_pairs
    from negchain.report.duplicates import Pair, write_duplicates
    from negchain.train.trained import load_run_encoder

    if out.suffix != ".html":
        raise ConfigError(f"--out must end in .html, got {out.name!r}; the .csv goes beside it")
    trained = load_run_encoder(run, device)
    found = trained.read(data or trained.config.data)
    embedded = trained.embed_found(found)
    count = len(embedded.names)
    positions, cosines, total = similar_pairs(
        embedded.features, above, chunk=max(1, 2**25 // max(1, count))
    )
    names, kinds = embedded.names, embedded.class_names
    pairs = [
        Pair(score, (names[a], names[b]), (kinds[a], kinds[b]), (a, b))
        for (a, b), score in zip(positions.tolist(), cosines.tolist(), strict=True)
    ]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["similarity", "file_a", "file_b", "class_a", "class_b"])
    writer.writerows([f"{p.similarity:.6f}", *p.names, *p.classes] for p in pairs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.with_suffix(".csv")) as file:
        file.write(text.getvalue().encode())
    possible = count * (count - 1) // 2
    crowded = possible > 0 and total > max(TOO_MANY * possible, count)
    pictures = {i: found.picture(i).numpy() for p in pairs[:SHOWN] for i in p.positions}
    title = Path(data or trained.config.data).name
    write_duplicates(
        out, title, pairs[:SHOWN], pictures,
        total=total, images=count, above=above, crowded=crowded,
    )  # fmt: skip
    result(f"{total:,} pairs of {count:,} images with a similarity of at least {above:g}")
    if crowded:
        result("that is so many that the encoder, not the images, is alike: raise --above")
    result(f"page: {out}")
    result(f"table: {out.with_suffix('.csv')}")
    return 0
