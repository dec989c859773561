"""The stale table: an embedding of every key as of its last encoding.

Negative Cache draws its negatives from it; EMC² with `proposal="cache"` only its proposals, so
there staleness costs speed of mixing and no bias. Rows are rewritten whenever a step encodes them
anyway, and a share of the table can be re-encoded per step in round-robin order (`next_ids`,
`refresh`).

Shapes: `M` keys, `N` rows, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from negchain import draws
from negchain.losses.base import ContrastiveLoss, LazyState
from negchain.losses.batch import as_embedding
from negchain.pool import Draw, Side, matches, write_rows
from negchain.weights.cache import draw_from, gumbel_winner, informed_proposal


class StaleTable(LazyState):
    """M embeddings, zero until first written, and the cursor of their refresh.

    Args:
        size: M.
        dim: D; None waits for the first batch.

    Example:
        >>> table = StaleTable(4, 2)
        >>> table.next_ids(3), table.next_ids(3)      # looking does not move the cursor
        (tensor([0, 1, 2]), tensor([0, 1, 2]))
        >>> table.refresh(torch.tensor([0, 1, 2]), torch.eye(3, 2), normalize=True)
        >>> table.next_ids(3)
        tensor([3, 0, 1])
    """

    embeddings: Tensor
    cursor: Tensor
    _lazy_buffers = ("embeddings",)

    def __init__(self, size: int, dim: int | None) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, dim or 0))
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))

    def _rows(self, dim: int) -> Tensor:
        """The table, or what stands for it before the first batch shows its width."""
        size, width = self.embeddings.shape
        if width == 0:
            return self.embeddings.new_zeros(1, 1).expand(size, dim)
        if width != dim:
            raise ValueError(f"the table holds embeddings of dimension {width}, got {dim}")
        return self.embeddings

    def logits(self, side: Side, beta: float | Tensor) -> Tensor:  # [N,M]
        """Stale logits of a side's rows against all keys, own and known positives excluded."""
        beta = beta.detach() if isinstance(beta, Tensor) else beta
        table = self._rows(side.queries.shape[1]).to(side.queries.dtype)
        logits = side.queries.detach() @ table.T * beta
        ids = torch.arange(self.embeddings.shape[0], device=logits.device)
        return logits.masked_fill(matches(ids, side.positive_ids, side.known), -math.inf)

    def winners(
        self, num_rows: int | None, side: Side, beta: float | Tensor, key: tuple[int, Tensor, int]
    ) -> Draw:
        """One exact draw from the stale softmax for each of the first `num_rows` rows, or for all.

        `key` is (seed, step, side number), what the Gumbel noise is a function of.
        """
        seed, step, number = key
        logits = self.logits(side, beta)[:num_rows]
        rows = torch.arange(len(logits), device=logits.device)
        stream = draws.STREAM_GUMBEL + 16 * number
        noise = draws.gumbel(seed, step, stream, rows, logits.shape[1], logits.dtype)
        winner, log_partition = gumbel_winner(logits, noise)
        return Draw(winner, log_partition=log_partition, private=True)

    def informed(
        self, count: int, side: Side, beta: float | Tensor, key: tuple[int, Tensor, int]
    ) -> Draw:
        """`count` draws shared by all rows, half from their stale softmaxes, half uniform."""
        seed, step, number = key
        log_q = informed_proposal(self.logits(side, beta))
        row = torch.full((1,), number, device=log_q.device)
        u = draws.uniform(seed, step, draws.STREAM_PROPOSE, row, count, torch.float64)
        ids = draw_from(log_q, u[0])
        return Draw(ids, log_q[ids], log_q_all=log_q)

    def write(self, ids: Tensor, embeddings: Tensor) -> None:
        """Remember embeddings [R, D] of keys, as they are; non-finite ones are left out."""
        rows = self._rows(embeddings.shape[1])
        if self.embeddings.shape[1] == 0:
            self.embeddings = torch.zeros_like(rows, memory_format=torch.contiguous_format)
        write_rows(self.embeddings, ids, embeddings.detach(), torch.isfinite(embeddings).all(1))

    def next_ids(self, count: int) -> Tensor:
        """The next `count` keys due for re-encoding, [count]."""
        size = self.embeddings.shape[0]
        return (self.cursor + torch.arange(count, device=self.cursor.device)) % size

    def refresh(self, ids: Tensor, embeddings: Tensor, *, normalize: bool) -> None:
        """Write re-encoded keys and move the cursor past them."""
        ids = ids.to(self.cursor.device)
        self.write(ids, as_embedding(embeddings.to(self.cursor.device), normalize))
        self.cursor.copy_((self.cursor + len(ids)) % self.embeddings.shape[0])


def propose_from(
    loss_fn: ContrastiveLoss,
    tables: nn.ModuleList,
    z_a: Tensor,
    index: Tensor,
    z_b: Tensor | None,
    key_index: Tensor | None,
    known: Tensor | None,
    draw: Callable[..., Draw],
) -> Draw | tuple[Draw, Draw]:
    """A draw for each side of a batch from its table: `draw(table, side, beta, key)`."""
    if z_b is None and loss_fn.num_sides == 2:
        raise ValueError("propose needs z_b= too: both directions are anchors")
    with torch.autocast(z_a.device.type, enabled=False):
        other = z_a if z_b is None else z_b
        _, sides = loss_fn._begin(z_a, other, index, key_index, known, use_batch=False, quiet=True)
        drawn = []
        for number, (side, table) in enumerate(zip(sides, tables, strict=True)):
            key = (loss_fn.seed, loss_fn.step, number)
            drawn.append(draw(table, side, loss_fn._beta(side.queries), key))
    return (drawn[0], drawn[1]) if len(drawn) == 2 else drawn[0]
