"""Random resized crop, antialiased resize and flip as two small matrices per image.

    out[c] = rows @ image[c] @ columns.T        rows [size,H], columns [size,W]

Row i of a matrix holds the weights by which output pixel i averages the source pixels: the
triangle filter of `F.interpolate(mode="bilinear", antialias=True)`, cut to the crop box. A flip
reverses the rows of `columns`. torchvision crops one image at a time, since every box has its own
shape; here a batch of boxes is two batched products, with no host synchronisation, so that the
operation can live inside a CUDA graph.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain.augment.pictures import Pictures

NUM_TRIES = 10  # as torchvision.transforms.RandomResizedCrop.get_params
NUM_UNIFORMS = 2 * NUM_TRIES + 2


class Box(NamedTuple):
    """Crop boxes in source pixels; whole numbers kept as float32, each [N]."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def central_square(height: Tensor, width: Tensor) -> Box:
    """Return the largest square in the middle of each picture, sides float32 [N]."""
    side = torch.minimum(height, width)
    return Box(((height - side) / 2).floor(), ((width - side) / 2).floor(), side, side)


def sample_box(
    uniforms: Tensor,  # [N,22]: 10 areas, 10 ratios, row offset, column offset
    height: int | Tensor,  # of all images, or [N] float32
    width: int | Tensor,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> Box:
    """Draw crop boxes as torchvision's RandomResizedCrop.

    Ten tries of (share of the area uniform in `scale`, aspect ratio log-uniform in `ratio`); the
    first that fits is used, at a uniform integer position. If none fits: the largest central box
    with the ratio clamped to `ratio`.

    >>> box = sample_box(torch.full((1, 22), 0.5), 96, 96, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3))
    >>> [int(side) for side in box]
    [13, 13, 71, 71]
    """
    zero = uniforms.new_zeros(len(uniforms), 1)
    height, width = (zero + (s[:, None] if isinstance(s, Tensor) else s) for s in (height, width))
    share = scale[0] + (scale[1] - scale[0]) * uniforms[:, :NUM_TRIES]
    area = height * width * share
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspect = (low + (high - low) * uniforms[:, NUM_TRIES:-2]).exp()

    # The fallback is an eleventh try that always fits, so that one argmax picks the box.
    shape = width / height
    last_height = torch.where(shape < ratio[0], (width / ratio[0]).round(), height)
    last_width = torch.where(shape > ratio[1], (height * ratio[1]).round(), width)
    heights = torch.cat([(area / aspect).sqrt().round(), last_height], dim=1)
    widths = torch.cat([(area * aspect).sqrt().round(), last_width], dim=1)
    fits = (heights > 0) & (heights <= height) & (widths > 0) & (widths <= width)
    first = fits.int().argmax(dim=1, keepdim=True)
    box_height, box_width = heights.gather(1, first), widths.gather(1, first)
    central = first == NUM_TRIES
    top = _offset(uniforms[:, -2:-1], height - box_height, central)
    left = _offset(uniforms[:, -1:], width - box_width, central)
    return Box(*(side.squeeze(1) for side in (top, left, box_height, box_width)))


def _offset(uniform: Tensor, slack: Tensor, central: Tensor) -> Tensor:
    # float32 may round uniform * (slack + 1) up to slack + 1, hence the minimum
    drawn = torch.minimum((uniform * (slack + 1)).floor(), slack)
    return torch.where(central, (slack / 2).floor(), drawn)


def filter_weights(
    start: Tensor,  # [N] first source pixel of the box
    length: Tensor,  # [N] source pixels in the box
    *,
    size: int,
    full: int,
    reverse: Tensor | None = None,  # [N] bool: mirror the output
) -> Tensor:
    """Return [N,size,full]: the antialiased bilinear resize of a box to `size` pixels.

    Output pixel i sits at c = (i + 1/2) * length / size and source pixel j of the box weighs
    max(0, 1 - |j + 1/2 - c| / support), support = max(1, length / size), rows normalised to 1.

    >>> filter_weights(torch.tensor([1.0]), torch.tensor([2.0]), size=1, full=4)
    tensor([[[0.0000, 0.5000, 0.5000, 0.0000]]])
    """
    output = torch.arange(size, device=start.device).expand(len(start), size)
    if reverse is not None:
        output = torch.where(reverse[:, None], size - 1 - output, output)
    step = length[:, None, None] / size
    centre = (output[:, :, None] + 0.5) * step  # [N,size,1]
    source = torch.arange(full, device=start.device) + 0.5 - start[:, None, None]  # [N,1,full]
    inside = (source > 0) & (source < length[:, None, None])
    weights = (1 - (source - centre).abs() / step.clamp_min(1)).clamp_min(0) * inside
    return weights / weights.sum(dim=2, keepdim=True)


def resample(images: Tensor, box: Box, flip: Tensor, *, size: int) -> Tensor:
    """Crop, resize and flip: uint8 [N,C,H,W] -> float32 [N,C,size,size] in [0,1].

    >>> images = torch.arange(8, dtype=torch.uint8).view(1, 1, 2, 4)
    >>> box = Box(*torch.tensor([[0.0], [1.0], [2.0], [2.0]]))
    >>> (resample(images, box, torch.tensor([True]), size=2) * 255).round().int().tolist()
    [[[[2, 1], [6, 5]]]]
    """
    count, channels, height, width = images.shape
    rows = filter_weights(box.top, box.height, size=size, full=height)
    columns = filter_weights(box.left, box.width, size=size, full=width, reverse=flip)
    # Scaling the small matrix rather than the images saves a pass over the pixels.
    across = torch.bmm(
        images.float().reshape(count, channels * height, width), columns.mul_(1 / 255).mT
    )
    return rows[:, None] @ across.view(count, channels, height, size)


def resample_each(pictures: Pictures, box: Box, flip: Tensor, *, size: int) -> Tensor:
    """`resample` for pictures of their own sizes, one at a time: float32 [N,C,size,size]."""
    out = torch.empty(len(pictures), pictures.channels, size, size, device=pictures.device)
    boxes = torch.stack(box, dim=1).int().tolist()
    for n, (picture, (top, left, height, width)) in enumerate(zip(pictures, boxes, strict=True)):
        cut = picture[:, top : top + height, left : left + width]
        out[n] = resize(cut[None], size=size)[0]
    return torch.where(flip[:, None, None, None], out.flip(3), out)


def resize(images: Tensor, *, size: int) -> Tensor:
    """Resize whole images: uint8 [N,C,H,W] -> float32 [N,C,size,size] in [0,1]."""
    pixels = images.float() / 255
    if images.shape[2:] == (size, size):
        return pixels
    return F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
