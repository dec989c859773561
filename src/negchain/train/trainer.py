"""A training run from its config to its report: the loop, and what keeps it safe.

Order of events at a step: train, log, evaluate, checkpoint. A checkpoint therefore never lacks
metrics of its own step, and a run that is killed loses at most the steps since the last one.
Under torchrun every rank runs this loop. Rank 0 alone evaluates and writes (`team`). Whatever
decides how the loop goes on is known to all ranks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from negchain import tasks
from negchain.optim import load_optimizer, lr_at, set_lr
from negchain.printable import reason
from negchain.progress import Progress
from negchain.report import write_report
from negchain.tasks.task import Judge, Task, at_start
from negchain.train import checkpoint
from negchain.train import team as teams
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.order import DataOrder
from negchain.train.reading import Clock, Reading, logged
from negchain.train.run_folder import RunFolder, read_metrics
from negchain.train.step import TrainStep
from negchain.train.stopping import Diverged, Interrupted, stopping


@dataclass
class Run:
    """Everything a run works with; `start.prepare` builds it, `Run.train` runs it."""

    task: Task
    folder: RunFolder
    encoder: Any  # the task's, which is judged and written
    step: TrainStep
    order: DataOrder
    judge: Judge
    total_steps: int
    done: int = 0  # steps finished
    seconds: float = 0.0  # spent training, over all sessions of the run
    evaluated: bool = False  # the last line of metrics, that of the end, is written
    best: float | None = None  # score of the best encoder so far, which best.pt holds
    waited: int = 0  # evaluations since then
    notes: list[str] = field(default_factory=list)  # what the user should know
    stop: bool = False
    team: teams.Team = field(default_factory=teams.here)
    shards: Any = None  # `parallel.Shards`, where ranks train parts of the encoder
    config: TrainConfig = field(init=False)
    device: torch.device = field(init=False)
    _reading: Reading | None = None  # logged, but not yet read from the device

    def __post_init__(self) -> None:
        """Its settings and device are the task's."""
        self.config, self.device = self.task.config, self.task.device

    def train(self, progress: Progress) -> dict[str, Any]:
        """Train to the end, evaluate, write summary and report; returns the summary."""
        self.capture()
        with stopping(self), progress:
            self.judge.told = progress.within
            if self.done == 0:
                self._fill(progress)
            progress.begin(self.total_steps, "steps", done=self.done)
            baseline = self._before(progress)
            progress.begin(self.total_steps, "steps", "training", self.done)
            self._loop(progress)
            return self._on_rank_0(lambda: self._finish(progress, baseline))

    def capture(self) -> bool:
        """Record the step as a CUDA graph where it can be one; returns whether it was."""
        return graphed(self.task) and self.step.try_capture()

    def advance(self, index: Tensor, loaded: Any = None) -> None:
        """Make the next step, at its learning rate, on the positions `index` [B]."""
        set_lr(self.step.optimizer, self._lr(self.done))
        self.step(self.done, index, loaded)
        self.done += 1

    def _on_rank_0(self, work: Callable[[], teams.T]) -> teams.T:
        """Rank 0's work on the whole encoder."""
        if self.shards and not self.team.leading:
            work = self.shards.collected(self.step.optimizer, work)
        return self.team.on_rank_0(work)

    def _finish(self, progress: Progress, baseline: dict[str, float]) -> dict[str, Any]:
        progress.say("evaluating")
        best = self._back_to_best()
        final, answers = self.judge.thorough(self.encoder)
        if not self.evaluated:
            self._log(final)
            self._keep_best(final)
            self.evaluated = True
            self._save()
        progress.say("reporting")
        artifacts = self.judge.artifacts(self.encoder, self.step.loss_fn)
        self.folder.keep_arrays({**artifacts, **answers})
        samples = self.done * self.config.batch_size
        summary = {
            "step": self.done,
            "samples": samples,
            "seconds": self.seconds,
            "samples_per_second": samples / max(self.seconds, 1e-9),
            "loss": float(self.step.loss),
            "score": self.judge.score(final),
            "score_by": self.judge.score_by(final),
            **best,
            **baseline,
            **final,
        }
        self.task.finish(self.encoder, self.folder.path, summary)
        self.folder.write_summary(summary)
        self._page()
        return summary

    def _fill(self, progress: Progress) -> None:
        """Encode everything once, where the loss keeps a table of old embeddings."""
        total = sum(table.size for table in self.step.loss_fn.tables)
        if total:
            progress.begin(total, "encoded", "filling the table of old embeddings")

        def report(done: int) -> None:
            progress.at(done)
            if self.team.any(self.stop):
                raise Interrupted("before the first step")

        self.step.fill(report)

    def _before(self, progress: Progress) -> dict[str, float]:
        """Judge the encoder before the first step, once; returns what the result must beat."""
        line = self._on_rank_0(lambda: self._first_line(progress))
        if self.done == 0 and self.config.patience is not None:
            self._keep_best(line)  # so that what is kept is never worse than the start
            if self.judge.score(line) == -math.inf:
                raise ConfigError(
                    f"--patience needs a number to decide by: --task {self.config.task} gives "
                    f"neither {self.judge.best_by or 'best_by'} nor {tasks.EXACT}; leave it out"
                )
        return {} if line is None else self.judge.baselines(line)

    def _first_line(self, progress: Progress) -> Any:
        lines = read_metrics(self.folder.path)
        line: Any = next((line for line in lines if line["step"] == 0), None)
        if line is None and self.done == 0:
            progress.say("evaluating")
            line, answers = self.judge.before(self.encoder)
            self.folder.keep_arrays({**self.judge.previews(), **at_start(answers)})
            self._log(line)  # last: a run that has this line is not judged at its start again
            self._page()
        return line

    def _page(self) -> None:
        write_report([self.folder.path], self.folder.path / "report.html")

    def _loop(self, progress: Progress) -> None:
        config, batches, clock = self.config, self._batches(), Clock(self.done)
        while self.done < self.total_steps and not self._stale():
            self.advance(*next(batches))
            progress.at(self.done)
            last = self.done == self.total_steps
            apart = config.eval_every * self.order.steps_per_epoch, config.checkpoint_every
            evaluates, due = (n > 0 and self.done % n == 0 and not last for n in apart)
            if self.done % config.log_every == 0 or last:
                self._read(clock, progress)
                self._reading = Reading(self.step, self.done, self.task.watched)
            if last or evaluates or self.device.type != "cuda":
                self._read(clock, progress)
            if evaluates:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()  # so that queued steps count as training time
                self.seconds += clock.lap()
                progress.say("evaluating")
                self._evaluate()
                self.team.on_rank_0(self._page)
                progress.say("training")
                clock = Clock(self.done)
            # asked once a step: a signal that comes later ends the run after the next
            stopping = self.team.any(self.stop)
            if stopping or due:
                self._read(clock, progress)
                self.seconds += clock.lap()
                self._save()
                clock.lap()
            if stopping:
                raise Interrupted(f"after step {self.done} of {self.total_steps}")

    def _read(self, clock: Clock, progress: Progress) -> None:
        """Log the last reading. On a GPU that is done one interval later, so that nothing waits."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        loss, info = reading.numbers()
        self.seconds += clock.lap(reading.at)
        rate = clock.steps_per_second(reading.step, reading.at) * self.config.batch_size
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {reading.step}; lower --lr (now {self.config.lr:g}), "
                "raise --warmup-epochs, or use --precision float32"
            )
        self._log({"loss": loss, "samples_per_second": rate, **logged(info)}, reading.step)
        noun = tasks.named(self.config.task).noun
        progress.at(self.done, f"{rate:,.0f} {noun}/s, loss {loss:.3f}")

    def _evaluate(self) -> None:
        found = self._on_rank_0(lambda: self.judge.quick(self.encoder))
        self._log(found)
        self._keep_best(found)

    def _stale(self) -> bool:
        """With --patience: whether the last evaluations found nothing better."""
        return self.config.patience is not None and self.waited >= self.config.patience

    def _back_to_best(self) -> dict[str, int]:
        """With --patience: load the best encoder (checkpoints keep the last); returns its step."""
        if self.config.patience is None:
            return {}
        if not self.evaluated:
            if not self._stale():
                self._evaluate()
            self.evaluated = True
            self._save()
        best = checkpoint.load_named(self.folder.checkpoints, "best")
        self.encoder.load_state_dict(best.state["encoder"])
        return {"best_step": best.step}

    def _batches(self) -> Iterator[tuple[Tensor, Any]]:
        """Positions, and what is loaded for them unless the device has it, from `done` on."""
        if self.task.resident:
            for step in range(self.done, self.total_steps):
                yield self.order.batch(step), None
            return
        while True:
            epoch = self.order.epoch(self.done) + 1
            end = min(self.total_steps, epoch * self.order.steps_per_epoch)
            positions = torch.stack([self.order.batch(step) for step in range(self.done, end)])
            loaded = self.task.load_ahead(positions[:, self.step.rows])
            yield from zip(positions, loaded, strict=True)

    def _lr(self, step: int) -> float:
        warm_up = int(self.config.warmup_epochs * self.order.steps_per_epoch)
        if self.config.steps is not None:
            warm_up = min(warm_up, self.total_steps // 10)
        return lr_at(step, self.total_steps, warm_up, self.config.lr)

    def _log(self, numbers: dict[str, float], step: int | None = None) -> None:
        if not self.team.leads:
            return
        step = self.done if step is None else step
        self.folder.log(
            {
                "step": step,
                "epoch": step / self.order.steps_per_epoch,
                "samples": step * self.config.batch_size,
                "seconds": self.seconds,
                "lr": self._lr(step),
                **numbers,
            }
        )

    def _save(self) -> None:
        """Write a checkpoint; no rank goes on before it is on the disk."""
        self._on_rank_0(self._write)

    def _write(self) -> None:
        self.folder.sync()
        state = {
            "step": self.done,
            "seconds": self.seconds,
            "fingerprint": self.task.fingerprint,
            **self._weights(),
            "loss": self.step.loss_fn.state_dict(),
            "optimizer": self.shards.moments if self.shards else self.step.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            "last_loss": float(self.step.loss),
            "evaluated": self.evaluated,
            "best": self.best,
            "task": self.task.state_tensors(),
            "waited": self.waited,
        }
        checkpoint.save(self.folder.checkpoints, state, self.done, self.config.keep_checkpoints)

    def _weights(self) -> dict[str, Any]:
        described = dict(self.encoder.encoder_config)
        return {"encoder_config": described, "encoder": self.encoder.state_dict()}

    def _keep_best(self, numbers: dict[str, float]) -> None:
        """Keep the encoder if it is the best so far."""
        score = self.judge.score(numbers)
        self.waited += 1
        if score > (-math.inf if self.best is None else self.best):
            self.best, self.waited = score, 0
            if self.team.leads:
                checkpoint.save_best(self.folder.checkpoints, self._weights(), self.done)

    def restore(self) -> None:
        """Continue from the newest whole checkpoint; `notes` says from which."""
        loaded = checkpoint.load_latest(self.folder.checkpoints)
        self.team.same("checkpoint", -1 if loaded is None else loaded.step)
        if loaded is None:
            self.folder.truncate_after(0)
            self.notes.append("no checkpoint was written yet: starting from the first step")
            return
        try:
            self._restore(loaded)
        except ConfigError:  # no checkpoint would do
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the checkpoint of step {loaded.step} in {self.folder.checkpoints} does not fit "
                f"this run ({reason(error)}); delete it to continue from the one before"
            ) from error

    def _restore(self, loaded: checkpoint.Loaded) -> None:
        state = loaded.state
        if state["fingerprint"] != self.task.fingerprint:
            raise ConfigError(
                f"the checkpoint was made on another data set ({state['fingerprint']}) than --data "
                f"holds now ({self.task.fingerprint}): files were added, removed or resized, or "
                "--resident-gb keeps them at another size; restore what was, or start a new run in "
                f"another --out (--pretrained {self.folder.path}, where the data take it, keeps "
                "the encoder)"
            )
        if self.shards:
            self.shards.load(state["encoder"], self.step.optimizer, state["optimizer"])
        else:
            self.encoder.load_state_dict(state["encoder"])
            load_optimizer(self.step.optimizer, state["optimizer"])
        self.step.loss_fn.load_state_dict(state["loss"])
        for tensor, saved in zip(self.task.state_tensors(), state["task"], strict=True):
            tensor.copy_(saved)
        if self.team.leads:  # the others' dropout begins anew, by their seeds
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda_rng"])
        self.done, self.seconds = loaded.step, float(state["seconds"])
        self.best, self.waited = state["best"], int(state["waited"])
        over = self.done >= self.total_steps or self._stale()
        self.evaluated = bool(state["evaluated"]) and over
        self.step.loss.fill_(state["last_loss"])
        self.folder.truncate_after(loaded.step)
        self.notes.append(f"continuing after step {self.done} of {self.total_steps}")
        self.notes += loaded.warnings


def graphed(task: Task) -> bool:
    """Whether the steps of a task are to be a CUDA graph."""
    return task.config.graph and task.device.type == "cuda" and task.capturable
