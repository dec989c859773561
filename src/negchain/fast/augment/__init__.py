"""Augmentation in four Triton launches; twin: `negchain.augment`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from negchain.fast.backends import prefers_triton

if TYPE_CHECKING:
    from negchain.augment.pictures import Images
    from negchain.augment.pipeline import Augmentation

KNOWN = frozenset({
    "size", "crop_scale", "crop_ratio", "flip", "jitter", "jitter_p", "grey_p", "blur_sigma",
    "blur_p", "normalize",
})  # fmt: skip
"""Settings of an augmentation that the kernels follow."""


def applies(augment: Augmentation, images: Images) -> bool:
    """Whether the kernels take these images, and do all of the augmentation.

    An operation they do not know, of a subclass or a new setting, would be left out.
    """
    from negchain.augment.pictures import Pictures
    from negchain.augment.pipeline import Augmentation

    if not prefers_triton(images.pixels if isinstance(images, Pictures) else images):
        return False
    own = type(augment).apply is Augmentation.apply and type(augment).sample is Augmentation.sample
    others = [field for field in fields(augment) if field.name not in KNOWN]
    return own and all(getattr(augment, field.name) == field.default for field in others)
