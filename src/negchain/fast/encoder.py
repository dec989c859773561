"""One fast path for every encoder.

`accelerate` takes an encoder and gives back a function with the same interface: pixels in,
embeddings out. After a backward pass all gradients are in `.grad` of the encoder's parameters,
where the optimizer, clipping or an all-reduce over several GPUs finds them. The caller need not
know which strategy is at work.

| strategy | what it does |
|---|---|
| plain | torch runs the encoder under autocast: the readable twin of the others |
| compiled | `torch.compile`, weight gradients on a CUDA stream of their own (`beside`) |
| blocks | hand-written layers (`negchain.fast.layers`), for ResNets without normalisation |

The two fast ones copy the weights to bf16 all at once, where autocast casts them one by one.
`choose` says which one an encoder gets; benchmarks/encoder_paths.py measures them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from negchain.fast.layers import faster_layers, is_fused
from negchain.fast.streams import WeightGradients, forked, new_stream

Strategy = Literal["plain", "compiled", "blocks"]


def applies(device: torch.device, autocast: torch.dtype | None) -> bool:
    """Whether anything but "plain" can be used: bf16 on a GPU that multiplies it."""
    # Before compute capability 8, bf16 convolutions have a fallback that the fused ones lack.
    on_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return autocast is not None and on_gpu


def choose(encoder: nn.Module, autocast: torch.dtype | None) -> Strategy:
    """The fastest strategy for an encoder, by what benchmarks/encoder_paths.py measured.

    An encoder with an attribute `compiles` that is False is left as it is.
    """
    able = applies(next(encoder.parameters()).device, autocast)
    if not able or not getattr(encoder, "compiles", True):
        return "plain"
    return "blocks" if is_fused(encoder) else "compiled"


def accelerate(
    encoder: nn.Module,
    autocast: torch.dtype | None,
    strategy: Strategy | None = None,
) -> PlainEncoder:
    """A faster encoder with the same results up to rounding.

    Args:
        encoder: on its device, in training mode.
        autocast: dtype of its arithmetic, None for its own.
        strategy: one of the table above; None takes what `choose` says.

    Example:
        >>> encoder = nn.Linear(2, 3)
        >>> fast = accelerate(encoder, autocast=None)
        >>> fast.begin()
        >>> fast(torch.ones(5, 2)).sum().backward()
        >>> encoder.weight.grad
        tensor([[5., 5.],
                [5., 5.],
                [5., 5.]])
    """
    chosen = strategy or choose(encoder, autocast)
    kinds = {"plain": PlainEncoder, "compiled": CompiledEncoder, "blocks": BlockEncoder}
    if chosen not in kinds:
        raise ValueError(f"strategy must be one of {', '.join(kinds)}, got {chosen!r}")
    if autocast is None and chosen != "plain":
        raise ValueError(f"strategy {chosen!r} copies weights to another dtype: give autocast")
    return kinds[chosen](encoder, autocast)


class PlainEncoder:
    """The encoder under autocast, as torch runs it.

    A step is `begin`, calls, and one backward pass through all of them.
    """

    def __init__(self, encoder: nn.Module, autocast: torch.dtype | None) -> None:
        self.encoder = encoder
        self.autocast = autocast
        self.device = next(encoder.parameters()).device

    def begin(self) -> None:
        """Begin a step: do what depends on its weights alone, not on pixels."""

    def __call__(self, pixels: Tensor) -> Tensor:  # [R,C,H,W] -> [R,D]
        """Embeddings, with a graph where gradients are enabled."""
        if isinstance(pixels, Tensor) and pixels.ndim == 4:  # convolutions are faster so
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self._run(pixels)

    def _run(self, pixels: Tensor) -> Tensor:
        embeddings: Tensor = self.encoder(pixels)
        return embeddings


class CopyingEncoder(PlainEncoder):
    """Runs with copies of the weights in autocast's dtype, made by one launch per call.

    The gradients of the copies become those of the weights in one launch as well. Every call has
    copies of its own: a copy with two uses would have its gradients added by autograd, which does
    not know that another stream is still computing them.
    """

    def __init__(
        self,
        encoder: nn.Module,
        autocast: torch.dtype | None,
        gradients: WeightGradients | None = None,
    ) -> None:
        super().__init__(encoder, autocast)
        # One name for every place that holds a weight: of two modules that share it both, of a
        # module that stands twice one. `functional_call` leaves its copy in a place given twice.
        by_name = {
            name: weight
            for prefix, module in encoder.named_modules()
            for name, weight in module.named_parameters(prefix, False, remove_duplicate=False)
            if weight.requires_grad
        }
        self._weights = list(dict.fromkeys(by_name.values()))  # one with two names: one copy
        self._cast = cast_by_autocast(encoder)
        place = {weight: number for number, weight in enumerate(self._weights)}
        self._place = {name: place[weight] for name, weight in by_name.items()}
        self.calls: list[tuple[Tensor, ...]] = []  # this step's copies, call by call
        self._ready: tuple[Tensor, ...] | None = None  # of the first call, made by `begin`
        self._copied: torch.cuda.Event | None = None
        self._gradients = gradients or WeightGradients(new_stream(self.device))

    def begin(self) -> None:
        """Copy the weights, beside what comes before the encoder."""
        self.calls = []
        self._ready = self._new_copies()

    def _new_copies(self) -> tuple[Tensor, ...]:
        copies: tuple[Tensor, ...] = _Cast.apply(self, *self._weights) if self._weights else ()
        self.calls.append(copies)
        side = self._gradients.stream
        self._copied = None if side is None else side.record_event()
        return copies

    def copy(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The copies; the current stream must wait for the gradients' stream to use them.

        A weight that autocast does not cast is its own copy: its gradient, too, comes to `collect`.
        """
        copies = {w: torch.empty_like(w, dtype=self.autocast) for w in weights if w in self._cast}
        with forked(self._gradients.stream):
            if copies:
                torch._foreach_copy_(list(copies.values()), list(copies))
        return tuple(copies.get(weight, weight.detach()) for weight in weights)

    def collect(self, call: int, given: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Gradients of the weights: those autograd has of the copies and those found beside."""
        copies = self.calls[call]
        answered = self._gradients.join(copies)
        found: list[Tensor | None] = []
        for copy, grad in zip(copies, given, strict=True):
            own = answered.get(copy)
            found.append(grad if own is None else own if grad is None else own + grad)
        narrow = {n: g for n, g in enumerate(found) if g is not None and g.itemsize < 4}
        wide = {number: torch.empty_like(self._weights[number]) for number in narrow}
        if narrow:
            torch._foreach_copy_(list(wide.values()), list(narrow.values()))
        return [wide.get(number, grad) for number, grad in enumerate(found)]

    def _named_copies(self) -> dict[str, Tensor]:
        """This call's copies by the names of their weights, ready to be used."""
        copies, self._ready = self._ready or self._new_copies(), None
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
        return {name: copies[number] for name, number in self._place.items()}


class _Cast(torch.autograd.Function):
    """`CopyingEncoder.copy`, and backward its `collect`."""

    @staticmethod
    def forward(ctx: Any, owner: CopyingEncoder, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.owner = owner
        ctx.set_materialize_grads(False)  # None where a gradient is found beside
        ctx.call = len(owner.calls)
        return owner.copy(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.owner.collect(ctx.call, grads)


class CompiledEncoder(CopyingEncoder):
    """The encoder through `torch.compile`; shapes are fixed, and CUDA graphs are the caller's."""

    def __init__(self, encoder: nn.Module, autocast: torch.dtype | None) -> None:
        from negchain.fast import beside  # imports the compiler

        super().__init__(encoder, autocast, beside.shared(next(encoder.parameters()).device))

        def run(copies: dict[str, Tensor], pixels: Tensor) -> Tensor:
            embeddings: Tensor = functional_call(encoder, copies, (pixels,), tie_weights=False)
            return embeddings

        self._compiled = torch.compile(run, dynamic=False, options=beside.OPTIONS)

    def _run(self, pixels: Tensor) -> Tensor:
        with _compiling():
            return self._compiled(self._named_copies(), pixels)


class BlockEncoder(CopyingEncoder):
    """The encoder with the hand-written layers of `negchain.fast.layers`."""

    def _run(self, pixels: Tensor) -> Tensor:
        copies = self._named_copies()
        with faster_layers(self.encoder, set(copies.values()), self._gradients):
            embeddings: Tensor = functional_call(self.encoder, copies, (pixels,), tie_weights=False)
        return embeddings


@contextmanager
def _compiling() -> Iterator[None]:
    """Let a process compile more than eight encoders.

    Torch counts compilations by source line, of which all encoders have the same; past its limit
    it would run them uncompiled.
    """
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=1000), warnings.catch_warnings():
        # the compiler reads `.grad` of the copies, which are no leaves
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def cast_by_autocast(encoder: nn.Module) -> set[nn.Parameter]:
    """Weights and biases that go as they are into a convolution or a product.

    Not those of layers that first work on them (weight standardisation): autocast rounds later.
    """
    found: set[nn.Parameter] = set()
    for module in encoder.modules():
        convolves = isinstance(module, nn.Conv2d) and (
            type(module).forward is nn.Conv2d.forward
            and type(module)._conv_forward is nn.Conv2d._conv_forward
        )
        multiplies = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if convolves or multiplies:
            found.update(module.parameters(recurse=False))
    return found
