"""A method of your own in 60 lines: hardness-weighted negatives as a new estimate W.

Shows    how docs/add_a_method.md's skeleton looks as a file: a pure function from logits to
         weights, and a loss that hands it the batch. Exclusion by id, draws with probabilities,
         both kinds of views, learned beta, autocast and `info` come from the base class.
Prints   a check that hardness = 0 is DCL to the last bit of its gradient, then the mean weight of
         the hardest negative and the effective number of negatives as the hardness grows.

    python examples/custom_weighting.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from negchain import DCLLoss
from negchain.losses.base import (
    ContrastiveLoss,
    detached_logits,
    effective_negatives,
    full_precision,
)
from negchain.losses.batch import Views
from negchain.objective import Estimate
from negchain.weights import softmax_weights


def hard_weights(logits: Tensor, hardness: float) -> tuple[Tensor, Tensor]:  # [N,K] -> [N,K], [N]
    """W_ij proportional to exp((1 + hardness) l_ij), and the log of the plain denominator.

    The weights of a batch as if beta were larger for negatives only. -inf stays excluded.
    """
    weights, _ = softmax_weights(logits * (1 + hardness))
    return weights, torch.logsumexp(logits, 1)


class HardLoss(ContrastiveLoss):
    """DCL whose weights lean towards the hard negatives of the batch."""

    def __init__(
        self,
        beta: float | Tensor = 14.28,
        hardness: float = 0.5,
        *,
        views: Views = "shared",
        symmetric: bool = True,
        normalize: bool = True,
    ) -> None:
        super().__init__(
            beta,
            views=views,
            symmetric=symmetric,
            denominator="negatives",
            num_samples=None,
            num_keys=None,
            normalize=normalize,
        )
        if hardness < 0:
            raise ValueError(f"hardness must be at least 0, got {hardness}; 0 is DCL")
        self.hardness = hardness

    @full_precision
    def forward(self, z_a: Tensor, z_b: Tensor, index: Tensor | None = None) -> Tensor:
        """The loss of a batch, [B,D] [B,D] [B] -> scalar."""
        _, sides = self._begin(z_a, z_b, index, None, None)
        total: list[Tensor] = []
        report: dict[str, list[Tensor]] = {"effective_negatives": [], "hardest_weight": []}
        for side in sides:
            similarity = side.similarities()
            logits = detached_logits(side, similarity, self._beta(similarity))
            weights, log_sum = hard_weights(logits, self.hardness)
            total.append(self._value(side, similarity, Estimate(weights, log_sum)))
            report["effective_negatives"].append(effective_negatives(weights))
            report["hardest_weight"].append(weights.max(1).values.mean())
        return self._finish(total, report)


def main() -> None:
    """Check against DCL, then turn the knob."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    z_b = torch.randn(32, 16, generator=generator)
    z_a = (z_b + 0.5 * torch.randn(32, 16, generator=generator)).requires_grad_()
    (ours,) = torch.autograd.grad(HardLoss(10.0, hardness=0.0)(z_a, z_b), z_a)
    (dcl,) = torch.autograd.grad(DCLLoss(10.0)(z_a, z_b), z_a)
    print(f"hardness 0 is DCL: {torch.equal(ours, dcl)}")
    for hardness in (0.0, 0.5, 1.0, 2.0):
        loss_fn = HardLoss(10.0, hardness)
        loss_fn(z_a, z_b).backward()
        info = loss_fn.info
        print(
            f"hardness {hardness:.1f}  hardest negative {info['hardest_weight']:.2f}  "
            f"effective negatives {info['effective_negatives']:.1f} of 62"
        )


if __name__ == "__main__":
    main()
