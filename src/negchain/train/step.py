"""One training step: positions in, parameters changed; eager, or replayed as a CUDA graph.

    positions -> inputs of anchors and keys (+ carried or drawn negatives) -> towers -> loss
              -> backward -> optimizer

Every random number of step t is a function of (seed, t), every input a tensor that stays where it
is, and nothing asks the device for a value: so the whole step can be captured once and replayed,
and a resumed run repeats what an uninterrupted one would have done.

What a position is and what a tower eats is the task's matter. Shapes: `B` batch, `D` embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from negchain import methods
from negchain.chunked import statistics_kept
from negchain.fast import encoder as fast_encoder
from negchain.fast.streams import forked, join, new_stream
from negchain.losses import ContrastiveLoss
from negchain.losses.request import Tower, Want
from negchain.tasks.task import Task

Towers = dict[Tower, fast_encoder.PlainEncoder]

MAIN_PRIORITY = -1  # of the graph's stream, above the weight gradients'
WARM_UP_STEPS = 3  # before capture: libraries initialise and allocate


def build_loss(task: Task, encoder: Any) -> ContrastiveLoss:
    """The loss module a task's settings name."""
    config = task.config
    method = methods.named(config.method)
    options = {**task.loss_options, **{name: getattr(config, name) for name in method.options}}
    options["augmentations"] = task.versions if task.versions > 1 else None
    settings = methods.LossSettings(
        task.num_samples,
        task.beta(encoder),
        encoder.embedding_dim,
        config.seed,
        config.denominator,
        options=options,
        layout=task.layout,
    )
    return method.build(settings)


class TrainStep:
    """A training step over a batch of positions.

    Args:
        task: on the training device.
        encoder: the task's, of one or two towers.
        loss_fn: on the training device.
        optimizer: over the encoder's parameters; capturable if the step is to be graphed.

    After a call `loss` holds the step's loss (a tensor on the device).
    """

    def __init__(
        self,
        task: Task,
        encoder: nn.Module,
        loss_fn: ContrastiveLoss,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.task = task
        self.encoder = encoder
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.autocast = task.autocast
        self.device = task.device
        size = task.config.batch_size
        self._inputs = torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        self.index, self.step = self._inputs[:size], self._inputs[size]  # [B], []
        self.loss = torch.zeros((), device=self.device)
        self.plain = self._towers(lambda tower: fast_encoder.PlainEncoder(tower, self.autocast))
        self.embed = self.plain
        self._one = torch.ones((), device=self.device)
        self._graph: tuple[torch.cuda.CUDAGraph, Any] | None = None  # and its numbers for `info`

    def _towers(self, make: Callable[[nn.Module], fast_encoder.PlainEncoder]) -> Towers:
        anchors, keys = self.task.towers(self.encoder)
        made = make(anchors)
        return {"anchors": made, "keys": made if keys is anchors else make(keys)}

    def __call__(self, step: int, index: Tensor, loaded: Any = None) -> None:
        """Run step number `step` on the positions `index`, [B]; `loaded`: of the task's stream."""
        number = torch.full((1,), step, dtype=torch.int64)
        self._inputs.copy_(torch.cat([index.cpu(), number]), non_blocking=True)
        if self._graph is None:
            self._run(loaded)
        else:
            graph, self.loss_fn._info = self._graph
            graph.replay()

    def capture(self, fast: fast_encoder.PlainEncoder | None = None) -> None:
        """Record the step as a CUDA graph; parameters and state end as they began.

        `fast` is the fast path of the one tower; None takes what `fast.encoder.accelerate` chooses.
        """
        kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._state()}
        made = self._towers(lambda tower: fast or fast_encoder.accelerate(tower, self.autocast))
        stream = new_stream(self.device)
        with forked(stream):
            # cuDNN times its algorithms for most shapes in the first step, with nothing beside.
            for _ in range(WARM_UP_STEPS):
                self._run(None)
                self.embed = made
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
        tensors += [*self.loss_fn.state_tensors(), *self.task.state_tensors()]
        held = [s for state in self.optimizer.state.values() for s in state.values()]
        return [*tensors, self.loss, *(t for t in held if isinstance(t, Tensor))]

    def _run(self, loaded: Any) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for tower in dict.fromkeys(self.embed.values()):
            tower.begin()
        loss = self._forward(loaded)
        torch.autograd.backward(loss, self._one)
        self.optimizer.step()  # several GPUs would first sum the gradients, all in `.grad` by now
        self.task.after_step(self.encoder)
        self.loss.copy_(loss.detach())

    def _forward(self, loaded: Any) -> Tensor:
        """The loss of the batch: what it asks for is encoded as the batch is."""
        loss_fn, index = self.loss_fn, self.index
        beta = self.task.beta(self.encoder)
        if isinstance(beta, Tensor) and not isinstance(beta, nn.Parameter):
            loss_fn.beta = beta  # computed from a parameter, with a graph of this step's own
        batch = self.task.batch(index, self.step)
        first = loss_fn.request(index, **batch.told)
        asked = self._items(first.wants)
        anchors, keys = Want(batch.anchors, "anchors"), Want(batch.keys, "keys")
        trained = [want for want in asked if want.gradient]
        drawn: list[Tensor] = []
        if self.task.one_pass or loss_fn.num_sides == 2:
            z_a, z_b, *answers = self._encode(self.embed, [anchors, keys, *trained], 0, loaded)
            second = loss_fn.request(index, z_a, z_b, **batch.told)
        else:  # only anchors draw: what they draw goes through the encoder with their positives
            (z_a,) = self._encode(self.embed, [anchors], 0, loaded)
            second = loss_fn.request(index, z_a, **batch.told)
            wants = [keys, *trained, *self._items(second.wants)]
            z_b, *answers = self._encode(self.embed, wants, len(index), loaded)
            answers, drawn = answers[: len(trained)], answers[len(trained) :]
        row = 2 * len(index) + _count(trained) + sum(map(len, drawn))
        self.task.watch(z_a, index)
        for position, want in enumerate(asked):
            if not want.gradient:
                answers.insert(position, self._renewed(want, row))
                row += len(want.ids)
        if second.wants:
            drawn = drawn or self._encode(self.embed, self._items(second.wants), row)
            second.answer(drawn)
        return loss_fn(z_a, z_b, index, first.answer(answers), second, **batch.told)

    def _items(self, wants: Sequence[Want]) -> list[Want]:
        """Wants by the task's ids; of a loss that names items only, the first version of each."""
        times = self.task.versions // self.loss_fn.ids_per_item
        return [w if times == 1 else w._replace(ids=w.ids * times) for w in wants]

    def _encode(
        self, towers: Towers, wants: Sequence[Want], row: int, loaded: Any = None
    ) -> list[Tensor]:
        """Embeddings of every want, in one pass or in one per tower; `row`: of the first draw."""
        found: dict[int, Tensor] = {}
        for side in ("anchors", "keys"):
            places = [n for n, want in enumerate(wants) if self.task.one_pass or want.tower == side]
            if not places or places[0] in found:
                continue
            mine = [wants[n] for n in places]
            z = towers[mine[0].tower](self.task.inputs(mine, self.step, row, loaded))
            parts = torch.split(z, [len(want.ids) for want in mine])
            found.update(zip(places, parts, strict=True))
            row += _count(mine)
        return [found[n] for n in range(len(wants))]

    def _renewed(self, want: Want, row: int) -> Tensor:
        """Embeddings for a stale table: made as the anchors' are, by the encoder as it trains.

        In a pass of its own without gradient, whose batch statistics leave running ones alone.
        """
        with torch.no_grad(), statistics_kept(self.encoder):
            return self._encode(self.plain, [want], row)[0]

    def fill(self, told: Callable[[int], None] = lambda done: None) -> None:
        """Fill the loss's stale tables, where it has any; `told` hears how many rows are done."""
        done = 0

        def encode(ids: Tensor, tower: Tower) -> Tensor:
            nonlocal done
            z = self._renewed(self._items([Want(ids, tower, gradient=False)])[0], 0)
            told(done := done + len(ids))
            return z

        self.loss_fn.fill((lambda ids: encode(ids, "anchors"), lambda ids: encode(ids, "keys")))


def _count(wants: Sequence[Want]) -> int:
    return sum(len(want.ids) for want in wants)
