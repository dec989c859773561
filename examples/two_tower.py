"""Two encoders (as in CLIP), a learned inverse temperature, and a chain table per direction.

Shows    views="paired": anchors x against keys y and y against x; `encode=` as a pair of functions,
         one per tower; beta as a parameter that the optimizer moves. A batch has 16 of 2,000 pairs.
Prints   recall@1 on 500 held-out pairs (does the nearest y belong to x, and the reverse?), before
         and after training, and the learned beta.

    python examples/two_tower.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from negchain import EMC2Loss

NUM_PAIRS, NUM_TEST, BATCH_SIZE, STEPS = 2000, 500, 16, 1500


def make_pairs(generator: torch.Generator) -> tuple[Tensor, Tensor]:  # -> [M,24], [M,40]
    """Two noisy, non-linear looks at one hidden vector of dimension 8."""
    hidden = torch.randn(NUM_PAIRS + NUM_TEST, 8, generator=generator)
    looks = []
    for width in (24, 40):
        mixing = torch.randn(8, width, generator=generator)
        clean = torch.tanh(hidden @ mixing / 2)
        looks.append(clean + 0.1 * torch.randn(clean.shape, generator=generator))
    return looks[0], looks[1]


def tower(width: int) -> nn.Module:
    """A small encoder into 32 dimensions."""
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 32))


@torch.no_grad()
def recall(query: nn.Module, key: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Share of x whose nearest y is its own, and of y whose nearest x is."""
    similarity = normalize(query(x), dim=1) @ normalize(key(y), dim=1).T
    own = torch.arange(len(x))
    forward = (similarity.argmax(1) == own).float().mean()
    return float(forward), float((similarity.argmax(0) == own).float().mean())


def main() -> None:
    """Train and print."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x, y = make_pairs(generator)
    test = x[NUM_PAIRS:], y[NUM_PAIRS:]
    encode_query, encode_key = tower(24), tower(40)
    loss_fn = EMC2Loss(
        NUM_PAIRS,
        beta=nn.Parameter(torch.tensor(10.0)),
        views="paired",
        denominator="all",  # a pair already solved stops pulling, and beta has a finite optimum
    )

    def embed_x(index: Tensor) -> Tensor:
        return encode_query(x[index])

    def embed_y(index: Tensor) -> Tensor:
        return encode_key(y[index])

    towers = [*encode_query.parameters(), *encode_key.parameters()]
    optimizer = torch.optim.Adam(
        [{"params": towers, "lr": 1e-3}, {"params": loss_fn.parameters(), "lr": 2e-2}]
    )
    before = recall(encode_query, encode_key, *test)
    for step in range(STEPS):
        index = torch.randint(0, NUM_PAIRS, (BATCH_SIZE,), generator=generator)
        z_a, z_b = embed_x(index), embed_y(index)
        loss = loss_fn(z_a, z_b, index, encode=(embed_x, embed_y))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if (step + 1) % (STEPS // 5) == 0:
            info = loss_fn.info
            print(
                f"step {step + 1:>5}  global loss {info['global_loss']:.3f}  "
                f"accepted {info['acceptance_rate']:.2f}  beta {float(loss_fn.beta.detach()):.1f}"
            )
    after = recall(encode_query, encode_key, *test)
    print(f"recall@1 on {NUM_TEST} held-out pairs: x to y {after[0]:.3f}, y to x {after[1]:.3f}")
    print(f"before training: {before[0]:.3f}, {before[1]:.3f}")


if __name__ == "__main__":
    main()
