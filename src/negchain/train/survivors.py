"""Which carried images are trained: those that got weight, as far as there is room.

Few chains still hold their carried state after the burn-in, so most carried images get no gradient
and need no backward pass. There is room for a fixed number, since a CUDA graph has fixed shapes. Of
more, some are chosen by priority sampling (Duffield, Lund and Thorup 2007): with u uniform and g
the gradient of an image's embedding, those of largest

    |g| / u,    each weighted by   max(|g|, t) / |g|,    t the largest |g| / u left out.

The expected gradient is that of all, and equal to it where all have room.

Shapes: `B` carried images, room for `K`, `D` embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from negchain.augment import Draws
from negchain.fast import backends

MOST_FUSED = 1024  # carried images that one program compares with each other


def gradient_of_survivors(
    grad: Tensor, first: int, room: int, drawn: Draws
) -> tuple[Tensor, Tensor]:
    """Choose the carried images to be trained, and weight their gradients.

    Args:
        grad: [first+B,D] gradients of embeddings, those of the carried images last; is changed.
        first: number of the others.
        room: K <= B.
        drawn: the uniforms; image n has the first of row n.

    Returns:
        [K] which carried images, as `choose` returns them, and [first+K,D] the gradients of all
        that is trained.

    Example:
        >>> grad = torch.tensor([[1.0], [0.0], [2.0], [0.0], [3.0]])
        >>> drawn = Draws(seed=0, step=torch.tensor(0), stream=0)
        >>> source, trained = gradient_of_survivors(grad, 1, 2, drawn)
        >>> source, trained.flatten()
        (tensor([3, 1]), tensor([1., 3., 2.]))
    """
    count = len(grad) - first
    if backends.prefers_triton(grad) and count <= MOST_FUSED:
        from negchain.train.survivors_triton import gradient_of_survivors_triton

        return gradient_of_survivors_triton(grad, first, room, drawn)
    carried = grad[first:]
    source, weight = choose(carried, drawn.uniforms(count, 1)[:, 0], room)
    chosen = (carried[source] * weight[:, None]).to(grad.dtype)
    return source, torch.cat([grad[:first], chosen])


def choose(grad: Tensor, u: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Choose at most `room` rows, K, to be trained; also returns their weights.

    Args:
        grad: [B,D] gradients of the carried images' embeddings.
        u: [B] uniforms in (0, 1).
        room: K <= B.

    Returns:
        [K] rows, where a row below K is at its own place (so that they can be moved in place, see
        `layers.recorded.move_rows`), and [K] weights, zero where nothing is to be trained.

    Example:
        >>> grad = torch.tensor([[0.0], [2.0], [0.0], [3.0]])
        >>> choose(grad, torch.full((4,), 0.5), room=2)
        (tensor([3, 1]), tensor([1., 1.]))
    """
    length = grad.float().norm(dim=1).nan_to_num(0.0, posinf=torch.inf)
    priority, order = (length / u).sort(descending=True, stable=True)
    left_out = priority[room] if room < len(grad) else priority.new_zeros(())
    chosen = (order.argsort() < room) & (length > 0)
    weight = torch.where(chosen, length.maximum(left_out) / length, 0.0)
    # Those beyond the room go, in their order, to the places of those that are not chosen.
    row = torch.arange(len(grad), device=grad.device)
    moves = chosen & (row >= room)
    places = (chosen[:room] * room + row[:room]).argsort()  # free ones first
    place = places[(moves.cumsum(0) - 1).clamp(0, room - 1)]
    source = torch.arange(room + 1, device=grad.device)  # and a place for all that stay away
    source.scatter_(0, torch.where(moves, place, room), row)
    source = source[:room]
    return source, weight[source]
