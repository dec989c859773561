"""--carried-gradient survivors: of the carried images, scored with the batch, those with weight
have a backward pass; a sample of them where there is no room for all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from interpreter import run_under_interpreter
from negchain.augment import Draws
from negchain.encoders import build_encoder
from negchain.train import step as step_module
from negchain.train import survivors, trainer
from negchain.train.config import ConfigError, resolve
from negchain.train.passes import OverlappedPass, PlainPass
from negchain.train.run_folder import RunFolder
from negchain.train.survivors import choose, gradient_of_survivors

# ------------------------------------------------------------------------------- which are chosen


def drawn(seed: int, first_row: int = 0) -> Draws:
    return Draws(seed, torch.tensor(seed + 1), step_module.STREAM_SURVIVORS, first_row)


def random_case(seed: int) -> tuple[Tensor, int, int]:
    """Gradients [first+B,D] of which some are zero, first, K."""
    generator = torch.Generator().manual_seed(seed)

    def below(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    count, first, dim = below(1, 40), below(0, 5), below(1, 9)
    grad = torch.randn(first + count, dim, generator=generator)
    share = float(torch.rand((), generator=generator)) * 1.2 - 0.1  # none to all
    grad[first:][torch.rand(count, generator=generator) < share] = 0
    return grad, first, below(1, count)


def slow_choice(grad: Tensor, u: Tensor, room: int) -> tuple[list[int], list[float]]:
    """`choose` as its description has it, one image after another."""
    lengths = [math.sqrt(sum(x * x for x in row)) for row in grad.tolist()]
    priorities = [length / draw for length, draw in zip(lengths, u.tolist(), strict=True)]
    order = sorted(range(len(grad)), key=lambda n: (-priorities[n], n))
    left_out = priorities[order[room]] if room < len(grad) else 0.0
    weight = {n: max(lengths[n], left_out) / lengths[n] for n in order[:room] if lengths[n] > 0}
    source = list(range(room))
    free = [place for place in source if place not in weight]
    for n in sorted(weight):
        if n >= room:
            source[free.pop(0)] = n
    return source, [weight.get(n, 0.0) for n in source]


@pytest.mark.parametrize("seed", range(50))
def test_choice_by_a_slow_one(seed) -> None:
    grad, first, room = random_case(seed)
    carried, u = grad[first:], drawn(seed).uniforms(len(grad) - first, 1)[:, 0]
    source, weight = choose(carried, u, room)
    expected, weights = slow_choice(carried, u, room)
    assert source.tolist() == expected
    assert weight.tolist() == pytest.approx(weights, rel=1e-5)
    # and what `move_rows` needs, each image with weight once
    assert len(set(expected)) == room
    assert all(row == place or row >= room for place, row in enumerate(expected))
    alive = int((carried != 0).any(1).sum())
    assert sum(w > 0 for w in weights) == min(alive, room)
    assert alive > room or set(weights) <= {0.0, 1.0}
    found = gradient_of_survivors(grad.clone(), first, room, drawn(seed))
    assert found[0].equal(source) and found[1][:first].equal(grad[:first])
    torch.testing.assert_close(found[1][first:], carried[source] * weight[:, None])


def test_nothing_to_train() -> None:
    source, trained = gradient_of_survivors(torch.zeros(9, 3), 2, 4, drawn(0))
    assert source.tolist() == [0, 1, 2, 3] and trained.equal(torch.zeros(6, 3))


DRAWS = 1000


def worst_z(sample: Callable[[Tensor, int, int, Draws], tuple[Tensor, Tensor]]) -> float:
    """Over images: how many standard errors the mean of what is trained is off the gradient."""
    first, room = 1, 2
    grad = torch.randn(first + 6, 3, generator=torch.Generator().manual_seed(1))
    grad[first:] *= torch.tensor([1.0, 0.0, 5.0, 0.3, 1.0, 2.0])[:, None]  # one without weight
    alive = [first + n for n in (0, 2, 3, 4, 5)]
    shares = torch.zeros(DRAWS, len(grad), dtype=torch.float64)
    for number in range(DRAWS):
        source, trained = sample(grad.clone(), first, room, drawn(number))
        whole = torch.zeros_like(grad)
        whole[first + source] = trained[first:]
        shares[number] = (whole * grad).sum(1) / grad.square().sum(1).clamp(min=1e-9)
        assert (whole[first + 1] == 0).all()
    shares = shares[:, alive]
    z = (shares.mean(0) - 1) / (shares.std(0) / DRAWS**0.5)
    return float(z.abs().max())


def unweighted(grad: Tensor, first: int, room: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """The planted bug: whoever is chosen keeps its own gradient."""
    source, trained = gradient_of_survivors(grad.clone(), first, room, draws)
    kept = torch.where(trained[first:] != 0, grad[first:][source], 0.0)
    return source, torch.cat([trained[:first], kept])


def test_expected_gradient_of_every_image() -> None:
    """Five images, |z| < 4.06: false alarms 2.5e-4."""
    assert worst_z(gradient_of_survivors) < 4.06
    assert worst_z(unweighted) > 3 * 4.06


# ------------------------------------------------------------------------------------- the kernel


def interpreted_kernel_is_the_twin() -> None:
    from negchain.train.survivors_triton import gradient_of_survivors_triton

    cases = [(*random_case(seed), seed % 3) for seed in range(16)]
    for count in (1, 33):
        for room in {1, count}:
            grad = torch.randn(2 + count, 3, generator=torch.Generator().manual_seed(count))
            cases += [(grad, 2, room, 0), (torch.zeros_like(grad), 2, room, 0)]
    cases.append((torch.randn(80, 1, generator=torch.Generator().manual_seed(0)), 3, 30, 0))
    cases.append((torch.randn(5, 1500, generator=torch.Generator().manual_seed(0)), 1, 2, 7))
    diverged = torch.randn(34, 3, generator=torch.Generator().manual_seed(1))
    diverged[[3, 20, 30]] = torch.nan  # takes no room from others
    cases.append((diverged, 2, 16, 0))
    for number, (grad, first, room, first_row) in enumerate(cases):
        draws, given = drawn(number, first_row), grad.bfloat16() if number % 4 == 3 else grad
        # a weight off by float32's rounding may round to bf16's neighbour
        rtol = 1e-5 if given.dtype == torch.float32 else 2**-7
        source, trained = gradient_of_survivors(given.clone(), first, room, draws)
        found = gradient_of_survivors_triton(given.clone(), first, room, draws)
        assert found[0].equal(source), (number, first, room)
        torch.testing.assert_close(found[1], trained, rtol=rtol, atol=1e-6, equal_nan=True)


def interpreted_kernel_takes_as_many_as_fit_one_program() -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("negchain.fast.backends.prefers_triton", lambda like: True)
        patch.setattr(
            "negchain.train.survivors_triton.gradient_of_survivors_triton",
            lambda grad, *given: (calls.append(len(grad)), (grad, grad))[1],
        )
        for count in (1, survivors.MOST_FUSED, survivors.MOST_FUSED + 1):
            gradient_of_survivors(torch.ones(3 + count, 1), 3, 1, drawn(0))
    assert calls == [4, 3 + survivors.MOST_FUSED]


def test_kernels_under_the_interpreter() -> None:
    run_under_interpreter(__file__)


# -------------------------------------------------------------------------------- training steps

STEPS = 150
SETTINGS = {"method": "emc2", "norm": "none", "data": "digits", "device": "cpu", "steps": 10}


def prepared(folder: Any, **settings: Any) -> Iterator[trainer.Run]:
    """A run whose weights and chains stay: only gradients are looked at."""
    config = resolve(None, {**SETTINGS, **settings})
    data = trainer.load_images(config, False)
    run = trainer.prepare(config, data, lambda: RunFolder.create(folder / "run", config="{}\n"))
    run.step.optimizer.step = lambda: None
    run.step.loss_fn.eval()
    yield run
    run.folder.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Chains with few proposals, so that many carried states survive."""
    yield from prepared(tmp_path_factory.mktemp("run"), batch_size=8, beta=40.0, burn_in=0.2)


def gradient(run: trainer.Run, step: int) -> Tensor:
    run.step(step, torch.arange(run.config.batch_size))
    return torch.cat([p.grad.flatten().clone() for p in run.encoder.parameters()])


def test_equals_one_pass_where_all_survivors_fit(run, monkeypatch) -> None:
    assert not run.step.score_first  # a small CNN gains nothing
    monkeypatch.setattr(step_module, "SURVIVORS", 1)
    for step in range(3):
        monkeypatch.setattr(run.step, "score_first", False)
        joint = gradient(run, step)
        monkeypatch.setattr(run.step, "score_first", True)
        assert torch.allclose(gradient(run, step), joint, atol=1e-5)


def never_trained(grad: Tensor, first: int, room: int, draws: Draws) -> tuple[Tensor, Tensor]:
    """The planted bug: the chosen have no weight."""
    source, trained = gradient_of_survivors(grad, first, room, draws)
    return source, torch.cat([trained[:first], torch.zeros_like(trained[first:])])


@pytest.fixture(scope="module")
def gradients(run) -> dict[str, Tensor]:
    """Of all steps, [STEPS,P] each; of 8 carried images one can be trained."""
    ways = {"joint": None, "apart": gradient_of_survivors, "never": never_trained,
            "unweighted": unweighted}  # fmt: skip
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "SURVIVORS", 8)
        for name, way in ways.items():
            patch.setattr(run.step, "score_first", way is not None)
            patch.setattr(step_module, "gradient_of_survivors", way)
            found[name] = torch.stack([gradient(run, step) for step in range(STEPS)])
    return found


def z_score(found: Tensor, joint: Tensor, direction: Tensor) -> float:
    difference = (found - joint) @ (direction / direction.norm())
    return float(difference.mean() / (difference.std() / STEPS**0.5))


def test_expected_gradient_is_that_of_one_pass(gradients) -> None:
    """False alarms: 1e-3.

    Both sides are averaged over the same steps, and their difference is read along the direction of
    what the carried images' own gradient adds.
    """
    joint, apart, never = (gradients[name] for name in ("joint", "apart", "never"))
    direction = (joint - never).mean(0)
    assert abs(z_score(apart, joint, direction)) < 3.29
    assert abs(z_score(never, joint, direction)) > 2 * 3.29
    assert (apart - joint).norm() > 1e-3 * joint.norm()  # a sample it was


def test_priority_sampling_without_its_weights_is_caught(gradients) -> None:
    """Read along what the weights add. False alarms: none known."""
    joint, apart, plain = (gradients[name] for name in ("joint", "apart", "unweighted"))
    direction = (joint - plain).mean(0)
    direction = direction / direction.norm()
    biases = [float(((found - joint) @ direction).mean()) for found in (apart, plain)]
    assert abs(biases[1]) > 3 * abs(biases[0])


# ----------------------------------------------------------------- a ResNet without normalisation

RESNET = {"encoder": "resnet18", "image_size": 32, "batch_size": 4, "beta": 40.0, "burn_in": 0.2}


@pytest.fixture(scope="module")
def resnet_runs(tmp_path_factory):
    """The default, and all carried images trained."""
    folder, given = tmp_path_factory.mktemp("resnets"), {**RESNET, "optimizer": "sgd"}
    runs = [prepared(folder / "default", **given)]
    runs.append(prepared(folder / "all", **given, carried_gradient="all"))
    yield [next(run) for run in runs]
    for run in runs:
        assert next(run, None) is None


def watched(patch: pytest.MonkeyPatch) -> list[int]:
    """Of each step, how many carried images have weight."""
    counts = []

    def counted(grad: Tensor, first: int, room: int, draws: Draws) -> tuple[Tensor, Tensor]:
        counts.append(int((grad[first:] != 0).any(1).sum()))
        return gradient_of_survivors(grad, first, room, draws)

    patch.setattr(step_module, "gradient_of_survivors", counted)
    return counts


def test_a_resnets_gradient_is_that_of_all(resnet_runs, monkeypatch) -> None:
    """In float32: two sums in another order."""
    survivors, everything = resnet_runs
    assert survivors.step.score_first and not everything.step.score_first
    monkeypatch.setattr(step_module, "SURVIVORS", 1)
    counts = watched(monkeypatch)
    for step in range(2):
        found, expected = (gradient(run, step) for run in resnet_runs)
        assert (found - expected).norm() <= 1e-5 * expected.norm()
        assert survivors.step.loss.allclose(everything.step.loss, rtol=1e-6)
    assert len(counts) == 2 and sum(counts) > 0


def test_a_resnets_step_with_the_recorded_pass(resnet_runs, monkeypatch) -> None:
    """As in a captured step, in bf16; 2^-8 is its last place."""
    run = resnet_runs[0]
    counts, found = watched(monkeypatch), {}
    for kind in (PlainPass, OverlappedPass):
        passes = kind(run.encoder, run.step.optimizer, torch.bfloat16)
        monkeypatch.setattr(run.step, "passes", passes)
        found[kind] = [(gradient(run, step), run.step.loss.clone()) for step in range(2)]
    assert sum(counts) > 0
    for (plain, loss), (overlapped, same) in zip(*found.values(), strict=True):
        assert (overlapped - plain).norm() <= 2**-8 * plain.norm()
        assert same.equal(loss)


# ------------------------------------------------------------------------------------- the option


@pytest.mark.parametrize("value", ["survivors", "all"])
@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "isir"}, ("--method emc2", "--method is 'isir'", "change --method")),
        (
            {"carried": "score"},
            ("--carried encode", "--carried is 'score'", "change --carried"),
        ),
        ({"carried": "cached"}, ("--carried encode", "--carried is 'cached'")),
        ({"proposal": "cache"}, ("--proposal batch", "--proposal is 'cache'")),
        ({"augmentations": 2}, ("--augmentations 0", "--augmentations is 2")),
    ],
)
def test_refused_where_it_means_nothing(settings, words, value) -> None:
    assert resolve(None, {**SETTINGS, "carried_gradient": value}).carried_gradient == value
    resolve(None, {**SETTINGS, **settings})  # left out
    with pytest.raises(ConfigError) as refused:
        resolve(None, {**SETTINGS, **settings, "carried_gradient": value})
    told = str(refused.value)
    assert all(word in told for word in (*words, "leave out --carried-gradient")), told


@pytest.mark.parametrize(
    "settings, first",
    [
        ({}, True),
        ({"carried_gradient": "survivors"}, True),
        ({"carried_gradient": "all"}, False),
        ({"carried_gradient": "survivors", "norm": "batch"}, False),
        ({"norm": "group"}, False),
        ({"method": "isir"}, False),
        ({"method": "infonce"}, False),
        ({"carried": "score"}, False),
        ({"carried": "cached"}, False),
        ({"proposal": "cache"}, False),
        ({"augmentations": 2}, False),
    ],
)
def test_which_runs_score_first(settings, first) -> None:
    config = resolve(None, {**SETTINGS, "encoder": "resnet18", "image_size": 32, **settings})
    encoder = build_encoder("resnet18", image_size=32, channels=1, norm=config.norm)
    assert step_module._scores_first(config, encoder) == first
