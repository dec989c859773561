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
from contextlib import AbstractContextManager, contextmanager
from random import getstate, setstate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STATISTICS = nn.modules.batchnorm._NormBase  # BatchNorm and InstanceNorm, of any dimension


class Chunked(nn.Module):
    """An encoder whose activations take the memory of `size` samples, at one more forward pass.

    Both passes draw the same random numbers, of torch's, numpy's and Python's global generators
    (those of a generator the encoder keeps for itself differ), and find the same buffers, which
    change once: running statistics are counted once. A layer that couples samples (BatchNorm) sees
    a chunk at a time. Put it inside `DistributedDataParallel(Chunked(encoder, 64))`, not around it.

    Args:
        encoder: from tensors [B, ...] (or dicts and tuples of them) to embeddings [B, D]. What is
            no tensor, and tensors of no dimension, go to every chunk as they are.
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
            part = _cut(inputs, slice(begin, begin + self.size), count)
            if torch.is_grad_enabled():
                parts.append(
                    checkpoint(self.encoder, *part, use_reentrant=False, context_fn=self._passes)
                )
            else:
                parts.append(self.encoder(*part))
        return torch.cat(parts)

    def _passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        replay = _Replay(self.encoder)
        return replay.first(), replay


class _Replay(AbstractContextManager[None]):
    """Later passes of a chunk: they find what the first one found, and leave what is there.

    A graph that is retained is replayed more than once. Buffers are exchanged, not written to: what
    a pass saves for its gradient may be one of them.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self.encoder = encoder
        self.found: list[tuple[nn.Module, str, Tensor]] = []  # buffers the first pass changed
        self.live: list[Tensor | None] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        self.numbers = getstate(), np.random.get_state()
        before = [
            (module, name, buffer, buffer._version, buffer.clone())
            for module in self.encoder.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        yield
        for module, name, buffer, version, value in before:
            changed = module._buffers[name] is not buffer or buffer._version != version
            if changed or isinstance(module, STATISTICS):  # whose kernels count no version
                self.found.append((module, name, value))

    def __enter__(self) -> None:
        self.now = getstate(), np.random.get_state()
        self.live = [module._buffers[name] for module, name, _ in self.found]
        for module, name, value in self.found:
            module._buffers[name] = value.clone()
        setstate(self.numbers[0])
        np.random.set_state(self.numbers[1])

    def __exit__(self, *_: object) -> None:
        for (module, name, _value), buffer in zip(self.found, self.live, strict=True):
            module._buffers[name] = buffer
        setstate(self.now[0])
        np.random.set_state(self.now[1])


@contextmanager
def statistics_kept(encoder: nn.Module) -> Iterator[None]:
    """Let normalisation layers use a batch's statistics without remembering them."""
    layers = [m for m in encoder.modules() if isinstance(m, STATISTICS)]
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
        if isinstance(value, (Mapping, tuple, list)) or (isinstance(value, Tensor) and value.dim()):
            return _length(value)
    raise ValueError("an encoder in chunks needs a tensor [B, ...] among its inputs")


def _cut(inputs: Any, rows: slice, count: int) -> Any:
    """The same inputs with some of their rows."""
    if isinstance(inputs, Tensor) and inputs.dim():
        if len(inputs) != count:
            raise ValueError(
                f"an encoder in chunks takes tensors of B = {count} rows each, got "
                f"{tuple(inputs.shape)}; keep what all samples share inside the encoder"
            )
        return inputs[rows]
    if isinstance(inputs, Mapping):
        return {name: _cut(value, rows, count) for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        parts = [_cut(value, rows, count) for value in inputs]
        return type(inputs)(*parts) if hasattr(inputs, "_fields") else type(inputs)(parts)
    return inputs
