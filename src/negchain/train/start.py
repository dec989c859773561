"""How a run begins: `start` makes a new one, `resume` takes up the one in a folder.

Both end in a `trainer.Run` that is ready for its next step; its `notes` are for the user.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from negchain import tasks
from negchain.files import read_object
from negchain.machine import provenance
from negchain.optim import build_optimizer
from negchain.tasks.task import Task, autocast_dtype
from negchain.train import checkpoint, loggers, trainer
from negchain.train.config import ConfigError, TrainConfig
from negchain.train.order import DataOrder
from negchain.train.resolve import choose_device
from negchain.train.run_folder import (
    RUNS,
    RunFolder,
    check_writable,
    default_out,
    load_run_config,
    refuse_taken,
)
from negchain.train.step import TrainStep, build_loss
from negchain.train.team import here


def start(
    config: TrainConfig, show: bool, augment: Callable[[Tensor], Tensor] | None = None
) -> trainer.Run:
    """A new run, ready for its first step; for `augment` see `negchain.train.run`."""
    team = here()
    out = None if config.out is None else Path(config.out)
    if team.leads:
        check_writable(out or RUNS)
        if out is not None:
            refuse_taken(out)
    loggers.check(config.logger)
    task = load(config, show)
    if augment is not None:
        task.augment_by(augment)
    text = json.dumps(record(task), indent=2) + "\n"

    def folder() -> RunFolder:
        name = config.name or config.method
        new = out or default_out(method=name, data=config.data, seed=config.seed)
        return RunFolder.create(new, config=text)

    return prepare(task, folder)


def resume(path: Path, config: TrainConfig, show: bool, pretrained: bool) -> trainer.Run:
    """The run of a folder, ready to go on after its newest checkpoint.

    `config`: its settings, `continued` by the user's. `pretrained`: whether the user, and not only
    the folder, named --pretrained.
    """
    saved = load_run_config(path)
    loggers.check(config.logger)
    size = checkpoint.largest(path / "checkpoints")
    _refuse_foreign(path, config, size, pretrained)
    task = load(config, show)
    run = prepare(task, lambda: RunFolder.resume(path), fresh=size is None)
    try:
        run.restore()
        if (config.epochs, config.steps) != (saved.epochs, saved.steps):
            was = saved.steps or saved.epochs * run.order.steps_per_epoch
            run.notes.append(
                f"extended from {was:,} to {run.total_steps:,} steps: from here on the learning "
                "rate follows the longer schedule"
            )
            known = read_object(path / "config.json")
            known |= {"epochs": config.epochs, "steps": config.steps}
            if run.team.leads:
                run.folder.rewrite_config(json.dumps(known, indent=2) + "\n")
        return run
    except BaseException:
        run.folder.close()
        raise


def _refuse_foreign(path: Path, config: TrainConfig, size: int | None, pretrained: bool) -> None:
    """Refuse what a folder may not ask for by itself: others may have prepared it.

    `size`: bytes of its largest checkpoint; None: it has none. `pretrained`: as above.
    """
    if size is not None:
        encoder = {"name": config.encoder, "channels": 1, "image_size": config.image_size or 224}
        try:
            tasks.named(config.task).fits(encoder, size)
        except ValueError as error:
            raise ConfigError(
                f"the checkpoints in {path} cannot be of the encoder its config.json names "
                f"({error}); restore the file, or start a new run"
            ) from None
    elif config.pretrained is not None and not pretrained:
        raise ConfigError(  # what a file says is never fetched
            "no checkpoint was written yet, and the run starts from --pretrained "
            f"{config.pretrained}; give --pretrained again, or start a new run"
        )
    known = read_object(path / "config.json").get("data_info")
    if isinstance(known, dict) and (own := known.get("augment")):
        raise ConfigError(
            f"the run in {path} augments by a function of Python ({own}), which the command line "
            "does not have; start it again with negchain.train.run(augment=...)"
        )


def prepare(task: Task, open_folder: Callable[[], RunFolder], fresh: bool = True) -> trainer.Run:
    """Build everything a run needs on its device; nothing is trained yet.

    The folder is opened last, so that a refusal leaves none behind. Unless the run is `fresh`, its
    weights come from a checkpoint and not from `--pretrained`.
    """
    config = task.config
    device, team = choose_device(config.device), here()
    _check_ranks(config, device)
    team.same("data set", task.fingerprint)
    torch.manual_seed(config.seed)
    order = DataOrder(task.num_samples, config.batch_size, config.seed)
    task.place(device)
    encoder, chosen = task.build()
    notes = [*task.notes, *chosen]
    task.capturable = not team.any(not task.capturable)  # GPUs may differ in memory
    if fresh and config.pretrained is not None:
        notes.append(task.start_from(encoder, config.pretrained))
    if config.precision == "float64":
        _in_double(encoder)
    loss_fn = build_loss(task, encoder).to(device)
    loss_fn.check_batch_size(config.batch_size)
    joint, shards = 0, None
    if team.world > 1:
        from negchain.train.parallel import Shards, join_norms  # FSDP2 takes time to import

        joint = join_norms(encoder)
        if config.shard_encoder:
            shards = Shards(encoder, task.towers(encoder), team, device)
    if trainer.graphed(task) and (shards or joint or config.batch_size % team.world):
        task.capturable = False
        notes.append("ranks with BatchNorm, uneven batches or parts: steps are no CUDA graph")
    if trainer.graphed(task) and team.world > 1:
        loss_fn.gather = "even"
    optimizer = build_optimizer(
        encoder, config.optimizer, lr=config.lr, weight_decay=config.weight_decay,
        momentum=config.momentum, capturable=trainer.graphed(task),
    )  # fmt: skip
    step = TrainStep(task, encoder, loss_fn, optimizer)
    total = config.steps or config.epochs * order.steps_per_epoch
    if team.world > 1:
        torch.manual_seed(config.seed + team.rank)  # dropout, if any, differs between ranks
    opened = open_folder() if team.leads else None
    path = team.on_rank_0(lambda: opened and opened.path)
    folder = opened or RunFolder(Path(path or ""), None)
    folder.logger_settings = config
    whole = shards.whole if shards else encoder
    judge = task.judge()
    return trainer.Run(task, folder, whole, step, order, judge, total, notes=notes, shards=shards)


def _check_ranks(config: TrainConfig, device: torch.device) -> None:
    """Refuse more ranks than a batch has samples, and more on a machine than it has GPUs."""
    world = here().world
    if config.batch_size < world:
        raise ConfigError(
            f"--batch-size {config.batch_size} is shared by {world} processes and must give each "
            "a sample; raise it, or lower --nproc-per-node"
        )
    if world == 1 or device.type != "cuda":
        return
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if ranks > gpus:
        raise ConfigError(
            f"every rank needs a GPU of its own, and torchrun started {ranks} on a machine with "
            f"{gpus}; lower --nproc-per-node or use --device cpu"
        )


def _in_double(encoder: nn.Module) -> None:
    """Let an encoder compute in float64: it, and each of its parts, widens what it is given."""

    def wider(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            g.double() if isinstance(g, Tensor) and g.is_floating_point() else g for g in given
        )

    for module in encoder.double().modules():
        module.register_forward_pre_hook(wider)


def load(config: TrainConfig, show: bool) -> Task:
    """The task of the settings; what is fetched is fetched by rank 0, before the others look."""
    team = here()
    if config.download and team.world > 1:
        team.on_rank_0(lambda: tasks.load(config, show) and None)
    return tasks.load(config, show and team.leads)


def record(task: Task) -> dict[str, Any]:
    """config.json: what was asked for, and what it ran on."""
    data = {
        "num_samples": task.num_samples,
        **task.info(),
        "skipped": [list(pair) for pair in task.skipped],
        "fingerprint": task.fingerprint,
        "notes": list(task.notes),
    }
    device = choose_device(task.config.device)
    ran = provenance(device)
    if autocast_dtype(task.config, device) is not None:  # --precision auto does not say
        ran["hardware"] += ", in bf16"
    return {**asdict(task.config), **ran, "data_info": data}
