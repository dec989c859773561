"""Augmentation in four Triton launches; twin: `negchain.augment`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from negchain.augment.pipeline import Augmentation

KNOWN = frozenset({
    "size", "crop_scale", "crop_ratio", "flip", "jitter", "jitter_p", "grey_p", "blur_sigma",
    "blur_p", "normalize",
})  # fmt: skip
"""Settings of an augmentation that the kernels follow."""


def applies(augment: Augmentation) -> bool:
    """Whether the kernels do all of it: what they do not know they would leave out.

    Example:
        >>> from negchain.augment import Augmentation
        >>> applies(Augmentation(size=8, flip=True))
        True
    """
    from negchain.augment.pipeline import Augmentation

    own = type(augment).apply is Augmentation.apply and type(augment).sample is Augmentation.sample
    others = [field for field in fields(augment) if field.name not in KNOWN]
    return own and all(getattr(augment, field.name) == field.default for field in others)
