"""One training step: positions in, parameters changed; eager, or replayed as a CUDA graph.

    positions -> images -> two augmented views (+ carried or drawn negatives) -> encoder -> loss
              -> backward -> optimizer

Every random number of step t is a function of (seed, t), every input a tensor that stays where it
is, and nothing asks the device for a value: so the whole step can be captured once and replayed,
and a resumed run repeats what an uninterrupted one would have done.

Shapes: `M` images, `B` batch, `D` embedding, `k` stored augmentations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from negchain import draws
from negchain.augment import Augmentation, Draws, Images, joined
from negchain.encoders import Encoder
from negchain.fast import encoder as fast_encoder
from negchain.fast.streams import forked, join, new_stream
from negchain.losses import DCLLoss, EMC2Loss, InfoNCELoss, NegativeCacheLoss, SogCLRLoss
from negchain.losses.base import ContrastiveLoss
from negchain.losses.table import StaleTable
from negchain.pool import Draw
from negchain.train.config import TrainConfig

MAIN_PRIORITY = -1  # of the graph's stream, above the weight gradients'
WARM_UP_STEPS = 3  # before capture: libraries initialise and allocate


def build_loss(config: TrainConfig, num_samples: int, dim: int) -> ContrastiveLoss:
    """The loss module a config names."""
    beta, denominator = config.beta, config.denominator
    if config.method == "infonce":
        return InfoNCELoss(beta, num_samples=num_samples)
    if config.method == "dcl":
        return DCLLoss(beta, num_samples=num_samples)
    if config.method == "sogclr":
        return SogCLRLoss(num_samples, beta, config.gamma, denominator=denominator)
    if config.method == "negcache":
        return NegativeCacheLoss(
            num_samples, dim, beta, config.refresh, denominator=denominator, seed=config.seed
        )
    return EMC2Loss(
        num_samples,
        beta,
        burn_in=config.burn_in,
        kernel="isir" if config.method == "isir" else "mh",
        carried=config.carried,
        denominator=denominator,
        walk=config.walk,
        proposal=config.proposal,
        augmentations=config.augmentations,
        seed=config.seed,
        dim=dim,
    )


class TrainStep:
    """A training step over a batch of positions.

    Args:
        config: the run's settings.
        encoder: on the training device.
        loss_fn: on the training device.
        optimizer: over the encoder's parameters; capturable if the step is to be graphed.
        augment: uint8 images and uniforms to pixels.
        images: positions [R] -> uint8 images on the device, of one size or `Pictures`; with stored
            augmentations ids `item * k + augmentation`.
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
        held = [s for state in self.optimizer.state.values() for s in state.values()]
        return [*tensors, self.loss, *(t for t in held if isinstance(t, Tensor))]

    def _run(self, batch: Images | None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.embed.begin()
        loss = self._forward(batch)
        torch.autograd.backward(loss, self._one)
        self.optimizer.step()  # several GPUs would first sum the gradients, all in `.grad` by now
        if isinstance(self.loss_fn, (NegativeCacheLoss, EMC2Loss)):
            self._refresh()
        self.loss.copy_(loss.detach())

    # ------------------------------------------------------------------ forward, per kind of loss

    def _forward(self, batch: Images | None) -> Tensor:
        loss_fn, index = self.loss_fn, self.index
        if self.config.augmentations is not None:
            return self._forward_stored()
        size = len(index)
        extra: dict[str, Tensor] = {}
        if isinstance(loss_fn, EMC2Loss) and loss_fn.carried_mode == "encode":
            ids = loss_fn.carried(index)
            assert isinstance(ids, Tensor)
            z_a, z_b, held = torch.split(self._encode((index, index, ids), batch), size)
            extra = {"carried": held}
        else:
            z_a, z_b = torch.split(self._encode((index, index), batch), size)
        if isinstance(loss_fn, NegativeCacheLoss):
            draw = loss_fn.propose(z_a, index, z_b)
            assert isinstance(draw, Draw)
            drawn = self._encode_plain(self.images(draw.ids))
            return loss_fn(z_a, z_b, index, draw=draw, drawn=drawn)
        if isinstance(loss_fn, EMC2Loss) and loss_fn.proposal == "cache":
            draw = loss_fn.propose(z_a, index)
            assert isinstance(draw, Draw)
            drawn = self._encode(draw.ids, first_row=3 * size)
            return loss_fn(z_a, z_b, index, draw=draw, drawn=drawn, **extra)
        return loss_fn(z_a, z_b, index, **extra)

    def _forward_stored(self) -> Tensor:
        """Two different ones of an item's k stored augmentations are its views."""
        k, index, size = self.config.augmentations, self.index, len(self.index)
        assert k is not None
        rows = torch.arange(size, device=self.device)
        u = draws.uniform(self.config.seed, self.step, draws.STREAM_STORED, rows, 2, torch.float64)
        first = draws.integers_below(torch.full_like(rows, k), u[:, 0])
        other = draws.integers_below(torch.full_like(rows, k - 1), u[:, 1])
        chosen = (first, (first + 1 + other) % k)
        ids = [index * k + a for a in chosen]
        loss_fn = self.loss_fn
        if isinstance(loss_fn, EMC2Loss):
            held = loss_fn.carried(index, chosen) if loss_fn.carried_mode == "encode" else ()
            z = self._encode_plain(self.images(torch.cat([*ids, *held])))
            z_a, z_b, *others = torch.split(z, size)
            carried = (others[0], others[1]) if others else None
            return loss_fn(z_a, z_b, index, carried=carried, augmentation=chosen)
        z_a, z_b = torch.split(self._encode_plain(self.images(torch.cat(ids))), size)
        if isinstance(loss_fn, NegativeCacheLoss):
            draw = loss_fn.propose(z_a, index, z_b)
            assert isinstance(draw, Draw)
            drawn = self._encode_plain(self.images(draw.ids * k))
            return loss_fn(z_a, z_b, index, draw=draw, drawn=drawn)
        return loss_fn(z_a, z_b, index)

    def _refresh(self) -> None:
        """Re-encode the next share of the stale table."""
        loss_fn = self.loss_fn
        assert isinstance(loss_fn, (NegativeCacheLoss, EMC2Loss))
        for table in loss_fn.tables:
            assert isinstance(table, StaleTable)
            count = math.ceil(self.config.refresh * table.embeddings.shape[0])
            ids = table.next_ids(count)
            stored = self.config.augmentations or 1
            # In eval mode: a refresh is no training batch, and may be of one image.
            self.encoder.eval()
            with torch.no_grad():
                z = self.plain(self.augment.plain(self.images(ids * stored)))
            self.encoder.train()
            table.refresh(ids, z, normalize=loss_fn.normalize)

    def _encode(
        self, ids: Tensor | Sequence[Tensor], batch: Images | None = None, first_row: int = 0
    ) -> Tensor:
        """Embeddings of freshly augmented images, [R, D]; `batch`: images of the first ids."""
        return self.embed(self.pixels(ids, batch, first_row))

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

    def _encode_plain(self, images: Images) -> Tensor:
        return self.embed(self.augment.plain(images))
