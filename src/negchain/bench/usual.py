"""The usual way to train SimCLR: the baseline of the trainer's throughput.

A DataLoader whose workers augment one image at a time with torchvision's v2 transforms, and an
eager step in bf16 on channels-last tensors: what a careful user of PyTorch writes. Where there was
a choice, the faster was taken: crops on bytes, the rest in float32 (the fastest of six orders, PIL
included, on one CPU core), workers that stay, pinned memory, fused Adam.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2  # type: ignore[import-untyped]

from negchain.augment import Augmentation
from negchain.augment.blur import kernel_size
from negchain.encoders import Encoder

PREFETCH = 2  # batches ahead per worker, the DataLoader's default


def num_workers() -> int:
    """16, or a worker per core where there are fewer."""
    return min(16, os.cpu_count() or 1)


def transforms(augment: Augmentation) -> Callable[[Tensor], Tensor]:
    """torchvision's transforms of the same recipe, for one uint8 image [C,H,W].

    >>> augment = Augmentation(size=8, crop_scale=(0.5, 1.0), flip=True, blur_sigma=(0.1, 2.0))
    >>> transforms(augment)(torch.zeros(3, 9, 9, dtype=torch.uint8)).shape
    torch.Size([3, 8, 8])
    """
    steps: list[Any] = []
    if augment.crop_scale is not None:
        steps.append(v2.RandomResizedCrop(augment.size, augment.crop_scale, augment.crop_ratio))
    else:
        steps.append(v2.Resize([augment.size, augment.size]))
    if augment.flip:
        steps.append(v2.RandomHorizontalFlip())
    steps.append(v2.ToDtype(torch.float32, scale=True))
    if augment.jitter is not None:
        steps.append(v2.RandomApply([v2.ColorJitter(*augment.jitter)], augment.jitter_p))
    if augment.grey_p:
        steps.append(v2.RandomGrayscale(augment.grey_p))
    if augment.blur_sigma is not None:
        blur = v2.GaussianBlur(kernel_size(augment.size), augment.blur_sigma)
        steps.append(blur if augment.blur_p == 1 else v2.RandomApply([blur], augment.blur_p))
    if augment.normalize is not None:
        steps.append(v2.Normalize(*augment.normalize))
    composed: Callable[[Tensor], Tensor] = v2.Compose(steps)
    return composed


class TwoViews(Dataset[tuple[Tensor, Tensor]]):
    """Item i: two random views of image i."""

    def __init__(self, images: Tensor, transform: Callable[[Tensor], Tensor]) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        """Number of images."""
        return len(self.images)

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        """Two views [C,size,size]."""
        image = self.images[position]
        return self.transform(image), self.transform(image)


def batches(
    images: Tensor, augment: Augmentation, batch_size: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views, epoch after epoch, without end."""
    loader = DataLoader(
        TwoViews(images, transforms(augment)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers(),
        persistent_workers=True,
        prefetch_factor=PREFETCH,
        pin_memory=pin,
        generator=torch.Generator().manual_seed(0),
    )
    while True:
        with warnings.catch_warnings():
            # Python 3.12 warns of every fork beside threads; these workers only augment.
            warnings.simplefilter("ignore", DeprecationWarning)
            epoch = iter(loader)
        yield from epoch


def info_nce(z_a: Tensor, z_b: Tensor, beta: float) -> Tensor:  # [B,D] [B,D] -> []
    """SimCLR's loss in four lines: every view against all others of both views.

    >>> import negchain
    >>> z_a, z_b = torch.randn(2, 6, 4)
    >>> torch.allclose(info_nce(z_a, z_b, 5.0), negchain.InfoNCELoss(beta=5.0)(z_a, z_b), atol=1e-5)
    True
    """
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = (z @ z.T * beta).fill_diagonal_(float("-inf"))
    half = len(z_a)
    target = torch.arange(2 * half, device=z.device)
    return F.cross_entropy(logits, (target + half) % (2 * half))


class UsualStep:
    """An eager training step on a pair of views.

    Args:
        encoder: on its device.
        beta: inverse temperature.
        lr: of Adam.
        weight_decay: of Adam.
        bf16: autocast the encoder.
    """

    def __init__(
        self, encoder: Encoder, *, beta: float, lr: float, weight_decay: float, bf16: bool
    ) -> None:
        self.device = next(encoder.parameters()).device
        self.on_gpu = self.device.type == "cuda"
        self.encoder = encoder
        self.beta = beta
        self.bf16 = bf16
        self.optimizer = torch.optim.Adam(
            encoder.parameters(), lr=lr, weight_decay=weight_decay, fused=self.on_gpu or None
        )

    def __call__(self, views: tuple[Tensor, Tensor]) -> None:
        """Move the views to the device and train on them."""
        pixels = torch.cat([view.to(self.device, non_blocking=True) for view in views])
        if self.on_gpu:
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            z_a, z_b = self.encoder(pixels).float().chunk(2)
        loss = info_nce(z_a, z_b, self.beta)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
