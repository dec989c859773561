"""One process and several, on the same joined batches: equal losses, gradients and state.

The ranks of a world size are started once and go through every case; one process is the reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import losses_under_test as under_test
import pytest
import torch
import torch.distributed as dist
from losses_under_test import Case, M, Method, battery, case_name
from torch import Tensor, nn

from forked import fork_ranks
from negchain import (
    Chunked,
    DCLLoss,
    Draw,
    EMC2Loss,
    Given,
    ImportanceLoss,
    Informed,
    NegativeCacheLoss,
    Uniform,
)
from negchain.losses import distributed as ranks_module
from negchain.losses.base import ContrastiveLoss

# Sizes of the ranks' batches, step by step: even, then uneven, with one rank that has none.
SIZES = {1: [[8], [5]], 2: [[4, 4], [4, 1]], 4: [[2] * 4, [3, 0, 1, 1]]}
MORE = {
    "dcl-five": Method(DCLLoss, {"proposals": Uniform(5)}, takes=("views",)),
    "mh-five": Method(EMC2Loss, {"proposals": Informed(5, refresh=0.2)}),
    "negcache-corpus": Method(
        NegativeCacheLoss, {"num_keys": 2 * M, "views": "paired"}, takes=("denominator",)
    ),
}
METHODS = under_test.METHODS | MORE
CASES: list[Case] = battery() + [
    (name, {key: value for key, value in options.items() if key in METHODS[name].takes})
    for name in MORE
    for options in (
        {"views": "shared", "denominator": "negatives"},
        {"views": "paired", "denominator": "all"},
    )
]
QUICK = [case_name(case) for case in CASES]
CASES += [  # and every loss and way of asking with all layouts and denominators
    (name, {key: value for key, value in options.items() if key in method.takes})
    for name, method in METHODS.items()
    for views in ("shared", "paired")
    for options in ({"views": views, "denominator": d} for d in ("negatives", "all"))
]
BY_NAME = {case_name(case): case for case in CASES}
FEWER = [  # with four ranks: every loss, layout, denominator and way of asking
    "infonce-paired", "dcl-five-shared", "sogclr-shared-all", "negcache-paired-all",
    "mh-augmentations-negatives", "mh-uniform-paired-all", "mh-given-shared-negatives",
    "isir-cached-paired-all", "isir-corpus-all", "mh-five-shared-negatives",
    "large batch-shared-negatives", "importance-paired-all", "topk-shared-negatives",
]  # fmt: skip


def batches(rank: int, world: int) -> Iterator[Tensor]:
    """This rank's part of every joined batch."""
    order = torch.randperm(M, generator=torch.Generator().manual_seed(3))
    for number, sizes in enumerate(SIZES[world]):  # chains of the first batch come again
        yield order[5 * number :][: sum(sizes)].split(sizes)[rank]


def built(name: str, **more: Any) -> tuple[ContrastiveLoss, nn.Module, Tensor]:
    """A loss with a learned beta, an encoder and its items, all in float64."""
    method, options = BY_NAME[name]
    beta = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    loss_fn = METHODS[method].build(beta, **options, **more)
    net, items = under_test.data(2 if loss_fn.num_keys or loss_fn.ids_per_item > 1 else 1)
    return loss_fn, net.double(), items.double()


def steps(
    loss_fn: ContrastiveLoss, net: nn.Module, items: Tensor, own: Iterator[Tensor]
) -> list[dict[str, Tensor]]:
    """Losses and mean gradients of some steps, as DDP makes them, and the state they leave."""
    seen = []
    wanted = [*net.parameters(), *loss_fn.parameters()]
    for index in own:
        more = torch.where(index % 3 == 0, (index + 5) % M, -1)
        known = torch.stack([(index + 1) % M, more], 1)
        known = known[:, : 1 + int((more >= 0).any())]  # as wide as this rank needs it
        with_known = loss_fn.num_keys is None and loss_fn.views == "shared"
        loss = under_test.run(loss_fn, net, items, index, known if with_known else None)
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g for p, g in zip(wanted, grads, strict=True)
        ]
        for grad in grads if dist.is_initialized() else ():
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        seen.append({"loss": loss.detach(), **dict(enumerate(grads)), **whole_state(loss_fn)})
    return seen


def whole_state(loss_fn: nn.Module) -> dict[str, Tensor]:
    """A copy of the state, its shards put together."""
    state = loss_fn.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


# ---------------------------------------------------------------------- what a rank does


def every_case(rank: int, world: int, names: Iterable[str]) -> dict[str, Any]:
    return {name: steps(*built(name), batches(rank, world)) for name in names}


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    kept = ranks_module._Gather.backward
    wrong: dict[str, Callable[..., Any]] = {
        "not scaled": lambda ctx, g: (g[ctx.ranks.rank], None),
        "no gradient": lambda ctx, g: (torch.zeros_like(g[0]), None),
        "another's rows": lambda ctx, g: (g[ctx.ranks.rank - 1] * ctx.ranks.world, None),
    }
    ranks_module._Gather.backward = staticmethod(wrong[name])  # type: ignore[method-assign]
    try:
        yield
    finally:
        ranks_module._Gather.backward = kept  # type: ignore[method-assign]


PLANTS = ("not scaled", "no gradient", "another's rows")


def plants(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name in PLANTS:
        with planted(name):
            found[name] = steps(*built("mh-shared-negatives"), batches(rank, world))
    return found


class Trained(nn.Module):
    """An encoder and its losses in one module, as people (and Lightning) write it."""

    def __init__(self) -> None:
        super().__init__()
        net, items = under_test.data(1)
        self.net, self.items = Chunked(net.double(), 2), items.double()
        self.register_buffer("shared", torch.zeros(1))  # a buffer DDP does broadcast
        self.beta = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
        self.losses = nn.ModuleList([EMC2Loss(M, self.beta), NegativeCacheLoss(M, self.beta)])

    def forward(self, index: Tensor) -> Tensor:
        z_a, z_b = self.net(self.items[index]), self.net(self.items[index] + 0.1)
        values = [f(z_a, z_b, index, encode=lambda i: self.net(self.items[i])) for f in self.losses]
        return torch.stack(values).sum()


def wrapped(rank: int, world: int) -> list[dict[str, Tensor]]:
    """The same inside DistributedDataParallel, which broadcasts buffers and averages gradients."""
    module = Trained()
    parallel = nn.parallel.DistributedDataParallel(module) if world > 1 else module
    module.shared += rank
    seen = []
    for index in batches(rank, world):
        module.zero_grad()
        parallel(index).backward()
        grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        seen.append(grads | {n: v.clone() for n, v in module.losses.state_dict().items()})
    seen.append({"shared": module.shared})
    return seen


def local_pools(rank: int, world: int) -> dict[str, Any]:
    names = ["mh-shared-negatives", "isir-cached-paired-all", "sogclr-paired-all"]
    names += ["negcache-shared-negatives", "mh-informed-paired-all", "mh-corpus-all"]
    names += ["negcache-corpus-all"]
    return {name: steps(*built(name, gather=False), batches(rank, world)) for name in names}


class Columns(ImportanceLoss):
    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, None]:
        self.count = logits.shape[1]
        return super().weigh(logits, ids)


def columns_of_repeats(rank: int, world: int) -> int:
    """Draws of a step in which sample 7 is on both ranks."""
    net, items = under_test.data(1)
    loss_fn = Columns(M, proposals=Uniform(alone=True))
    under_test.run(loss_fn, net, items, torch.tensor([[3, 7, 7], [7, 5]][rank]))
    return loss_fn.count


def one_way_of_given(rank: int, world: int) -> Tensor:
    """A call of one direction has draws of one, wherever it is made."""
    z = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine, loss_fn = (
        slice(8 // world * rank, 8 // world * (rank + 1)),
        DCLLoss(proposals=Given(), views="paired"),
    )
    draw = Draw(torch.arange(8)[mine] + 20)
    index = torch.arange(8)[mine]
    return loss_fn(*z[:2, mine], index, draw=draw, drawn=z[2, mine], one_way=True)


def refusals(rank: int, world: int) -> dict[str, str]:
    """What ranks say that were called wrongly, one of them or all; none may wait for ever."""
    net, items = under_test.data(1)
    mine = torch.arange(4) + 4 * rank

    def says(index: Tensor, seed: int = 0, z: Callable[[Tensor], Tensor] = net) -> str:
        with pytest.raises(ValueError) as error:
            DCLLoss(M, seed=seed)(z(items[index % M]), net(items[index % M]), index)
        return str(error.value)

    return {
        "gathered": says(torch.arange(4)),
        "seed": says(mine, seed=2**63 + rank),  # as `torch.seed()` gives them; told modulo 2^63
        "shape": says(mine, z=lambda x: net(x)[: 4 - rank]),
        "range": says(mine + M * (rank == 1)),
    }


def others(rank: int, world: int) -> dict[str, Any]:
    """Batches promised to be even, ranks in groups, bytes sent."""
    loss_fn, net, items = built("mh-paired-all", gather="even")
    with mock.patch("torch.equal", side_effect=AssertionError("a GPU would be waited for")):
        even = steps(loss_fn, net, items, iter([next(batches(rank, world))]))
    groups = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(world // 2)]
    own, seen = groups[rank // 2], []
    loss_fn, net, items = built("mh-uniform-shared-negatives", gather=own)
    for index in (torch.arange(3) + 3 * (rank % 2), torch.arange(6, 8) + 3 * (rank % 2)):
        under_test.run(loss_fn, net, items, index)
        seen.append(whole_state(loss_fn))
    counted = EMC2Loss(M, proposals=Informed(8, refresh=0.25))
    z = torch.randn(4, 5)
    counted(z, z, torch.arange(4) + 4 * rank, encode=lambda ids: torch.randn(len(ids), 5))
    return {"even": even, "groups": seen, "bytes": counted.bytes_sent}


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    made: dict[str, Any] = {"cases": every_case(rank, world, FEWER if world == 4 else QUICK)}
    if world == 2:
        made |= {"plants": plants(rank, world), "wrapped": wrapped(rank, world)}
        made |= {"local": local_pools(rank, world), "refusals": refusals(rank, world)}
        made |= {"columns": columns_of_repeats(rank, world)}
        made |= {"one way": one_way_of_given(rank, world)}
    else:
        made |= {"others": others(rank, world)}
    torch.save(made, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def all_cases(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    torch.save({"cases": every_case(rank, world, BY_NAME)}, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


# ---------------------------------------------------------------------- what is held against it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank of every world size saw."""
    folders = {world: tmp_path_factory.mktemp(f"world{world}") for world in (2, 4)}
    for world, folder in folders.items():
        fork_ranks(world, one_rank, world, str(folder))
    return {world: _loaded(folder, world) for world, folder in folders.items()}


def _loaded(folder: Path, world: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(world)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return every_case(0, 1, QUICK)


def same(a: list[dict[Any, Tensor]], b: list[dict[Any, Tensor]]) -> None:
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(
                mine[name], theirs[name], rtol=1e-12, atol=1e-12, equal_nan=True, msg=str(name)
            )


@pytest.mark.parametrize(
    ("world", "name"), [(2, name) for name in QUICK] + [(4, name) for name in FEWER]
)
def test_ranks_equal_one_process(
    world: int, name: str, found: dict[int, Any], alone: dict[str, Any]
) -> None:
    for rank in range(world):
        same(found[world][rank]["cases"][name], alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_and_denominator(world: int, tmp_path: Path) -> None:
    fork_ranks(world, all_cases, world, str(tmp_path))
    alone = every_case(0, 1, BY_NAME)
    for made in _loaded(tmp_path, world):
        for name in BY_NAME:
            same(made["cases"][name], alone[name])


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_bugs_are_found(plant: str, found: dict[int, Any], alone: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        same(found[2][0]["plants"][plant], alone["mh-shared-negatives"])


def test_inside_a_wrapped_module(found: dict[int, Any]) -> None:
    """In chunks as well: a rank encodes again in the backward pass while DDP averages."""
    reference = wrapped(0, 1)
    for rank in range(2):
        assert found[2][rank]["wrapped"][-1]["shared"].item() == 0  # what DDP does to a buffer
        same(found[2][rank]["wrapped"][:-1], reference[:-1])


def test_local_pools_share_their_state(found: dict[int, Any]) -> None:
    first, second = found[2][0]["local"], found[2][1]["local"]
    for name, seen in first.items():
        for mine, theirs in zip(seen, second[name], strict=True):
            assert not torch.equal(mine["loss"], theirs["loss"])
            same(
                [{k: v for k, v in mine.items() if k != "loss"}],
                [{k: v for k, v in theirs.items() if k != "loss"}],
            )
    pools = [index for rank in range(2) for index in batches(rank, 2) if len(index) > 1]
    visited = torch.cat(pools).unique()
    average = first["sogclr-paired-all"][-1]["log_u"]
    assert torch.equal(torch.isfinite(average).nonzero()[:, 1].unique(), visited)
    assert int(first["mh-corpus-all"][-1]["key_counts"][-1]) == sum(map(sum, SIZES[2]))


def test_a_local_pool_is_the_loss_of_its_batch(found: dict[int, Any]) -> None:
    values = []
    for rank in range(2):
        loss_fn, net, items = built("mh-shared-negatives")
        loss_fn.step += rank  # ranks draw differently
        (seen,) = steps(loss_fn, net, items, iter([next(batches(rank, 2))]))
        values.append(seen)
        torch.testing.assert_close(
            found[2][rank]["local"]["mh-shared-negatives"][0]["loss"], seen["loss"]
        )
    mean = {n: (values[0][n] + values[1][n]) / 2 for n in values[0] if isinstance(n, int)}
    told = found[2][0]["local"]["mh-shared-negatives"][0]
    same([{n: told[n] for n in mean}], [mean])


def test_a_sample_on_two_ranks_draws_once(found: dict[int, Any]) -> None:
    """Its draws are the same on both: offered twice, p = 0.85 of a chain's state became 0.76."""
    assert [found[2][rank]["columns"] for rank in range(2)] == [4, 4]


def test_draws_of_one_direction(found: dict[int, Any]) -> None:
    for rank in found[2]:
        torch.testing.assert_close(rank["one way"], one_way_of_given(0, 1), rtol=1e-12, atol=1e-12)


def test_refusals_reach_every_rank(found: dict[int, Any]) -> None:
    for rank in range(2):
        said = found[2][rank]["refusals"]
        assert "gathers by itself" in said["gathered"]
        assert "agree on seed, got [0, 1]" in said["seed"]
        assert "ranks [1] refused" in said["shape"] if rank == 0 else "one shape" in said["shape"]
        assert "[0, 24)" in said["range"]


def test_even_batches_and_groups(found: dict[int, Any], alone: dict[str, Any]) -> None:
    for rank in range(4):
        same(found[4][rank]["others"]["even"], alone["mh-paired-all"][:1])
    loss_fn, net, items = built("mh-uniform-shared-negatives")
    for number, index in enumerate((torch.arange(6), torch.tensor([6, 7, 9, 10]))):
        under_test.run(loss_fn, net, items, index)
        state = {n: v.clone() for n, v in loss_fn.state_dict().items()}
        for rank in range(4):
            same([found[4][rank]["others"]["groups"][number]], [state])


def test_bytes_sent_are_those_of_the_formula(found: dict[int, Any]) -> None:
    """docs/several_gpus.md; nothing in it grows with the data set but the refreshed share."""
    world = 4
    b, d, drawn, due = 4, 5, 8 // world, -(-6 // world)
    head, positions, z = 10 * 8, 8 * b, 4 * 2 * b * d
    asked = head + positions + z  # what informed draws depend on
    called = head + positions + 8 * b + z + 4 * d * (b + drawn + due)
    for rank in range(world):
        assert found[world][rank]["others"]["bytes"] == (world - 1) * (asked + called)


def test_copies_of_data_parallel_are_refused() -> None:
    loss_fn = EMC2Loss(M)
    replica = loss_fn._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="throws them away"):
        replica.request(torch.arange(4))


def test_gather_is_checked() -> None:
    with pytest.raises(ValueError, match="gather must be"):
        DCLLoss(gather="all")  # type: ignore[arg-type]
