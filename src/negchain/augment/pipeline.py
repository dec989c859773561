"""A whole augmentation: which operations, their strengths, and their draws per image.

    uniforms [N,U] --sample--> Params (one value per image) --apply--> pixels [N,C,size,size]

The order is SimCLR's: crop and resize, flip, colour jitter, grey, blur, normalise. Randomness is
an argument, nothing synchronises with the host and all shapes follow from the inputs' shapes, so
the whole augmentation can be captured in a CUDA graph. The tests compute the same pixels with
torchvision, one image at a time.

On a GPU each of the torch operations here is a launch: simclr-stl10 took 0.73 ms for 96 images of
96 pixels on an H200, `fast.augment` 0.023 ms for 64, so CUDA tensors take that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from negchain import rng
from negchain.augment import blur, colour, crop
from negchain.augment.pictures import Images, Pictures
from negchain.fast import augment as fused
from negchain.printable import counted


class Params(NamedTuple):
    """What happens to each image of a batch; every field has one row per image."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor
    order: Tensor  # [N,4] int64, see colour.sample_jitter
    factors: Tensor  # [N,4] brightness, contrast, saturation, hue; (1, 1, 1, 0): unchanged
    grey: Tensor
    sigma: Tensor  # 0: not blurred


@dataclass(frozen=True)
class Uniforms:
    """Where uniforms come from, not yet made: those of `negchain.rng` for one step and use.

    Image n of a batch has row `first_row + n`. The fused kernels hash them where they
    use them, which saves a step the launches that would write them.

    >>> whole = Uniforms(seed=0, step=torch.tensor(7), use=32).made(5, 3)
    >>> Uniforms(seed=0, step=torch.tensor(7), use=32, first_row=2).made(3, 3).equal(whole[2:])
    True
    """

    seed: int
    step: Tensor  # [] int64, on the device of the images
    use: int
    first_row: int = 0

    def made(self, count: int, num_uniforms: int) -> Tensor:
        """Uniforms as a tensor [count,num_uniforms], float32."""
        last = self.first_row + count
        rows = torch.arange(self.first_row, last, device=self.step.device)
        return rng.uniform(self.seed, self.step, self.use, rows, num_uniforms, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """A batched augmentation; an operation whose setting is None, False or 0 is left out.

    >>> augment = Augmentation(size=8, crop_scale=(0.5, 1.0), flip=True)
    >>> augment.num_uniforms
    23
    >>> images = torch.randint(256, (2, 3, 11, 13), dtype=torch.uint8)
    >>> augment(images, torch.rand(2, augment.num_uniforms)).shape
    torch.Size([2, 3, 8, 8])
    """

    size: int
    """Side of the square output, in pixels."""
    crop_scale: tuple[float, float] | None = None
    """Range of the share of the image's area that a crop keeps."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's width/height, log-uniform."""
    flip: bool = False
    """Mirror half of the images left to right."""
    jitter: tuple[float, float, float, float] | None = None
    """Strength of the brightness, contrast, saturation and hue jitter."""
    jitter_p: float = 0.8
    """Probability of the colour jitter."""
    grey_p: float = 0.0
    """Probability of dropping the colours."""
    blur_sigma: tuple[float, float] | None = None
    """Range of the Gaussian blur's width, in output pixels."""
    blur_p: float = 1.0
    """Probability of the blur."""
    normalize: tuple[Sequence[float], Sequence[float]] | None = None
    """Mean and standard deviation per channel, subtracted and divided at the end."""

    @property
    def num_uniforms(self) -> int:
        """Uniforms in [0,1) needed per image."""
        return sum(self.widths())

    def widths(self) -> list[int]:
        """Columns of `uniforms` for crop, flip, jitter, grey and blur."""
        return [
            crop.NUM_UNIFORMS if self.crop_scale is not None else 0,
            1 if self.flip else 0,
            colour.NUM_UNIFORMS if self.jitter is not None else 0,
            1 if self.grey_p else 0,
            blur.NUM_UNIFORMS if self.blur_sigma is not None else 0,
        ]

    def check_uniforms(self, uniforms: Tensor) -> None:
        """Raise ValueError unless `uniforms` is [N,num_uniforms]."""
        if uniforms.shape[1] != self.num_uniforms:
            needed = counted(self.num_uniforms, "uniform", "uniforms")
            raise ValueError(
                f"this augmentation needs {needed} per image, got "
                f"{uniforms.shape[1]}; draw uniforms of shape [N, num_uniforms]"
            )

    def sample(self, uniforms: Tensor, height: int | Tensor, width: int | Tensor) -> Params:
        """Turn uniforms [N,U] in [0,1) into what to do with N images of height x width.

        Pictures of their own sizes have these as float32 [N]; without a random crop they are cut
        to their central square.

        >>> params = Augmentation(size=8, flip=True).sample(torch.tensor([[0.2], [0.7]]), 9, 9)
        >>> params.flip
        tensor([ True, False])
        """
        self.check_uniforms(uniforms)
        ends = list(accumulate(self.widths()))
        for_crop, for_flip, for_jitter, for_grey, for_blur = uniforms.tensor_split(ends[:-1], dim=1)
        zero = uniforms.new_zeros(len(uniforms))
        never = torch.zeros_like(zero, dtype=torch.bool)
        if isinstance(height, Tensor) and isinstance(width, Tensor):
            box = crop.central_square(height, width)
        else:
            box = crop.Box(zero, zero, zero + height, zero + width)
        order = torch.arange(4, device=uniforms.device).expand(len(uniforms), 4)
        factors = (order < colour.HUE).float()
        if self.crop_scale is not None:
            box = crop.sample_box(
                for_crop, height, width, scale=self.crop_scale, ratio=self.crop_ratio
            )
        if self.jitter is not None:
            order, factors = colour.sample_jitter(for_jitter, self.jitter, self.jitter_p)
        return Params(
            *box,
            flip=for_flip[:, 0] < 0.5 if self.flip else never,
            order=order,
            factors=factors,
            grey=for_grey[:, 0] < self.grey_p if self.grey_p else never,
            sigma=blur.sample_sigma(for_blur, self.blur_sigma, self.blur_p)
            if self.blur_sigma is not None
            else zero,
        )

    def apply(self, images: Images, params: Params) -> Tensor:
        """Augment uint8 [N,C,H,W] or `Pictures` as `params` say: float32 [N,C,size,size].

        Pixels lie in [0,1] before the optional normalisation.

        >>> augment = Augmentation(size=8)
        >>> params = augment.sample(torch.rand(1, 0), 8, 8)
        >>> augment.apply(torch.full((1, 1, 8, 8), 51, dtype=torch.uint8), params).mean().item()
        ... # doctest: +ELLIPSIS
        0.2...
        """
        check_images(images)
        with torch.autocast(images.device.type, enabled=False):  # bf16 would cost 8-bit pixels
            box = crop.Box(*params[:4])
            if isinstance(images, Pictures):
                pixels = crop.resample_each(images, box, params.flip, size=self.size)
            elif self.crop_scale is not None or self.flip:
                pixels = crop.resample(images, box, params.flip, size=self.size)
            else:
                pixels = crop.resize(images, size=self.size)
            if self.jitter is not None:
                pixels = colour.jitter(pixels, params.order, params.factors)
            if self.grey_p and pixels.shape[1] == 3:
                pixels = colour.to_grey(pixels, params.grey)
            if self.blur_sigma is not None:
                pixels = blur.blur(pixels, params.sigma)
            return self._normalized(pixels.clamp(0, 1))

    def __call__(self, images: Images, uniforms: Tensor | Uniforms) -> Tensor:
        """Augment uint8 images with uniforms [N,num_uniforms]: `sample`, then `apply`.

        `images` are [N,C,H,W] of one size, or `Pictures` of their own sizes. On a GPU with Triton
        either kind of uniforms takes four launches (`fast.augment`).
        """
        if fused.applies(self, images):
            from negchain.fast.augment.fused_triton import augment_fused

            return augment_fused(self, images, uniforms)
        if isinstance(uniforms, Uniforms):
            uniforms = uniforms.made(len(images), self.num_uniforms)
        return self.apply(images, self.sample(uniforms, *sides(images)))

    def from_table(
        self,
        table: Images,
        index: Tensor,
        uniforms: Tensor | Uniforms,
        dtype: torch.dtype,
    ) -> Tensor:
        """Augment `table[index]`, M uint8 images and positions [N]: pixels [N,C,size,size].

        On a GPU with Triton they come as an encoder wants them, in `dtype` and channels last,
        without a copy of the images in between; elsewhere as from a call, float32.

        >>> table = torch.randint(256, (4, 3, 9, 9), dtype=torch.uint8)
        >>> augment, index = Augmentation(size=8, flip=True), torch.tensor([2, 2, 0])
        >>> augment.from_table(table, index, torch.rand(3, 1), torch.float32).shape
        torch.Size([3, 3, 8, 8])
        """
        if not fused.applies(self, table):
            return self(table[index], uniforms)
        from negchain.fast.augment.fused_triton import augment_fused

        return augment_fused(self, table, uniforms, index=index, dtype=dtype, channels_last=True)

    def plain(self, images: Images) -> Tensor:
        """Return the evaluation view of uint8 images: resized and normalised, nothing random.

        Of `Pictures` it is that of their central squares.

        >>> Augmentation(size=8, flip=True).plain(torch.zeros(1, 3, 9, 9, dtype=torch.uint8)).shape
        torch.Size([1, 3, 8, 8])
        """
        check_images(images)
        if isinstance(images, Pictures):
            still = Augmentation(size=self.size, normalize=self.normalize)
            return still(images, torch.empty(len(images), 0, device=images.device))
        return self._normalized(crop.resize(images, size=self.size).clamp(0, 1))

    def _normalized(self, pixels: Tensor) -> Tensor:
        if self.normalize is None:
            return pixels
        # Python numbers, one channel at a time: a constant tensor would be copied from the host,
        # which a CUDA graph cannot capture
        pairs = zip(pixels.unbind(1), *self.normalize, strict=True)
        return torch.stack([(channel - mean) / std for channel, mean, std in pairs], dim=1)


def sides(images: Images) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Height and width: of all images as numbers, or of each picture as float32 [N]."""
    if isinstance(images, Tensor):
        return images.shape[2], images.shape[3]
    height, width = images.sizes.float().unbind(1)
    return height, width


def check_images(images: Images) -> None:
    """Raise ValueError unless `images` are uint8 [N,1,H,W], [N,3,H,W] or `Pictures`."""
    if isinstance(images, Pictures):
        return
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            "images must be uint8 of shape [N,1,H,W] or [N,3,H,W], got "
            f"{images.dtype} of shape {list(images.shape)}; convert them to grey or RGB bytes"
        )


# SimCLR's operations; each recipe adds its own strengths.
_SIMCLR = partial(Augmentation, crop_scale=(0.08, 1.0), flip=True, grey_p=0.2)
_RECIPES: dict[str, Callable[..., Augmentation]] = {
    # EMC² on STL-10: strong jitter, always blurred
    "simclr-stl10": partial(_SIMCLR, jitter=(0.8, 0.8, 0.8, 0.2), blur_sigma=(0.1, 2.0)),
    "simclr-imagenet": partial(
        _SIMCLR, jitter=(0.4, 0.4, 0.2, 0.1), blur_sigma=(0.1, 2.0), blur_p=0.5
    ),
    # the common SimCLR recipe for 32-pixel images: a blur would leave nothing
    "cifar": partial(
        _SIMCLR,
        jitter=(0.4, 0.4, 0.4, 0.1),
        normalize=((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    ),
    # no mirror image: a mirrored 2 is no digit
    "digits": partial(Augmentation, crop_scale=(0.5, 1.0)),
    # pictures with captions, which say "left" and "red": no mirror image, no other colours
    "mild": partial(
        Augmentation,
        crop_scale=(0.6, 1.0),
        normalize=((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ),
    "none": Augmentation,
}
RECIPES: tuple[str, ...] = tuple(_RECIPES)
"""Names that `augmentation` knows."""


def augmentation(name: str, *, size: int) -> Augmentation:
    """Return the recipe `name` for square outputs of `size` pixels.

    Change single settings with `dataclasses.replace`.

    >>> augmentation("simclr-stl10", size=96).blur_sigma
    (0.1, 2.0)
    """
    return _RECIPES[name](size=size)


_CHUNK_PIXELS = 2**23  # float32 values per intermediate tensor: 32 MiB


def finite_views(images: Images, augment: Augmentation, k: int, seed: int) -> Tensor:
    """Return k stored augmentations of each image: M uint8 images -> uint8 [M,k,C,size,size].

    The views are stored before normalisation; `augment.plain(views[:, j])` normalises them. Equal
    seeds give equal draws on every device, whatever the chunk size.

    >>> images = torch.randint(256, (5, 3, 12, 12), dtype=torch.uint8)
    >>> finite_views(images, Augmentation(size=8, flip=True), k=2, seed=0).shape
    torch.Size([5, 2, 3, 8, 8])
    """
    check_images(images)
    augment = replace(augment, normalize=None)
    count = len(images)
    if isinstance(images, Pictures):  # cut one at a time, so the views are what takes memory
        channels, height, width = images.channels, augment.size, augment.size
    else:
        channels, height, width = images.shape[1:]
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(count, k, augment.num_uniforms, generator=generator)
    shape = (count, k, channels, augment.size, augment.size)
    views = torch.empty(shape, dtype=torch.uint8, device=images.device)
    per_image = k * channels * max(height * width, augment.size**2)
    chunk = max(1, _CHUNK_PIXELS // per_image)
    for start in range(0, count, chunk):
        some = slice(start, start + chunk)
        rows = torch.arange(count, device=images.device)[some].repeat_interleave(k)
        pixels = augment(images[rows], uniforms[some].flatten(0, 1).to(images.device))
        views[some] = (pixels * 255).round_().to(torch.uint8).view_as(views[some])
    return views
