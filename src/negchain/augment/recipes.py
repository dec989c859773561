"""Named augmentations.

simclr-stl10     EMC² on STL-10: crops from 8 %, strong jitter, always blurred, not normalised.
simclr-imagenet  ImageNet: jitter (.4,.4,.2,.1), half of the images blurred, not normalised.
cifar            the common SimCLR recipe for 32-pixel images: crops from 8 %, jitter
                 (.4,.4,.4,.1), no blur (it would leave nothing), CIFAR-10 mean and deviation.
digits           crops from 50 %, no mirror image (a mirrored 2 is no digit), one channel.
mild             pictures with captions: crops from 60 %, no mirror image (captions say "left") and
                 no other colours (they say "red"), ImageNet's mean and deviation.
none             resize only.
"""

from collections.abc import Callable
from functools import partial
from types import MappingProxyType

from negchain.augment.pipeline import Augmentation

_SIMCLR = partial(Augmentation, crop_scale=(0.08, 1.0), flip=True, jitter_p=0.8, grey_p=0.2)
_RECIPES = MappingProxyType[str, Callable[..., Augmentation]](
    {
        "simclr-stl10": partial(
            _SIMCLR, jitter=(0.8, 0.8, 0.8, 0.2), blur_sigma=(0.1, 2.0), blur_p=1.0
        ),
        "simclr-imagenet": partial(
            _SIMCLR, jitter=(0.4, 0.4, 0.2, 0.1), blur_sigma=(0.1, 2.0), blur_p=0.5
        ),
        "cifar": partial(
            _SIMCLR,
            jitter=(0.4, 0.4, 0.4, 0.1),
            normalize=((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        ),
        "digits": partial(Augmentation, crop_scale=(0.5, 1.0)),
        "mild": partial(
            Augmentation,
            crop_scale=(0.6, 1.0),
            normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ),
        "none": Augmentation,
    }
)
RECIPES: tuple[str, ...] = tuple(_RECIPES)
"""Names that `augmentation` knows."""


def augmentation(name: str, *, size: int) -> Augmentation:
    """Return the recipe `name` for square outputs of `size` pixels.

    Change single settings with `dataclasses.replace`.

    >>> augmentation("simclr-stl10", size=96).blur_sigma
    (0.1, 2.0)
    """
    return _RECIPES[name](size=size)
