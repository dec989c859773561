"""The fused Triton kernels give the pixels of their torch twin.

Functions named `interpreted_...` run under Triton's interpreter, which must be chosen before Triton
is imported: `test_under_the_interpreter` runs them all in a process of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interpreter import run_under_interpreter
from negchain.augment import RECIPES, Augmentation, Images, Params, Pictures, Uniforms, augmentation
from negchain.augment.pipeline import sides

STRONG = (0.8, 0.8, 0.8, 0.2)
NORMALIZE = ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
ALONE = {
    "nothing": Augmentation(size=12),
    "crop": Augmentation(size=12, crop_scale=(0.08, 1.0)),
    "flip": Augmentation(size=12, flip=True),
    "jitter": Augmentation(size=12, jitter=STRONG, jitter_p=0.8),
    "wild jitter": Augmentation(size=12, jitter=(2.0, 2.0, 2.0, 0.5), jitter_p=1.0),
    "jitter without contrast": Augmentation(size=12, jitter=(0.4, 0.0, 0.4, 0.1)),
    "grey": Augmentation(size=12, grey_p=0.5),
    "blur": Augmentation(size=21, blur_sigma=(0.1, 2.0), blur_p=0.7),
    "normalize": Augmentation(size=12, normalize=NORMALIZE),
}
ALL = Augmentation(
    size=21,
    crop_scale=(0.08, 1.0),
    flip=True,
    jitter=STRONG,
    grey_p=0.3,
    blur_sigma=(0.1, 2.0),
    blur_p=0.8,
    normalize=NORMALIZE,
)


def batch(count: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise, with a flat, a saturated and a smooth image among it."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, height, width), generator=generator)
    images[0] = 128
    images[1, 1:] = 0
    images[2] = torch.linspace(0, 255, width)
    return images.to(torch.uint8)


def draws(augment: Augmentation, count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, augment.num_uniforms, generator=torch.Generator().manual_seed(seed))


def for_channels(augment: Augmentation, channels: int) -> Augmentation:
    if augment.normalize is None:
        return augment
    mean, std = augment.normalize
    return replace(augment, normalize=(mean[:channels], std[:channels]))


def fused_sample(augment: Augmentation, uniforms: Tensor, height: int, width: int) -> Params:
    """The kernel's rows of numbers as `Augmentation.sample` returns them."""
    from negchain.fast.augment import fused_params_triton as fields

    rows = fields.fused_params(augment, uniforms, len(uniforms), (height, width))
    neutral = augment.sample(uniforms, height, width)
    order, gains = neutral.order, neutral.factors  # without jitter the kernel writes neither
    if augment.jitter is not None:
        order = rows[:, fields.ORDER.value :][:, :4].long()
        gains = rows[:, fields.GAINS.value :][:, :4]
    return Params(
        top=rows[:, fields.TOP.value],
        left=rows[:, fields.LEFT.value],
        height=rows[:, fields.HEIGHT.value],
        width=rows[:, fields.WIDTH.value],
        flip=rows[:, fields.FLIP.value] > 0.5,
        order=order,
        factors=torch.empty_like(gains).scatter_(1, order, gains),
        grey=rows[:, fields.GREY.value] > 0.5,
        sigma=rows[:, fields.SIGMA.value],
    )


def by_kernels(augment: Augmentation, images: Images, drawn: Tensor | Uniforms) -> Tensor:
    from negchain.fast.augment.fused_triton import augment_fused

    return augment_fused(augment, images, drawn)


def by_torch(augment: Augmentation, images: Images, drawn: Tensor | Uniforms) -> Tensor:
    if isinstance(drawn, Uniforms):
        drawn = drawn.made(len(images), augment.num_uniforms)
    return augment.apply(images, augment.sample(drawn, *sides(images)))


def same_boxes(actual: Params, expected: Params) -> Tensor:
    """[N] bool: images whose box has the same sides and place; a side on a half may differ."""
    return (torch.stack(actual[:4]) == torch.stack(expected[:4])).all(dim=0)


def assert_equals_twin(augment: Augmentation, images: Tensor, seed: int = 1) -> None:
    uniforms = draws(augment, len(images), seed)
    actual = by_kernels(augment, images, uniforms)
    expected = by_torch(augment, images, uniforms)
    assert actual.dtype == torch.float32 and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------- under the interpreter


@pytest.mark.parametrize(
    "channels, height, width",
    [
        (3, 17, 23),
        pytest.param(1, 17, 23, marks=pytest.mark.slow),
        pytest.param(3, 12, 12, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ALONE)
def interpreted_each_operation_alone(name: str, channels: int, height: int, width: int) -> None:
    augment = for_channels(ALONE[name], channels)
    assert_equals_twin(augment, batch(3, channels, height, width))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("height, width", [(17, 23), (21, 21), (70, 45)])
def interpreted_all_operations(channels: int, height: int, width: int) -> None:
    assert_equals_twin(for_channels(ALL, channels), batch(4, channels, height, width))


def interpreted_several_blocks_per_image() -> None:
    """50 x 50 pixels are five blocks: their sums of luminance add up to the image's."""
    assert_equals_twin(replace(ALL, size=50), batch(3, 3, 33, 57))


def interpreted_one_pixel() -> None:
    assert_equals_twin(replace(ALL, size=1), batch(3, 3, 4, 3))
    assert_equals_twin(replace(ALL, size=7), batch(3, 3, 1, 1))


def interpreted_all_orders_of_jitter() -> None:
    augment = Augmentation(size=12, jitter=STRONG, jitter_p=1.0)
    images, uniforms = batch(24, 3, 12, 12), draws(augment, 24)
    orders = torch.tensor(list(itertools.permutations(range(4))))
    places = orders.argsort(dim=1)
    uniforms[:, 5:9] = places / 4  # an operation's sort key is its place
    assert augment.sample(uniforms, 12, 12).order.equal(orders)
    actual = by_kernels(augment, images, uniforms)
    expected = by_torch(augment, images, uniforms)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    uniforms[:, 5:9] = 0.75 - places / 4  # saboteur: the reversed order is far off
    wrong = by_torch(augment, images, uniforms)
    assert (wrong - expected).abs().amax(dim=(1, 2, 3)).median() > 2 / 255


@pytest.mark.parametrize("height, width", [(96, 96), (40, 200)])
def interpreted_params(height: int, width: int) -> None:
    """Narrow images reach the central box; a side may round either way at a half."""
    augment = replace(ALL, size=96)
    uniforms = draws(augment, 100)
    uniforms[:3], uniforms[3:6] = 0.0, 1 - 2**-24  # the ends, where all sort keys tie
    actual = fused_sample(augment, uniforms, height, width)
    expected = augment.sample(uniforms, height, width)
    assert (~same_boxes(actual, expected)).sum() <= 1
    assert actual.flip.equal(expected.flip) and actual.grey.equal(expected.grey)
    assert actual.order[6:].equal(expected.order[6:])
    torch.testing.assert_close(actual.factors, expected.factors, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.sigma, expected.sigma, rtol=0, atol=1e-6)


def hashed_equals_read(augment: Augmentation, hashed: Uniforms, read: Uniforms, count: int) -> bool:
    """Whether the kernel's rows are the same bits: draws hashed in it, or read from a tensor."""
    from negchain.fast.augment import fused_params_triton as fields

    uniforms = read.made(count, augment.num_uniforms)
    rows = [fields.fused_params(augment, drawn, count, (40, 60)) for drawn in (hashed, uniforms)]
    if augment.jitter is None:  # then these are not written
        for some in rows:
            some[:, fields.PLACES.value : fields.POSITION.value] = 0
    return rows[0].view(torch.int32).equal(rows[1].view(torch.int32))


@pytest.mark.parametrize(
    "seed, step, first_row", [(0, 0, 0), (16, 7, 1), (-3, 2**33 + 5, 96), (2**40 + 1, 100, 17)]
)
def interpreted_draws_in_the_kernel(seed: int, step: int, first_row: int) -> None:
    drawn = Uniforms(seed, torch.tensor(step), 32, first_row)
    assert hashed_equals_read(ALL, drawn, drawn, 3)
    saboteurs = [
        replace(drawn, first_row=first_row + 1),
        replace(drawn, step=torch.tensor(step + 1)),
        replace(drawn, use=33),
        replace(drawn, seed=seed + 1),
    ]
    assert not any(hashed_equals_read(ALL, other, drawn, 1) for other in saboteurs)


@pytest.mark.parametrize("name", ALONE)
def interpreted_draws_of_each_operation(name: str) -> None:
    """The columns that an operation's draws have depend on which operations there are."""
    drawn = Uniforms(3, torch.tensor(11), 32, 5)
    assert hashed_equals_read(ALONE[name], drawn, drawn, 2)


def interpreted_pixels_from_draws() -> None:
    images, drawn = batch(5, 3, 17, 23), Uniforms(1, torch.tensor(4), 32, first_row=3)
    uniforms = drawn.made(5, ALL.num_uniforms)
    actual = by_kernels(ALL, images, drawn)
    assert actual.equal(by_kernels(ALL, images, uniforms))
    expected = ALL(images, drawn)  # on a CPU by torch
    assert expected.equal(by_torch(ALL, images, uniforms))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def interpreted_dtype_and_memory_format(
    dtype: torch.dtype, channels_last: bool, channels: int
) -> None:
    from negchain.fast.augment.fused_triton import augment_fused

    augment = for_channels(ALL, channels)
    images, uniforms = batch(3, channels, 17, 23), draws(augment, 3)
    actual = augment_fused(augment, images, uniforms, dtype=dtype, channels_last=channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert actual.dtype == dtype and actual.is_contiguous(memory_format=layout)
    expected = by_torch(augment, images, uniforms)
    tolerance = max(1e-5, 4 * torch.finfo(dtype).eps)  # values reach 3.5
    torch.testing.assert_close(actual.float(), expected, rtol=0, atol=tolerance)


def interpreted_index_gathers() -> None:
    from negchain.fast.augment.fused_triton import augment_fused

    table, index = batch(7, 3, 17, 23), torch.tensor([6, 0, 3, 3, 5])
    uniforms = draws(ALL, 5)
    actual = augment_fused(ALL, table, uniforms, index=index)
    assert actual.equal(augment_fused(ALL, table[index], uniforms))
    torch.testing.assert_close(actual, ALL(table[index], uniforms), rtol=0, atol=1e-5)


def ragged(channels: int = 3, seed: int = 0) -> Pictures:
    """Noise of many shapes: one pixel, rows, columns, narrow, larger and smaller than a view."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 1), (1, 9), (40, 3), (17, 23), (70, 45), (12, 12), (33, 90)]
    noise = [torch.randint(256, (channels, *shape), generator=generator) for shape in shapes]
    return Pictures.pack([pixels.to(torch.uint8) for pixels in noise])


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", [*ALONE, "all"])
def interpreted_pictures_of_their_own_sizes(name: str, channels: int) -> None:
    augment = for_channels(ALONE.get(name, ALL), channels)
    pictures = ragged(channels)
    uniforms = draws(augment, len(pictures))
    actual = by_kernels(augment, pictures, uniforms)
    expected = by_torch(augment, pictures, uniforms)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def interpreted_pictures_by_index() -> None:
    from negchain.fast.augment.fused_triton import augment_fused

    pictures, drawn = ragged(), Uniforms(0, torch.tensor(1), 32)
    index = torch.tensor([6, 0, 3, 6, 0, 3, 3, 5, 2])
    actual = augment_fused(ALL, pictures, drawn, index=index)
    chosen = pictures[index]
    assert actual.equal(augment_fused(ALL, chosen, drawn))
    torch.testing.assert_close(actual, by_torch(ALL, chosen, drawn), rtol=0, atol=1e-5)


def interpreted_every_other_picture() -> None:
    pictures = ragged()[::2]
    drawn = draws(ALL, len(pictures))
    assert not pictures.offsets.is_contiguous()
    actual, expected = by_kernels(ALL, pictures, drawn), by_torch(ALL, pictures, drawn)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def interpreted_pictures_of_one_size_are_images() -> None:
    images, uniforms = batch(5, 3, 70, 45), draws(ALL, 5)
    pictures = Pictures.of(images)
    assert by_kernels(ALL, pictures, uniforms).equal(by_kernels(ALL, images, uniforms))


def interpreted_inputs_are_kept_and_results_repeat() -> None:
    images, uniforms = batch(3, 3, 17, 23), draws(ALL, 3)
    kept = images.clone(), uniforms.clone()
    first = by_kernels(ALL, images, uniforms)
    assert first.equal(by_kernels(ALL, images, uniforms))
    assert images.equal(kept[0]) and uniforms.equal(kept[1])
    spread = images.transpose(2, 3).contiguous().transpose(2, 3)
    assert first.equal(by_kernels(ALL, spread, uniforms))


def interpreted_errors() -> None:
    with pytest.raises(ValueError, match="uniforms per image"):
        by_kernels(ALL, batch(4, 3, 9, 9), torch.rand(4, 3))
    with pytest.raises(ValueError, match="one row of uniforms per image"):
        by_kernels(ALL, batch(4, 3, 9, 9), draws(ALL, 5))
    with pytest.raises(ValueError, match="uint8 of shape"):
        by_kernels(ALL, batch(4, 3, 9, 9).float(), draws(ALL, 4))
    with pytest.raises(ValueError, match="one mean and one deviation per channel"):
        by_kernels(ALL, batch(4, 1, 9, 9), draws(ALL, 4))


@pytest.mark.slow
def test_under_the_interpreter() -> None:
    run_under_interpreter(__file__)


@pytest.mark.slow
def test_the_rest_under_the_interpreter() -> None:
    run_under_interpreter(__file__, "slow and not gpu")


# ----------------------------------------------------------------------------- without a device


def test_a_cpu_takes_torch() -> None:
    images, uniforms = batch(3, 3, 17, 23), draws(ALL, 3)
    assert ALL(images, uniforms).equal(by_torch(ALL, images, uniforms))


def test_from_table_takes_draws() -> None:
    table, index = batch(7, 3, 17, 23), torch.tensor([6, 0, 3, 6, 0, 3])
    drawn = Uniforms(0, torch.tensor(1), 32, first_row=2)
    actual = ALL.from_table(table, index, drawn, torch.float32)
    uniforms = drawn.made(6, ALL.num_uniforms)
    assert actual.equal(ALL(table[index], uniforms))


# ------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("height, width", [(96, 96), (120, 200)])
@pytest.mark.parametrize("name", RECIPES)
def test_gpu_equals_torch(name: str, height: int, width: int) -> None:
    """2e-4: a centre of the filter is off by a rounding there, which the jitter amplifies."""
    augment = augmentation(name, size=96)
    images, uniforms = batch(64, 3, height, width).cuda(), draws(augment, 64).cuda()
    params = augment.sample(uniforms, height, width)
    alike = same_boxes(fused_sample(augment, uniforms, height, width), params)
    assert (~alike).sum() <= 1
    actual = augment(images, uniforms)[alike]
    expected = by_torch(augment, images, uniforms)[alike]
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_gpu_pictures_equal_torch(name: str) -> None:
    """Pictures of their own sizes, by index, and their evaluation view; captured in a graph."""
    augment = augmentation(name, size=96)
    generator = torch.Generator().manual_seed(3)
    shapes = [(40, 300), (96, 96), (288, 432), (500, 288), (300, 301), (20, 20), (97, 511)]
    noise = [torch.randint(256, (3, *shape), generator=generator).byte() for shape in shapes]
    pictures = Pictures.pack(noise).to("cuda")
    index = torch.arange(56, device="cuda") % len(shapes)
    uniforms = draws(augment, len(index)).cuda()
    expected = by_torch(augment, pictures[index], uniforms)
    apart = (augment(pictures[index], uniforms) - expected).abs().amax((1, 2, 3))
    assert (apart > 1e-3).sum() <= 1  # a crop whose side is rounded may fall the other way
    torch.testing.assert_close(
        augment.plain(pictures).cpu(), augment.plain(pictures.to("cpu")), rtol=0, atol=2e-4
    )
    call = augment.from_table(pictures, index, uniforms, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = augment.from_table(pictures, index, uniforms, torch.float32)
    graph.replay()
    assert replayed.equal(call)


@pytest.mark.gpu
def test_gpu_params() -> None:
    """Sides that lie on a half are fewer than one image in a thousand."""
    augment = augmentation("simclr-stl10", size=96)
    uniforms = draws(augment, 20_000).cuda()
    actual = fused_sample(augment, uniforms, 96, 96)
    expected = augment.sample(uniforms, 96, 96)
    assert (~same_boxes(actual, expected)).sum() <= 20
    assert actual.flip.equal(expected.flip) and actual.grey.equal(expected.grey)
    assert (actual.order != expected.order).any(dim=1).sum() <= 4  # tied sort keys
    torch.testing.assert_close(actual.factors, expected.factors, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual.sigma, expected.sigma, rtol=0, atol=1e-6)


@pytest.mark.gpu
def test_gpu_graph_replays_bf16_channels_last_of_a_table() -> None:
    from negchain.fast.augment.fused_triton import augment_fused

    augment = augmentation("simclr-stl10", size=96)
    table = batch(50, 3, 96, 96).cuda()
    index, uniforms = torch.arange(32).cuda(), draws(augment, 32).cuda()

    def run() -> Tensor:
        return augment_fused(
            augment, table, uniforms, index=index, dtype=torch.bfloat16, channels_last=True
        )

    run()  # kernels are compiled outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pixels = run()
    index.copy_(torch.arange(18, 50))
    uniforms.copy_(draws(augment, 32, seed=5))
    graph.replay()
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert pixels.equal(run())
    alike = same_boxes(fused_sample(augment, uniforms, 96, 96), augment.sample(uniforms, 96, 96))
    assert (~alike).sum() <= 1
    expected = by_torch(augment, table[index], uniforms)
    torch.testing.assert_close(pixels.float()[alike], expected[alike], rtol=0, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("first_row", [0, 96])
def test_gpu_draws_in_the_kernel(first_row: int) -> None:
    augment = augmentation("simclr-stl10", size=96)
    for seed, step in itertools.product([0, 16, 2**40 + 1], [0, 7, 2**33 + 5]):
        drawn = Uniforms(seed, torch.tensor(step).cuda(), 32, first_row)
        assert hashed_equals_read(augment, drawn, drawn, 96)
        wrong = replace(drawn, first_row=first_row + 1)
        assert not hashed_equals_read(augment, wrong, drawn, 96)


@pytest.mark.gpu
def test_gpu_graph_reads_the_step_at_replay() -> None:
    """The blur reads what other threads of its program wrote: many repeats, equal bits."""
    augment = augmentation("simclr-stl10", size=96)
    table, step = batch(50, 3, 96, 96).cuda(), torch.tensor(0).cuda()
    views, carried = torch.arange(32).cuda(), torch.arange(18, 50).cuda()
    drawn, whole = Uniforms(0, step, 32), torch.cat([views, views, carried])

    def run() -> Tensor:
        return augment.from_table(table, whole, drawn, torch.bfloat16)

    run()  # kernels are compiled outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pixels = run()
    for number in range(20):
        step.fill_(number)
        graph.replay()
        uniforms = drawn.made(96, augment.num_uniforms)
        assert pixels.equal(augment.from_table(table, whole, uniforms, torch.bfloat16))
        boxes = fused_sample(augment, uniforms, 96, 96)
        alike = same_boxes(boxes, augment.sample(uniforms, 96, 96))
        expected = by_torch(augment, table[whole], uniforms)
        torch.testing.assert_close(pixels.float()[alike], expected[alike], rtol=0, atol=2**-8)
