"""How far are EMC²'s weights from the exact softmax *during* training, and why?

Data     256 digits (scikit-learn), augmented afresh at every step; an MLP, Adam, b = 8, beta 14.28.
Asks     after every epoch, under the encoder of that moment: the error of the mean of one visit's
         sum_z W(z) z for every item and view (4 fixed ones), relative to the exact sum_z p(z) z,
         noise taken out by two halves (benchmarks/differing_views.py). The visit begins at
             view    a draw from the exact softmax of a random view of the item, encoder of now
             age     the same with the encoder of half an epoch ago, the mean age of a state
             all     the state the library's chains really hold (four sets of them, other seeds)
         so that `view` is what differing views cost, `age` - `view` what the older encoder adds and
         `all` - `age` what slow mixing adds. DCL, which has no state, stands beside.

    OMP_NUM_THREADS=1 PYTHONPATH=src:benchmarks python benchmarks/error_in_training.py --out FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from differing_views import World, cosine, errors, exact, softmaxes
from torch import Tensor
from torch.nn.functional import normalize

from negchain import EMC2Loss
from negchain.augment import augmentation, finite_views
from negchain.reproduce.common import Options, append, provenance
from negchain.reproduce.pages import markdown
from negchain.reproduce.stationarity import build, first_images

M, BATCH, BETA, VIEWS, SETS, SWEEPS = 256, 8, 14.28, 4, 4, 12


def drawn(p: Tensor, generator: torch.Generator) -> Tensor:  # [M V,M V] -> [SETS M]
    """An item for every chain from the softmax of a random view of its own item."""
    by_item = p.view(M, VIEWS, M, VIEWS).sum(3)
    view = torch.randint(0, VIEWS, (SETS, M), generator=generator)
    rows = by_item[torch.arange(M), view].flatten(0, 1)
    return torch.multinomial(rows, 1, generator=generator)[:, 0]


def main() -> None:
    """Train, measure after every epoch, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    images = first_images("digits", M, 8)
    augment = augmentation("digits", size=8)
    encoder = build("mlp", images, given.seed)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=given.lr)
    generator = torch.Generator().manual_seed(given.seed)
    fixed = augment.plain(finite_views(images, augment, VIEWS, given.seed).flatten(0, 1))

    def seen(ids: Tensor) -> Tensor:
        return augment(images[ids], torch.rand(len(ids), augment.num_uniforms, generator=generator))

    def embedded() -> Tensor:  # [M,V,D]
        with torch.no_grad():
            return normalize(encoder(fixed), dim=-1).view(M, VIEWS, -1)

    chains = [EMC2Loss(M, BETA, seed=seed) for seed in range(SETS)]
    if given.out:
        append(given.out, {"record": "error-in-training", **provenance(Options(device="cpu"))})
    lines, steps = [], M // BATCH
    for epoch in range(given.epochs + 1):
        then = embedded()
        for step, index in enumerate(torch.randperm(M, generator=generator).split(BATCH)):
            if epoch == 0:
                break  # the encoder at the start, and chains at their uniform draws
            z_a, z_b = encoder(torch.cat([seen(index), seen(index)])).chunk(2)
            optimizer.zero_grad()
            chains[0](z_a, z_b, index, encode=lambda ids: encoder(seen(ids))).backward()
            with torch.no_grad():
                for others in chains[1:]:
                    others(z_a, z_b, index, encode=lambda ids: encoder(seen(ids)))
            optimizer.step()
            then = embedded() if step == steps // 2 else then
        now, start = embedded(), torch.Generator().manual_seed(epoch)
        held = torch.cat([loss_fn.held(torch.arange(M))[0] for loss_fn in chains])
        p = {"view": softmaxes(now, BETA), "age": softmaxes(then, BETA)}
        begins: dict[str, Callable[[], Tensor]] = {
            **{case: partial(drawn, soft, start) for case, soft in p.items()},
            "all": held.clone,
        }
        row: dict[str, float] = {"epoch": epoch, "cosine": cosine(now)}
        for case, begin in begins.items():
            world = World(now[:, 0], now, BETA, BATCH, epoch, groups=SETS // 2)
            world.begin = {"mh": begin}
            methods = {"mh": world.mh, **({"dcl": world.dcl} if case == "all" else {})}
            found = errors(world, methods, exact(now, BETA), SWEEPS)
            row[case] = found["mh"]["by_view"]
            if "dcl" in found:
                row["dcl"] = found["dcl"]["by_view"]
        print(json.dumps(row), flush=True)
        if given.out:
            append(given.out, {"job": {**vars(given), "out": None, "epoch": epoch}, **row})
        lines.append([epoch, *(f"{row[k]:.2f}" for k in ("cosine", "dcl", "view", "age", "all"))])
    heads = ["epoch", "cosine of views", "DCL", "view", "view and age", "all: view, age, mixing"]
    print(markdown(heads, lines))


if __name__ == "__main__":
    main()
