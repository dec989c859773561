"""One training step: positions in, parameters changed; eager, or replayed as a CUDA graph.

    positions -> inputs of anchors and keys (+ carried or drawn negatives) -> towers -> loss
              -> backward -> optimizer

Every random number of step t is a function of (seed, t), every input a tensor that stays where it
is, and nothing asks the device for a value: so the whole step can be captured once and replayed,
and a resumed run repeats what an uninterrupted one would have done.

The task knows what a position is and what a tower takes.

Several ranks share a step: each encodes its rows of the batch and its share of what the loss asks
for, with the draws one process would use for them; the loss gathers by itself. Gradients are
averaged in one all-reduce between the backward pass and the optimizer, not by DDP: a step may be
several passes through several towers, with copies of the weights, recorded as a CUDA graph, which
DDP's hooks do not fit, while all gradients are in `.grad` here whatever made them.

Shapes: `B` batch of all ranks, `D` embedding.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from negchain import methods
from negchain.chunked import STATISTICS, statistics_kept
from negchain.fast import encoder as fast_encoder
from negchain.fast.streams import forked, join, new_stream
from negchain.losses import ContrastiveLoss
from negchain.losses.distributed import Ranks, joined_rows
from negchain.losses.request import Request, Tower, Want
from negchain.printable import reason
from negchain.tasks.task import Task

Towers = dict[Tower, fast_encoder.PlainEncoder]

MAIN_PRIORITY = -1  # of the graph's CUDA stream, above the weight gradients'
WARM_UP_STEPS = 3  # before capture: libraries initialise and allocate
FILLED = 256  # rows of a table that one process fills at a time


class Share(NamedTuple):
    """What this rank encodes of a want of all ranks."""

    want: Want
    size: int  # ids of all ranks
    places: Tensor | None = None  # [R] of this rank's among them; None: it is alone


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
    loss_fn = method.build(settings)
    if task.key_counts is not None:
        loss_fn.give_key_counts(task.key_counts)
    return loss_fn


class TrainStep:
    """A training step over a batch of positions; after a call `loss` holds its loss.

    All is on the training device. The optimizer is capturable if the step is to be graphed.
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
        # BatchNorm tells a pass of draws from one of pairs: they would be negatives for that alone
        self.seen_together = any(isinstance(m, STATISTICS) for m in encoder.modules())
        size = task.config.batch_size
        self._inputs = torch.zeros(size + 1, dtype=torch.int64, device=self.device)
        self.index, self.step = self._inputs[:size], self._inputs[size]  # [B], []
        self.ranks = loss_fn.ranks()
        rank, world = (0, 1) if self.ranks is None else (self.ranks.rank, self.ranks.world)
        bounds = [size * r // world for r in range(world + 1)]  # of every rank's rows
        self._counts = [end - begin for begin, end in itertools.pairwise(bounds)]
        self.rows = slice(bounds[rank], bounds[rank + 1])
        own = torch.arange(self.rows.start, self.rows.stop, device=self.device)
        self._places = None if self.ranks is None else own  # of this rank's rows in the batch
        self.loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.plain = self._towers(fast_encoder.PlainEncoder)
        self.embed = self.plain
        self._one = torch.ones((), device=self.device)
        self._graph: tuple[torch.cuda.CUDAGraph, Any] | None = None  # and its numbers for `info`
        self._forget_beta()

    def _towers(self, make: Callable[..., fast_encoder.PlainEncoder]) -> Towers:
        anchors, keys = self.task.towers(self.encoder)
        made = make(anchors, self.autocast)
        return {"anchors": made, "keys": made if keys is anchors else make(keys, self.autocast)}

    def __call__(self, step: int, index: Tensor, loaded: Any = None) -> None:
        """Run step number `step` on the positions `index`, [B]; `loaded`: by the task, ahead."""
        number = torch.full((1,), step, dtype=torch.int64)
        self._inputs.copy_(torch.cat([index.cpu(), number]), non_blocking=True)
        if self._graph is None:
            self._run(loaded)
        else:
            graph, self.loss_fn._info = self._graph
            graph.replay()

    def try_capture(self) -> bool:
        """`capture`, or warn that this step cannot be recorded; returns whether it was.

        The task is told as well (`capturable`): it need not keep to one shape then.
        """
        try:
            self.capture()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.task.capturable = False
            warnings.warn(
                "the step is no CUDA graph but runs operation by operation, more slowly: "
                f"{reason(error)}",
                stacklevel=2,
            )
            return False
        return True

    def capture(self) -> None:
        """Record the step as a CUDA graph; parameters and state end as they began.

        Where an operation cannot be recorded torch says so in a RuntimeError, and steps go on
        as before.
        """
        kept = {id(tensor): (tensor, tensor.detach().clone()) for tensor in self._state()}
        dropout = torch.cuda.get_rng_state(self.device)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        spare = generator.clone_state()  # type: ignore[no-untyped-call]
        try:
            self._graph = self._recorded()
        except RuntimeError:
            generator.graphsafe_set_state(spare)  # its own believes that it is being recorded
            self.embed = self.plain
            raise
        finally:
            torch.cuda.set_rng_state(dropout, self.device)
            with torch.no_grad():
                for tensor, value in kept.values():
                    tensor.copy_(value)
                for tensor in self._state():
                    if id(tensor) not in kept:
                        tensor.zero_()  # optimizer state of the warm-up: zero is where it begins

    def _recorded(self) -> tuple[torch.cuda.CUDAGraph, Any]:
        made = self._towers(fast_encoder.accelerate)
        side = new_stream(self.device)
        with forked(side), warnings.catch_warnings():
            # torch warns where autograd's thread makes its CUDA context, which is harmless
            warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
            # cuDNN times its algorithms for most shapes in the first step, with nothing beside.
            for _ in range(WARM_UP_STEPS):
                self._run(None)
                self.embed = made
        join(side)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog may ask the device while this thread records
        mode = "global" if self.ranks is None else "thread_local"
        main = new_stream(self.device, MAIN_PRIORITY)
        with torch.cuda.graph(graph, stream=main, capture_error_mode=mode):
            self._run(None)
        return graph, self.loss_fn._info

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
        torch.autograd.backward(loss, self._one.to(loss.dtype))
        self._forget_beta()
        if self.ranks is not None:
            self._average(self.ranks)
        self.optimizer.step()
        self.task.after_step(self.encoder)
        self.loss.copy_(loss.detach())

    def _forget_beta(self) -> None:
        """Drop the autograd graph of a computed beta: it belongs to the step that made it."""
        if isinstance(self.loss_fn.beta, Tensor) and self.loss_fn.beta.grad_fn is not None:
            self.loss_fn.beta = self.loss_fn.beta.detach()

    def _average(self, ranks: Ranks) -> None:
        """Gradients become their mean over the ranks: that of one process on the whole batch."""
        held = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        grads = [grad for grad in held if type(grad) is Tensor]  # FSDP has averaged the others
        if not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=ranks.group)
        means = torch.split(flat.div_(ranks.world), [grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))

    def _forward(self, loaded: Any) -> Tensor:
        """The loss of the batch: what it asks for is encoded as the batch is."""
        loss_fn = self.loss_fn
        beta = self.task.beta(self.encoder)
        if isinstance(beta, Tensor) and not isinstance(beta, nn.Parameter):
            loss_fn.beta = beta  # computed from a parameter, with a graph of this step's own
        whole = self.task.batch(self.index, self.step)
        told = {name: _rows_of(value, self.rows) for name, value in whole.told.items()}
        index = self.index[self.rows]
        first = loss_fn.request(index, **told)
        asked = self._shares(first)
        anchors = self._of_batch(whole.anchors, "anchors")
        keys = self._of_batch(whole.keys, "keys")
        trained = [share for share in asked if share.want.gradient]
        encoded = [anchors, keys, *trained]
        both_draw = self.task.one_pass or loss_fn.num_sides == 2
        if both_draw and self.seen_together and loss_fn.tables:
            second = loss_fn.request(index, *self._seen(anchors, keys, loaded), **told)
            encoded += self._shares(second)
            z_a, z_b, *answers = self._encode(self.embed, encoded, 0, loaded)
        elif both_draw:
            z_a, z_b, *answers = self._encode(self.embed, encoded, 0, loaded)
            second = loss_fn.request(index, z_a, z_b, **told)
        else:  # only anchors draw: what they draw goes through the encoder with their positives
            (z_a,) = self._encode(self.embed, [anchors], 0, loaded)
            second = loss_fn.request(index, z_a, **told)
            encoded += self._shares(second)
            z_b, *answers = self._encode(self.embed, encoded[1:], anchors.size, loaded)
        answers, drawn = answers[: len(trained)], answers[len(trained) :]
        row = sum(share.size for share in encoded)
        if self.ranks is None:
            self.task.watch(z_a.detach(), self.index)
        elif self.task.state_tensors():
            self.task.watch(joined_rows(z_a.detach(), self._counts, self.ranks), self.index)
        for position, share in enumerate(asked):
            if not share.want.gradient:
                answers.insert(position, self._renewed(share, row))
                row += share.size
        if second.wants:
            drawn = drawn or self._encode(self.embed, self._shares(second), row)
            second.answer(drawn)
        return loss_fn(z_a, z_b, index, first.answer(answers), second, **told)

    def _seen(self, anchors: Share, keys: Share, loaded: Any) -> list[Tensor]:
        """Embeddings that say what to draw; the same random numbers train right after."""
        with torch.no_grad(), statistics_kept(self.encoder):
            return self._encode(self.plain, [anchors, keys], 0, loaded)

    def _of_batch(self, ids: Tensor, tower: Tower) -> Share:
        """This rank's rows of the batch."""
        return Share(Want(ids[self.rows], tower), len(ids), self._places)

    def _shares(self, request: Request) -> list[Share]:
        """This rank's of what a loss asks for."""
        found, size = [], len(self.index)
        for part, want in zip(request.parts, self._items(request.wants), strict=True):
            count = len(want.ids)
            if self.ranks is None or self._places is None:
                found.append(Share(want, count))
            elif part.whole is not None:
                places = torch.arange(count, device=self.device) + self.ranks.rank * count
                found.append(Share(want, part.whole.numel(), places))
            else:  # so many of every row of the batch
                copies = torch.arange(part.per_row, device=self.device)[:, None] * size
                places = (copies + self._places).flatten()
                found.append(Share(want, part.per_row * size, places))
        return found

    def _items(self, wants: Sequence[Want]) -> list[Want]:
        """Wants by the task's ids; of a loss that names items only, the first version of each."""
        times = self.task.versions // self.loss_fn.ids_per_item
        return [w if times == 1 else w._replace(ids=w.ids * times) for w in wants]

    def _encode(
        self, towers: Towers, shares: Sequence[Share], row: int, loaded: Any = None
    ) -> list[Tensor]:
        """Embeddings of every want, in one pass or in one per tower; `row`: of the first draw.

        Rows are numbered in the order of `shares`, so that what is asked for later moves none.
        """
        found: dict[int, Tensor] = {}
        begins = list(itertools.accumulate((share.size for share in shares), initial=row))
        for side in ("anchors", "keys"):
            at = [n for n, s in enumerate(shares) if self.task.one_pass or s.want.tower == side]
            if not at or at[0] in found:
                continue
            wants = [shares[n].want for n in at]
            numbers: int | Tensor = begins[at[0]]
            if self.ranks is not None or at[-1] - at[0] >= len(at):  # not one after the other
                numbers = torch.cat([begins[n] + self._own_rows(shares[n]) for n in at])
            z = towers[wants[0].tower](self.task.inputs(wants, self.step, numbers, loaded))
            parts = torch.split(z, [len(want.ids) for want in wants])
            found.update(zip(at, parts, strict=True))
        return [found[n] for n in range(len(shares))]

    def _own_rows(self, share: Share) -> Tensor:
        """Places [R] of this rank's ids among those of all ranks."""
        return (
            torch.arange(share.size, device=self.device) if share.places is None else share.places
        )

    def _renewed(self, share: Share, row: int) -> Tensor:
        """Embeddings for a stale table: made as the anchors' are, by the encoder as it trains.

        In a pass of its own without gradient, whose batch statistics leave running ones alone.
        """
        count = len(share.want.ids)
        if share.size == 1 and count:  # BatchNorm refuses a batch of one pixel
            twice = share.want._replace(ids=share.want.ids.repeat(2))
            places = None if share.places is None else torch.arange(2, device=self.device)
            share = Share(twice, 2, places)
        with torch.no_grad(), statistics_kept(self.encoder):
            return self._encode(self.plain, [share], row)[0][:count]

    def fill(self, report: Callable[[int], None] = lambda done: None) -> None:
        """Fill the loss's stale tables, if it has any; `report` gets the number of rows done."""
        done = 0

        def encode(ids: Tensor, tower: Tower) -> Tensor:
            nonlocal done
            (want,) = self._items([Want(ids, tower, gradient=False)])
            places, tables = None, self.loss_fn.tables
            if tables and self.ranks is not None:  # as one process numbers them
                places = tables[0].order.places(ids) % FILLED
            z = self._renewed(Share(want, len(ids), places), 0)
            report(done := done + len(ids) * (1 if self.ranks is None else self.ranks.world))
            return z

        towers = (lambda ids: encode(ids, "anchors")), (lambda ids: encode(ids, "keys"))
        self.loss_fn.fill(towers, FILLED)


def _rows_of(value: Any, rows: slice) -> Any:
    """Some rows of an argument of the loss: a tensor, or several."""
    return tuple(part[rows] for part in value) if isinstance(value, tuple) else value[rows]
