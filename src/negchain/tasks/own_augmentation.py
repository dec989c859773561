"""An augmentation of the user's own: any function on a batch of uint8 images."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from negchain.augment import Augmentation, Images, Uniforms
from negchain.train.presets import ConfigError

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class OwnAugmentation(Augmentation):
    """`function` in the place of a recipe: uint8 [N,C,H,W] to pixels [N,C,size,size].

    It draws from torch's global generator, which is seeded by the step before each call. So a
    resumed run draws what an uninterrupted one would have.

    Example:
        >>> own = OwnAugmentation(size=4, function=lambda x: x[:, :, ::2, ::2])
        >>> own(torch.full((2, 1, 8, 8), 51, dtype=torch.uint8), torch.rand(2, 1))[0, 0, 0, 0]
        tensor(0.2000)
    """

    function: Function

    @property
    def name(self) -> str:
        """What the function is called, for the record."""
        return str(getattr(self.function, "__qualname__", type(self.function).__qualname__))

    @property
    def num_uniforms(self) -> int:
        """One, which seeds the function's generator."""
        return 1

    def __call__(self, images: Images, uniforms: Tensor | Uniforms) -> Tensor:
        """Pixels of a batch, seeded by the first uniform of its first image."""
        drawn = uniforms.made(1, 1) if isinstance(uniforms, Uniforms) else uniforms
        with torch.random.fork_rng(), torch.autocast(images.device.type, enabled=False):
            torch.manual_seed(int(drawn[0, 0].item() * 2**24))
            found = self.function(self._squares(images))
        channels = images.shape[1] if isinstance(images, Tensor) else images.channels
        wanted = [len(images), channels, self.size, self.size]
        if not isinstance(found, Tensor) or list(found.shape) != wanted:
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"augment must return pixels of shape {wanted}, got {got}")
        if found.dtype != torch.uint8 and (not found.is_floating_point() or (found > 32).any()):
            raise ConfigError(
                f"augment must return uint8, or floats in [0, 1], got {found.dtype} up to "
                f"{found.max().item():g}; divide by 255"
            )
        pixels = found.float() / 255 if found.dtype == torch.uint8 else found.float()
        return self._normalized(pixels)

    def _squares(self, images: Images) -> Tensor:
        """Pictures of their own sizes as central squares of twice the side that is wanted."""
        if isinstance(images, Tensor):
            return images
        squares = Augmentation(size=2 * self.size).plain(images)
        return (255 * squares).round().to(torch.uint8)
