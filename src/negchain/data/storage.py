"""How pictures are kept for cropping: at which size, and in memory or as files.

A picture whose shorter side is three times the encoder's gives crops down to a ninth of its area
that are not enlarged, and, shrunk by a filter that keeps detail (Lanczos), crops that hold what
torchvision's hold when cut from the original: the tests compare the two. Where that does not fit
into the budget twice the side is tried: crops of a quarter of the area and more are not enlarged,
four draws of five. What does not fit even so stays on disk, at three times. Pictures that are no
larger are kept as they are, and squares of the encoder's own size need nothing beside them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from negchain.data.decode import Size, stored_size

TIMES = (3, 2)


@dataclass(frozen=True)
class Storage:
    """The decision for all folders of a run.

    >>> choose([(4000, 3000)] * 100, side=96, budget=1 << 30).note
    'crops are cut from whole pictures, kept with shorter sides up to 288 px (0.03 GB of \
--resident-gb 1): from 11 % of the area on none is enlarged'
    """

    side: int
    """Side of the squares the encoder sees."""
    short: int
    """Shorter side up to which whole pictures are kept; 0: the squares are the pictures."""
    resident: bool
    """Whether everything is decoded into memory."""
    note: str = ""
    """What the user is told."""


def choose(sizes: Sequence[Size], side: int, budget: int) -> Storage:
    """Decide from the sizes of all files, (0, 0) for unreadable ones, and a budget in bytes.

    >>> choose([(96, 96)] * 10, side=96, budget=0).short
    0
    """
    sizes = [size for size in sizes if size != (0, 0)]
    if set(sizes) <= {(side, side)}:
        return Storage(side, 0, len(sizes) * 3 * side * side <= budget)
    for times in TIMES:
        short = times * side
        num_bytes = sum(3 * math.prod(stored_size(size, short)) for size in sizes)
        if num_bytes <= budget:
            return Storage(side, short, True, _note(sizes, times, short, num_bytes, budget))
    short = TIMES[0] * side
    note = (
        f"{len(sizes):,} pictures need {num_bytes / 2**30:.2f} GB at {times * side} px and "
        f"--resident-gb allows {budget / 2**30:g}: they are decoded anew for every crop"
    )
    return Storage(side, short, False, note)


def _note(sizes: Sequence[Size], times: int, short: int, num_bytes: int, budget: int) -> str:
    enough = sum(min(size) >= short for size in sizes)
    of = "" if enough == len(sizes) else f" of the {enough:,} that are large enough"
    share = f"from {100 / times**2:.0f} % of the area on none{of} is enlarged"
    return (
        f"crops are cut from whole pictures, kept with shorter sides up to {short} px "
        f"({num_bytes / 2**30:.2f} GB of --resident-gb {budget / 2**30:g}): "
        + (share if enough else "none is that large, so small crops are enlarged")
    )
