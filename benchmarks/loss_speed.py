"""Time of each loss (forward + backward) against InfoNCE, and of mh_scan's backends; ratios first.

    PYTHONPATH=src python benchmarks/loss_speed.py [--device cpu|cuda] [--batch-size 256]

Bar: on 2 CPU cores, b = 256, d = 128, EMC² at most 6 times InfoNCE. All methods run in one process,
interleaved, so that a noisy machine hits them alike; medians with quartiles.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch

import negchain
from negchain.weights.metropolis import scan_reference


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def graphed(call, device: str):
    """On a GPU, replay as a CUDA graph: at these sizes eager time is launch time."""
    if device != "cuda":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def interleaved(calls: dict, device: str, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            begin = clock(device)
            call()
            times[name].append((clock(device) - begin) * 1e3)
    return times


def loss_calls(device: str, batch: int, dim: int, num_samples: int, beta: float) -> dict:
    z_a, z_b, held = (torch.randn(batch, dim, device=device, requires_grad=True) for _ in range(3))
    index = torch.randperm(num_samples, device=device)[:batch]

    def call(loss_fn, **extra):
        loss_fn = loss_fn.to(device)

        def run() -> None:
            torch.autograd.grad(loss_fn(z_a, z_b, index, **extra), (z_a, z_b))

        return run

    carried = {"carried": held}
    emc2 = negchain.EMC2Loss
    return {
        "InfoNCE": call(negchain.InfoNCELoss(beta)),
        "DCL": call(negchain.DCLLoss(beta)),
        "SogCLR": call(negchain.SogCLRLoss(num_samples, beta)),
        "EMC2 encode": call(emc2(num_samples, beta), **carried),
        "EMC2 cached": call(emc2(num_samples, beta, carried="cached", dim=dim)),
        "EMC2 score": call(emc2(num_samples, beta, carried="score")),
        "EMC2 i-SIR": call(emc2(num_samples, beta, kernel="isir"), **carried),
        "EMC2 sequential": call(emc2(num_samples, beta, walk="sequential"), **carried),
    }


def scan_calls(device: str, batch: int, beta: float) -> tuple[dict, dict[str, bool]]:
    logits = beta * torch.randn(2 * batch, 2 * batch, device=device) * 0.3
    start, log_u = logits[:, 0].clone(), torch.rand_like(logits).log()
    burn_in = batch - 1
    backends = ["torch"] + (["triton"] if device == "cuda" else [])
    calls = {"reference": lambda: scan_reference(logits, start, log_u, burn_in)}
    expected = scan_reference(logits, start, log_u, burn_in)
    equal = {}
    for name in backends:

        def run(name: str = name) -> negchain.Scan:
            return negchain.mh_scan(logits, start, log_u, burn_in, name)

        equal[name] = all(map(torch.equal, run(), expected))
        calls[name] = run
    return calls, equal


def table(title: str, times: dict[str, list[float]], base: str) -> list[dict]:
    rows = []
    reference = statistics.median(times[base])
    print(f"\n{title}\n{'':<18} {'ratio':>8} {'median ms':>10} {'quartiles':>20}")
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:<18} {middle / reference:>8.2f} {middle:>10.3f} {low:>10.3f} {high:>9.3f}")
        rows.append({"name": name, "ratio": middle / reference, "ms": middle, "q": [low, high]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json")
    given = parser.parse_args()
    device = given.device
    hardware = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    record: dict = {"hardware": hardware, "threads": torch.get_num_threads(), "tables": {}}
    print(f"{hardware}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for batch in given.batch_size:
        for beta in (5.0, 14.28):
            torch.manual_seed(0)
            calls = loss_calls(device, batch, given.dim, 50_000, beta)
            calls = {name: graphed(call, device) for name, call in calls.items()}
            title = f"loss forward + backward, b = {batch}, d = {given.dim}, beta = {beta:g}"
            times = interleaved(calls, device, given.repeats)
            record["tables"][title] = table(title, times, "InfoNCE")
        calls, equal = scan_calls(device, batch, 14.28)
        # The reference loops over columns from the host: it is timed as it is.
        calls = {n: c if n == "reference" else graphed(c, device) for n, c in calls.items()}
        title = f"mh_scan, 2b = {2 * batch} chains and columns (equal to reference: {equal})"
        times = interleaved(calls, device, max(5, given.repeats // 4))
        record["tables"][title] = table(title, times, "reference")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
