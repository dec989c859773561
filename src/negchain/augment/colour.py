"""Colour jitter with a random order per image, and greyscale, as few passes over the batch.

Brightness, contrast and saturation are all one blend,

    x <- clamp(f * x + (1 - f) * reference)      reference: 0 | mean of grey(x) | grey(x)

so a place in the order costs one blend whatever each image does there. Hue is the costly
operation and every image has it once: the blends before it are applied (as f = 1 where an image
has none left), then hue once, then the blends after it. Six blends and one hue instead of four of
each. Pixels equal torchvision's functional operations on float images.
"""

import torch
from torch import Tensor

CONTRAST, SATURATION, HUE = 1, 2, 3  # as torchvision's ColorJitter; brightness is 0
NUM_UNIFORMS = 9  # applied?, four factors, four sort keys of the order


def sample_jitter(
    uniforms: Tensor,  # [N,9]
    strength: tuple[float, float, float, float],  # brightness, contrast, saturation, hue
    probability: float,
) -> tuple[Tensor, Tensor]:
    """Draw (order [N,4], factors [N,4]) as torchvision's ColorJitter.

    `order[n]` lists the operations (0 brightness, 1 contrast, 2 saturation, 3 hue) first to last;
    `factors[n]` is indexed by operation. An image that is left alone has factors (1, 1, 1, 0).

    >>> uniforms = torch.tensor([[0.1, 0.0, 0.5, 0.5, 1.0, 0.9, 0.2, 0.4, 0.3]])
    >>> order, factors = sample_jitter(uniforms, (0.8, 0.8, 0.8, 0.2), probability=0.8)
    >>> order.tolist(), [round(factor, 2) for factor in factors[0].tolist()]
    ([[1, 3, 2, 0]], [0.2, 1.0, 1.0, 0.2])
    """
    applied, drawn = uniforms[:, 0] < probability, uniforms[:, 1:5]
    factors = []
    for operation, limit in enumerate(strength):
        low, high = (-limit, limit) if operation == HUE else (max(0.0, 1 - limit), 1 + limit)
        neutral = 0.0 if operation == HUE else 1.0
        value = low + (high - low) * drawn[:, operation]
        factors.append(torch.where(applied, value, neutral))
    order = uniforms[:, 5:9].argsort(dim=1)
    return order, torch.stack(factors, dim=1)


def grey(pixels: Tensor) -> Tensor:
    """Return the luminance [N,1,H,W] of [N,C,H,W] (ITU-R 601-2 weights, as torchvision).

    >>> grey(torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1, 1)).item()  # doctest: +ELLIPSIS
    0.4129...
    """
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.unbind(1)
    return torch.add(0.2989 * red, green, alpha=0.587).add(blue, alpha=0.114)[:, None]


def to_grey(pixels: Tensor, chosen: Tensor) -> Tensor:
    """Replace the `chosen` [N] bool images of [N,C,H,W] by their luminance in every channel."""
    return torch.where(chosen[:, None, None, None], grey(pixels), pixels)


def jitter(pixels: Tensor, order: Tensor, factors: Tensor) -> Tensor:
    """Apply the four operations to [N,C,H,W] in [0,1], each image in its own `order` [N,4].

    One channel has no saturation and no hue: both leave it as it is.

    >>> order, factors = torch.tensor([[1, 0, 2, 3]]), torch.tensor([[0.5, 1.0, 1.0, 0.0]])
    >>> jitter(torch.ones(1, 3, 1, 1), order, factors).flatten()
    tensor([0.5000, 0.5000, 0.5000])
    """
    gains = factors.gather(1, order)  # [N,4] by place in the order
    if pixels.shape[1] == 1:
        return _blends(pixels, order, torch.where(order == HUE, 1.0, gains), range(4))
    place = torch.arange(4, device=order.device)
    hue_place = (order == HUE).int().argmax(dim=1, keepdim=True)
    pixels = _blends(pixels, order, torch.where(place < hue_place, gains, 1.0), range(3))
    pixels = shift_hue(pixels, factors[:, HUE])
    return _blends(pixels, order, torch.where(place > hue_place, gains, 1.0), range(1, 4))


def _blends(pixels: Tensor, order: Tensor, gains: Tensor, places: range) -> Tensor:
    """Apply the blends at `places` of the order; a gain of 1 changes nothing, bit for bit."""
    rest = 1 - gains
    grey_share = torch.where(order == SATURATION, rest, 0.0)[:, :, None, None]  # [N,4,1,1]
    mean_share = torch.where(order == CONTRAST, rest, 0.0)[:, :, None, None]
    gains = gains[:, :, None, None]
    for place in places:
        one = slice(place, place + 1)
        luminance = grey(pixels)
        mean = mean_share[:, one] * luminance.mean(dim=(2, 3), keepdim=True)
        reference = torch.addcmul(mean, grey_share[:, one], luminance)
        pixels = torch.addcmul(reference, gains[:, one], pixels).clamp_(0, 1)
    return pixels


def shift_hue(pixels: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of [N,3,H,W] in [0,1] by `shift` [N] of a full circle.

    With M, m the largest and smallest channel and h in [0,6) the hue, a colour channel is
    M - (M - m) * clamp(min(k, 4 - k), 0, 1), k = (n + h) mod 6, n = 5, 3, 1 for red, green, blue:
    the way back from HSV needs h alone, and saturation is never divided out.

    >>> red = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1)
    >>> shift_hue(red, torch.tensor([1 / 3])).flatten().round().tolist()
    [0.0, 1.0, 0.0]
    """
    channel = torch.arange(3, device=pixels.device).view(1, 3, 1, 1)
    largest, leader = pixels.max(dim=1, keepdim=True)
    spread = largest - pixels.amin(dim=1, keepdim=True)
    # (g - b, b - r, r - g); grey pixels have spread 0 and any hue, here that of red
    opposed = pixels.roll(-1, dims=1) - pixels.roll(1, dims=1)
    hue = opposed.gather(1, leader) / spread.clamp_min(1e-30) + 2 * leader
    turned = (hue + 6 * shift[:, None, None, None] + (5 - 2 * channel)) % 6
    return largest - spread * torch.minimum(turned, 4 - turned).clamp_(0, 1)
