"""The encoder's passes inside a training step: embeddings, gradients, the optimizer's step.

`PlainPass` is what torch does by itself. `OverlappedPass` gives the same numbers from a CUDA graph
with fewer and concurrent launches:

* the weights of convolutions and linear layers are copied to bf16 all at once, where autocast casts
  them one by one, and their gradients come back the same way;
* layers are those of `negchain.fast.layers`: weight gradients run beside those of activations;
* Adam steps a weight as soon as its gradient is there, while the backward pass goes on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from negchain.encoders import Encoder
from negchain.fast.layers import FasterLayers, Recorded, WeightGradients, is_fused
from negchain.fast.streams import forked, join, new_stream
from negchain.train import adam


class PlainPass:
    """Passes as torch makes them.

    Args:
        encoder: on its device.
        optimizer: over its parameters.
        autocast: dtype of the encoder's arithmetic, None for its own.

    A step is `begin`, any number of `embed` and `backward` (or `score` and `backward_rows`), then
    `finish`.
    """

    def __init__(
        self, encoder: nn.Module, optimizer: torch.optim.Optimizer, autocast: torch.dtype | None
    ) -> None:
        self.encoder = encoder
        self.optimizer = optimizer
        self.autocast = autocast
        self.device = next(encoder.parameters()).device
        self._one = torch.ones((), device=self.device)
        self._scored: Tensor | None = None

    def begin(self) -> None:
        """Forget the last step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def embed(self, pixels: Tensor) -> Tensor:  # [R,C,H,W] -> [R,D]
        """Embeddings, with a graph where gradients are enabled."""
        pixels = self._laid_out(pixels)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return self._encode(pixels)

    def _laid_out(self, pixels: Tensor) -> Tensor:
        on_gpu = self.device.type == "cuda"
        return pixels.contiguous(memory_format=torch.channels_last) if on_gpu else pixels

    def _encode(self, pixels: Tensor) -> Tensor:
        embeddings: Tensor = self.encoder(pixels)
        return embeddings

    def score(self, pixels: Tensor) -> Tensor:  # [R,C,H,W] -> [R,D]
        """Embeddings apart from their graph; `backward_rows` may follow, once."""
        self._scored = self.embed(pixels)
        return self._scored.detach()

    def backward(self, value: Tensor, grad: Tensor | None = None) -> None:
        """Add the gradients of `value` to those of this step."""
        torch.autograd.backward(value, self._one if grad is None else grad)

    def backward_rows(self, first: int, source: Tensor, grad: Tensor) -> None:
        """`backward` of some embeddings that `score` returned.

        Args:
            first: the rows before this are among them.
            source: [K] of the rows from `first` on, as in `layers.recorded.move_rows`.
            grad: [first+K,D] their gradients.
        """
        assert self._scored is not None
        whole = torch.zeros_like(self._scored)
        whole[:first] = grad[:first]
        whole.index_copy_(0, first + source, grad[first:])
        self.backward(self._scored, whole)
        self._scored = None

    def finish(self) -> None:
        """Step the optimizer."""
        self.optimizer.step()


class OverlappedPass(PlainPass):
    """The same on a GPU with bf16 arithmetic; made for capture, correct outside as well.

    Args:
        encoder: on its device.
        optimizer: over its parameters.
        autocast: as in `PlainPass`; the copies have this dtype.

    A step has one backward pass: Adam does not wait for more. `backward_rows` takes the time of the
    rows it is given where `can_record`, else that of all.
    """

    def __init__(
        self, encoder: nn.Module, optimizer: torch.optim.Optimizer, autocast: torch.dtype
    ) -> None:
        super().__init__(encoder, optimizer, autocast)
        by_name = _cast_by_autocast(encoder)
        copy_of: dict[Tensor, Tensor] = {}
        for weight in by_name.values():  # a weight with two names gets one copy
            copy_of[weight] = weight.detach().to(autocast).requires_grad_(weight.requires_grad)
        self._copies = {name: copy_of[weight] for name, weight in by_name.items()}
        self._original_of = {copy: weight for weight, copy in copy_of.items()}
        self._trained = {copy for copy in self._original_of if copy.requires_grad}
        self._adam: adam.AdamUpdate | None = None  # known after a first step: what has gradients
        self._gradients = WeightGradients(new_stream(self.device))
        self._records = can_record(encoder)
        self._recorded: Recorded | None = None
        self._steps = new_stream(self.device)  # of Adam's
        self._early: set[Tensor] = set()
        self._copied: torch.cuda.Event | None = None
        self._kept: list[Tensor] = []

    def begin(self) -> None:
        """Forget the last step's gradients; copy the weights beside what comes first."""
        super().begin()
        self._recorded = None  # of a step that did not end
        for copy in self._original_of:
            copy.grad = None
        side = self._gradients.stream
        with forked(side), torch.no_grad():
            torch._foreach_copy_(list(self._original_of), list(self._original_of.values()))
            if self._adam is not None:
                self._adam.begin()
        self._copied = None if side is None else side.record_event()

    def _encode(self, pixels: Tensor) -> Tensor:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        with FasterLayers(self.encoder, self._trained, self._gradients, self._recorded):
            embeddings: Tensor = torch.func.functional_call(self.encoder, self._copies, (pixels,))
        return embeddings

    def score(self, pixels: Tensor) -> Tensor:
        """The same, with what the backward pass needs recorded instead of a graph."""
        if not self._records:
            return super().score(pixels)
        pixels = self._laid_out(pixels)
        self._recorded = Recorded(pixels)
        with torch.no_grad():
            return self.embed(pixels).detach()  # that one may require a gradient, not the recorded

    def backward_rows(self, first: int, source: Tensor, grad: Tensor) -> None:
        """The same; overwrites rows of what `score` was given and of what it returned."""
        if self._recorded is None:
            super().backward_rows(first, source, grad)
            return
        embeddings = self.embed(self._recorded.keep(first, source))
        self._recorded.end()
        self._recorded = None
        self.backward(embeddings, grad)

    def _step_now(self, copy: Tensor, grad: Tensor) -> bool:
        """Step a weight beside the backward pass, if it is one that may be."""
        assert self._adam is not None
        if copy not in self._early:
            return False
        self._kept.append(grad)
        with forked(self._steps):
            self._adam.update(self._original_of[copy], grad)
        return True

    def finish(self) -> None:
        """Step what has not been stepped."""
        answered = self._gradients.join()
        if self._kept:
            join(self._steps)
        found = dict(answered)
        if self._adam is not None:  # an embedding was not used, so that a part is still expected
            for copy in self._early & found.keys():
                self._adam.update(self._original_of[copy], found.pop(copy))
        for copy in self._original_of:  # used by something else than our layers
            if copy.grad is not None:
                found[copy] = copy.grad if copy not in found else found[copy] + copy.grad
        weights = [self._original_of[copy] for copy in found]
        wide = [torch.empty_like(weight) for weight in weights]
        if wide:
            torch._foreach_copy_(wide, list(found.values()))
        for weight, grad in zip(weights, wide, strict=True):
            weight.grad = grad
        self._kept = []
        self.optimizer.step()
        if self._adam is None and adam.supports(self.optimizer):
            self._early = {copy for copy in answered if copy.grad is None}
            early = [self._original_of[copy] for copy in self._early]
            self._adam = adam.AdamUpdate(self.optimizer, early)
            self._gradients.then = self._step_now


def can_record(encoder: nn.Module) -> bool:
    """Whether a backward pass can go over some rows of a forward pass: our ResNets, all trained."""
    if type(encoder) is not Encoder or not is_fused(encoder.backbone, encoder.projector):
        return False
    return all(parameter.requires_grad for parameter in encoder.parameters())


def _cast_by_autocast(encoder: nn.Module) -> dict[str, nn.Parameter]:
    """Weights and biases that go as they are into a convolution or a product, by name.

    Not those of layers that first work on them (weight standardisation): autocast rounds later.
    """
    found = {}
    for prefix, module in encoder.named_modules():
        convolves = isinstance(module, nn.Conv2d) and (
            type(module).forward is nn.Conv2d.forward
            and type(module)._conv_forward is nn.Conv2d._conv_forward
        )
        multiplies = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if convolves or multiplies:
            found.update(module.named_parameters(prefix, recurse=False))
    return found
