"""Training runs through the trainer, evaluated on the way: the only file here that uses it."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from negchain.bench.runs import prepared as vanishing
from negchain.bench.runs import stepper
from negchain.bench.timing import Timed, milliseconds
from negchain.data import DataBundle
from negchain.reproduce.common import Row, tell
from negchain.tasks.images import load_images
from negchain.train import trainer
from negchain.train.config import TrainConfig
from negchain.train.resolve import for_method, resolve

POINTS = (0.125, 0.25, 0.5, 0.75, 1.0)  # of a run, where it is evaluated
CHAINS = ("acceptance_rate", "carried_mass", "chain_age", "effective_negatives")
_loaded: dict[tuple[Any, ...], DataBundle] = {}


def train(job: Row, deadline: float) -> Row:
    """Train as a job says and measure at `POINTS`: 1-NN, linear probe, exact loss.

    A job holds `settings` (of `negchain.train.config.TrainConfig`, with `preset`), `method`,
    `seed`, perhaps `points`, and perhaps `chain`: then the chains have the paper's R = 2b - 2
    proposals (both copies of every other item), of which P = `burn_in` are discarded.
    """
    with prepared(job) as (run, graph):
        at = {max(1, round(share * run.total_steps)) for share in job.get("points", POINTS)}
        curve, seconds, begin = [], 0.0, time.perf_counter()
        late = False
        while run.done < run.total_steps and not late:
            run.advance(run.order.batch(run.done))
            tell(run.done / run.total_steps)
            late = time.time() > deadline
            if run.done in at or late:
                loss = float(run.step.loss)  # waits for the device
                seconds += time.perf_counter() - begin
                samples = run.done * run.config.batch_size
                point = {"step": run.done, "samples": samples, "seconds": seconds, "loss": loss}
                judge, last = run.judge, run.done == run.total_steps
                # at the end with the authors' probe too
                point |= judge.thorough(run.encoder)[0] if last else judge.quick(run.encoder)
                info = run.step.loss_fn.info
                curve.append(point | {name: float(info[name]) for name in CHAINS if name in info})
                begin = time.perf_counter()
        shown = {k: v for k, v in vars(run.config).items() if v is not None and k != "out"}
        images = run.task.num_samples
    config = {**shown, "data": Path(str(shown["data"])).name, "images": images, "graph": graph}
    return {"complete": run.done == run.total_steps, "curve": curve, "config": config}


def time_steps(job: Row, steps: int) -> Row:
    """Milliseconds of a training step, after a warm-up."""
    with prepared(job) as (run, graph):
        timed = Timed(stepper(run), run.device)
        times = [milliseconds(timed, steps) for _ in range(6)]
        return {"ms": sorted(times[1:]), "images": run.task.num_samples, "graph": graph}


def peak_memory(job: Row) -> Row:
    """The most memory that a run's tensors take during its first steps.

    On a CPU by the profiler's list of what is allocated and freed, pictures not counted. On a GPU
    by its allocator, pictures counted, less what earlier runs of the process left (libraries'
    workspaces, it seems).
    """
    config = config_of(job)
    images_of(config)  # they are no memory of the run's
    if torch.cuda.is_available() and config.device != "cpu":
        gc.collect()  # the run before refers to itself
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()  # here: a graph allocates while it is captured only
        with prepared(job) as (run, _):
            _steps(run)
            peak = torch.cuda.max_memory_allocated() - held
            images = run.task.num_samples
        return {"peak_bytes": peak, "images": images, "device": torch.cuda.get_device_name()}
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes about itself
    cpu = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True)
    with profiler as profile:
        with prepared(job) as (run, _), torch.profiler.record_function("first steps"):
            _steps(run)
            images = run.task.num_samples
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = next(event.start_ns() for event in events if event.name() == "first steps")
    peak = held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held) if event.start_ns() >= begin else peak
    return {"peak_bytes": peak, "images": images, "device": "CPU"}


def _steps(run: trainer.Run) -> None:
    """Three: the optimizer has its state after the first."""
    for step in range(3):
        run.step(step, run.order.batch(step))


@contextmanager
def prepared(job: Row) -> Iterator[tuple[Any, bool]]:
    """A run ready for its first step, and whether its step is a CUDA graph."""
    config = config_of(job)
    loaded = images_of(config)
    if torch.cuda.is_available():
        torch.compiler.reset()  # else the compiler takes each run's encoder for a variant
        gc.collect()
    with vanishing(config, loaded) as run:
        graph = run.capture()
        run.step.fill()
        yield run, graph


def images_of(config: TrainConfig) -> DataBundle:
    """The pictures of a run; those of the last one are kept."""
    key = (config.data, config.image_size, config.subset)
    if key not in _loaded:
        _loaded.clear()
        _loaded[key] = load_images(config)
    return _loaded[key]


def config_of(job: Row) -> TrainConfig:
    """The settings of a job's run."""
    settings = {"eval_every": 0, "checkpoint_every": 0, **job["settings"]}
    method = job["method"]
    known = for_method(method, settings)
    config = resolve(None, {**known, "method": method, "seed": job["seed"]})
    if "chain" in job:
        share = job["chain"]["burn_in"] / (2 * config.batch_size - 2)
        config = replace(config, proposal="both", burn_in=share)
    return config
