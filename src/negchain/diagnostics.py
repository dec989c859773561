"""How good is each estimator on *my* embeddings? Bias and variance against the exact gradient.

With the embeddings frozen the gradient of the global loss with respect to them is known exactly.
Running a loss over random batches gives one stochastic gradient per step; its long-run mean
shows the bias, its spread the variance. Only the negative term differs between methods, so the
batch's positive term is taken out of both sides.

    relative_bias   | mean_t g_t - g |  /  |g|          (with the part that noise alone explains)
    norm_ratio      <mean_t g_t, g>  /  |g|^2            1 = right length along the exact gradient
    relative_std    sqrt( mean_t |g_t - mean g|^2 ) / |g|

Shapes: `M` items, `B` batch, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from negchain.exact import global_loss
from negchain.losses import DCLLoss, EMC2Loss, InfoNCELoss, NegativeCacheLoss, SogCLRLoss
from negchain.losses.base import ContrastiveLoss
from negchain.losses.batch import as_embedding
from negchain.losses.chains import Carried
from negchain.objective import Denominator
from negchain.pool import Draw

METHODS = ("infonce", "dcl", "sogclr", "negcache", "emc2", "emc2-cached", "emc2-score", "isir")


@dataclass(frozen=True)
class EstimatorRow:
    """One estimator's gradient against the exact one."""

    method: str
    relative_bias: float
    """Distance of the mean gradient from the exact one, relative to its norm."""
    noise_floor: float
    """The relative bias an unbiased estimator of this variance would show after as many steps."""
    norm_ratio: float
    """Length of the mean gradient along the exact one."""
    relative_std: float
    """Spread of a single step's gradient."""
    state_bytes_per_sample: float
    """Memory of the loss's state."""


@dataclass(frozen=True)
class EstimatorReport:
    """The table `estimator_report` returns; `print` it.

    Example:
        >>> z = torch.nn.functional.normalize(torch.randn(30, 4), dim=-1)
        >>> report = estimator_report(z, batch_size=4, beta=5.0, steps=5, methods=["dcl"])
        >>> report.as_dicts()[0]["method"]
        'dcl'
    """

    rows: tuple[EstimatorRow, ...]
    num_samples: int
    batch_size: int
    beta: float
    steps: int

    def __str__(self) -> str:
        """The table as text, best first."""
        head = f"{'method':<12} {'bias':>7} {'(noise)':>8} {'length':>7} {'std/step':>9}"
        lines = [
            f"negative gradient against the exact one: M = {self.num_samples}, "
            f"b = {self.batch_size}, beta = {self.beta:g}, {self.steps} steps",
            f"{head} {'bytes/sample':>13}",
        ]
        for row in sorted(self.rows, key=lambda r: r.relative_bias):
            lines.append(
                f"{row.method:<12} {row.relative_bias:>7.3f} {row.noise_floor:>8.3f} "
                f"{row.norm_ratio:>7.2f} {row.relative_std:>9.2f} "
                f"{row.state_bytes_per_sample:>13.1f}"
            )
        return "\n".join(lines)

    def as_dicts(self) -> list[dict[str, float | str]]:
        """The rows as plain dictionaries, for JSON."""
        return [asdict(row) for row in self.rows]


def estimator_report(
    z_a: Tensor,
    z_b: Tensor | None = None,
    *,
    batch_size: int,
    beta: float,
    steps: int = 2000,
    warm_up: int | None = None,
    methods: Sequence[str] = METHODS,
    denominator: Denominator = "negatives",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> EstimatorReport:
    """Bias and variance of every estimator's negative gradient on frozen embeddings.

    Args:
        z_a: [M, D] embeddings of the data set.
        z_b: [M, D] of a second view; None: the same.
        batch_size: b.
        beta: inverse temperature.
        steps: batches averaged over, after the warm-up.
        warm_up: batches before them, in which chains and averages settle; None: 10 visits each.
        methods: which of `METHODS`.
        denominator: the exact gradient's and the estimators' ("infonce" and "dcl" have their own).
        seed: of batches and samplers.
        progress: called with each method's name before it runs.

    Returns:
        An `EstimatorReport`.

    Example:
        >>> z = torch.randn(60, 8)
        >>> report = estimator_report(z, batch_size=8, beta=5.0, steps=20, methods=["dcl", "isir"])
        >>> [row.method for row in report.rows]
        ['dcl', 'isir']
    """
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}")
    z_a = as_embedding(z_a.detach(), True)
    z_b = z_a if z_b is None else as_embedding(z_b.detach(), True)
    size = z_a.shape[0]
    if not 2 <= batch_size <= size:
        raise ValueError(f"batch_size must be between 2 and the {size} samples, got {batch_size}")
    warm_up = 10 * math.ceil(size / batch_size) if warm_up is None else warm_up
    rows = []
    for method in methods:
        if progress is not None:
            progress(method)
        loss_fn = _build(method, size, z_a.shape[1], beta, denominator, seed)
        exact = exact_negative_gradient(z_a, z_b, beta, loss_fn.denominator)
        pull = _pull(z_a, z_b, beta, loss_fn.denominator)
        table = torch.stack([z_a, z_b])
        rows.append(_measure(method, loss_fn, table, exact, pull, batch_size, steps, warm_up, seed))
    return EstimatorReport(tuple(rows), size, batch_size, beta, steps)


def exact_negative_gradient(
    z_a: Tensor, z_b: Tensor, beta: float, denominator: Denominator = "negatives"
) -> Tensor:
    """Gradient of eq. (1)'s negative term with respect to both views' embeddings, [2, M, D]."""
    table = torch.stack([z_a, z_b]).requires_grad_()
    loss = global_loss(table[0], table[1], beta, denominator=denominator, normalize=False)
    (gradient,) = torch.autograd.grad(loss, table)
    index = torch.arange(len(z_a), device=z_a.device)
    return gradient - _positive_gradient(
        table.detach(), index, beta, _pull(z_a, z_b, beta, denominator)
    )


def step_negative_gradient(
    loss_fn: ContrastiveLoss, table: Tensor, index: Tensor, pull: Tensor, carried_view: Tensor
) -> Tensor:
    """One step's gradient with respect to all embeddings, without its positive term.

    Args:
        loss_fn: moves its state, as in training.
        table: [2, M, D] unit embeddings of both views.
        index: [B] the batch.
        pull: [2, M] exact factor of each anchor's positive term.
        carried_view: [B] which view of its item a carried or drawn negative is seen in.

    Returns:
        [2, M, D]
    """
    table = table.detach().requires_grad_()
    value = _call(loss_fn, table, index, carried_view)
    (gradient,) = torch.autograd.grad(value, table)
    beta = loss_fn.beta
    assert isinstance(beta, float)
    return gradient - _positive_gradient(table.detach(), index, beta, pull)


def _call(loss_fn: ContrastiveLoss, table: Tensor, index: Tensor, view: Tensor) -> Tensor:
    z_a, z_b = table[0, index], table[1, index]
    if isinstance(loss_fn, EMC2Loss):
        if loss_fn.carried_mode != "encode":
            return loss_fn(z_a, z_b, index)
        ids = loss_fn.carried(index)
        assert isinstance(ids, Tensor)
        return loss_fn(z_a, z_b, index, carried=table[view, ids])
    if isinstance(loss_fn, NegativeCacheLoss):
        draw = loss_fn.propose(z_a, index, z_b)
        assert isinstance(draw, Draw)
        seen = view.repeat(2)
        return loss_fn(z_a, z_b, index, draw=draw, drawn=table[seen, draw.ids])
    return loss_fn(z_a, z_b, index)


def _pull(z_a: Tensor, z_b: Tensor, beta: float, denominator: Denominator) -> Tensor:  # [2,M]
    """Exact factor of each anchor's positive term: 1, or 1 - p+."""
    if denominator == "negatives":
        return torch.ones(2, len(z_a), dtype=z_a.dtype, device=z_a.device)
    both = torch.cat([z_a, z_b])
    ids = torch.arange(len(z_a), device=z_a.device).repeat(2)
    logits = (beta * both @ both.T).masked_fill_(ids[:, None] == ids[None, :], -math.inf)
    positive = beta * torch.linalg.vecdot(z_a, z_b).repeat(2)
    return torch.sigmoid(torch.logsumexp(logits, 1) - positive).view(2, -1)


def _positive_gradient(table: Tensor, index: Tensor, beta: float, pull: Tensor) -> Tensor:
    """Gradient of the batch's mean of -pull * beta * s(x, y), both views anchors, [2, M, D]."""
    scale = -beta * pull[:, index].sum(0)[:, None] / (2 * len(index))
    gradient = torch.zeros_like(table)
    gradient[0, index] = scale * table[1, index]
    gradient[1, index] = scale * table[0, index]
    return gradient


def _build(
    method: str, size: int, dim: int, beta: float, denominator: Denominator, seed: int
) -> ContrastiveLoss:
    if method == "infonce":
        return InfoNCELoss(beta, normalize=False)
    if method == "dcl":
        return DCLLoss(beta, normalize=False)
    if method == "sogclr":
        return SogCLRLoss(size, beta, denominator=denominator, normalize=False)
    if method == "negcache":
        return NegativeCacheLoss(
            size, dim, beta, denominator=denominator, normalize=False, seed=seed
        )
    _, _, mode = method.partition("-")
    return EMC2Loss(
        size,
        beta,
        kernel="isir" if method == "isir" else "mh",
        carried=_MODES[mode],
        denominator=denominator,
        normalize=False,
        seed=seed,
    )


_MODES: dict[str, Carried] = {"": "encode", "cached": "cached", "score": "score"}


def _measure(
    method: str,
    loss_fn: ContrastiveLoss,
    table: Tensor,
    exact: Tensor,
    pull: Tensor,
    batch_size: int,
    steps: int,
    warm_up: int,
    seed: int,
) -> EstimatorRow:
    generator = torch.Generator().manual_seed(seed)
    size = table.shape[1]
    loss_fn.to(table.device)
    if isinstance(loss_fn, NegativeCacheLoss):
        loss_fn.refresh(torch.arange(size), table[0])
    mean, squares = torch.zeros_like(exact), 0.0
    for step in range(warm_up + steps):
        index = torch.randperm(size, generator=generator)[:batch_size].to(table.device)
        view = torch.randint(0, 2, (batch_size,), generator=generator).to(table.device)
        gradient = step_negative_gradient(loss_fn, table, index, pull, view)
        if step >= warm_up:
            mean += gradient / steps
            squares += float(gradient.square().sum()) / steps
    variance = max(0.0, squares - float(mean.square().sum()))
    norm = float(exact.norm())
    state = sum(b.numel() * b.element_size() for b in loss_fn.buffers() if b.numel() >= size)
    return EstimatorRow(
        method=method,
        relative_bias=float((mean - exact).norm()) / norm,
        noise_floor=math.sqrt(variance / steps) / norm,
        norm_ratio=float((mean * exact).sum()) / norm**2,
        relative_std=math.sqrt(variance) / norm,
        state_bytes_per_sample=state / size,
    )
