"""What the paper says, in plain Python loops: slow, obvious, and independent of the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def dot(x: Tensor, y: Tensor) -> float:
    total = 0.0
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        total += a * b
    return total


def unit(z: Tensor) -> Tensor:
    return z / z.norm(dim=-1, keepdim=True)


def are_positives(i: int, j: int, ids: Sequence[int], known: Sequence[Sequence[int]]) -> bool:
    """Whether item j may not be a negative of item i; `known` speaks for its own row alone."""
    return ids[i] == ids[j] or ids[j] in known[i]


def sides_of(views: str, symmetric: bool) -> list[tuple[list[int], list[int]]]:
    """Per direction: the views that are anchors and the views that are keys."""
    if views == "shared":
        return [([0, 1] if symmetric else [0], [0, 1])]
    return [([0], [1]), ([1], [0])][: 2 if symmetric else 1]


def contrastive_loops(
    z_a: Tensor,
    z_b: Tensor,
    beta: float,
    *,
    views: str = "shared",
    symmetric: bool = True,
    denominator: str = "negatives",
    ids: Sequence[int] | None = None,
    known: Sequence[Sequence[int]] | None = None,
    num_negatives: int | None = None,
) -> float:
    """Eq. (1) by three nested loops over unit embeddings.

    With `num_negatives` the sum over negatives is scaled by num_negatives / K (K of them seen): the
    estimate of the global loss from a batch.
    """
    size = len(z_a)
    ids = list(range(size)) if ids is None else ids
    known = [[] for _ in range(size)] if known is None else known
    table = [z_a, z_b]
    total, sides = 0.0, sides_of(views, symmetric)
    for anchors, keys in sides:
        part = 0.0
        for view in anchors:
            for i in range(size):
                x, y = table[view][i], table[1 - view][i]
                negatives, count = 0.0, 0
                for key_view in keys:
                    for j in range(size):
                        if not are_positives(i, j, ids, known):
                            negatives += math.exp(beta * dot(x, table[key_view][j]))
                            count += 1
                if num_negatives is not None:
                    negatives *= num_negatives / count
                if denominator == "all":
                    negatives += math.exp(beta * dot(x, y))
                part += -beta * dot(x, y) + math.log(negatives)
        total += part / (size * len(anchors))
    return total / len(sides)


def contrastive_dense(
    z_a: Tensor,
    z_b: Tensor,
    beta: float | Tensor,
    *,
    views: str = "shared",
    symmetric: bool = True,
    denominator: str = "negatives",
    ids: Sequence[int] | None = None,
    known: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """The same as one dense, differentiable formula; normalises its inputs."""
    size = len(z_a)
    ids = list(range(size)) if ids is None else ids
    known = [[] for _ in range(size)] if known is None else known
    table = [torch.nn.functional.normalize(z, dim=-1) for z in (z_a, z_b)]
    mask = torch.tensor(
        [[are_positives(i, j, ids, known) for j in range(size)] for i in range(size)]
    )
    parts = []
    for anchors, keys in sides_of(views, symmetric):
        rows = torch.cat([table[v] for v in anchors])
        positives = (rows * torch.cat([table[1 - v] for v in anchors])).sum(1)
        logits = beta * rows @ torch.cat([table[v] for v in keys]).T
        logits = logits.masked_fill(mask.repeat(len(anchors), len(keys)), -math.inf)
        if denominator == "all":
            logits = torch.cat([logits, beta * positives[:, None]], 1)
        parts.append((torch.logsumexp(logits, 1) - beta * positives).mean())
    return torch.stack(parts).mean()


def algorithm_1(
    logits: Sequence[float], start: float, log_u: Sequence[float], burn_in: int
) -> tuple[list[int], int, int, float, int, int]:
    """One chain, scalars only: visits per column, visits of the start, final column and logit.

    Returns (visits, start visits, last, last logit, accepts, counted steps).
    """
    visits, start_visits = [0] * len(logits), 0
    state, current, accepts, step, counted = -1, start, 0, 0, 0
    for column, proposal in enumerate(logits):
        if proposal == -math.inf:
            continue
        if current == -math.inf or log_u[column] < proposal - current:
            state, current, accepts = column, proposal, accepts + 1
        if step >= burn_in:
            counted += 1
            if state >= 0:
                visits[state] += 1
            else:
                start_visits += 1
        step += 1
    if counted == 0:
        counted = 1
        if state >= 0:
            visits[state] += 1
        else:
            start_visits += 1
    return visits, start_visits, state, current, accepts, counted


def metropolis_matrix(logits: Tensor) -> Tensor:  # [m] -> [m,m]
    """Kernel of one step, uniform proposals: T[z, z'] = 1/m min(1, p(z')/p(z)) if z' != z."""
    size = len(logits)
    kernel = torch.zeros(size, size, dtype=torch.float64)
    for z in range(size):
        for proposal in range(size):
            accept = math.exp(min(0.0, float(logits[proposal] - logits[z])))
            kernel[z, proposal] += accept / size
            kernel[z, z] += (1 - accept) / size
    return kernel


def expected_visits(logits: Tensor, start: float, burn_in: int) -> tuple[Tensor, float]:
    """Expected weights of one scan over fixed columns, accept/reject integrated out exactly.

    Returns (weights [K], start weight); from the state's distribution after every step.
    """
    size = len(logits)
    levels = [*logits.tolist(), start]
    state = torch.zeros(size + 1, dtype=torch.float64)
    state[size] = 1.0
    total = torch.zeros_like(state)
    for column in range(size):
        after = torch.zeros_like(state)
        for z in range(size + 1):
            accept = math.exp(min(0.0, levels[column] - levels[z]))
            after[column] += state[z] * accept
            after[z] += state[z] * (1 - accept)
        state = after
        if column >= burn_in:
            total += state
    total /= size - burn_in
    return total[:size], float(total[size])


def subsets(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(items, size))


def clusters(
    num_points: int = 300,
    num_clusters: int = 20,
    dim: int = 64,
    noise: float = 0.08,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Unit embeddings in clusters, and the cluster of each; point i belongs to i % num_clusters."""
    generator = torch.Generator().manual_seed(seed)
    centres = unit(torch.randn(num_clusters, dim, generator=generator, dtype=dtype))
    label = torch.arange(num_points) % num_clusters
    z = centres[label] + noise * torch.randn(num_points, dim, generator=generator, dtype=dtype)
    return unit(z), label
