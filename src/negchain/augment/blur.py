"""Gaussian blur with a width per image, as two small banded matrices.

    out[c] = band @ image[c] @ band.T           band [size,size]

Row i of `band` is the kernel centred at i with what falls outside reflected back, i.e. the blurred
identity matrix. Every image has its own kernel, which a grouped convolution would run as N * C
groups; the batched product is the same arithmetic at matrix speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_UNIFORMS = 2  # applied?, sigma


def kernel_size(size: int) -> int:
    """Return the odd kernel width of about a tenth of the image, as SimCLR.

    >>> kernel_size(96), kernel_size(224), kernel_size(32)
    (9, 23, 3)
    """
    return size // 10 | 1


def sample_sigma(
    uniforms: Tensor,  # [N,2]
    limits: tuple[float, float],
    probability: float,
) -> Tensor:
    """Draw sigma [N] uniform in `limits`; 0 stands for an image that is not blurred.

    >>> sample_sigma(torch.tensor([[0.2, 0.5], [0.7, 0.5]]), (0.5, 1.5), probability=0.5)
    tensor([1., 0.])
    """
    low, high = limits
    return torch.where(uniforms[:, 0] < probability, low + (high - low) * uniforms[:, 1], 0.0)


def band_matrices(sigma: Tensor, size: int) -> Tensor:
    """Return [N,size,size]: the one-dimensional blur of `size` pixels, edges reflected."""
    radius = kernel_size(size) // 2
    distance = torch.arange(-radius, radius + 1, device=sigma.device)
    # At sigma 0.01 a neighbour weighs exp(-5000) = 0: the kernel of an unblurred image is exact.
    kernel = torch.softmax(-(distance**2) / (2 * sigma[:, None].clamp_min(0.01) ** 2), dim=1)
    padded = F.pad(torch.eye(size, device=sigma.device)[None], (radius, radius), mode="reflect")
    shifted = padded[0].unfold(1, 2 * radius + 1, 1)  # [source, output, kernel]
    return torch.einsum("nk,jik->nij", kernel, shifted)


def blur(pixels: Tensor, sigma: Tensor) -> Tensor:
    """Blur [N,C,size,size] by `sigma` [N] pixels, equal to torchvision's `gaussian_blur`."""
    count, channels, size, _ = pixels.shape
    band = band_matrices(sigma, size)
    across = torch.bmm(pixels.reshape(count, channels * size, size), band.mT)
    return band[:, None] @ across.view(count, channels, size, size)
