"""The stale table: an embedding of every key as of its last encoding.

Negative Cache draws its negatives from it; `proposals=Informed()` only its proposals, whose
probabilities are corrected for, so a stale table slows mixing and leaves the target p as it is
(equal views; tests/losses/test_enumerated.py). Rows are rewritten whenever a step encodes them
anyway, and a share of the table is encoded anew per step in turn (`next_ids`, `refresh`).

The table is read in chunks of keys, so that beyond the table itself (and one number per key where a
probability of every key is asked for) memory grows by an eighth of it at most, in float32.

Shapes: `M` keys, `N` rows, `D` embedding, `R` draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from negchain import rng
from negchain.losses.batch import Batch, as_embedding, check_answer
from negchain.losses.columns import Key, PrivateSide
from negchain.losses.distributed import Ranks, share_out, together
from negchain.losses.request import TOWERS, Encodes, Part, Request, encoders_of
from negchain.losses.settings import Informed, check_dim
from negchain.losses.shards import Shards
from negchain.losses.state import Rows, Stateful
from negchain.objective import constant
from negchain.pool import Side, is_among

if TYPE_CHECKING:
    from negchain.losses.base import ContrastiveLoss

CHUNK_ELEMENTS = 1 << 24  # logits held at a time: 64 MiB in float32
Chunk = tuple[slice, Tensor]  # some keys, and their logits [N, chunk]


class Spread:
    """An order of 0 .. M - 1 in which neighbours are far apart: steps of a golden section of M.

    Keys are encoded anew in it. Data often lie class by class, and with BatchNorm a pass over one
    class has that class's statistics: its embeddings lose what the class has in common.

    Example:
        >>> order = Spread(10)
        >>> order.ids(torch.arange(10))
        tensor([0, 7, 4, 1, 8, 5, 2, 9, 6, 3])
        >>> order.places(order.ids(torch.arange(3)))
        tensor([0, 1, 2])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.step = next(n for n in count(round(0.618 * size)) if math.gcd(n, size) == 1)

    def ids(self, places: Tensor) -> Tensor:
        """What stands at some places, which may go round."""
        return places % self.size * self.step % self.size

    def places(self, ids: Tensor) -> Tensor:
        """Where some stand."""
        return ids * pow(self.step, -1, self.size) % self.size


class StaleTable(Stateful):
    """M embeddings, zero until first written, and the cursor of their refresh.

    Example:
        >>> table = StaleTable(4, 2)
        >>> table.next_ids(3), table.next_ids(3)      # looking does not move the cursor
        (tensor([0, 3, 2]), tensor([0, 3, 2]))
        >>> table.refresh(torch.tensor([0, 3, 2]), torch.eye(3, 2), normalize=True)
        >>> table.next_ids(3)
        tensor([1, 0, 3])
    """

    embeddings: Tensor
    cursor: Tensor

    def __init__(self, size: int, dim: int | None, ranks: Ranks | None = None) -> None:
        super().__init__()
        self.size, self.order = size, Spread(size)
        self.writes = 0  # so far; draws whose q is looked up later belong to one number of them
        self.rows = Rows.of(size, ranks)
        embeddings = torch.zeros(self.rows.count, dim or 0, dtype=torch.float32)
        self.add_state("embeddings", embeddings, lazy=True, rows=self.rows)
        self.add_state("cursor", torch.zeros((), dtype=torch.int64))

    def logits(self, side: Side, beta: float | Tensor) -> Iterator[Chunk]:
        """Stale logits of a side's rows, some keys at a time; own and known positives excluded.

        The keys are those of this rank.
        """
        table = self.wide("embeddings", side.queries.shape[1], 0.0)
        queries = side.queries.detach() * constant(beta)
        positives = side.positive_ids[:, None]
        if side.known is not None:
            positives = torch.cat([positives, side.known], 1)
        chunk = max(1, CHUNK_ELEMENTS // max(len(queries), 1))
        if table.dtype != queries.dtype:  # its rows are converted, a chunk at a time
            chunk = max(1, min(chunk, 4 * CHUNK_ELEMENTS // table.shape[1]))
        for begin in range(0, self.rows.count, chunk):
            part = table[begin : begin + chunk].to(queries.dtype)
            logits = queries @ part.T
            begin += self.rows.first
            column = positives - begin  # a row excludes few keys: touch only these
            inside = (column >= 0) & (column < len(part)) & (positives >= 0)
            column = column.clamp(0, len(part) - 1)
            bound = torch.where(inside, -math.inf, math.inf).to(logits.dtype)
            logits.scatter_reduce_(1, column, bound, "amin")  # adding would sort them on a GPU
            yield slice(begin, begin + len(part)), logits

    def _kept(self, side: Side, beta: float | Tensor) -> Callable[[], Iterable[Chunk]]:
        """`logits` for two passes: computed once where they are an eighth of the table, or less."""
        if 8 * len(side.queries) > side.queries.shape[1]:
            return lambda: self.logits(side, beta)
        kept = list(self.logits(side, beta))
        return lambda: kept

    def winners(
        self, side: Side, beta: float | Tensor, key: Key
    ) -> tuple[Tensor, Tensor]:  # -> [N], [N]
        """A draw from the stale softmax of each row (Gumbel-max), and its log partition."""
        seed, step, number = key
        rows = torch.arange(side.num_rows, device=side.queries.device)
        best = side.queries.new_full((side.num_rows,), -math.inf)
        log_sum, winner = best.clone(), torch.zeros_like(rows)
        use = rng.FOR_GUMBEL + 16 * number
        for keys, logits in self.logits(side, beta):
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits, 1))
            noise = rng.gumbel(
                seed, step, use, rows, logits.shape[1], logits.dtype, first_column=keys.start
            )
            top, at = (logits + noise).max(1)
            winner = torch.where(top > best, at + keys.start, winner)
            best = torch.maximum(best, top)
        if self.rows.ranks is None:
            return winner, log_sum
        at = self.rows.every(best).argmax(0)  # the best of the ranks' best
        return self.rows.every(winner)[at, rows], torch.logsumexp(self.rows.every(log_sum), 0)

    def informed(
        self, count: int, side: Side, beta: float | Tensor, settings: Informed, key: Key
    ) -> tuple[Tensor, Tensor | Callable[[Tensor], Tensor]]:  # -> [R], [M] or a function
        """`count` draws shared by all rows from q, and log q of every key; see `Informed`."""
        seed, step, number = key
        log_q = self.log_proposal(side, beta, settings)
        row = torch.full((1,), number, device=log_q.device)
        u = rng.uniform(seed, step, rng.FOR_PROPOSE, row, count, torch.float64)
        drawn = self.rows.draw(log_q, u[0])
        return drawn, log_q if self.rows.ranks is None else partial(self.rows.read, log_q)

    def informed_rows(
        self, count: int, side: Side, beta: float | Tensor, settings: Informed, key: Key
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:  # -> [N, count], ids [N, ...] -> log q
        """`count` draws for each row from its own q, and log q_i of any ids; see `Informed`."""
        seed, step, number = key
        beta = constant(beta) * settings.sharpness
        chunks = self._kept(side, beta)
        log_sum = self._log_sum(chunks(), side)[:, None]
        rows = torch.arange(side.num_rows, device=side.queries.device)
        use = rng.FOR_PROPOSE + 16 * number
        points = rng.uniform(seed, step, use, rows, count, torch.float64)
        drawn = torch.full_like(points, -1, dtype=torch.int64)
        before = torch.zeros_like(points[:, :1])

        def shares() -> Iterator[Chunk]:
            for keys, logits in chunks():
                yield keys, self._mixed(logits - log_sum, settings).double().exp()

        if self.rows.ranks is not None:  # the mass of the ranks before this one
            for _, share in shares():
                before = before + share.sum(1, keepdim=True)
            before = self.rows.every(before)[: self.rows.ranks.rank].sum(0)
        for keys, share in shares():
            upto = before + share.cumsum(1)
            at = torch.searchsorted(upto, points).clamp_(max=share.shape[1] - 1)
            inside = (points > before) & (points <= upto[:, -1:])
            drawn = torch.where(inside, at + keys.start, drawn)
            before = upto[:, -1:]
        drawn = self.rows.every(drawn).amax(0)
        drawn = torch.where(drawn < 0, self.size - 1, drawn)  # beyond the sum by rounding
        table, queries = self.wide("embeddings", side.queries.shape[1], 0.0), side.queries.detach()
        queries, writes = queries * beta, self.writes

        def log_q(ids: Tensor) -> Tensor:
            if self.writes != writes:
                raise ValueError(
                    "the table has been written to since these draws were made, and no longer has "
                    "their probabilities; ask again, request(index, z_a, z_b), before the call"
                )
            flat = ids.reshape(len(queries), -1)
            keys = self.rows.read(table, flat).to(queries.dtype)
            stale = torch.einsum("nd,ncd->nc", queries, keys)
            stale = stale.masked_fill(side.excludes(flat), -math.inf)
            return self._mixed(stale - log_sum, settings).view(ids.shape)

        return drawn, log_q

    def top(self, count: int, side: Side) -> Tensor:  # -> [N, count]
        """The `count` keys each row is most similar to, by the table; in order of their ids."""
        best = side.queries.new_full((side.num_rows, 0), -math.inf)
        ids = torch.zeros_like(best, dtype=torch.int64)
        for keys, logits in self.logits(side, 1.0):
            top, at = logits.topk(min(count, logits.shape[1]), 1, sorted=False)
            best, ids = torch.cat([best, top], 1), torch.cat([ids, at + keys.start], 1)
            best, at = best.topk(min(count, best.shape[1]), 1, sorted=False)
            ids = ids.gather(1, at)
        if not isinstance(self.rows, Shards):
            return ids.sort(1).values
        width = min(count, self.rows.block)  # the last ranks may have fewer rows
        more = side.positive_ids[:, None].expand(-1, width - ids.shape[1])  # which are no negatives
        best, ids = F.pad(best, (0, more.shape[1]), value=-math.inf), torch.cat([ids, more], 1)
        best, ids = (torch.cat([*self.rows.every(one)], 1) for one in (best, ids))
        at = best.topk(min(count, self.size), 1, sorted=False).indices
        return ids.gather(1, at).sort(1).values

    def _log_sum(self, chunks: Iterable[Chunk], side: Side) -> Tensor:  # -> [N]
        """Log partition of every row's stale softmax; +inf without negatives: no share."""
        log_sum = side.queries.new_full((side.num_rows,), -math.inf)
        for _, logits in chunks:
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits, 1))
        log_sum = torch.logsumexp(self.rows.every(log_sum), 0)
        return torch.where(log_sum > -math.inf, log_sum, math.inf)

    def _mixed(self, log_stale: Tensor, settings: Informed) -> Tensor:
        """log( (1 - share) / M + share * stale )."""
        uniform = math.log1p(-settings.share) - math.log(self.size)
        if settings.share == 0:
            return torch.full_like(log_stale, uniform)
        log_stale = log_stale + math.log(settings.share)
        return torch.logaddexp(log_stale, torch.full_like(log_stale, uniform))

    def log_proposal(self, side: Side, beta: float | Tensor, settings: Informed) -> Tensor:  # [M]
        """log q(z) of `Informed`, of this rank's keys."""
        beta = constant(beta) * settings.sharpness
        mean = side.queries.new_full((self.rows.count,), -math.inf)
        if settings.share > 0:
            chunks = self._kept(side, beta)
            log_sum = self._log_sum(chunks(), side)[:, None]
            num_rows = (log_sum < math.inf).sum().clamp(min=1)  # that have negatives
            log_sum = log_sum + num_rows.to(log_sum.dtype).log()
            for keys, logits in chunks():
                own = slice(keys.start - self.rows.first, keys.stop - self.rows.first)
                mean[own] = torch.logsumexp(logits - log_sum, 0)
        return self._mixed(mean, settings)

    def write(self, ids: Tensor, embeddings: Tensor, bad: Tensor | None = None) -> None:
        """Remember embeddings [R, D] of keys, as they are; non-finite and `bad` ones left out."""
        self.widen("embeddings", embeddings.shape[1], 0.0)
        self.writes += 1
        good = torch.isfinite(embeddings).all(1)
        if bad is not None:
            good = good & ~is_among(ids, bad)
        self.rows.write(self.embeddings, ids, embeddings.detach(), good)

    def next_ids(self, count: int, ahead: int = 0) -> Tensor:
        """The next `count` keys due for re-encoding, [count]; those of `ahead` steps from now."""
        first = self.cursor + ahead * count
        return self.order.ids(first + torch.arange(count, device=self.cursor.device))

    def refresh(self, ids: Tensor, embeddings: Tensor, *, normalize: bool) -> None:
        """Write re-encoded keys and move the cursor past them."""
        ids = ids.to(self.cursor.device)
        self.write(ids, as_embedding(embeddings.to(self.cursor.device), normalize))
        self.cursor.copy_((self.cursor + len(ids)) % self.size)


class Tables(nn.ModuleList):
    """The stale tables of a loss, one per side."""

    def __init__(self, count: int, size: int, dim: int | None, ranks: Ranks | None = None) -> None:
        check_dim(dim, ranks is not None)
        super().__init__(StaleTable(size, dim, ranks) for _ in range(count))

    def __iter__(self) -> Iterator[StaleTable]:  # type: ignore[override]
        return super().__iter__()  # type: ignore[return-value]

    def __getitem__(self, side: int) -> StaleTable:  # type: ignore[override]
        return super().__getitem__(side)  # type: ignore[return-value]

    def keep_as(self, dtype: torch.dtype) -> None:
        """Hold the embeddings in float16 or bfloat16 from now on: half the memory.

        Draws are corrected by the q they were made with, so rounding biases nothing but Negative
        Cache's draws; see docs/large_tables.md.

        Example:
            >>> tables = Tables(1, 4, 2)
            >>> tables.keep_as(torch.float16)
            >>> tables[0].embeddings.dtype
            torch.float16
        """
        for table in self:
            table.embeddings = table.embeddings.to(dtype)

    def due(self, share: float, ahead: int = 0) -> list[Part]:
        """The share of every table that a step encodes anew."""
        parts = []
        for side, table in enumerate(self):
            ids = table.next_ids(math.ceil(share * table.size), ahead)
            if len(ids):
                parts.append(Part("refresh", side, ids))
        return parts

    def fill(self, loss_fn: ContrastiveLoss, encode: Encodes, chunk: int) -> None:
        """Encode every key once, `chunk` at a time; ranks share the work."""
        encoders_of(encode, TOWERS[: len(self)])  # before any row
        ranks = loss_fn.ranks()
        world = 1 if ranks is None else ranks.world
        for number, table in enumerate(self):
            whole = table.order.ids(torch.arange(table.size, device=loss_fn.step.device))
            for ids in torch.split(whole, chunk * world):
                part = Part("refresh", number, ids)
                part = part if ranks is None else share_out(part, ranks)
                z = Request(loss_fn, ids, 0, [part]).encode(encode).parts[0].embeddings
                assert z is not None
                z = z if ranks is None else together(z, len(ids), ranks)
                table.refresh(ids, z, normalize=loss_fn.normalize)

    def remember(
        self, sides: Sequence[Side], requests: Sequence[Request], batch: Batch, normalize: bool
    ) -> None:
        """Write what a step encoded into the tables."""
        for number, table in enumerate(self):
            side = sides[number]
            bad = None  # ids of samples that are marked: one out of range has another's
            if batch.faults is not None:
                bad = side.positive_ids.masked_fill(batch.valid.repeat(side.views), -1)
            table.write(side.positive_ids, side.positives, bad)  # they may be no columns
            table.write(side.key_ids.flatten(), side.keys.flatten(0, 1), bad)
            if isinstance(side, PrivateSide):
                table.write(side.private_ids.flatten(), side.private_keys.flatten(0, 1))
            for request in requests:
                for part in (p for p in request.parts if p.side == number):
                    assert part.embeddings is not None
                    if part.purpose == "refresh":
                        table.refresh(part.ids, part.embeddings, normalize=normalize)
                    elif part.purpose == "carried":
                        z = part.embeddings.detach()
                        table.write(part.ids, check_answer(z, part.ids, batch.both, normalize))

    def touched(
        self, index: Tensor, key_index: Tensor, requests: Sequence[Request]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every table [M, D], and the rows a step may have written, without the refreshed ones."""
        for number, table in enumerate(self):
            ids = [index if number else key_index]
            for request in requests:
                parts = (p for p in request.parts if p.side == number and p.purpose != "refresh")
                ids += [part.ids.flatten() for part in parts]
            yield table.embeddings, torch.cat(ids)
