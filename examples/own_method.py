"""A method of your own, outside the package: defined, registered, measured, trained and drawn.

Shows    everything a new estimator needs: `weigh`, which turns logits into weights, and one call of
         `negchain.methods.register`. Command line, trainer, report and `estimator_report` then know
         it. This one leans towards hard negatives, W_ij ~ exp((1 + hardness) l_ij), and remembers
         per sample how hard its negatives were.
Prints   its bias beside DCL's on clustered embeddings, the 1-NN accuracy of both after training on
         scikit-learn's digits, and where the page is that compares them.

    python examples/own_method.py --epochs 10 --out runs/own_method
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

import negchain
from negchain import methods, train
from negchain.pool import write_rows
from negchain.report import write_report


class HardLoss(negchain.WeightedLoss):
    """DCL whose weights lean towards the hard negatives of the batch; hardness 0 is DCL."""

    hardest: Tensor

    def __init__(self, num_samples: int, beta: float, hardness: float = 0.5, **settings) -> None:
        super().__init__(num_samples, beta, **settings)
        self.hardness = hardness
        self.add_state("hardest", torch.zeros(num_samples))  # in state_dict, follows .to(device)

    def weigh(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N,K] (-inf: no negative) -> weights [N,K], log of the sum for the value [N]."""
        return torch.softmax((1 + self.hardness) * logits, 1), torch.logsumexp(logits, 1)

    def commit(self, logits: Tensor, ids: Tensor) -> None:
        """The only place where state changes; called in training mode."""
        mixed = 0.9 * self.hardest[ids] + 0.1 * logits.amax(1)
        write_rows(self.hardest, ids, mixed, torch.isfinite(mixed))  # repeated ids: the first row's


def build(settings: methods.LossSettings) -> HardLoss:
    """From the settings of a run to the loss."""
    return HardLoss(settings.num_samples, settings.beta, **settings.common)


methods.register(
    methods.Method(
        name="hard",
        title="Hard DCL",
        colour=("#7b3fb8", "#b98ae6"),  # on light and on dark pages
        build=build,
        denominator="negatives",  # built in: `--denominator all` is refused
    )
)


def clusters(generator: torch.Generator) -> Tensor:  # -> [100,16]
    """Unit vectors in 20 clusters."""
    centres = normalize(torch.randn(20, 16, generator=generator), dim=-1)
    return centres.repeat(5, 1) + 0.1 * torch.randn(100, 16, generator=generator)


def main() -> None:
    """Measure, train, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--subset", type=int, default=0, help="train on the first N digits only")
    parser.add_argument("--steps", type=int, default=300, help="of the estimator report")
    parser.add_argument("--out", type=Path, default=Path("runs/own_method"))
    options = parser.parse_args()
    z = clusters(torch.Generator().manual_seed(0))
    chosen = ["hard", "dcl"]
    print(negchain.estimator_report(z, batch_size=8, beta=5.0, steps=options.steps, methods=chosen))
    runs = []
    for name in chosen:
        folder = train.run(
            method=name,
            data="digits",
            epochs=options.epochs,
            subset=options.subset,
            eval_every=0,
            out=str(options.out / name),
        )
        summary = json.loads((folder / "summary.json").read_text())
        print(f"{methods.METHODS[name].title}: 1-NN accuracy {summary['knn1']:.3f}")
        runs.append(folder)
    print(f"comparison: {write_report(runs, options.out / 'compare.html')}")


if __name__ == "__main__":
    main()
