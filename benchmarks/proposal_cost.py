"""What proposing from a table of a million documents costs: time, memory, half precision.

    PYTHONPATH=src python benchmarks/proposal_cost.py MODEL_FOLDER [--documents 1000000]

Shows    a training step (b queries, 3 b documents of 256 tokens with gradient) that draws two
         documents per query from the table, against the same step with random documents (no table
         is read); a CUDA graph, median of 48, one process. The table holds random directions, and
         nothing of it is refreshed: a refresh of r documents costs what encoding them costs.
Prints   time of a step, what proposing adds, and its share; bytes of the table, and memory
         beyond the step without one; for a table in half precision also how far its q is from
         float32's (total variation): the correction uses the q drawn from, so that is all it does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from retrieval import DEVICE, WARM_UP, Encoder, recorded
from torch import Tensor
from torch.nn.functional import normalize

import negchain as nc
from negchain.losses.settings import Informed

BETA, ANCHORS = 50.0, 4096


def build(kind: str, documents: int, size: int, dim: int, half: bool) -> Any:
    """A loss with a table of random directions."""
    more = {"views": "paired", "symmetric": False, "num_keys": documents, "dim": dim}
    informed = {"share": 0.9, "sharpness": 0.5, "refresh": 0.0, "alone": True}
    if kind == "random":
        return nc.InfoNCELoss(ANCHORS, BETA, proposals=nc.Uniform(2 * size), **more).to(DEVICE)
    if kind == "top k":
        loss_fn = nc.TopKLoss(ANCHORS, BETA, 2, 20, 0.0, denominator="all", **more)
    else:
        draws = {"num": 2, "per_row": True} if kind == "per row" else {"num": 2 * size}
        proposals = Informed(**draws, **informed)
        loss_fn = nc.ImportanceLoss(ANCHORS, BETA, proposals, denominator="all", **more)
    loss_fn = loss_fn.to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for table in loss_fn.tables:
            for part in table.embeddings.split(1 << 16):
                made = torch.randn(part.shape, generator=generator, device=DEVICE)
                part.copy_(normalize(made, dim=1))
            if half:
                table.embeddings = table.embeddings.half()
    return loss_fn


def measure(loss_fn: Any, encoder: Encoder, given: argparse.Namespace, steps: int) -> list[float]:
    """Milliseconds of steps."""
    on_gpu, size = DEVICE.type == "cuda", given.batch
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=0.0, fused=on_gpu, capturable=on_gpu)
    words = encoder.model.config.vocab_size
    index = torch.arange(size, device=DEVICE)

    def tokens(count: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(5, words, (count, length), device=DEVICE)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def step() -> None:
        keys = torch.randint(given.documents, (size,), device=DEVICE)
        q, d = encoder(tokens(size, given.length // 8)), encoder(tokens(size, given.length))
        loss = loss_fn(q, d, index, key_index=keys, encode=lambda ids: encoder(
            tokens(len(ids), given.length)))  # fmt: skip
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    stream, laps, run = torch.cuda.Stream() if on_gpu else None, [], step
    wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    with torch.cuda.stream(stream):  # type: ignore[arg-type]  # None: as it is
        for number in range(steps):
            if stream is not None and number == WARM_UP:
                run = recorded(step, stream)
            wait()
            begin = time.perf_counter()
            run()
            wait()
            laps.append(1000 * (time.perf_counter() - begin))
            index.add_(size).remainder_(ANCHORS)
    return laps[steps // 5 :]


@torch.no_grad()
def proposal(loss_fn: Any, size: int, dim: int) -> Tensor:
    """q over all documents for some queries near documents of the table."""
    table = loss_fn.tables[0]
    noise = torch.Generator(DEVICE).manual_seed(1)
    near = table.embeddings[: 3 * size : 3].float()
    queries = near + 0.05 * torch.randn(size, dim, generator=noise, device=DEVICE)
    own = torch.arange(size, device=DEVICE) + 3 * size
    side = SimpleNamespace(
        queries=normalize(queries, dim=1), positive_ids=own, known=None, num_rows=size
    )
    return table.log_proposal(side, BETA, Informed(share=0.9, sharpness=0.5)).double().exp()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a document")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    encoder = Encoder(given.model).to(DEVICE)
    dim = encoder.model.config.hidden_size
    print(f"{given.documents:,} documents, D = {dim}, b = {given.batch}, {given.length} tokens, "
          f"{DEVICE}, torch {torch.__version__}")  # fmt: skip
    print(
        "| draws | table | ms a step | proposing, ms | share of the step | table, MB | peak, MB |"
    )
    print("|---" * 7 + "|")
    plain, kept = 0.0, {}
    for kind, half in (("random", False), ("informed", False), ("informed", True),
                       ("per row", False), ("top k", False), ("top k", True)):  # fmt: skip
        loss_fn = build(kind, given.documents, given.batch, dim, half)
        if kind == "informed":
            kept[half] = proposal(loss_fn, given.batch, dim)
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms = float(np.median(measure(loss_fn, encoder, given, given.steps)))
        plain = ms if kind == "random" else plain
        size = sum(t.embeddings.nbytes for t in loss_fn.tables) / 1e6
        peak = torch.cuda.max_memory_allocated() / 1e6 if DEVICE.type == "cuda" else float("nan")
        held = "half" if half else "float32" if size else "none"
        print(f"| {kind} | {held} | {ms:.2f} | {ms - plain:.2f} | {(ms - plain) / ms:.1%} | "
              f"{size:,.0f} | {peak:,.0f} |", flush=True)  # fmt: skip
        del loss_fn
    print(f"total variation between q of half precision and float32: "
          f"{0.5 * float((kept[True] - kept[False]).abs().sum()):.2e}")  # fmt: skip


if __name__ == "__main__":
    main()
