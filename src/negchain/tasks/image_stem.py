"""Which first layers a ResNet gets, chosen by the pictures and said to the user.

torchvision's stem halves a picture twice before the first block, which throws too much away of a
picture of 32 px, and is what makes the network fast. Keeping every pixel costs about eight times
as much, so photographs that were only shrunk to 64 px do not get it unless asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from negchain.encoders import SMALL_IMAGE

if TYPE_CHECKING:
    from negchain.data import DataBundle
    from negchain.train.config import TrainConfig

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
    own = data.native
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
