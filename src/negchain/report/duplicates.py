"""Near-duplicates: a page of pairs side by side, most similar first, and a table of all."""

import csv
import io
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from negchain.files import replacing
from negchain.printable import counted

from .galleries import Pixels, block, picture
from .page import Page

COLUMNS = ("similarity", "file_a", "file_b", "class_a", "class_b")  # of the table
SHOWN = 200  # pairs on the page; the table has them all
TOO_MANY = 0.05  # of all pairs: if more are that similar, the encoder is at fault, not the images


class Pair(NamedTuple):
    """Two images with their cosine similarity."""

    similarity: float
    names: tuple[str, str]
    classes: tuple[str, str]
    positions: tuple[int, int]
    across: bool
    """Whether one is trained on and the other tests."""

    @property
    def remark(self) -> str:
        """What is worth knowing about the pair."""
        across = "in training and test" if self.across else ""
        other = "two classes" if all(self.classes) and self.classes[0] != self.classes[1] else ""
        return ", ".join(text for text in (across, other) if text)


def crowded(total: int, images: int) -> bool:
    """Whether so many pairs say more about the encoder than about the images."""
    return total > max(TOO_MANY * images * (images - 1) / 2, images)


def write_duplicates(
    out: Path,
    title: str,
    pairs: Sequence[Pair],
    pixels: Callable[[int], Pixels],
    *,
    total: int,
    images: int,
    above: float,
) -> None:
    """Write the page to `out` and a .csv beside it; `pixels` gives uint8 [C,H,W] by position."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows([f"{p.similarity:.6f}", *p.names, *p.classes] for p in pairs)
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.with_suffix(".csv")) as file:
        file.write(text.getvalue().encode())
    page = Page()
    page.add(
        '<header><p class="eyebrow">negchain · near-duplicates</p>'
        f"<h1>{counted(total, 'pair', 'pairs')} in {escape(title)}</h1>"
        f'<ul class="chips"><li><b>{images:,}</b> image{"s" * (images != 1)}</li>'
        f"<li>similarity at least <b>{above:g}</b></li></ul></header>"
    )
    if crowded(total, images):
        page.add(
            '<p class="notice"><b>So many pairs mean that the encoder hardly tells images apart.'
            "</b> Raise --above, or train the encoder for longer.</p>"
        )
    pairs = pairs[:SHOWN]
    shown = f" The {len(pairs)} most similar are shown, all are in the .csv." * (len(pairs) < total)
    twins = block(
        "Pairs the encoder can hardly tell apart, most similar first. Two photographs of one thing "
        f"are found as well as copies: look before you delete.{shown}",
        (_card(pair, pixels) for pair in pairs),
        "chains twins",
    )
    none = '<p class="lead">No two images are that similar. Lower --above to see the nearest.</p>'
    page.add(f"<section>{twins or none}</section>")
    page.write(out, f"Near-duplicates in {title}")


def _card(pair: Pair, pixels: Callable[[int], Pixels]) -> str:
    named = "".join(
        f'<br><span title="{escape(name)}">{escape(name)}{f" · {escape(kind)}" * bool(kind)}</span>'
        for name, kind in zip(pair.names, pair.classes, strict=True)
    )
    remark = f" · <b>{pair.remark}</b>" if pair.remark else ""
    first, second = (
        picture(pixels(i), name) for i, name in zip(pair.positions, pair.names, strict=True)
    )
    return (
        f'<figure>{first}<span aria-hidden="true"></span>{second}<figcaption>similarity '
        f"{pair.similarity:.3f}{remark}{named}</figcaption></figure>"
    )
