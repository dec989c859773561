"""One training step: positions in, parameters changed; eager, or replayed as a CUDA graph.

    positions -> images -> two augmented views (+ carried or drawn negatives) -> encoder -> loss
              -> backward -> optimizer

Every random number of step t is a function of (seed, t), every input a tensor that stays where it
is, and nothing asks the device for a value: so the whole step can be captured once and replayed,
and a resumed run repeats what an uninterrupted one would have done.

Shapes: `M` images, `B` batch, `D` embedding, `k` stored augmentations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from negchain import draws, methods
from negchain.augment import Augmentation, Draws, Images, joined
from negchain.encoders import Encoder
from negchain.fast import encoder as fast_encoder
from negchain.fast.streams import forked, join, new_stream
from negchain.losses import ContrastiveLoss
from negchain.train.config import TrainConfig

MAIN_PRIORITY = -1  # of the graph's stream, above the weight gradients'
WARM_UP_STEPS = 3  # before capture: libraries initialise and allocate


def build_loss(config: TrainConfig, num_samples: int, dim: int) -> ContrastiveLoss:
    """The loss module a config names."""
    method = methods.named(config.method)
    options = {name: getattr(config, name) for name in (*method.options, "augmentations")}
    settings = methods.LossSettings(
        num_samples, config.beta, dim, config.seed, config.denominator, options=options
    )
    return method.build(settings)


class TrainStep:
    """A training step over a batch of positions.

    Args:
        config: the run's settings.
        encoder: on the training device.
        loss_fn: on the training device.
        optimizer: over the encoder's parameters; capturable if the step is to be graphed.
        augment: uint8 images and uniforms to pixels.
        images: positions [R] -> uint8 images on the device; with stored augmentations
            ids `item * k + augmentation`.
        autocast: dtype of the encoder's arithmetic, None for its own.
        table: all M images, where they are on the device.

    After a call `loss` holds the step's loss (a tensor on the device).
    """

    def __init__(
        self,
        config: TrainConfig,
        encoder: Encoder,
        loss_fn: ContrastiveLoss,
        optimizer: torch.optim.Optimizer,
        augment: Augmentation,
        images: Callable[[Tensor], Images],
        autocast: torch.dtype | None,
        table: Images | None = None,
    ) -> None:
        self.config = config
        self.encoder = encoder
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.augment = augment
        self.images = images
        self.autocast = autocast
        self.table = table
        self.device = next(encoder.parameters()).device
        size = config.batch_size
        self._inputs = torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        self.index, self.step = self._inputs[:size], self._inputs[size]  # [B], []
        self.loss = torch.zeros((), device=self.device)
        self.plain = fast_encoder.PlainEncoder(encoder, autocast)
        self.embed = self.plain
        self._one = torch.ones((), device=self.device)
        self._graph: tuple[torch.cuda.CUDAGraph, Any] | None = None  # and its numbers for `info`

    def __call__(self, step: int, index: Tensor, batch: Images | None = None) -> None:
        """Run step number `step` on the positions `index`, [B]; `batch` their images if at hand."""
        number = torch.full((1,), step, dtype=torch.int64)
        self._inputs.copy_(torch.cat([index.cpu(), number]), non_blocking=True)
        if self._graph is None:
            self._run(batch)
        else:
            graph, self.loss_fn._info = self._graph
            graph.replay()

    def capture(self, fast: fast_encoder.PlainEncoder | None = None) -> None:
        """Record the step as a CUDA graph; parameters and state end as they began.

        `fast` is the encoder's fast path; None takes what `fast.encoder.accelerate` chooses.
        """
        kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._state()}
        fast = fast or fast_encoder.accelerate(self.encoder, self.autocast)
        stream = new_stream(self.device)
        with forked(stream):
            # cuDNN times its algorithms for most shapes in the first step, with nothing beside.
            for _ in range(WARM_UP_STEPS):
                self._run(None)
                self.embed = fast
        join(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=new_stream(self.device, MAIN_PRIORITY)):
            self._run(None)
        with torch.no_grad():
            for tensor, value in kept.values():
                tensor.copy_(value)
            for tensor in self._state():
                if id(tensor) not in kept:
                    tensor.zero_()  # optimizer state made by the warm-up: zero is where it begins
        self._graph = graph, self.loss_fn._info

    def _state(self) -> list[Tensor]:
        """Every tensor a step changes in place."""
        modules: tuple[nn.Module, ...] = (self.encoder, self.loss_fn)
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        tensors += self.loss_fn.state_tensors()
        held = [s for state in self.optimizer.state.values() for s in state.values()]
        return [*tensors, self.loss, *(t for t in held if isinstance(t, Tensor))]

    def _run(self, batch: Images | None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.embed.begin()
        loss = self._forward(batch)
        torch.autograd.backward(loss, self._one)
        self.optimizer.step()  # several GPUs would first sum the gradients, all in `.grad` by now
        self.loss.copy_(loss.detach())

    def _forward(self, batch: Images | None) -> Tensor:
        """The loss of the batch: what it asks for is encoded as the batch is."""
        loss_fn, index, stored = self.loss_fn, self.index, self._stored_views()
        first = loss_fn.request(index, augmentation=stored)
        trained = [want.ids for want in first.wants if want.gradient]
        sizes = [len(index), len(index), *map(len, trained)]
        views = [index, index]
        if stored is not None:
            views = [index * self._per_item + view for view in stored]
        z_a, z_b, *answers = torch.split(self._encode([*views, *trained], batch), sizes)
        row = sum(sizes)
        for position, want in enumerate(first.wants):
            if not want.gradient:
                answers.insert(position, self._renewed(want.ids, row))
                row += len(want.ids)
        second = loss_fn.request(index, z_a, z_b, augmentation=stored)
        if len(second.ids):
            second.answer(self._encode(self._ids_of(loss_fn, second.ids), first_row=row))
        return loss_fn(z_a, z_b, index, first.answer(answers), second, augmentation=stored)

    @property
    def _per_item(self) -> int:
        return self.config.augmentations or 1

    def _ids_of(self, loss_fn: ContrastiveLoss, ids: Tensor) -> Tensor:
        """Ids of stored views, for a loss that names items only: the first view of each."""
        return ids * (self._per_item // loss_fn.ids_per_item)

    def _stored_views(self) -> tuple[Tensor, Tensor] | None:
        """Which two of an item's k stored augmentations are its views; None: fresh views."""
        k, size = self.config.augmentations, len(self.index)
        if k is None:
            return None
        rows = torch.arange(size, device=self.device)
        u = draws.uniform(self.config.seed, self.step, draws.STREAM_STORED, rows, 2, torch.float64)
        first = draws.integers_below(torch.full_like(rows, k), u[:, 0])
        other = draws.integers_below(torch.full_like(rows, k - 1), u[:, 1])
        return first, (first + 1 + other) % k

    def _renewed(self, ids: Tensor, first_row: int) -> Tensor:
        """Embeddings for a stale table: augmented as the anchors are, by the encoder as it trains.

        In a pass of its own without gradient, whose batch statistics leave running ones alone.
        """
        ids = self._ids_of(self.loss_fn, ids)
        with torch.no_grad(), _statistics_kept(self.encoder):
            return self.plain(self._pixels_of(ids, first_row))

    def fill(self) -> None:
        """Fill the loss's stale tables, where it has any, before the first step."""
        self.loss_fn.fill(lambda ids: self._renewed(ids, 0))

    def _encode(
        self, ids: Sequence[Tensor] | Tensor, batch: Images | None = None, first_row: int = 0
    ) -> Tensor:
        """Embeddings of freshly augmented (or stored) images; `batch`: images of the first ids."""
        return self.embed(self._pixels_of(ids, first_row, batch))

    def _pixels_of(
        self, ids: Sequence[Tensor] | Tensor, first_row: int, batch: Images | None = None
    ) -> Tensor:
        if self.config.augmentations is None:
            return self.pixels(ids, batch, first_row)
        whole = ids if isinstance(ids, Tensor) else torch.cat([*ids])
        return self.augment.plain(self.images(whole))

    def pixels(
        self, ids: Tensor | Sequence[Tensor], batch: Images | None = None, first_row: int = 0
    ) -> Tensor:
        """The images at `ids`, whole or in parts, with this step's draws: [R, C, size, size]."""
        drawn = Draws(self.config.seed, self.step, draws.STREAM_AUGMENT, first_row)
        if self.table is not None and batch is None:
            return self.augment.from_table(self.table, ids, drawn, self.autocast or torch.float32)
        whole = ids if isinstance(ids, Tensor) else torch.cat([*ids])
        if batch is None:
            return self.augment(self.images(whole), drawn)
        views = batch.to(self.device, non_blocking=True)
        places = torch.arange(len(whole) - len(views), device=self.device)
        given = [views]
        if len(whole) > 2 * len(views):  # what follows the two views of the batch
            given.append(self.images(whole[2 * len(views) :]))
        return self.augment(joined(given)[torch.cat([places[: len(views)], places])], drawn)


@contextmanager
def _statistics_kept(encoder: nn.Module) -> Iterator[None]:
    """Let normalisation layers use a batch's statistics without remembering them."""
    layers = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, kept, strict=True):
            layer.momentum = momentum
