"""Which first layers a ResNet gets, chosen by the pictures and said to the user.

torchvision's stem halves a picture twice before the first block, which throws too much away of a
picture of 32 px, and is what makes the network fast. Keeping every pixel costs about eight times
as much, so photographs that were only shrunk to 64 px do not get it unless asked for.
"""

from __future__ import annotations

import statistics
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from negchain.data.sources import BUILT_IN, named_sources
from negchain.encoders import SMALL_IMAGE

if TYPE_CHECKING:
    from negchain.data import DataBundle
    from negchain.train.config import TrainConfig

LOOKED_AT = 16  # pictures whose size is looked up
FEWEST = 48  # px; below, torchvision's stem leaves a single position in the last block


def small_stem(config: TrainConfig, data: DataBundle) -> bool:
    """Whether the encoder keeps every pixel at first."""
    return _choose(config, data)[0]


def stem_note(config: TrainConfig, data: DataBundle) -> str | None:
    """What to tell the user about it; None where there was nothing to choose."""
    return _choose(config, data)[1]


def _choose(config: TrainConfig, data: DataBundle) -> tuple[bool, str | None]:
    size = config.image_size or data.pretrain.size[0]
    if config.encoder not in ("resnet18", "resnet50") or config.stem != "auto":
        return config.stem == "small", None
    if size > SMALL_IMAGE:
        return False, None
    own = short_side(config.data, data.pretrain.names)
    if size < FEWEST or own <= SMALL_IMAGE:
        why = f"they have {own} px" if own <= SMALL_IMAGE else f"{size} px are few"
        return True, (
            f"{config.encoder} keeps every pixel of the pictures at first ({why}); "
            "--stem large takes about an eighth of the time and sees less"
        )
    return False, (
        f"{config.encoder} halves the pictures twice at first (they have {own} px and are shrunk "
        f"to {size}); --stem small sees more and takes about eight times as long"
    )


def short_side(data: str, names: tuple[str, ...]) -> int:
    """The shorter side in pixels of a typical picture as it is stored, of the largest source."""
    sides = []
    for source in named_sources(data):
        if source in BUILT_IN:
            sides.append(BUILT_IN[source])
            continue
        folder = Path(source) if Path(source).is_dir() else Path(source).parent
        files = [folder / name for name in names[:: max(1, len(names) // LOOKED_AT)]]
        found = [side for file in files if (side := _side(file)) is not None]
        if found:
            sides.append(int(statistics.median(found)))
    return max(sides, default=SMALL_IMAGE + 1)


def _side(file: Path) -> int | None:
    try:
        with warnings.catch_warnings(), Image.open(file) as image:
            warnings.simplefilter("ignore")
            return min(image.size)
    except Exception:  # of another source, or gone
        return None
