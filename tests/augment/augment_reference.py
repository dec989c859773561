"""The readable twin of `Augmentation.apply`: torchvision's own operations, one image at a time.

Slow, and synchronises with the host for every parameter.
"""

import torch
import torchvision.transforms.v2.functional as ops  # type: ignore[import-untyped]
from torch import Tensor

from negchain.augment.blur import kernel_size
from negchain.augment.pictures import Images
from negchain.augment.pipeline import Augmentation, Params

_JITTER = (ops.adjust_brightness, ops.adjust_contrast, ops.adjust_saturation, ops.adjust_hue)


def reference_apply(augment: Augmentation, images: Images, params: Params) -> Tensor:
    """Augment uint8 images as `params` say: what `augment.apply(images, params)` must equal.

    >>> augment = Augmentation(size=16, crop_scale=(0.2, 1.0), jitter=(0.4, 0.4, 0.4, 0.1))
    >>> images = torch.randint(256, (2, 3, 20, 24), dtype=torch.uint8)
    >>> params = augment.sample(torch.rand(2, augment.num_uniforms), 20, 24)
    >>> expected = reference_apply(augment, images, params)
    >>> torch.allclose(augment.apply(images, params), expected, atol=1e-4)
    True
    """
    rows = [Params(*(field[n] for field in params)) for n in range(len(images))]
    return torch.stack([_one(augment, *pair) for pair in zip(images, rows, strict=True)])


def _one(augment: Augmentation, image: Tensor, params: Params) -> Tensor:  # [C,H,W]
    box = [int(side) for side in params[:4]]
    pixels: Tensor = ops.resized_crop(
        image.float() / 255, *box, size=[augment.size] * 2, antialias=True
    )
    if params.flip:
        pixels = ops.horizontal_flip(pixels)
    if augment.jitter is not None:
        for operation in params.order.tolist():
            pixels = _JITTER[operation](pixels, params.factors[operation].item())
    if params.grey:
        pixels = ops.rgb_to_grayscale(pixels, num_output_channels=len(pixels))
    if params.sigma > 0:
        sigma = params.sigma.item()
        pixels = ops.gaussian_blur(pixels, [kernel_size(augment.size)] * 2, [sigma, sigma])
    if augment.normalize is not None:
        pixels = ops.normalize(pixels, *(list(values) for values in augment.normalize))
    return pixels
