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
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from negchain import draws
from negchain.augment import Augmentation
from negchain.encoders import Encoder
from negchain.losses import DCLLoss, EMC2Loss, InfoNCELoss, NegativeCacheLoss, SogCLRLoss
from negchain.losses.base import ContrastiveLoss
from negchain.losses.table import StaleTable
from negchain.pool import Draw
from negchain.train.config import ConfigError, TrainConfig

STREAM_AUGMENT = 32
STREAM_STORED = 33  # which stored augmentations a step uses
STREAM_SURVIVORS = 34  # which carried images are trained when there are too many
SURVIVORS = 8  # one in so many carried images can be trained
TRAINED_STEPS = 4  # one in so many steps trains them, with so many times the weight
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
        images: positions [R] -> uint8 images [R, C, H, W] on the device; with stored augmentations
            ids `item * k + augmentation`.
        autocast: dtype of the encoder's arithmetic, None for its own.
        table: [M, C, H, W] all images, where they are on the device.

    After a call `loss` holds the step's loss (a tensor on the device).
    """

    def __init__(
        self,
        config: TrainConfig,
        encoder: Encoder,
        loss_fn: ContrastiveLoss,
        optimizer: torch.optim.Optimizer,
        augment: Augmentation,
        images: Callable[[Tensor], Tensor],
        autocast: torch.dtype | None,
        table: Tensor | None = None,
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
        self.step = torch.zeros((), dtype=torch.int64, device=self.device)
        self.index = torch.zeros(config.batch_size, dtype=torch.int64, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.score_first = config.carried_gradient == "sampled"
        if self.score_first and _couples_samples(encoder):
            raise ConfigError(
                "--carried-gradient sampled needs an encoder without batch norm and dropout, got "
                f"--encoder {config.encoder}; leave out --carried-gradient"
            )
        # by whether survivors are trained: the graph, and the numbers for `info` it writes
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def __call__(self, step: int, index: Tensor, batch: Tensor | None = None) -> None:
        """Run step number `step` on the positions `index`, [B]; `batch` their images if at hand."""
        self.step.fill_(step)
        self.index.copy_(index, non_blocking=True)
        survivors = self.trains_survivors(step)
        if self._graphs:
            graph, self.loss_fn._info = self._graphs[survivors]
            graph.replay()
        else:
            self._run(batch, survivors)

    def trains_survivors(self, step: int) -> bool:
        """Whether this step trains carried images apart from the batch; see `_train_survivors`."""
        if not self.score_first:
            return False
        return random.Random(f"{self.config.seed}/{step}").random() < 1 / TRAINED_STEPS

    def capture(self) -> None:
        """Record the step as a CUDA graph (two where carried images are scored first).

        Parameters and state end as they began.
        """
        kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._state()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run(None, self.score_first)
        torch.cuda.current_stream().wait_stream(stream)
        graphs = {}
        for survivors in (False, True) if self.score_first else (False,):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run(None, survivors)
            graphs[survivors] = graph, self.loss_fn._info
        with torch.no_grad():
            for tensor, value in kept.values():
                tensor.copy_(value)
            for tensor in self._state():
                if id(tensor) not in kept:
                    tensor.zero_()  # optimizer state made by the warm-up: zero is where it begins
        self._graphs = graphs

    def _state(self) -> list[Tensor]:
        """Every tensor a step changes in place."""
        modules: tuple[nn.Module, ...] = (self.encoder, self.loss_fn)
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        held = [s for state in self.optimizer.state.values() for s in state.values()]
        return [*tensors, self.loss, *(t for t in held if isinstance(t, Tensor))]

    def _run(self, batch: Tensor | None, survivors: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        scored: list[Tensor] = []
        loss = self._forward(batch, scored)
        torch.autograd.backward(loss)
        if survivors:
            self._train_survivors(*scored)
        self.optimizer.step()
        if isinstance(self.loss_fn, (NegativeCacheLoss, EMC2Loss)):
            self._refresh()
        self.loss.copy_(loss.detach())  # in place: several graphs write it

    # ------------------------------------------------------------------ forward, per kind of loss

    def _forward(self, batch: Tensor | None, scored: list[Tensor]) -> Tensor:
        """The loss; `scored` receives carried embeddings and pixels that are trained apart."""
        loss_fn, index = self.loss_fn, self.index
        if self.config.augmentations is not None:
            return self._forward_stored()
        size = len(index)
        extra: dict[str, Tensor] = {}
        if isinstance(loss_fn, EMC2Loss) and loss_fn.carried_mode == "encode":
            ids = loss_fn.carried(index)
            assert isinstance(ids, Tensor)
            if self.score_first:
                scored += self._score(ids)
                extra = {"carried": scored[0]}
                z = self._encode(torch.cat([index, index]), batch)
            else:
                z = self._encode(torch.cat([index, index, ids]), batch)
                extra = {"carried": z[2 * size :]}
        else:
            z = self._encode(torch.cat([index, index]), batch)
        z_a, z_b = z[:size], z[size : 2 * size]
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

    def _score(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of the carried images, where gradients are collected, and their pixels."""
        with torch.no_grad():
            pixels = self.pixels(ids, first_row=2 * len(ids))
            held = self._embed(pixels).float()
        return held.requires_grad_(), pixels

    def _train_survivors(self, held: Tensor, pixels: Tensor) -> None:
        """Encode again, with gradient, the carried images that got weight.

        Few chains still hold their carried state after the burn-in, and another pass is slow
        however few there are. So a random quarter of the steps trains them, a random b / 8 if there
        are more, weighted so that the expected gradient is that of all at every step. (Gradients of
        the anchors never wait: they need no second pass.)
        """
        assert held.grad is not None
        capacity = -(-len(held) // SURVIVORS)
        alive = (held.grad != 0).any(1)
        row = torch.zeros(1, dtype=torch.int64, device=self.device)
        u = draws.uniform(
            self.config.seed, self.step, STREAM_SURVIVORS, row, len(held), torch.float32
        )
        chosen = (alive + 0.5 * u[0]).topk(capacity).indices
        weight = (alive.sum() / capacity).clamp(min=1.0) * TRAINED_STEPS
        z = self._embed(pixels[chosen])
        torch.autograd.backward(z, (held.grad[chosen] * weight).to(z.dtype))

    def _forward_stored(self) -> Tensor:
        """Two different ones of an item's k stored augmentations are its views."""
        k, index, size = self.config.augmentations, self.index, len(self.index)
        assert k is not None
        rows = torch.arange(size, device=self.device)
        u = draws.uniform(self.config.seed, self.step, STREAM_STORED, rows, 2, torch.float64)
        first = draws.integers_below(torch.full_like(rows, k), u[:, 0])
        other = draws.integers_below(torch.full_like(rows, k - 1), u[:, 1])
        chosen = (first, (first + 1 + other) % k)
        ids = [index * k + a for a in chosen]
        loss_fn = self.loss_fn
        if isinstance(loss_fn, EMC2Loss):
            held = loss_fn.carried(index, chosen) if loss_fn.carried_mode == "encode" else ()
            z = self._encode_plain(self.images(torch.cat([*ids, *held])))
            carried = (z[2 * size : 3 * size], z[3 * size :]) if len(held) else None
            return loss_fn(
                z[:size], z[size : 2 * size], index, carried=carried, augmentation=chosen
            )
        z = self._encode_plain(self.images(torch.cat(ids)))
        z_a, z_b = z[:size], z[size:]
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
                z = self._encode_plain(self.images(ids * stored))
            self.encoder.train()
            table.refresh(ids, z, normalize=loss_fn.normalize)

    def _encode(self, ids: Tensor, batch: Tensor | None = None, first_row: int = 0) -> Tensor:
        """Embeddings of freshly augmented images, [R, D]; `batch`: images of the first ids."""
        return self._embed(self.pixels(ids, batch, first_row))

    def pixels(self, ids: Tensor, batch: Tensor | None = None, first_row: int = 0) -> Tensor:
        """The images at `ids` augmented with this step's draws, [R, C, size, size]."""
        seed, count = self.config.seed, self.augment.num_uniforms
        rows = torch.arange(first_row, first_row + len(ids), device=self.device)
        u = draws.uniform(seed, self.step, STREAM_AUGMENT, rows, count, torch.float32)
        if self.table is not None and batch is None:
            return self.augment.from_table(self.table, ids, u, self.autocast or torch.float32)
        if batch is None:
            return self.augment(self.images(ids), u)
        views = batch.to(self.device, non_blocking=True)
        given = [views, views]
        if len(ids) > 2 * len(views):
            given.append(self.images(ids[2 * len(views) :]))
        return self.augment(torch.cat(given), u)

    def _encode_plain(self, images: Tensor) -> Tensor:
        return self._embed(self.augment.plain(images))

    def _embed(self, pixels: Tensor) -> Tensor:
        if self.device.type == "cuda":
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            embeddings: Tensor = self.encoder(pixels)
        return embeddings


def _couples_samples(encoder: nn.Module) -> bool:
    """Whether an image's embedding depends on who else is encoded with it, or on a coin."""
    coupled = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return any(isinstance(module, coupled) for module in encoder.modules())
