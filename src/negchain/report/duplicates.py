"""The page of near-duplicates: pairs of pictures side by side, most similar first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .galleries import Pictures, block, picture
from .page import Page


@dataclass(frozen=True)
class Pair:
    """Two images with their cosine similarity."""

    similarity: float
    names: tuple[str, str]
    classes: tuple[str, str]
    positions: tuple[int, int]

    @property
    def remark(self) -> str:
        """What is worth knowing about the pair."""
        splits = {name.split("/")[0] for name in self.names} & {"train", "test", "val"}
        across = "in training and test" if len(splits) > 1 and "train" in splits else ""
        other = "two classes" if all(self.classes) and self.classes[0] != self.classes[1] else ""
        return ", ".join(text for text in (across, other) if text)


def write_duplicates(
    out: Path,
    title: str,
    pairs: Sequence[Pair],
    pictures: Mapping[int, Pictures],
    *,
    total: int,
    images: int,
    above: float,
    crowded: bool,
) -> None:
    """Write the page; `pictures` holds uint8 [C,H,W] by position."""
    page = Page()
    page.add(
        '<header><p class="eyebrow">negchain · near-duplicates</p>'
        f"<h1>{total:,} pair{'s' * (total != 1)} in {escape(title)}</h1>"
        f'<ul class="chips"><li><b>{images:,}</b> images</li>'
        f"<li>similarity at least <b>{above:g}</b></li></ul></header>"
    )
    if crowded:
        page.add(
            '<p class="notice"><b>So many pairs mean that the encoder, not the images, is alike.'
            "</b> Raise --above, or train the encoder for longer.</p>"
        )
    shown = f" The {len(pairs)} most similar are shown, all are in the .csv." * (len(pairs) < total)
    lead = (
        "Pairs the encoder can hardly tell apart, most similar first. Two photographs of one thing "
        "are found as well as copies: look before you delete." + shown
        if pairs
        else "No two images are that similar. Lower --above to see the nearest."
    )
    cards = [_card(pair, pictures) for pair in pairs]
    page.add(f"<section>{block(lead, cards, 'chains twins')}</section>")
    page.write(out, f"Near-duplicates in {title}")


def _card(pair: Pair, pictures: Mapping[int, Pictures]) -> str:
    named = "".join(
        f'<br><span title="{escape(name)}">{escape(name)}{f" · {escape(kind)}" * bool(kind)}</span>'
        for name, kind in zip(pair.names, pair.classes, strict=True)
    )
    remark = f" · <b>{pair.remark}</b>" if pair.remark else ""
    first, second = (
        picture(pictures[i], name) for i, name in zip(pair.positions, pair.names, strict=True)
    )
    return (
        f'<figure>{first}<span aria-hidden="true"></span>{second}<figcaption>similarity '
        f"{pair.similarity:.3f}{remark}{named}</figcaption></figure>"
    )
