"""How fast should EMC²'s partition follow, where the positive is kept in the denominator?

Shows    labelled pairs tuned with denominator="all": solved pairs should stop pulling. They do if
         1 - p+ is that of today's encoder; `partition_rate` 1 estimates it afresh at every visit.
Data     synthetic retrieval: 400 queries with a key each and 200 further keys, two linear towers
         over features that hide the latents; 300 pairs train, 100 are held out. b = 16, beta = 20.
Prints   mean reciprocal rank of the held-out pairs over all 600 keys, mean and standard error over
         seeds, per rate; and the paired difference to rate 1.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/partition_rate.py
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from negchain import EMC2Loss, Uniform

QUERIES, TRAINED, KEYS, LATENT, FEATURES, DIM, SIZE = 400, 300, 600, 12, 48, 16, 16
RATES = (1.0, 0.3, 0.05)


def features(seed: int) -> tuple[Tensor, Tensor]:
    """Queries [400, F] and keys [600, F]; query i belongs to key i."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    latents = draw(40, LATENT)[torch.randint(40, (KEYS,), generator=generator)]
    latents = latents + 0.5 * draw(KEYS, LATENT)  # clusters: hard negatives
    asked = latents[:QUERIES] + 0.3 * draw(QUERIES, LATENT)

    def seen(z: Tensor) -> Tensor:  # another view of the latents for each tower, with noise
        hidden = torch.tanh(z @ draw(LATENT, FEATURES) / math.sqrt(LATENT))
        return hidden + 0.3 * draw(len(z), FEATURES)

    return seen(asked), seen(latents)


def reciprocal_rank(queries: Tensor, keys: Tensor) -> float:
    """Of the held-out queries' keys among all keys."""
    s = normalize(queries[TRAINED:], dim=1) @ normalize(keys, dim=1).T
    own = s[torch.arange(len(s)), torch.arange(TRAINED, QUERIES)]
    return float((1 / (s >= own[:, None]).sum(1)).mean())


def run(rate: float, one_to_one: bool, seed: int, epochs: int) -> float:
    x, y = features(seed)
    torch.manual_seed(seed)
    towers = nn.ModuleList([nn.Linear(FEATURES, DIM), nn.Linear(FEATURES, DIM)])
    options = {} if one_to_one else {"num_keys": KEYS, "proposals": Uniform(SIZE)}
    loss_fn = EMC2Loss(
        TRAINED, 20.0, views="paired", denominator="all", partition_rate=rate, **options
    )
    optimizer = torch.optim.Adam(towers.parameters(), lr=3e-3)
    encode = (lambda ids: towers[0](x[ids]), lambda ids: towers[1](y[ids]))
    for _ in range(epochs):
        for index in torch.randperm(TRAINED).split(SIZE):
            more = {} if one_to_one else {"key_index": index}
            z = encode[0](index), encode[1](index)
            loss = loss_fn(*z, index, encode=encode, **more)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return reciprocal_rank(towers[0](x), towers[1](y))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, one_to_one in (("a corpus, uniform draws", False), ("one to one, the batch", True)):
        found = {
            rate: torch.tensor(
                [run(rate, one_to_one, seed, options.epochs) for seed in range(options.seeds)]
            )
            for rate in RATES
        }
        for rate, values in found.items():
            apart = values - found[1.0]
            errors = [float(v.std()) / math.sqrt(len(v)) for v in (values, apart)]
            print(
                f"{name}, rate {rate:4}: MRR {float(values.mean()):.3f} +- {errors[0]:.3f}, "
                f"minus rate 1: {float(apart.mean()):+.3f} +- {errors[1]:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
