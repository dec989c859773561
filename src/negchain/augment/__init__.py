"""Batched image augmentation on the training device, with parameters per image.

    augment = augmentation("simclr-stl10", size=96)
    pixels = augment(images, uniforms)       # uint8 [N,C,H,W], [N,num_uniforms] -> float32

Images of different sizes come as `Pictures`: crops are cut from each as it is.
`Uniforms` says where a step's uniforms come from, without holding them.
`augment.plain(images)` is the evaluation view and `finite_views` stores k augmentations per image.
"""

from negchain.augment.pictures import Images, Pictures, joined
from negchain.augment.pipeline import (
    RECIPES,
    Augmentation,
    Params,
    Uniforms,
    augmentation,
    finite_views,
)

__all__ = [
    "RECIPES",
    "Augmentation",
    "Uniforms",
    "Images",
    "Params",
    "Pictures",
    "augmentation",
    "finite_views",
    "joined",
]
