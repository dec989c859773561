"""State in blocks on the ranks that own them: the same numbers as with all of it in one place."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from losses_under_test import M, towers
from test_distributed import batches, built, same, steps, whole_state
from test_table import side_of
from torch import Tensor

from forked import fork_ranks
from negchain import EMC2Loss, Informed, NegativeCacheLoss
from negchain.losses.distributed import Ranks
from negchain.losses.state import Rows
from negchain.losses.table import StaleTable

NAMES = [
    "mh-shared-all", "mh-cached-paired-all", "mh-informed-paired-all", "mh-five-shared-negatives",
    "negcache-paired-all", "negcache-shared-negatives", "sogclr-paired-all",
    "sogclr-informed-shared", "importance-shared-negatives", "importance-paired-all",
    "importance-rows-shared-negatives", "topk-paired-all", "mh-rows-paired",
    "isir-corpus-all", "mh-augmentations-all", "large batch-shared-negatives",
]  # fmt: skip
SAVED = ["mh-cached-paired-all", "mh-five-shared-negatives", "sogclr-paired-all"]
GRID = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


def proposals() -> dict[str, Tensor]:
    """Distributions over seven ids: any, none of it here or there, all on one id."""
    q = torch.tensor([0.3, 0.0, 0.1, 0.05, 0.25, 0.1, 0.2], dtype=torch.float64)
    first, last = torch.arange(7) < 4, torch.arange(7) == 6
    return {"any": q, "first": q * first, "second": q * ~first, "last": q * last}


def nearest(ranks: Ranks | None) -> Tensor:
    """All seven keys by similarity to two rows that may not use some of them."""
    table, made = StaleTable(7, 4, ranks), torch.Generator().manual_seed(0)
    whole, queries = torch.randn(7, 4, generator=made), torch.randn(2, 4, generator=made)
    table.embeddings = whole[table.rows.first : table.rows.first + table.rows.count]
    known = torch.tensor([[5, -1], [2, 5]])
    return table.top(20, side_of(queries, known))


def rows_of(rank: int, world: int) -> dict[str, Any]:
    """Reading, writing and drawing by rows of tables of several sizes."""
    ranks = Ranks(rank, world, None, EMC2Loss(M))
    found: dict[str, Any] = {}
    for total in (1, 2, 7):
        rows = Rows.of(total, ranks)
        whole = torch.arange(3 * total).view(total, 3)
        table = whole[rows.first : rows.first + rows.count].clone()
        slots = torch.tensor([total - 1, 0, total // 2, 0])[rank:]  # another number on each rank
        assert torch.equal(rows.read(table, slots), whole[slots])
        new, allowed = torch.tensor([[7], [8], [9]]), torch.tensor([False, True, True])
        rows.write(table, torch.tensor([0, total - 1, total - 1]), new.expand(-1, 3), allowed)
        everyone = rows.read(table, torch.arange(total))
        assert everyone[total - 1].tolist() == [8, 8, 8]
        assert torch.equal(everyone[:-1], whole[:-1])
    rows = Rows.of(7, ranks)
    for name, q in proposals().items():
        mine = q.log()[rows.first : rows.first + rows.count]
        found[name] = rows.draw(mine, GRID)
        values = rows.read(mine, torch.tensor([[6, 0], [0, 4]]))
        torch.testing.assert_close(values, q.log()[torch.tensor([[6, 0], [0, 4]])])
    for keep in ({"proposals": Informed()}, {"carried": "cached"}):
        with pytest.raises(ValueError, match="needs dim="):
            EMC2Loss(M, shard_state=True, **keep)
    sharded, plain, index = EMC2Loss(M, shard_state=True), EMC2Loss(M), torch.arange(rank, M, 2)
    z = torch.randn(len(index), 5)
    sharded(z, z, index, encode=lambda ids: torch.ones(len(ids), 5))
    plain.load_state_dict(sharded.state_dict())  # once: "mixed torch.Tensor and DTensor"
    assert torch.equal(plain.held(torch.arange(M))[0], sharded.held(torch.arange(M))[0])
    found["top"] = nearest(ranks)
    heavier = proposals()["any"].log()[rows.first : rows.first + rows.count] + rank  # a wrong mass
    return found | {"planted": rows.draw(heavier, GRID)}


def filled(name: str, rank: int, world: int, **more: Any) -> list[dict[str, Tensor]]:
    """Steps that begin with full tables: among equal similarities the nearest is anybody."""
    loss_fn, net, items = built(name, dim=5, **more)
    loss_fn.fill(towers(loss_fn, lambda ids: net(items[ids])))
    return steps(loss_fn, net, items, batches(rank, world))


def bytes_sent(rank: int, world: int, folder: str) -> tuple[int, int]:
    """What a sharded table adds to the traffic of a step."""
    index = torch.arange(rank, M, 6)  # four samples, half of them the other rank's
    counts = []
    for shard in (False, True):
        file = Path(folder) / f"chains{shard}{rank if not shard else ''}"
        loss_fn = EMC2Loss(M, shard_state=shard, chain_file=file)
        z = torch.ones(4, 5)
        loss_fn(z, z, index, encode=lambda ids: torch.ones(len(ids), 5))
        counts.append(loss_fn.bytes_sent)
    assert (Path(folder) / f"chainsTrue.{rank}-of-2").stat().st_size == 4 * M // 2
    return counts[0], counts[1]


def one_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet{world}", rank=rank, world_size=world)
    made: dict[str, Any] = {"resumed": {}}
    if world == 2:
        made["rows"] = rows_of(rank, world)
        made["bytes"] = bytes_sent(rank, world, folder)
        made["cases"] = {name: filled(name, rank, world, shard_state=True) for name in NAMES}
    for name in SAVED:
        loss_fn, net, items = built(name, shard_state=True, dim=5)
        if world == 2:
            steps(loss_fn, net, items, islice(batches(rank, world), 1))
            dcp.save(loss_fn.state_dict(), checkpoint_id=f"{folder}/{name}")
        else:
            state = loss_fn.state_dict()
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            loss_fn.load_state_dict(state)
            made["resumed"][name] = steps(loss_fn, net, items, islice(batches(rank, world), 1, 2))
    torch.save(made, f"{folder}/{world}.{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks saw and saved, and what four made of it."""
    path = tmp_path_factory.mktemp("shards")
    for world in (2, 4):
        fork_ranks(world, one_rank, world, str(path))
    return path


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"2.{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_shards_change_no_number(name: str, found: list[dict[str, Any]]) -> None:
    alone = filled(name, 0, 1)
    for rank in range(2):
        same(found[rank]["cases"][name], alone)


def test_every_id_is_drawn_as_often_as_it_should(found: list[dict[str, Any]]) -> None:
    """By enumeration: of n uniforms on a grid an id of probability q gets n q, to one."""
    for name, q in proposals().items():
        drawn = found[0]["rows"][name]
        assert torch.equal(drawn, found[1]["rows"][name])
        counts = torch.bincount(drawn, minlength=7)
        assert ((counts - len(GRID) * q / q.sum()).abs() <= 1).all(), (name, counts)
        assert (counts[q == 0] == 0).all()
    planted = torch.bincount(found[0]["rows"]["planted"], minlength=7)
    assert ((planted - len(GRID) * proposals()["any"]).abs() > 1).any()


def test_no_negative_is_among_the_nearest_twice(found: list[dict[str, Any]]) -> None:
    """Blocks of four and three: what fills the second up is no negative of any row."""
    alone = nearest(None)
    for row, excluded in enumerate(({0, 5}, {1, 2, 5})):
        kept = [[n for n in ids[row].tolist() if n not in excluded]
                for ids in (alone, found[0]["rows"]["top"], found[1]["rows"]["top"])]  # fmt: skip
        assert kept == [[n for n in range(7) if n not in excluded]] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # so it is
@pytest.mark.parametrize("name", SAVED)
def test_other_ranks_continue(name: str, folder: Path) -> None:
    """Saved by two ranks, resumed by four, and by one without shards."""
    loss_fn, net, items = built(name, dim=5)
    first, second = steps(loss_fn, net, items, batches(0, 1))
    for rank in range(4):
        saved = torch.load(folder / f"4.{rank}.pt", weights_only=True)
        same(saved["resumed"][name], [second])
    plain, net, items = built(name, dim=5)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder / name)
    plain.load_state_dict(state)
    same([whole_state(plain)], [{n: first[n] for n in whole_state(plain)}])


def test_bytes_are_those_of_the_formula(found: list[dict[str, Any]]) -> None:
    """docs/several_gpus.md: counts, the positions that lie elsewhere, the rows asked for here."""
    for rank in range(2):
        plain, sharded = found[rank]["bytes"]
        assert sharded - plain == 8 * 2 + 8 * 2 + 4 * 2


def test_what_cannot_be_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="gather=True"):
        EMC2Loss(M, gather=False, shard_state=True)


def test_alone_nothing_is_sharded() -> None:
    loss_fn = NegativeCacheLoss(M, shard_state=True)
    assert loss_fn.tables[0].embeddings.shape == (M, 0)
    assert EMC2Loss(M, proposals=Informed(), shard_state=True).chains.states.shape == (1, M)
