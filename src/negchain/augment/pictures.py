"""Pictures of different sizes as one buffer of bytes, which kernels read in place.

    pixels  [ picture 0: C x h0 x w0 | picture 1: C x h1 x w1 | ... ]      uint8
    offsets [N]    where each begins                                       int64
    sizes   [N,2]  its height and width                                    int32

Choosing pictures (`pictures[positions]`) copies their offsets and sizes, never their pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pictures:
    """N uint8 pictures, each of its own height and width, all grey or all RGB.

    >>> wide, tall = torch.zeros(3, 4, 6).byte(), torch.ones(3, 5, 2).byte()
    >>> pictures = Pictures.pack([wide, tall])
    >>> len(pictures), pictures.sizes.tolist()
    (2, [[4, 6], [5, 2]])
    >>> [picture.shape for picture in pictures[torch.tensor([1, 1])]]
    [torch.Size([3, 5, 2]), torch.Size([3, 5, 2])]
    """

    pixels: Tensor
    """uint8 [total]: every picture as [C,h,w], one behind the other."""
    offsets: Tensor
    """int64 [N]: where in `pixels` a picture begins."""
    sizes: Tensor
    """int32 [N,2]: height and width."""
    channels: int = 3
    """1 or 3."""

    @classmethod
    def pack(cls, pictures: Sequence[Tensor]) -> Pictures:
        """Copy pictures [C,h,w] into one buffer; none count as RGB."""
        sizes = torch.tensor([p.shape[1:] for p in pictures], dtype=torch.int32).view(-1, 2)
        ends = torch.tensor([p.numel() for p in pictures], dtype=torch.int64).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends[:-1]]) if pictures else ends
        flat = [p.flatten() for p in pictures] or [torch.empty(0, dtype=torch.uint8)]
        return cls(torch.cat(flat), offsets, sizes, len(pictures[0]) if pictures else 3)

    @classmethod
    def of(cls, images: Tensor) -> Pictures:
        """View uint8 images [N,C,H,W] of one size as pictures; contiguous ones are not copied."""
        count, channels, height, width = images.shape
        offsets = torch.arange(count) * (channels * height * width)
        sizes = torch.tensor([height, width], dtype=torch.int32).expand(count, 2).contiguous()
        flat = images.reshape(-1)
        return cls(flat, offsets.to(flat.device), sizes.to(flat.device), channels)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, positions: Tensor | slice) -> Pictures:
        """The pictures at `positions`, in that order; they share the pixels."""
        return replace(self, offsets=self.offsets[positions], sizes=self.sizes[positions])

    def __iter__(self) -> Iterator[Tensor]:
        """Each picture as a view [C,h,w]; asks the device for the sizes."""
        for offset, (height, width) in zip(self.offsets.tolist(), self.sizes.tolist(), strict=True):
            end = offset + self.channels * height * width
            yield self.pixels[offset:end].view(self.channels, height, width)

    def trimmed(self) -> Pictures:
        """The same pictures without the pixels before the first and behind the last of them."""
        if not len(self):
            return replace(self, pixels=self.pixels[:0])
        ends = self.offsets + self.channels * self.sizes.long().prod(1)
        first, last = int(self.offsets.min()), int(ends.max())
        return replace(self, pixels=self.pixels[first:last], offsets=self.offsets - first)

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Pictures:
        """The same pictures on `device`."""
        return self._each(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Pictures:
        """The same pictures in pinned memory; a DataLoader asks for it by this name."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Pictures:
        pixels, offsets, sizes = map(change, (self.pixels, self.offsets, self.sizes))
        return Pictures(pixels, offsets, sizes, self.channels)


Images = Tensor | Pictures
"""uint8 images: [N,C,H,W] of one size, or `Pictures` of their own sizes."""


def joined(parts: Sequence[Images]) -> Images:
    """Images of several parts, one part behind the other; all of one kind.

    >>> two = Pictures.pack([torch.zeros(1, 2, 3).byte(), torch.zeros(1, 1, 1).byte()])
    >>> joined([two, two]).offsets.tolist()
    [0, 6, 7, 13]
    """
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return torch.cat(tensors)
    pictures = [part for part in parts if isinstance(part, Pictures)]
    assert len(pictures) == len(parts) and len({p.channels for p in pictures}) == 1
    begins = accumulate((len(p.pixels) for p in pictures), initial=0)
    return Pictures(
        torch.cat([p.pixels for p in pictures]),
        torch.cat([p.offsets + begin for p, begin in zip(pictures, begins, strict=False)]),
        torch.cat([p.sizes for p in pictures]),
        pictures[0].channels,
    )
