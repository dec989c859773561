"""A fast training step against the eager one, with float32 as the yardstick."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from negchain.bench import runs
from negchain.data import DataBundle
from negchain.train import trainer

# How far from float32 the fast step may be: so many times as far as the eager one, and so much
# beside. A gradient is many numbers, so the distances of two that round alike are nearly equal. A
# loss is one, and of random pictures so exact in bf16 that what is allowed beside is the bound.
LOSS_ALLOWED = (4.0, 1e-3)
GRADIENT_ALLOWED = (1.5, 1e-3)  # of its norm
WEIGHT_ALLOWED = (3.0, 0.01)  # of its own gradient's norm
NEGLIGIBLE = 1e-3  # of the whole gradient's norm: such a weight's is judged with the whole


def checked(graph: trainer.Run, data: DataBundle, steps: int = 20) -> tuple[bool, str]:
    """Loss and gradient of the first steps, replayed, eagerly and in float32, from the same state.

    The same state anew for every step, because training amplifies rounding. The gradient is read
    from Adam's first moment.

    Float32 is the yardstick: a gradient in bf16 is several per cent from the true one, and how far
    two such gradients may be apart depends on method and batch. The captured step may be as far
    from float32 as the eager one is, in root mean squares over all steps: few draws fall otherwise,
    in steps that differ.
    """
    precise = replace(graph.config, precision="float32")
    with runs.prepared(graph.config, data) as eager, runs.prepared(precise, data) as exact:
        three = (graph, eager, exact)
        advances = [runs.stepper(run) for run in three]
        losses, squares = [], []
        for number in range(steps):
            for run in three[1:] if number else ():
                _copy_state(graph, run)
            before = [0.9 * moment for moment in _moments(exact)]
            for advance in advances:
                advance()
            losses.append(torch.stack([run.step.loss for run in three]).double())
            replayed, plain, true = map(_moments, three)
            pairs = ((replayed, true), (plain, true), (true, before))
            squares.append(torch.stack([_squared_distances(*pair) for pair in pairs]))
    weights = [key for key, _ in graph.encoder.named_parameters()]
    return _judged(weights, torch.stack(losses).cpu(), torch.stack(squares).sum(0).cpu())


def _judged(weights: list[str], losses: Tensor, squares: Tensor) -> tuple[bool, str]:
    """The verdict on losses [S,3] and squared distances [3,P] of graph, eager step and float32."""
    far, size = squares[:2], squares[2]
    counts = ~(size < NEGLIGIBLE**2 * size.sum())  # so that one which is no number counts
    loss = (losses[:, :2] - losses[:, 2:]).square().mean(0).sqrt()  # [2]: of graph, of eager step
    whole = (far.sum(1) / size.sum()).sqrt()
    each = (far / size).sqrt()[:, counts]

    def used(apart: Tensor, allowed: tuple[float, float]) -> Tensor:
        return apart[0] / (allowed[0] * apart[1] + allowed[1])

    shares = used(each, WEIGHT_ALLOWED)
    worst = int(shares.argmax())
    verdicts = (used(loss, LOSS_ALLOWED), used(whole, GRADIENT_ALLOWED), shares)
    texts = [f"{a:.2g} (eager {b:.2g})" for a, b in (loss, whole, each[:, worst])]
    named = [weight for weight, counted in zip(weights, counts, strict=True) if counted]
    return all(bool((share <= 1).all()) for share in verdicts), (
        f"{len(losses)} losses near {losses[0, 2]:.3f} are {texts[0]} from float32's, gradients "
        f"{texts[1]} of their norm, those of {named[worst]}, the worst weight, {texts[2]}"
    )


def _moments(run: trainer.Run) -> list[Tensor]:
    """Adam's first moment of every parameter; zero before its first step."""
    state = run.step.optimizer.state
    parameters = list(run.encoder.parameters())
    held = [state[p]["exp_avg"] if state.get(p) else torch.zeros_like(p) for p in parameters]
    return [moment.detach().clone() for moment in held]


def _squared_distances(some: list[Tensor], others: list[Tensor]) -> Tensor:
    """Of each tensor from its partner, [P]."""
    apart = [(a - b).norm() for a, b in zip(some, others, strict=True)]
    return torch.stack(apart).double().square()


def _copy_state(source: trainer.Run, target: trainer.Run) -> None:
    """Weights, chains, tables and moments of one run to another of the same method."""
    target.encoder.load_state_dict(source.encoder.state_dict())
    target.step.loss_fn.load_state_dict(source.step.loss_fn.state_dict())
    pairs = zip(source.encoder.parameters(), target.encoder.parameters(), strict=True)
    for given, taken in pairs:
        for name, value in source.step.optimizer.state[given].items():
            target.step.optimizer.state[taken][name].copy_(value)
