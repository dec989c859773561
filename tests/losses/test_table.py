"""The stale table: its draws, read in chunks of any size with memory that does not grow with it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import negchain.losses.table as module
from negchain import EMC2Loss, ImportanceLoss, Informed, NegativeCacheLoss
from negchain.losses.table import Spread, StaleTable
from negchain.pool import Side
from oracles import unit

SIZE, DIM, ROWS, BETA = 57, 6, 9, 4.0


def side_of(queries: Tensor, known: Tensor | None = None) -> Side:
    rows = len(queries)
    return Side(
        queries=queries,
        positives=queries,
        anchor_ids=torch.arange(rows),
        positive_ids=torch.arange(rows),
        known=known,
        keys=queries.new_zeros(1, 0, queries.shape[1]),
        key_ids=torch.zeros(1, 0, dtype=torch.int64),
        excluded=torch.zeros(rows, 0, dtype=torch.bool),
        multiplicity=1,
        ids_per_item=1,
        num_keys=SIZE,
    )


def filled(size: int = SIZE, seed: int = 0) -> StaleTable:
    table = StaleTable(size, DIM)
    table.embeddings = unit(torch.randn(size, DIM, generator=torch.Generator().manual_seed(seed)))
    return table


def problem() -> tuple[StaleTable, Side, Tensor]:
    """A table, rows with known positives, and the stale softmax of every row by hand."""
    table = filled()
    queries = unit(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)))
    known = torch.full((ROWS, 2), -1)
    known[3] = torch.tensor([50, 8])
    logits = BETA * queries @ table.embeddings.T
    logits[torch.arange(ROWS), torch.arange(ROWS)] = -math.inf
    logits[3, [50, 8]] = -math.inf
    return table, side_of(queries, known), logits


@pytest.mark.parametrize("chunk", [1, 5, 20, SIZE, 10**6])
def test_any_chunk_gives_the_same(monkeypatch, chunk) -> None:
    table, side, logits = problem()
    key = (3, torch.tensor(2), 0)
    settings = Informed(share=0.7, sharpness=0.5)
    whole = table.winners(side, BETA, key), table.informed(40, side, BETA, settings, key)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk * ROWS)
    assert sum(1 for _ in table.logits(side, BETA)) == math.ceil(SIZE / chunk)
    joined = torch.cat([part for _, part in table.logits(side, BETA)], 1)
    assert torch.allclose(joined, logits, atol=1e-6)
    ids, log_sum = table.winners(side, BETA, key)
    assert torch.equal(ids, whole[0][0]) and torch.allclose(log_sum, whole[0][1], atol=1e-6)
    nearest = logits.topk(7, 1).indices.sort(1).values
    assert torch.equal(table.top(7, side), nearest)
    drawn, log_q = table.informed(40, side, BETA, settings, key)
    assert torch.equal(drawn, whole[1][0]) and torch.allclose(log_q, whole[1][1], atol=1e-6)
    sharp = (0.5 * logits).softmax(1).mean(0)
    assert torch.allclose(log_q.exp(), 0.3 / SIZE + 0.7 * sharp, atol=1e-6)
    assert log_q.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("rows", [2, 3])
def test_few_rows_read_the_table_once(monkeypatch, rows: int, per_row: bool) -> None:
    """Two logits per key are an eighth of its 16 numbers: they are kept for the second pass."""
    table = StaleTable(SIZE, 16)
    made = torch.Generator().manual_seed(0)
    table.embeddings = unit(torch.randn(SIZE, 16, generator=made))
    side = side_of(unit(torch.randn(rows, 16, generator=made)))
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 20 * rows)
    reads, read = [], table.logits
    monkeypatch.setattr(table, "logits", lambda *given: (reads.append(1), read(*given))[1])
    settings = Informed(num=5, share=0.7, sharpness=0.5, per_row=per_row)
    draw = table.informed_rows if per_row else table.informed
    _, log_q = draw(5, side, BETA, settings, (3, torch.tensor(2), 0))
    assert len(reads) == (1 if rows == 2 else 2)
    stale = 0.5 * BETA * side.queries @ table.embeddings.T
    stale[range(rows), range(rows)] = -math.inf
    expected = 0.3 / SIZE + 0.7 * stale.softmax(1)
    found = log_q(torch.arange(SIZE).expand(rows, SIZE)) if per_row else log_q
    assert torch.allclose(found.exp(), expected if per_row else expected.mean(0), atol=1e-6)


class Largest(TorchDispatchMode):
    """The most bytes a single new tensor takes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def largest(size: int, what: str) -> int:
    table, queries = filled(size), unit(torch.randn(ROWS, DIM))
    key = (0, torch.tensor(0), 0)
    with Largest() as seen:
        if what == "winners":
            table.winners(side_of(queries), BETA, key)
        elif what == "top":
            table.top(16, side_of(queries))
        else:
            table.informed(16, side_of(queries), BETA, Informed(), key)
    return seen.bytes


def test_memory_does_not_grow_with_the_table(monkeypatch) -> None:
    """Beyond the table: a chunk of logits; informed draws also a probability per key."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 12)
    assert largest(20_000, "winners") == largest(80_000, "winners") <= 8 << 12
    assert largest(80_000, "top") <= 4 << 12  # the logits of a chunk, no id beside each
    assert (
        largest(80_000, "informed") <= 80_000 * 8
    )  # float64, once per key; ROWS times that before
    assert largest(80_000, "informed") > 80_000 * 4  # and the measure does see it


def test_a_half_table_is_converted_a_part_at_a_time(monkeypatch) -> None:
    """One row has few logits: a chunk of them alone would be all of the table in float32."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1 << 12)
    table = StaleTable(4096, 64)
    table.embeddings = unit(torch.randn(4096, 64)).half()
    with Largest() as seen:
        table.winners(side_of(unit(torch.randn(1, 64))), BETA, (0, torch.tensor(0), 0))
    assert seen.bytes == 4 * 4 << 12


@pytest.mark.statistical
def test_winners_are_draws_from_the_stale_softmax(monkeypatch) -> None:
    """20,000 draws of one row against its softmax, across chunks; false alarm 1e-4."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * 20_000)
    table = filled(12)
    query = unit(torch.randn(1, DIM, generator=torch.Generator().manual_seed(2)))
    side = side_of(query.expand(20_000, -1))
    side = Side(**{**side.__dict__, "positive_ids": torch.full((20_000,), 4)})
    ids, log_sum = table.winners(side, BETA, (0, torch.tensor(0), 0))
    logits = (BETA * query @ table.embeddings.T)[0].double()
    logits[4] = -math.inf
    counts = torch.bincount(ids, minlength=12)
    assert counts[4] == 0
    kept = torch.arange(12) != 4
    expected = logits.softmax(0)[kept] * 20_000
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-4
    assert torch.allclose(log_sum, logits.logsumexp(0).float().expand(20_000), atol=1e-5)
    flat = torch.bincount(torch.randint(0, 11, (20_000,)), minlength=11)  # a planted uniform draw
    assert stats.chisquare(flat.numpy(), expected.numpy()).pvalue < 1e-6


@pytest.mark.parametrize("build", [NegativeCacheLoss, EMC2Loss])
def test_what_a_step_encodes_is_written(build) -> None:
    """The batch, carried states, draws, and the share that is due; the rest stays zero."""
    options = {"refresh": 0.1} if build is NegativeCacheLoss else {"proposals": Informed(3)}
    loss_fn = build(SIZE, BETA, views="paired", symmetric=False, **options)
    z = unit(torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(0)))
    index, asked = torch.arange(20, 25), []

    def encode(ids: Tensor) -> Tensor:
        asked.append(ids)
        return z[ids]

    loss_fn(z[index], z[index], index, encode=encode)
    table = loss_fn.tables[0].embeddings
    written = torch.zeros(SIZE, dtype=torch.bool)
    written[torch.cat([index, *asked])] = True
    assert torch.allclose(table[written], z[written], atol=1e-6)
    assert (table[~written] == 0).all() and (~written).any()
    loss_fn.fill(lambda ids: z[ids], chunk=10)
    assert torch.allclose(table := loss_fn.tables[0].embeddings, z, atol=1e-6) and len(table)


def test_a_round_of_refreshes() -> None:
    loss_fn = NegativeCacheLoss(SIZE, refresh=0.25)
    z = unit(torch.randn(SIZE, DIM, generator=torch.Generator().manual_seed(0)))
    seen = []
    for _ in range(4):
        want = next(w for w in loss_fn.request([1, 2]).wants if not w.gradient)
        seen += want.ids.tolist()
        loss_fn(z[[1, 2]], z[[1, 2]], [1, 2], encode=lambda ids: z[ids])
    assert set(seen[:SIZE]) == set(range(SIZE))  # all of them before any comes again
    assert len(seen) == 60 and seen[SIZE:] == seen[: 60 - SIZE]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 97, 1000, 12_000])
def test_keys_are_encoded_anew_far_apart(size) -> None:
    order, places = Spread(size), torch.arange(size)
    ids = order.ids(places)
    assert torch.equal(ids.sort().values, places)
    assert torch.equal(order.places(ids), places)
    assert torch.equal(order.ids(places + size), ids)
    if size >= 1000:  # any hundredth of them has every tenth of the data
        for some in ids.split(size // 100):
            assert len(torch.unique(some * 10 // size)) >= min(10, len(some)) - 2


def test_a_table_of_sorted_data_tells_classes_apart(monkeypatch) -> None:
    """BatchNorm takes from a pass over one class what the class has in common."""
    generator, label = torch.Generator().manual_seed(0), torch.arange(240) // 60
    means = torch.randn(4, DIM, generator=generator)[label]
    items = means + 0.5 * torch.randn(240, DIM, generator=generator)
    encoder = torch.nn.BatchNorm1d(DIM)  # in training mode: by the statistics of a pass

    def told_apart() -> float:
        loss_fn = NegativeCacheLoss(240, BETA, refresh=0.25)
        loss_fn.fill(lambda ids: encoder(items[ids]).detach(), chunk=60)
        table = loss_fn.tables[0].embeddings
        own = label[:, None] == label
        similarity = table @ table.T
        return float(similarity[own].mean() - similarity[~own].mean())

    assert told_apart() > 0.5
    monkeypatch.setattr(Spread, "ids", lambda self, places: places % self.size)
    assert told_apart() < 0.05  # in the order of the data: class by class


@pytest.mark.parametrize("per_row", [False, True])
def test_draws_keep_the_q_they_were_made_with(per_row) -> None:
    """Shared draws have q of every key; rows look theirs up, so a table written since is refused.

    It was read as it stood at the call: a loss of 3.9 became 7.4.
    """
    z, index = unit(torch.randn(20, DIM, dtype=torch.float64)), torch.arange(5)
    proposals = Informed(3, refresh=0.0, alone=True, per_row=per_row)
    loss_fn = ImportanceLoss(20, BETA, proposals)
    loss_fn.fill(lambda ids: z[ids])
    first, second = loss_fn.request(index), loss_fn.request(index, z[index], z[index])
    second.answer(z[second.ids])
    value = loss_fn.eval()(z[index], z[index], index, first, second)
    loss_fn.fill(lambda ids: z.flip(0)[ids])
    if per_row:
        with pytest.raises(ValueError, match="written to since .* ask again"):
            loss_fn(z[index], z[index], index, first, second)
    else:
        assert torch.equal(loss_fn(z[index], z[index], index, first, second), value)


@pytest.mark.parametrize("build", [ImportanceLoss, NegativeCacheLoss, EMC2Loss])
def test_a_marked_sample_writes_no_row(build, monkeypatch) -> None:
    """As on a GPU, where a position out of range is brought into it, to another key's row."""
    monkeypatch.setattr("negchain.losses.batch.fit_for_numpy", lambda z: False)
    z = torch.randn(SIZE, DIM)
    given = {"proposals": Informed(num=4, refresh=0)} if build is EMC2Loss else {}
    loss_fn = build(SIZE, BETA, **given)
    loss_fn.fill(lambda ids: z[ids])
    before = loss_fn.tables[0].embeddings.clone()
    index, fresh = torch.tensor([3, 5, SIZE + 7]), torch.randn(3, DIM)
    z[index[:2]] = fresh[:2]  # a draw may be of one of them, and is written too
    loss_fn(fresh, fresh, index, encode=lambda ids: z[ids])
    after = loss_fn.tables[0].embeddings
    assert torch.allclose(after[-1], before[-1])
    assert torch.allclose(after[[3, 5]], unit(fresh[:2]))
