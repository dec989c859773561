"""How good is each estimator on *my* embeddings? Bias and variance against the exact gradient.

With the embeddings frozen the gradient of the global loss with respect to them is known exactly.
Running a loss over random batches gives one stochastic gradient per step; its long-run mean
shows the bias, its spread the variance. Only the negative term differs between methods, so the
batch's positive term is taken out of both sides.

    bias          the part of | mean_t g_t - g | / |g| that noise does not explain: with the means
                  m1, m2 of two losses with seeds (and chains) of their own, which take turns,
                  sqrt( <m1 - g, m2 - g> ) / |g|
    noise         standard error of that mean, | m1 - m2 | / (2 |g|): with what chains carry
                  from visit to visit
    length        <mean_t g_t, g> / |g|^2            1 = right length along the exact gradient
    std/step      sqrt( mean_t |g_t - mean g|^2 ) / |g|

Give several views of every item: one chain serves all views of an item, and the bias that this
causes shows only if the views differ.

Shapes: `V` views, `M` items, `B` batch, `D` embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from negchain.losses import ContrastiveLoss
from negchain.losses.batch import as_embedding
from negchain.methods import METHODS, LossSettings, named
from negchain.objective import Denominator

CHUNK_ELEMENTS = 1 << 24  # logits held at a time


@dataclass(frozen=True)
class EstimatorRow:
    """One estimator's gradient against the exact one."""

    method: str
    relative_bias: float
    """Error of the mean gradient beyond noise, relative to the exact gradient's norm."""
    noise: float
    """Standard error of the mean gradient, relative to the exact gradient's norm."""
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
    num_views: int
    batch_size: int
    beta: float
    steps: int

    def __str__(self) -> str:
        """The table as text, best first."""
        head = f"{'method':<14} {'bias':>7} {'noise':>8} {'length':>7} {'std/step':>9}"
        lines = [
            f"negative gradient against the exact one: M = {self.num_samples}, "
            f"{self.num_views} view{'s' * (self.num_views > 1)}, b = {self.batch_size}, "
            f"beta = {self.beta:g}, {self.steps} steps",
            f"{head} {'bytes/sample':>13}",
        ]
        for row in sorted(self.rows, key=lambda r: r.relative_bias):
            lines.append(
                f"{row.method:<14} {row.relative_bias:>7.3f} {row.noise:>8.3f} "
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
    methods: Sequence[str] | None = None,
    denominator: Denominator = "negatives",
    seed: int = 0,
    progress: bool = False,
) -> EstimatorReport:
    """Bias and variance of every estimator's negative gradient on frozen embeddings.

    Args:
        z_a: [M, D] embeddings of the data set, or [V, M, D] of V views of every item.
        z_b: [M, D] of a second view; None: no other than `z_a`'s.
        batch_size: b.
        beta: inverse temperature.
        steps: batches averaged over, after the warm-up; at least 2.
        warm_up: batches before them, for each of two losses, in which chains and averages settle;
            None: 10 visits each.
        methods: names of `negchain.methods.METHODS`; None: all of them.
        denominator: the exact gradient's and the estimators' (InfoNCE, DCL and logQ have their
            own).
        seed: of batches and samplers.
        progress: show a bar per method on the terminal (with rich).

    Returns:
        An `EstimatorReport`.

    Example:
        >>> z = torch.randn(60, 8)
        >>> report = estimator_report(z, batch_size=8, beta=5.0, steps=20, methods=["dcl", "isir"])
        >>> [row.method for row in report.rows]
        ['dcl', 'isir']
    """
    names = list(METHODS) if methods is None else list(methods)
    unknown = sorted(set(names) - set(METHODS))
    if unknown:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {', '.join(unknown)}")
    shapes = [list(z.shape) for z in (z_a, z_b) if z is not None]
    if len(shapes[0]) not in (2, 3) or shapes[1:] not in ([], [shapes[0][-2:]]):
        raise ValueError(f"z_a must be [M, D] or [V, M, D], and z_b [M, D], got {shapes}")
    table = z_a.detach() if z_a.dim() == 3 else z_a.detach()[None]
    if z_b is not None:
        table = torch.cat([table, z_b.detach()[None]])
    table = as_embedding(table, True)
    num_views, size, dim = table.shape
    if not 2 <= batch_size <= size:
        raise ValueError(
            f"batch_size must be from 2 to the number of samples, {size}, got {batch_size}"
        )
    if steps < 2:
        raise ValueError(f"steps must be at least 2, one for each of two losses, got {steps}")
    warm_up = 10 * math.ceil(size / batch_size) if warm_up is None else warm_up
    if warm_up < 0:
        raise ValueError(f"warm_up must be at least 0, got {warm_up}")
    rows = []
    for name in names:
        pair = [
            named(name).build(LossSettings(size, beta, dim, own, denominator, normalize=False))
            for own in (seed, seed + 1)
        ]
        count: Iterable[int] = range(2 * warm_up + steps)
        if progress:
            from rich.progress import track

            count = track(count, name)
        rows.append(_measure(name, pair, table, batch_size, count, 2 * warm_up, seed))
    return EstimatorReport(tuple(rows), size, num_views, batch_size, beta, steps)


def exact_negative_gradient(
    table: Tensor, beta: float, denominator: Denominator = "negatives", copies: int = 2
) -> Tensor:  # [V,M,D] -> [V,M,D]
    """Gradient of eq. (1)'s negative term: all views are anchors, all views of others negatives.

    With "all" the positive is any other view (the view itself where there is one), and an item
    stands for `copies` negatives, however many views of it are known.
    """
    num_views, size, _ = table.shape
    flat = table.flatten(0, 1)
    positives = beta * torch.einsum("vmd,umd->vmu", table, table).flatten(0, 1)
    if num_views > 1:
        other = ~torch.eye(num_views, dtype=torch.bool, device=table.device)
        positives = positives[other.repeat_interleave(size, 0)].view(len(flat), -1)
    gradient = torch.zeros_like(flat)
    chunk = max(1, CHUNK_ELEMENTS // len(flat))
    for rows in torch.split(torch.arange(len(flat), device=table.device), chunk):
        logits = _others(table, rows, beta)
        weights = logits.softmax(1) * (beta / len(flat))
        if denominator == "all":
            log_sum = _log_partition(logits, copies, num_views)
            weights *= torch.sigmoid(log_sum[:, None] - positives[rows]).mean(1, keepdim=True)
        gradient[rows] += weights @ flat
        gradient += weights.T @ flat[rows]
    return gradient.view(table.shape)


def step_negative_gradient(
    loss_fn: ContrastiveLoss,
    table: Tensor,
    index: Tensor,  # [B]
    views: Tensor,  # [2,B] of its items
    generator: torch.Generator,  # says in which view a carried or drawn negative is seen
) -> Tensor:  # [V,M,D] -> [V,M,D]
    """One training step's gradient with respect to all embeddings, without its positive term."""
    table = table.detach().requires_grad_()

    def encode(ids: Tensor) -> Tensor:
        view = torch.randint(0, len(table), (len(ids),), generator=generator)
        return table[view.to(ids.device), ids]

    pair = [table[view, index] for view in views]
    value = loss_fn(*pair, index, encode=encode)
    (gradient,) = torch.autograd.grad(value, table)
    beta = loss_fn.beta
    assert isinstance(beta, float)
    pull = torch.full_like(index, 2, dtype=table.dtype)
    if loss_fn.denominator == "all":
        pull = _pull(table.detach(), index, views, beta, loss_fn.multiplicity)
    scale = beta * pull[:, None] / (2 * len(index))
    for mine, other in ((0, 1), (1, 0)):
        positive = scale * pair[other].detach()
        gradient.index_put_((views[mine], index), positive, accumulate=True)
    return gradient


def _pull(table: Tensor, index: Tensor, views: Tensor, beta: float, copies: int) -> Tensor:  # [B]
    """Factor of each pair's positive term with "all": 1 - p+ of its two anchors, summed."""
    rows = views * table.shape[1] + index
    first, second = table.flatten(0, 1)[rows]
    positive = beta * torch.linalg.vecdot(first, second)
    log_sums = [_log_partition(_others(table, own, beta), copies, len(table)) for own in rows]
    return torch.sigmoid(log_sums[0] - positive) + torch.sigmoid(log_sums[1] - positive)


def _others(table: Tensor, rows: Tensor, beta: float) -> Tensor:  # [V,M,D] [R] -> [R,V*M]
    """Logits of rows (view after view) to all views of other items; -inf to those of their own."""
    flat = table.flatten(0, 1)
    item = torch.arange(len(flat), device=table.device) % table.shape[1]
    return (beta * flat[rows] @ flat.T).masked_fill_(item[rows, None] == item, -math.inf)


def _log_partition(logits: Tensor, copies: int, num_views: int) -> Tensor:  # [R,V*M] -> [R]
    return torch.logsumexp(logits, 1) + math.log(copies / num_views)


def _measure(
    name: str,
    pair: Sequence[ContrastiveLoss],
    table: Tensor,
    batch_size: int,
    count: Iterable[int],
    warm_up: int,
    seed: int,
) -> EstimatorRow:
    first = pair[0]
    exact = exact_negative_gradient(table, float(first.beta), first.denominator, first.multiplicity)
    norm = float(exact.norm())
    if norm**2 == 0:
        raise ValueError(
            "errors are relative to the exact gradient, and that is 0 here: the embeddings are all "
            f"0, or with denominator='all' all pairs are solved at beta={first.beta:g}; give other "
            "embeddings, or a lower beta"
        )
    generator = torch.Generator().manual_seed(seed)
    num_views, size, _ = table.shape
    for loss_fn in pair:
        loss_fn.to(table.device)
        loss_fn.fill(lambda ids: table[0, ids])
    halves, counts, squares = exact.new_zeros(2, *exact.shape), [0, 0], 0.0
    for step in count:
        index = torch.randperm(size, generator=generator)[:batch_size].to(table.device)
        view = torch.randint(0, num_views, (batch_size,), generator=generator)
        other = view
        if num_views > 1:
            other = view + torch.randint(1, num_views, (batch_size,), generator=generator)
        views = torch.stack([view, other % num_views]).to(table.device)
        gradient = step_negative_gradient(pair[step % 2], table, index, views, generator)
        if step >= warm_up:
            halves[step % 2] += gradient
            counts[step % 2] += 1
            squares += float(gradient.square().sum())
    steps = sum(counts)
    mean = halves.sum(0) / steps
    first_half, second_half = (h / c for h, c in zip(halves, counts, strict=True))
    square = float(((first_half - exact) * (second_half - exact)).sum())
    variance = max(0.0, squares / steps - float(mean.square().sum()))
    state = sum(s.numel() * s.element_size() for s in first.state_tensors() if s.numel() >= size)
    return EstimatorRow(
        method=name,
        relative_bias=math.sqrt(max(0.0, square)) / norm,
        noise=float((first_half - second_half).norm()) / (2 * norm),
        norm_ratio=float((mean * exact).sum()) / norm**2,
        relative_std=math.sqrt(variance) / norm,
        state_bytes_per_sample=state / size,
    )
