"""The chain table: its size must not be felt in a step, and it is one integer per sample."""

from __future__ import annotations

import torch

import negchain
from negchain.bench.table import Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved, release
from negchain.losses.chains import ChainTable

BATCH, DIM, BETA = 256, 128, 14.28
SMALL = 10**5
STEPS = 512  # batches of positions drawn ahead
BANK = 4096  # embeddings that stand for those of the data set


def table(settings: Settings) -> Table:
    """A step of the EMC² loss with tables from 10^5 to 10^8 (10^9 on a CPU) samples."""
    sizes = [SMALL, _large(settings)]
    if settings.large and not settings.on_gpu:
        sizes.append(10**9)
    timed: dict[str, Timed] = {}
    for size in sizes:
        settings.say(f"{size:,} samples")
        timed[_name(size)] = _step(settings, size)
    settings.say("timing")
    times = interleaved(timed, settings.rounds, window_ms=20.0 if settings.quick else 60.0)
    base = _name(SMALL)
    rows = [Row.of(name, times[name], "ms", against=base, base=times[base]) for name in times]
    del timed
    release()
    return Table(
        subject="tables",
        title=f"Chain tables, EMC² loss step, b = {BATCH}, d = {DIM}",
        compares=f"time against the same step with {base}",
        rows=(*rows, *_bytes()),
        notes=(
            "Loss forward + backward at positions drawn anew for every step, carried states "
            "looked up; bytes are those of the state of actual tables.",
        ),
    )


def _large(settings: Settings) -> int:
    if settings.on_gpu:
        return 10**8
    return 10**6 if settings.quick else 10**7


def _name(size: int) -> str:
    digits = len(str(size)) - 1
    return f"10^{digits} samples"


def _step(settings: Settings, size: int) -> Timed:
    """Steps at random positions of a data set of `size`."""
    device, generator = settings.device, settings.generator()
    loss_fn = negchain.EMC2Loss(size, BETA).to(device)
    z_a, z_b = (
        torch.randn(BATCH, DIM, generator=generator).to(device).requires_grad_() for _ in range(2)
    )
    bank = torch.randn(BANK, DIM, generator=generator).to(device)
    ahead = torch.randint(size, (STEPS, BATCH), generator=generator).to(device)
    number = torch.zeros(1, dtype=torch.int64, device=device)

    def call() -> object:
        index = ahead[number % STEPS][0]
        number.add_(1)
        request = loss_fn.request(index)
        held = bank[request.ids % BANK].requires_grad_()  # who shares a row of the bank is not felt
        value = loss_fn(z_a, z_b, index, request.answer(held))
        return torch.autograd.grad(value, (z_a, z_b, held))

    return graphed(call, device)


def _bytes() -> list[Row]:
    """Bytes per sample, from tables of 1,000 chains over as many and over 2^31 + 1 states."""
    rows = []
    for name, num_states in (("up to 2^31 samples", 1000), ("beyond 2^31 samples", 2**31 + 1)):
        chains = ChainTable(
            1, 1000, num_states=num_states, ids_per_item=1, own=True, keep="encode", seed=0
        )
        held = sum(state.nbytes for state in chains.state_tensors()) / 1000
        rows.append(Row.of(f"state per sample, {name}", [held], "bytes"))
    return rows
