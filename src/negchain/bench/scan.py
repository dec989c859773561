"""`mh_scan` against the column loop it replaces, with equality on fresh inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from negchain.bench.table import Check, Row, Settings, Table
from negchain.bench.timing import Timed, graphed, interleaved
from negchain.weights.metropolis import Backend, Scan, mh_scan, scan_reference

BATCHES = (32, 256)
BETA = 14.28
CALLS = 50  # of a fast scan in one graph
CHECKED_INPUTS = 3
Inputs = tuple[Tensor, Tensor, Tensor, int]


def table(settings: Settings) -> Table:
    """Scans of 2b chains over 2b columns, b = 32 and 256."""
    rows: list[Row] = []
    checks: list[Check] = []
    backends: tuple[Backend, ...] = ("triton", "torch") if settings.on_gpu else ("torch",)
    generator = settings.generator()
    for batch in BATCHES:
        settings.say(f"b = {batch}")
        for backend in backends:
            checks.append(_check(backend, batch, generator, settings.device))
        rows += _rows(settings, batch, backends, _inputs(batch, generator, settings.device))
    return Table(
        subject="scan",
        title="mh_scan, 2b chains over 2b columns",
        compares="speed-up against the loop over columns (`scan_reference`, all chains at once)",
        rows=tuple(rows),
        checks=tuple(checks),
        notes=(f"float32 logits of spread 0.3 β, β = {BETA}, burn-in b - 1.",)
        + ((f"A fast scan is timed as {CALLS} calls in a CUDA graph.",) if settings.on_gpu else ()),
    )


def _inputs(batch: int, generator: torch.Generator, device: torch.device) -> Inputs:
    """Logits with each chain's own two columns excluded, starts, log-uniforms, burn-in."""
    size = 2 * batch
    logits = BETA * 0.3 * torch.randn(size, size, generator=generator)
    own = torch.arange(size)
    logits[own, own] = logits[own, (own + batch) % size] = -math.inf
    start = BETA * 0.3 * torch.randn(size, generator=generator)
    log_u = torch.rand(size, size, generator=generator).log()
    return logits.to(device), start.to(device), log_u.to(device), batch - 1


def _check(backend: Backend, batch: int, generator: torch.Generator, device: torch.device) -> Check:
    differing = 0
    for _ in range(CHECKED_INPUTS):
        inputs = _inputs(batch, generator, device)
        found, expected = mh_scan(*inputs, backend=backend), scan_reference(*inputs)
        same = [
            (a == b).flatten(1).all(1) if a.dim() > 1 else a == b
            for a, b in zip(found, expected, strict=True)
        ]
        differing += int((~torch.stack(same).all(0)).sum())
    chains = 2 * batch * CHECKED_INPUTS
    return Check(
        name=f"{backend} equals the loop to the last bit, b = {batch}",
        ok=differing == 0,
        found=f"{differing} of {chains} chains differ, {CHECKED_INPUTS} random inputs",
    )


def _rows(
    settings: Settings, batch: int, backends: tuple[Backend, ...], inputs: Inputs
) -> list[Row]:
    device, cpu = settings.device, torch.device("cpu")
    logits, start, log_u, burn_in = inputs
    here = "the loop on this GPU" if settings.on_gpu else "the loop"
    timed = {here: Timed(lambda: scan_reference(logits, start, log_u, burn_in), device)}
    if settings.on_gpu:
        on_cpu = [tensor.cpu() for tensor in (logits, start, log_u)]
        timed["the loop on the CPU"] = Timed(
            lambda: scan_reference(on_cpu[0], on_cpu[1], on_cpu[2], burn_in), cpu
        )
    loops = list(timed)
    for backend in backends:

        def run(backend: Backend = backend) -> Scan:
            return mh_scan(logits, start, log_u, burn_in, backend)

        timed[backend] = graphed(run, device, CALLS)
    times = interleaved(timed, settings.rounds)
    rows = [Row.of(f"{loop}, b = {batch}", times[loop], "ms") for loop in loops]
    for backend in backends:
        for loop in loops:
            rows.append(
                Row.of(
                    f"{backend}, b = {batch}",
                    times[backend],
                    "ms",
                    against=loop,
                    base=times[loop],
                    speed_up=True,
                )
            )
    return rows
