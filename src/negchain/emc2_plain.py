"""EMC² and nothing else: for reading. `negchain.EMC2Loss` computes the same, for every setting.

Every sample has a Markov chain over its negatives whose state, one integer, is kept from visit to
visit. When the sample is in a batch, the chain walks over the other items of the batch: each is a
proposal, accepted by the Metropolis-Hastings rule for the target

    p_i(z)  =  softmax over all negatives z of   beta * s(x_i, z)

and the share of steps it spends at z is the estimate W_i(z) of p_i(z) in the gradient

    beta / N  sum_i [ -grad s(x_i, y_i) + sum_z W_i(z) grad s(x_i, z) ]             W held constant

tests/test_emc2_plain.py shows that gradients and chains are those of `EMC2Loss`.

Shapes: `B` batch, `N` = 2B rows (both views of an item are anchors), `D` embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from negchain import rng


class PlainEMC2:
    """EMC² for two views of one encoder.

    Example:
        >>> items, encoder, emc2 = torch.randn(50, 3), torch.nn.Linear(3, 8), PlainEMC2(50)
        >>> index = torch.tensor([4, 7, 9])
        >>> z_a, z_b = encoder(items[index]), encoder(items[index] + 0.1)
        >>> emc2(z_a, z_b, index, encoder(items[emc2.carried(index)])).backward()
    """

    def __init__(self, num_samples: int, beta: float = 14.28, seed: int = 0) -> None:
        self.beta, self.seed, self.step = beta, seed, torch.tensor(0)
        # Each chain starts at a uniform draw from the other samples (Algorithm 1's input).
        own = torch.arange(num_samples)
        u = rng.uniform(seed, self.step, rng.FOR_INIT, own, 1, torch.float64)[:, 0]
        others = (u * (num_samples - 1)).long()
        self.states = others + (others >= own)  # [M] the whole state of the method

    def carried(self, index: Tensor) -> Tensor:  # [B] -> [B]
        """The samples that the chains of a batch hold: encode them with the batch."""
        return self.states[index]

    def __call__(self, z_a: Tensor, z_b: Tensor, index: Tensor, z_carried: Tensor) -> Tensor:
        """A scalar with the gradient above, [B,D] [B,D] [B] [B,D] -> []; the chains move on."""
        z_a, z_b, z_carried = (normalize(z, dim=1) for z in (z_a, z_b, z_carried))
        size, rows = len(index), torch.arange(2 * len(index))
        # A row is offered one copy of every item, the item's two rows different ones, by a coin.
        copy = self._bits(rng.FOR_COPY, rows[:1], size)[0, :, None] % 2 == 0
        keys = torch.stack([torch.where(copy, z_a, z_b), torch.where(copy, z_b, z_a)])  # [2,B,D]
        anchors = torch.stack([z_a, z_b])  # [2,B,D]
        similarity = (anchors @ keys.transpose(1, 2)).flatten(0, 1)  # [N,B]
        to_carried = (anchors * z_carried).sum(2).flatten()  # [N]
        to_positive = (z_a * z_b).sum(1).repeat(2)  # [N]

        own = index.repeat(2)[:, None] == index  # an item is no negative of its own rows
        logits = (self.beta * similarity.detach()).masked_fill(own, -math.inf)
        weights, last = self._walk(logits, self.beta * to_carried.detach(), rows)
        negative = (weights[:, :size] * similarity).sum(1) + weights[:, size] * to_carried

        # The item's one chain goes on from the final state of one of its two rows, by a coin.
        first = self._bits(rng.FOR_VIEW, rows[:size], 1)[:, 0] % 2 == 0
        last = torch.where(first, last[:size], last[size:])  # [B]
        new = torch.where(last < size, index[last % size], self.states[index])
        for row in reversed(range(size)):  # the first row of an item that stands here twice decides
            self.states[index[row]] = new[row]
        self.step += 1
        return self.beta * (negative - to_positive).mean()

    def _walk(self, logits: Tensor, current: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Metropolis-Hastings over the columns in random order, half of the steps burn-in.

        [N,B] logits, [N] logit of the carried state -> [N,B+1] share of the counted steps at each
        column (the last: at the carried state), [N] column of the final state.
        """
        num_rows, size = logits.shape
        order = rng.permutation(self.seed, self.step, rng.FOR_ORDER, size)
        at = (self.seed, self.step, rng.FOR_ACCEPT)
        log_u = rng.log_uniform(*at, rows, size, logits.dtype)
        num_steps = (logits > -math.inf).sum(1)  # R: excluded columns are no steps
        burn_in, step = num_steps // 2, torch.zeros_like(num_steps)  # P
        state, visits = torch.full_like(num_steps, size), logits.new_zeros(num_rows, size + 1)
        for r, column in enumerate(order):
            proposal = logits[:, column]
            moves = proposal - log_u[:, r] > current  # log u < logit(Z') - logit(Z)
            state = torch.where(moves, column, state)
            current = torch.where(moves, proposal, current)
            is_step = proposal > -math.inf
            visits[rows, state] += (is_step & (step >= burn_in)).to(visits.dtype)
            step += is_step
        visits[:, size] += num_steps == 0  # a last batch of one offers nothing: the chain stays
        return visits / visits.sum(1, keepdim=True), state

    def _bits(self, use: int, rows: Tensor, num_columns: int) -> Tensor:
        return rng.bits(self.seed, self.step, use, rows, num_columns)
