"""What a stale table in half precision costs the estimators: bytes, and the change of their means.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/half_tables.py

Nothing is sampled. Small: 6 items, all pairs of draws and all partners of a batch of two, so that
the bias of the mean weights and of the mean partition is exact. Large: 20,000 clustered embeddings
and a stale table, every probability of q summed over.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from negchain import ImportanceLoss, Informed
from negchain.losses.table import StaleTable
from negchain.pool import Side

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SETTINGS = Informed(2, share=0.9, refresh=0, alone=True)


def small(dtype: torch.dtype, beta: float = 10.0) -> tuple[float, float]:
    """Relative bias of the partition, and total variation of the mean weights from the exact."""
    m, g = 6, torch.Generator().manual_seed(0)
    z = F.normalize(torch.randn(m, 4, generator=g).double(), dim=1)
    old = F.normalize(z + 0.3 * torch.randn(m, 4, generator=g), dim=1)
    exact = (beta * z[0] @ z.T).masked_fill(torch.arange(m) == 0, -torch.inf)
    partition, weights = 0.0, torch.zeros(m).double()
    for other in range(1, m):
        loss_fn = ImportanceLoss(m, beta, SETTINGS, views="paired", symmetric=False)
        loss_fn.tables.keep_as(dtype)
        loss_fn.fill(lambda ids: old[ids])
        index = torch.tensor([0, other])
        (part,) = loss_fn.request(index, z[index], z[index]).parts
        log_q = part.log_q.double()
        for pair in itertools.product(range(m), repeat=2):
            ratio = (exact[list(pair)] - log_q[list(pair)]).exp()
            chance = log_q[list(pair)].sum().exp() / (m - 1)
            partition += float(chance * ratio.mean())
            if ratio.sum() > 0:  # else the row has no negative in this batch
                weights.index_add_(0, torch.tensor(pair), chance * ratio / ratio.sum())
    far = (weights / weights.sum() - exact.softmax(0)).abs().sum() / 2
    return partition / float(exact.exp().sum()) - 1, float(far)


def large(beta: float = 20.0) -> list[tuple[str, ...]]:
    """Rows of the table: what half precision changes in q, in draws and in their variance."""
    size, dim, rows = 20_000, 128, 64
    g = torch.Generator().manual_seed(0)
    centres = torch.randn(200, dim, generator=g)
    z = F.normalize(centres.repeat(100, 1) + 1.5 * torch.randn(size, dim, generator=g), dim=1)
    old = F.normalize(z + 0.03 * torch.randn(size, dim, generator=g), dim=1)
    ids = torch.randperm(size, generator=g)[:rows]
    none = torch.zeros(rows, 0, dtype=torch.bool)
    side = Side(z[ids], z[ids], ids, ids, None, z[None, :0], ids[None, :0], none, 1, 1, size)
    exact = (beta * z[ids] @ z.T).scatter(1, ids[:, None], -torch.inf).double()
    found: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    lines = []
    for dtype in DTYPES:
        table = StaleTable(size, dim)
        table.embeddings = old.to(dtype)
        stale = torch.cat([part for _, part in table.logits(side, beta)], 1).double().softmax(1)
        q = table.log_proposal(side, beta, SETTINGS).double().exp()
        found[dtype] = stale, q
        first, first_q = found[torch.float32]
        variance = (exact.softmax(1).square() / q).sum(1) - 1
        bias, far = small(dtype)
        lines.append((
            str(dtype).removeprefix("torch."), f"{table.embeddings.nbytes / size:,.0f}",
            f"{bias:+.1e}", f"{far:.6f}",
            f"{(q - first_q).abs().sum() / 2:.1e}", f"{variance.mean():.3f}",
            f"{(stale - first).abs().sum(1).mean() / 2:.1e}",
            f"{(stale - exact.softmax(1)).abs().sum(1).mean() / 2:.4f}",
        ))  # fmt: skip
    return lines


def main() -> None:
    """The table."""
    head = ("table", "bytes a key", "partition, relative bias", "mean weights, TV from exact",
            "q, TV from float32's", "variance of one draw", "stale softmax, TV from float32's",
            "stale softmax, TV from exact")  # fmt: skip
    for line in (head, ("---",) * len(head), *large()):
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
