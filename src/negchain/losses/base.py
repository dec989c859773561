"""What all losses share: settings, laying out a batch, reporting, loading state.

A loss module's `forward` always does the same things in the same order:

    batch, sides = self._begin(...)            check and lay out; nothing has changed yet
    estimate     = ...                          this method's pure functions of `negchain.weights`
    value        = contrastive_objective(...)   the one equation
    write_rows(...)                             the only place where state changes
    return self._finish(...)                    mean over sides; numbers for `info`

Shapes: `B` batch, `N` rows, `K` columns, `D` embedding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from negchain.losses.batch import (
    Batch,
    Drawn,
    Draws,
    Views,
    as_embedding,
    check_batch,
    lay_out,
    per_side,
)
from negchain.objective import Denominator, Estimate, contrastive_objective
from negchain.pool import Draw, Side, matches

Method = TypeVar("Method", bound=Callable[..., Tensor])


def full_precision(method: Method) -> Method:
    """Run a method outside autocast: scores are float32 or better, whatever the encoder's type."""

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        with torch.autocast(next(self.buffers()).device.type, enabled=False):
            return method(self, *args, **kwargs)

    return cast(Method, wrapped)


OTHER_STATE = (
    "this is the state of a loss for another data set, or with other settings; build the loss as "
    "it was built when the state was saved, or start without it"
)


class LazyState(nn.Module):
    """A module with buffers whose last dimension is 0 until the first batch gives their width."""

    _lazy_buffers: tuple[str, ...] = ()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Give waiting buffers the width they were saved with."""
        for name in self._buffers.keys() & set(self._lazy_buffers):
            saved, buffer = state_dict.get(prefix + name), getattr(self, name)
            if saved is None or saved.shape == buffer.shape:
                continue
            waiting = 0 in (saved.shape[-1], buffer.shape[-1])
            if waiting and saved.shape[:-1] == buffer.shape[:-1]:
                setattr(self, name, buffer.new_zeros(saved.shape))
        errors: list[str] = args[-1]
        known = len(errors)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if len(errors) > known and OTHER_STATE not in errors:
            errors.append(OTHER_STATE)


class ContrastiveLoss(LazyState):
    """Abstract base of the losses; see `negchain.EMC2Loss` and its siblings."""

    __call__: Callable[..., Tensor]
    step: Tensor
    _faults: Tensor

    def __init__(
        self,
        beta: float | Tensor,
        *,
        views: Views,
        symmetric: bool,
        denominator: Denominator,
        num_samples: int | None,
        num_keys: int | None,
        normalize: bool,
        seed: int = 0,
    ) -> None:
        super().__init__()
        one_of("views", views, ("shared", "paired"))
        one_of("denominator", denominator, ("negatives", "all"))
        if not isinstance(beta, Tensor) and not 0 < beta < math.inf:
            raise ValueError(f"beta (1 / temperature) must be positive and finite, got {beta}")
        if num_samples is not None and num_samples < (2 if num_keys is None else 1):
            raise ValueError(
                f"num_samples must be at least 2, got {num_samples}: one sample has no negative"
            )
        if num_keys is not None and (views != "paired" or num_keys < 2):
            raise ValueError(
                "num_keys (the size of a corpus of keys) needs views='paired' and at least 2 keys, "
                f"got num_keys={num_keys} and views={views!r}"
            )
        # a Parameter is registered by nn.Module, and may be learned; a number may be numpy's
        self.beta = beta if isinstance(beta, Tensor) else float(beta)
        self.views: Views = views
        # A corpus of keys has no anchors of its own to run the other direction from.
        self.symmetric = symmetric and num_keys is None
        self.denominator: Denominator = denominator
        self.num_samples = num_samples
        self.num_keys = num_keys
        self.normalize = normalize
        self.seed = seed
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_faults", torch.zeros(2, dtype=torch.int64), persistent=False)
        self._info: Mapping[str, Tensor | Callable[[], Tensor]] = {}

    @property
    def num_sides(self) -> int:
        """Directions of comparison, each with a table of state of its own."""
        return 2 if self.views == "paired" and self.symmetric else 1

    @property
    def num_positions(self) -> int | None:
        """M, the size of the set the negatives come from."""
        return self.num_samples if self.num_keys is None else self.num_keys

    @property
    def multiplicity(self) -> int:
        """Negatives of the target that share one id: the two views of an item."""
        return 2 if self.views == "shared" else 1

    @property
    def info(self) -> dict[str, float]:
        """Numbers about the last call as Python floats; reading them waits for the device.

        Every loss reports `effective_negatives` (mean over rows of 1 / sum of squared weights) and
        `nonfinite_rows` (samples since the last reading); with a known data set size also
        `global_loss`, the estimate of eq. (1).

        Raises:
            ValueError: samples since the last reading had an index out of range. (On a CPU such a
                batch is refused at once; on a GPU its rows change no state and are reported here.)
        """
        names, values = self.take_info()
        return self.read_info(names, values.tolist())

    def take_info(self) -> tuple[list[str], Tensor]:
        """What `info` will say, still on the device: names, and values for `read_info`."""
        values = [v() if callable(v) else v for v in self._info.values()]
        numbers = torch.stack([*self._faults, *(value.detach() for value in values)])
        self._faults.zero_()
        return list(self._info), numbers

    def read_info(self, names: list[str], values: list[float]) -> dict[str, float]:
        """`info` from what `take_info` gave."""
        nonfinite, out_of_range = map(float, values[:2])
        if out_of_range:
            raise ValueError(
                f"index must hold data set positions below {self.num_samples}, but "
                f"{out_of_range:.0f} since the last look at info did not; was the loss built for "
                "another data set?"
            )
        return {**dict(zip(names, values[2:], strict=True)), "nonfinite_rows": nonfinite}

    def extra_repr(self) -> str:
        """The settings, for `print(loss)`."""
        beta = (
            f"{float(self.beta.detach()):g} (learned)"
            if isinstance(self.beta, Tensor)
            else self.beta
        )
        return f"beta={beta}, views={self.views!r}, denominator={self.denominator!r}"

    def _begin(
        self,
        z_a: Tensor,
        z_b: Tensor,
        index: Tensor | None,
        key_index: Tensor | None,
        known: Tensor | None,
        draw: Draws | None = None,
        drawn: Drawn | None = None,
        *,
        key_ids: tuple[Tensor, ...] | None = None,
        coin: Tensor | None = None,
        ids_per_item: int = 1,
        use_batch: bool = True,
        quiet: bool = False,
        items: slice = slice(None),
    ) -> tuple[Batch, list[Side]]:
        batch = check_batch(
            z_a,
            z_b,
            index,
            key_index,
            known,
            num_samples=self.num_samples,
            num_keys=self.num_keys,
            normalize=self.normalize,
        )
        sides = lay_out(
            batch,
            views=self.views,
            symmetric=self.symmetric,
            num_positions=self.num_positions,
            multiplicity=self.multiplicity,
            key_ids=key_ids,
            coin=coin,
            ids_per_item=ids_per_item,
            use_batch=use_batch,
            items=items,
        )
        if (draw is None) != (drawn is None):
            raise ValueError("draw= (ids) and drawn= (their embeddings) go together; pass both")
        draws, embeddings = (
            per_side(name, value, self.num_sides)
            for name, value in (("draw", draw), ("drawn", drawn))
        )
        sides = [
            self._with_draw(side, *pair) if pair[0] is not None else side  # type: ignore[arg-type]
            for side, pair in zip(sides, zip(draws, embeddings, strict=True), strict=True)
        ]
        if use_batch and z_a.shape[0] < 2 and all(side.num_draws() == 0 for side in sides):
            raise ValueError(
                f"a batch of {z_a.shape[0]} holds no negative; use 2 samples or more, or pass draw="
            )
        if not quiet:
            self._faults += batch.faults
        return batch, sides

    def _with_draw(self, side: Side, draw: Draw, drawn: Tensor) -> Side:
        """Append a draw's columns, shared ([R]) or private to each row ([N, C])."""
        if draw.private and draw.ids.dim() == 1:
            log_q = None if draw.log_q is None else draw.log_q[:, None]
            draw = draw._replace(ids=draw.ids[:, None], log_q=log_q)
        ids, shape = draw.ids.to(side.keys.device), tuple(draw.ids.shape)
        if ids.dim() not in (1, 2) or ids.is_floating_point():
            raise ValueError(f"draw.ids must be integers [R] or [N, C], got {ids.dtype} {shape}")
        if ids.dim() == 2 and shape[0] not in (side.num_rows, side.num_rows // 2):
            raise ValueError(f"draw.ids [N, C] must have {side.num_rows} rows, got {shape}")
        dim, groups = side.keys.shape[2], side.keys.shape[0]
        if tuple(drawn.shape) not in ((*shape, dim), (ids.numel(), dim)):
            raise ValueError(
                f"drawn must be the embeddings of draw.ids, [{ids.numel()}, {dim}], "
                f"got {tuple(drawn.shape)}"
            )
        _check_probabilities(draw, self.num_positions)
        size = None if self.num_positions is None else self.num_positions * side.ids_per_item
        if ids.device.type == "cpu" and size is not None and ids.numel():
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= size:
                raise ValueError(
                    f"draw.ids must hold data set positions in [0, {size}), "
                    f"got {low if low < 0 else high}"
                )
        drawn = as_embedding(drawn, self.normalize).to(side.keys.dtype)
        if drawn.device.type == "cpu" and not bool(torch.isfinite(drawn).all()):
            raise ValueError("drawn embeddings must be finite, got NaN or inf")
        if ids.dim() == 2:
            repeat = side.num_rows // shape[0]
            log_q = None if draw.log_q is None else draw.log_q.repeat(repeat, 1)
            return dataclasses.replace(
                side,
                private_ids=ids.repeat(repeat, 1),
                private_keys=drawn.view(*shape, -1).repeat(repeat, 1, 1),
                draw=draw._replace(log_q=log_q),
            )
        items = ids // side.ids_per_item
        excluded = matches(items, side.positive_ids, side.known)
        excluded = excluded | ~torch.isfinite(drawn).all(1)[None, :]
        return dataclasses.replace(
            side,
            keys=torch.cat([side.keys, drawn.expand(groups, -1, -1)], 1),
            key_ids=torch.cat([side.key_ids, ids.expand(groups, -1)], 1),
            excluded=torch.cat([side.excluded, excluded], 1),
            draw=draw,
        )

    def _beta(self, like: Tensor) -> float | Tensor:
        return self.beta.to(like.dtype) if isinstance(self.beta, Tensor) else self.beta

    def _value(
        self,
        side: Side,
        similarity: Tensor,
        estimate: Estimate,
        carried_similarity: Tensor | None = None,
    ) -> Tensor:
        positive = torch.linalg.vecdot(side.queries, side.positives)
        beta = self._beta(similarity)
        return contrastive_objective(
            positive, similarity, estimate, beta, self.denominator, carried_similarity
        )

    def _finish(self, total: list[Tensor], report: dict[str, list[Tensor]]) -> Tensor:
        """The mean loss over sides; the other numbers stay on the device for `info`."""
        self._info = {name: torch.stack(v).mean() for name, v in report.items() if v}
        return sum(total[1:], total[0]) / len(total)


def _check_probabilities(draw: Draw, num_positions: int | None) -> None:
    ids, log_q, log_q_all = draw.ids, draw.log_q, draw.log_q_all
    if log_q is not None and log_q.shape != ids.shape:
        raise ValueError(
            "draw.log_q must have the shape of draw.ids, "
            f"got {tuple(log_q.shape)} and {tuple(ids.shape)}"
        )
    if log_q_all is not None and log_q_all.shape != (num_positions,):
        raise ValueError(
            f"draw.log_q_all must hold one log-probability per item, [{num_positions}], "
            f"got {tuple(log_q_all.shape)}"
        )


def detached_logits(side: Side, similarity: Tensor, beta: float | Tensor) -> Tensor:
    """Corrected logits beta * s - log(q m_neg), [N, K+C]; -inf where excluded or not finite."""
    beta = beta.detach() if isinstance(beta, Tensor) else beta
    logits = similarity.detach() * beta
    correction = side.log_correction()
    if correction is not None:
        logits = logits - correction
    return logits.masked_fill(side.all_excluded() | ~torch.isfinite(logits), -math.inf)


def global_log_partition(
    side: Side, logits: Tensor, beta: float | Tensor = 1.0
) -> Tensor | None:  # [N,K+C] -> [N]
    """log( m_neg / K sum_j exp(l_ij) ) over all columns at hand; None if m_neg is unknown.

    Columns at hand include the copies of the batch's items that rows are not offered as proposals
    (`Side.hidden_keys`): a partition may count an item twice, a walk must not meet it twice.
    """
    log_num_negatives = side.log_num_negatives()
    if log_num_negatives is None:
        return None
    log_sum, counts = torch.logsumexp(logits, 1), side.counts()
    if side.hidden_keys is not None and side.draw is None:
        hidden = dataclasses.replace(side, keys=side.hidden_keys.detach())
        beta = beta.detach() if isinstance(beta, Tensor) else beta
        others = hidden.similarities().detach() * beta
        others = others.masked_fill(side.excluded | ~torch.isfinite(others), -math.inf)
        log_sum, counts = torch.logaddexp(log_sum, torch.logsumexp(others, 1)), 2 * counts
    return log_sum + log_num_negatives - counts.clamp(min=1).to(log_sum.dtype).log()


def effective_negatives(weights: Tensor, private: Tensor | None = None) -> Tensor:
    """Mean over rows of (sum W)^2 / sum W^2: how many negatives share a row's weight; -> [].

    Example:
        >>> effective_negatives(torch.tensor([[0.5, 0.5, 0.0, 0.0]]))
        tensor(2.)
    """
    total, squares = weights.sum(1), torch.linalg.vecdot(weights, weights)
    if private is not None:
        total, squares = total + private, squares + private * private
    tiny = torch.finfo(weights.dtype).tiny
    mean: Tensor = (total * total / squares.clamp(min=tiny)).mean()
    return mean


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
