"""Chain tables of any size: first states drawn when asked for, tables in files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from losses_under_test import METHODS, M, data, run, same_state, snapshot
from torch import Tensor

from forked import fork
from negchain import EMC2Loss, LargeBatchEMC2Loss, rng
from negchain.losses.chains import ChainTable, state_dtype
from negchain.losses.state import Rows
from negchain.pool import write_rows


def table(num_chains: int, num_states: int | None = None, **more) -> ChainTable:
    settings = {"ids_per_item": 1, "own": True, "keep": "encode", "seed": 0, **more}
    return ChainTable(1, num_chains, num_states=num_states or num_chains, **settings)


def eager_states(num_chains, num_states, ids_per_item, own, seed, side) -> Tensor:
    """All first states at once, as versions that stored them drew them."""
    rows = torch.arange(num_chains)
    u = rng.uniform(seed, torch.tensor(side), rng.FOR_INIT, rows, 1, torch.float64)[:, 0]
    choices = num_states - ids_per_item if own else num_states
    drawn = rng.integers_below(torch.full_like(rows, choices), u)
    if own:
        first = rows // ids_per_item * ids_per_item
        drawn = torch.where(drawn >= first, drawn + ids_per_item, drawn)
    return drawn


# ---------------------------------------------------------------- first states


@pytest.mark.parametrize("seed", [0, 3, 2**40 + 5])
@pytest.mark.parametrize(
    "options",
    [{}, {"views": "paired"}, {"augmentations": 3}, {"views": "paired", "num_keys": 77}],
)
def test_lazy_first_states_are_the_eager_ones(options, seed) -> None:
    loss_fn = EMC2Loss(500, seed=seed, **options)
    per_item = loss_fn.augmentations or 1
    num_chains, num_states = 500 * per_item, options.get("num_keys", 500) * per_item
    own = "num_keys" not in options
    assert loss_fn.chains.states.shape == (loss_fn.num_sides, num_chains)
    assert (loss_fn.chains.states == -1).all() and loss_fn.chains.states.dtype == torch.int32
    slots = torch.randperm(num_chains, generator=torch.Generator().manual_seed(0))[:200]
    for side in range(loss_fn.num_sides):
        expected = eager_states(num_chains, num_states, per_item, own, seed, side)
        assert torch.equal(loss_fn.chains.ids(side, slots), expected[slots])


def test_first_states_are_those_of_earlier_versions() -> None:
    """Values printed by the version that drew all states at construction."""
    chains = EMC2Loss(1000, seed=3, views="paired").chains
    slots = torch.arange(6)
    assert chains.ids(0, slots).tolist() == [777, 281, 344, 154, 841, 91]
    assert chains.ids(1, slots).tolist() == [381, 886, 492, 790, 313, 854]
    chains = EMC2Loss(1000, seed=2**40 + 5, augmentations=3).chains
    assert chains.ids(0, torch.arange(2994, 3000)).tolist() == [629, 242, 1820, 896, 138, 1650]


@pytest.mark.parametrize("name", ["mh", "mh-cached", "mh-augmentations", "isir-given"])
def test_a_run_from_stored_first_states_is_the_same_run(name) -> None:
    """A checkpoint of a version that stored every first state loads, and changes nothing."""
    results = []
    for stored in (False, True):
        net, items = data()
        loss_fn = METHODS[name].build(5.0)
        if stored:
            state = snapshot(loss_fn)
            slots = torch.arange(state["chains.states"].shape[1])
            state["chains.states"] = loss_fn.chains.ids(0, slots)[None]
            assert state["chains.states"].min() >= 0
            loss_fn.load_state_dict(state)
        values = []
        for step in range(6):
            index = torch.randperm(M, generator=torch.Generator().manual_seed(step))[:5]
            values.append(run(loss_fn, net, items, index).item())
        slots = torch.arange(loss_fn.chains.states.shape[1])
        results.append((values, loss_fn.chains.ids(0, slots)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


def test_resume_with_chains_that_never_moved() -> None:
    net, items = data()
    whole, first = METHODS["mh"].build(5.0, seed=4), METHODS["mh"].build(5.0, seed=4)
    batches = [torch.arange(5), torch.arange(3, 9), torch.arange(5, 14)]
    expected = [run(whole, net, items, index).item() for index in batches]
    got = [run(first, net, items, index).item() for index in batches[:2]]
    states = first.chains.states
    assert (states[0, 9:] == -1).all() and (states >= 0).any()
    second = METHODS["mh"].build(5.0, seed=4)
    second.load_state_dict(snapshot(first))
    got.append(run(second, net, items, batches[2]).item())
    assert got == expected and same_state(snapshot(whole), snapshot(second))


def test_chains_2_to_the_32_apart_have_draws_of_their_own() -> None:
    """No memory: the states of a chain table this size are one expanded number."""
    huge = table(8, 2**33)
    huge.states, huge.rows = torch.full((1, 1), -1).expand(1, 2**33), Rows(2**33)
    slots = torch.arange(2000)
    low, high = huge.ids(0, slots), huge.ids(0, slots + 2**32)
    assert (low != high).float().mean() > 0.99
    assert torch.equal(low, table(8, 2**33).initial_ids(0, slots))  # as in a table that is smaller
    assert (high != huge.initial_ids(1, slots)).float().mean() > 0.99  # nor the other side's
    for drawn, own in ((low, slots), (high, slots + 2**32)):
        assert (drawn != own).all() and drawn.min() >= 0 and drawn.max() < 2**33
        assert 0.4 < (drawn >= 2**32).float().mean() < 0.6


def test_four_bytes_per_state_as_long_as_they_suffice() -> None:
    sizes = [100, 10**8, 10**9, 2**31, 2**31 + 1, 10**10]
    assert [state_dtype(size).itemsize for size in sizes] == [4, 4, 4, 4, 8, 8]
    edge = table(4, 2**31, own=False)
    edge.states[0, 0] = 2**31 - 1  # the largest id
    assert edge.states.dtype == torch.int32 and edge.ids(0, torch.tensor([0])).item() == 2**31 - 1
    slots = torch.arange(3 * 10**6)
    assert edge.initial_ids(0, slots).max() > 2**31 - 2**13  # P(not) < 1e-5; seed fixed


def test_nothing_waits_for_the_device() -> None:
    """On the meta device any reading of a value raises, as it would inside a CUDA graph."""
    chains = EMC2Loss(100, views="paired").to("meta").chains
    slots = torch.arange(7, device="meta")
    assert chains.ids(1, slots).shape == (7,) and chains.ids(1, slots).dtype == torch.int64
    write_rows(chains.states[0], slots, slots, slots >= 0)


def test_building_a_table_takes_its_own_memory_and_no_more(monkeypatch) -> None:
    rows: list[int] = []
    uniform = rng.uniform
    monkeypatch.setattr(rng, "uniform", lambda *a: rows.append(len(a[3])) or uniform(*a))
    chains = table(10**6)
    assert rows == [] and chains.states.untyped_storage().nbytes() == 4 * 10**6
    assert chains.state_dict()["states"].data_ptr() == chains.states.data_ptr()
    chains.ids(0, torch.tensor([5, 6]))
    assert rows == [2]


# ---------------------------------------------------------------- a table in a file


def test_a_mapped_run_is_the_same_run(tmp_path) -> None:
    results = []
    for name in (None, "after.bin"):
        net, items = data()
        loss_fn = METHODS["mh"].build(5.0, views="paired")
        run(loss_fn, net, items, torch.arange(6))  # the file takes over what has moved
        if name:
            loss_fn.chains.map_to(tmp_path / name)
        run(loss_fn, net, items, torch.arange(4, 12))
        results.append(snapshot(loss_fn))
    assert same_state(*results)
    written = torch.from_file(str(tmp_path / "after.bin"), size=2 * M, dtype=torch.int32)
    assert torch.equal(written.view(2, M), results[1]["chains.states"])
    assert [path.name for path in tmp_path.iterdir()] == ["after.bin"]
    other = METHODS["mh"].build(5.0, views="paired")
    other.chains.map_to(tmp_path / "other.bin")
    other.load_state_dict(results[1])  # goes into the file
    assert (tmp_path / "other.bin").read_bytes() == (tmp_path / "after.bin").read_bytes()


def test_a_killed_process_leaves_its_chains(tmp_path) -> None:
    path = tmp_path / "chains.bin"
    here, there = multiprocessing.Pipe()

    def train() -> None:
        loss_fn = EMC2Loss(1000, carried="cached", dim=8)
        loss_fn.chains.map_to(path)
        z = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        for step in range(20):
            index = torch.arange(32) + 7 * step
            loss_fn(z[index], z[index].roll(1, 1), index)
        there.send(loss_fn.chains.ids(0, torch.arange(1000)).tolist())
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(train)
    child.join()
    assert child.exitcode == -signal.SIGKILL and here.poll()
    held = torch.tensor(here.recv())
    again = table(1000, file=path)
    assert torch.equal(again.ids(0, torch.arange(1000)), held)
    assert (again.states >= 0).sum() > 50 and (again.states[0, 200:] == -1).all()


def test_a_file_of_another_table_is_refused(tmp_path) -> None:
    path = tmp_path / "chains.bin"
    table(100, file=path)
    before = path.read_bytes()
    assert before == b"\xff" * 400
    with pytest.raises(ValueError, match="1 x 101 chains .* has 404 bytes, but .* has 400.*delete"):
        table(101, file=path)
    with pytest.raises(ValueError, match="has 800 bytes"):
        table(100, 2**32, file=path)
    assert path.read_bytes() == before
    assert table(100, file=path).states.dtype == torch.int32


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch) -> None:
    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        table(100, file=tmp_path / "chains.bin")
    assert list(tmp_path.iterdir()) == []


def test_chunks_join_without_a_seam(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("negchain.losses.chains.CHUNK", 16)
    chains = ChainTable(2, 41, num_states=41, ids_per_item=1, own=True, keep="encode", seed=0)
    chains.states.copy_(torch.arange(82).view(2, 41))
    chains.map_to(tmp_path / "chains.bin")
    assert torch.equal(chains.states, torch.arange(82, dtype=torch.int32).view(2, 41))


def test_a_mapped_table_stays_on_the_cpu(tmp_path) -> None:
    loss_fn = EMC2Loss(100)
    loss_fn.chains.map_to(tmp_path / "chains.bin")
    assert loss_fn.double().chains.states.untyped_storage().filename is not None
    with pytest.raises(ValueError, match="stays on the CPU.*state_dict"):
        loss_fn.to("meta")
    with pytest.raises(ValueError, match="needs a loss on the CPU.*meta"):
        EMC2Loss(100).to("meta").chains.map_to(tmp_path / "other.bin")


def _private_bytes() -> int:
    """Memory of this process alone: resident less shared, which is the kernel's to take back."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _best_seconds(function: Callable[[], object]) -> float:
    times = []
    for _ in range(40):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 4]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_large_mapped_table_is_small_and_fast(tmp_path) -> None:
    """2 x 10^7 chains, 80 MB: neither in memory nor in the way; `negchain bench` has the bar."""
    size = 2 * 10**7
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(256, 16, generator=generator)

    def step(loss_fn: EMC2Loss) -> Callable[[], object]:
        def one() -> Tensor:
            index = torch.randint(0, loss_fn.num_samples, (256,), generator=generator)
            return loss_fn(z, z.roll(1, 1), index, loss_fn.request(index).answer(z))

        return one

    small, large = EMC2Loss(10**5), EMC2Loss(1000)
    before = _private_bytes()
    chains = table(size, file=tmp_path / "chains.bin")
    chains.ids(0, torch.randint(0, size, (256,), generator=generator))
    assert _private_bytes() - before < 40 << 20  # half of the table
    large.num_samples, large.chains = size, chains
    ratios = (_best_seconds(step(large)) / _best_seconds(step(small)) for _ in range(3))
    assert any(ratio < 1.5 for ratio in ratios)


@pytest.mark.parametrize("build", [EMC2Loss, LargeBatchEMC2Loss])
def test_info_keeps_no_embeddings(build) -> None:
    """It is read seldom and kept until the next call, so what it holds is memory of every step."""
    loss_fn, z = build(20, 5.0, carried="cached"), torch.randn(6, 11)
    loss_fn(z, z, torch.arange(6))
    later = [loss_fn._info[name] for name in ("acceptance_rate", "chain_age")]
    held = [value for number in later for there in number.args for value in there]
    assert held and not any(value is not None and 11 in value.shape for value in held)
