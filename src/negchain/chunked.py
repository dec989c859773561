"""Large batches on little memory: an encoder that works on a few samples at a time.

A contrastive loss needs the embeddings of the whole batch at once, but not the activations behind
them. `Chunked` computes embeddings some samples at a time and keeps nothing else. In the backward
pass each chunk is encoded again, with the same random numbers, and differentiated (GradCache,
arXiv:2101.06983, by `torch.utils.checkpoint`). It works with every loss, requests included. The
gradient equals that of the same chunks with all activations kept.

Shapes: `B` batch, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Chunked(nn.Module):
    """An encoder whose activations take the memory of `size` samples, at one more forward pass.

    Dropout draws the same masks in both passes, and running statistics are counted once. A layer
    that couples samples (BatchNorm) sees a chunk at a time. Put it inside
    `DistributedDataParallel(Chunked(encoder, 64))`, not around it.

    Args:
        encoder: from tensors [B, ...] (or dicts and tuples of them) to embeddings [B, D].
        size: samples of a chunk.

    Example:
        >>> import negchain
        >>> encoder, items = Chunked(nn.Linear(5, 8), size=16), torch.randn(100, 5)
        >>> index, loss_fn = torch.arange(64), negchain.EMC2Loss(100)
        >>> encode = lambda ids: encoder(items[ids])
        >>> loss_fn(encode(index), encode(index), index, encode=encode).backward()
    """

    def __init__(self, encoder: nn.Module, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"size (samples of a chunk) must be at least 1, got {size}")
        if isinstance(encoder, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "a wrapped encoder cannot be run again inside a backward pass; use "
                "DistributedDataParallel(Chunked(encoder, size))"
            )
        self.encoder = encoder
        self.size = size

    def forward(self, *inputs: Any) -> Tensor:
        """Embeddings [B, D] of inputs whose tensors all have B rows."""
        count = _length(inputs)
        parts = []
        for begin in range(0, max(count, 1), self.size):
            part = _cut(inputs, slice(begin, begin + self.size))
            if torch.is_grad_enabled():
                parts.append(
                    checkpoint(self.encoder, *part, use_reentrant=False, context_fn=self._passes)
                )
            else:
                parts.append(self.encoder(*part))
        return torch.cat(parts)

    def _passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), statistics_kept(self.encoder)


@contextmanager
def statistics_kept(encoder: nn.Module) -> Iterator[None]:
    """Let normalisation layers use a batch's statistics without remembering them."""
    layers = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    counts = [(t, t.clone()) for m in layers if (t := m.num_batches_tracked) is not None]
    kept = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, kept, strict=True):
            layer.momentum = momentum
        for number, count in counts:
            number.copy_(count)


def _length(inputs: Any) -> int:
    """B: rows of the first tensor."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    for value in inputs.values() if isinstance(inputs, Mapping) else inputs:
        if isinstance(value, (Tensor, Mapping, tuple, list)):
            return _length(value)
    raise ValueError("an encoder in chunks needs a tensor [B, ...] among its inputs")


def _cut(inputs: Any, rows: slice) -> Any:
    """The same inputs with some of their rows."""
    if isinstance(inputs, Tensor):
        return inputs[rows]
    if isinstance(inputs, Mapping):
        return {name: _cut(value, rows) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_cut(value, rows) for value in inputs)
    return inputs
