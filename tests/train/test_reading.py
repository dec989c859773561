"""Numbers of a step on their way to the log: the same lines in the same order, read late or not."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from negchain import EMC2Loss, InfoNCELoss
from negchain.progress import Progress
from negchain.tasks.images import ImageTask, load_images
from negchain.train import checkpoint, reading, start, trainer
from negchain.train.config import TrainConfig
from negchain.train.reading import Clock, Reading
from negchain.train.resolve import resolve
from negchain.train.run_folder import RunFolder, read_metrics
from negchain.train.step import TrainStep

CLOCK = ("seconds", "samples_per_second")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------- numbers of a loss


def called(loss_fn: Any) -> Any:
    loss_fn(normal(6, 5), normal(6, 5, seed=1), torch.arange(6), encode=held)
    return loss_fn


def held(ids: torch.Tensor) -> torch.Tensor:
    return normal(len(ids), 5, seed=9)


def infonce() -> InfoNCELoss:
    return InfoNCELoss(20, 5.0)


def emc2() -> EMC2Loss:
    return EMC2Loss(20, 5.0)


@pytest.mark.parametrize("make", [infonce, emc2])
def test_what_is_taken_and_read_is_info(make) -> None:
    loss_fn, twin = called(make()), called(make())
    names, values = loss_fn.take_info()
    assert values.ndim == 1 and len(values) == len(names) + 3
    found, expected = loss_fn.read_info(names, values.tolist()), twin.info
    assert found == expected and "effective_negatives" in found
    assert "global_loss_low" in found
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    for name, value in twin._info.items():  # not torch's rounding of a stack
        assert found[name] == float(value())
    assert make().info == {"nonfinite_rows": 0.0, "rows_without_negatives": 0.0}


def test_reading_numbers_changes_none() -> None:
    loss_fn = called(infonce())
    loss_fn.faults += torch.tensor([3, 0, 0])
    names, values = loss_fn.take_info()
    loss_fn.faults += torch.tensor([4, 0, 1])  # those of a later step
    assert loss_fn.read_info(names, values.tolist())["nonfinite_rows"] == 3.0
    for _ in range(2):
        assert loss_fn.info["nonfinite_rows"] == 7.0
        assert loss_fn.info["rows_without_negatives"] == 1.0
    loss_fn.faults += torch.tensor([0, 2, 0])
    for _ in range(2):
        with pytest.raises(ValueError, match="below 20, but 2 did not"):
            _ = loss_fn.info


def test_a_reading_keeps_its_steps_numbers() -> None:
    loss_fn = called(emc2())
    step: Any = SimpleNamespace(loss_fn=loss_fn, loss=torch.tensor(1.25))
    expected = called(emc2()).info
    taken = Reading(step, 7, {"online_probe": torch.tensor(0.5)})
    step.loss.fill_(math.nan)
    loss_fn.faults += 5
    loss_fn(normal(6, 5, seed=2), normal(6, 5, seed=3), torch.arange(6, 12), encode=held)
    assert taken.step == 7
    assert taken.numbers() == (1.25, {**expected, "online_probe": 0.5})
    step.loss.fill_(math.nan)
    loss_fn.faults.zero_()
    assert math.isnan(Reading(step, 8).numbers()[0])


def test_faults_of_a_reading_raise() -> None:
    loss_fn = called(infonce())
    loss_fn.faults += torch.tensor([0, 1, 0])
    taken = Reading(SimpleNamespace(loss_fn=loss_fn, loss=torch.tensor(1.0)), 1)
    with pytest.raises(ValueError, match="but 1 did not"):
        taken.numbers()


def test_clock(monkeypatch) -> None:
    now = SimpleNamespace(perf_counter=lambda: now.at, at=100.0)
    monkeypatch.setattr(reading, "time", now)
    clock = Clock(10)
    now.at = 104.0
    assert clock.lap() == 4.0 and clock.steps_per_second(30, now.at) == 5.0
    now.at = 110.0
    assert clock.steps_per_second(30, 104.0) == 5.0  # whatever came since
    assert clock.lap() == 6.0 and clock.lap() == 0.0
    assert clock.steps_per_second(60, now.at) == 5.0
    assert Clock(0).steps_per_second(1, now.at) > 0  # no division by zero


# --------------------------------------------------------------------------------- lines of a run

STEPS, EPOCH = 23, 6  # 48 images, 8 a batch
SETTINGS = {"log_every": 4, "eval_every": 1, "checkpoint_every": 9}
Event = tuple[str, int]


class Judge:
    """Says at once what it is asked."""

    def quick(self, encoder: Any) -> dict[str, float]:
        return {"knn1": 0.5}

    def score(self, numbers: Any) -> float:
        return -math.inf  # none is kept as the best


@pytest.fixture(scope="module")
def data():
    return load_images(resolve(None, {"data": "digits", "subset": 48, "batch_size": 8}))


@pytest.fixture
def make_run(tmp_path, data, monkeypatch):
    """Builds runs on digits that note what happens; `late` as on a GPU, where reading waits."""
    opened = []

    def make(late: bool, **changed: Any) -> tuple[trainer.Run, list[Event]]:
        given = {"data": "digits", "subset": 48, "steps": STEPS, "norm": "none", "device": "cpu"}
        settings = {**given, "method": "emc2", "batch_size": 8, **SETTINGS, **changed}
        config: TrainConfig = resolve(None, settings)
        folder = tmp_path / f"{len(opened)}"
        task = ImageTask(config, data)
        run = start.prepare(task, lambda: RunFolder.create(folder, config="{}\n"))
        opened.append(run)
        run.judge = Judge()  # type: ignore[assignment]
        assert run.order.steps_per_epoch == EPOCH
        if late:
            run.device = torch.device("cuda")
            monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
            monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
        return run, noted(run)

    def noted(run: trainer.Run) -> list[Event]:
        events: list[Event] = []
        step, log, save = run.step, run.folder.log, run._save

        class Noted:
            def __call__(self, number: int, *given: Any) -> None:
                step(number, *given)
                events.append(("train", number + 1))

            def __getattr__(self, name: str) -> Any:
                return getattr(step, name)

        def logged(line: dict[str, Any]) -> None:
            events.append(("evaluate" if "knn1" in line else "log", line["step"]))
            log(line)

        def saved() -> None:
            save()
            events.append(("save", run.done))

        run.step, run.folder.log, run._save = Noted(), logged, saved  # type: ignore
        return events

    yield make
    for run in opened:
        run.folder.close()


def expected_events(log_every: int, eval_every: int, checkpoint_every: int) -> list[Event]:
    """Train, log, evaluate, checkpoint."""
    events: list[Event] = []
    for step in range(1, STEPS + 1):
        events.append(("train", step))
        if step % log_every == 0 or step == STEPS:
            events.append(("log", step))
        if eval_every and step % (eval_every * EPOCH) == 0 and step != STEPS:
            events.append(("evaluate", step))
        if checkpoint_every and step % checkpoint_every == 0 and step != STEPS:
            events.append(("save", step))
    return events


def without_training(events: list[Event]) -> list[Event]:
    return [event for event in events if event[0] != "train"]


def lines_of(run: trainer.Run) -> list[dict[str, Any]]:
    lines = read_metrics(run.folder.path)
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


CASES = [
    SETTINGS,
    {"log_every": 1, "eval_every": 0, "checkpoint_every": 0},
    {"log_every": 100, "eval_every": 2, "checkpoint_every": 5},
    {"log_every": 6, "eval_every": 1, "checkpoint_every": 6},
    {"log_every": 23, "eval_every": 0, "checkpoint_every": 23},
]
both_ways = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_late_reading_changes_nothing_in_the_log(make_run, settings) -> None:
    expected = expected_events(**settings)
    here, events = make_run(False, **settings)
    here._loop(Progress(show=False))
    assert events == expected
    there, found = make_run(True, **settings)
    there._loop(Progress(show=False))
    assert without_training(found) == without_training(expected)
    assert lines_of(there) == lines_of(here)
    assert [line["step"] for line in lines_of(here)] == [
        step for what, step in expected if what in ("log", "evaluate")
    ]
    for at, (what, step) in enumerate(found):
        if what == "save":  # a checkpoint never lacks metrics of its own step
            before = [event for event in expected[: expected.index(("save", step))]]
            assert [e for e in without_training(before)] == without_training(found[:at])
    if settings["log_every"] == 1:  # a log line comes one interval later: the device never waits
        assert found[:4] == [("train", 1), ("train", 2), ("log", 1), ("train", 3)]


def test_times_add_up(make_run) -> None:
    for late in (False, True):
        run, _ = make_run(late)
        run._loop(Progress(show=False))
        lines = read_metrics(run.folder.path)
        seconds = [line["seconds"] for line in lines]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert run.seconds == pytest.approx(seconds[-1])
        assert all(line["samples_per_second"] > 0 for line in lines if "loss" in line)


def diverging(patch: pytest.MonkeyPatch, first: int) -> None:
    """From step `first` on, counted from 1, the loss is not a number."""
    real = TrainStep.__call__

    def broken(self: TrainStep, number: int, *given: Any) -> None:
        real(self, number, *given)
        if number + 1 >= first:
            self.loss.fill_(math.nan)

    patch.setattr(TrainStep, "__call__", broken)


@both_ways
@pytest.mark.parametrize(
    "first, settings, told, trained, saved",
    [
        (7, {"log_every": 5, "checkpoint_every": 10}, 10, (10, 10), []),
        (7, {"log_every": 5, "checkpoint_every": 4}, 10, (10, 12), [4, 8]),
        (11, {"log_every": 5, "checkpoint_every": 0, "eval_every": 0}, 15, (15, 20), []),
        (1, {"log_every": 1, "checkpoint_every": 1}, 1, (1, 1), []),
        (23, {"log_every": 5, "checkpoint_every": 0}, 23, (23, 23), []),
    ],
)
def test_divergence(make_run, monkeypatch, late, first, settings, told, trained, saved) -> None:
    """Told with the number of the first logged step it shows at; what it spoilt is not saved.

    Steps between two log lines are not looked at: a checkpoint among them is written, as ever.
    """
    run, events = make_run(late, **settings)
    diverging(monkeypatch, first)
    with pytest.raises(trainer.Diverged, match=rf"the loss is nan at step {told};.*--lr"):
        run._loop(Progress(show=False))
    assert ("train", trained[late]) in events and ("train", trained[late] + 1) not in events
    assert [step for what, step in events if what == "save"] == saved
    assert all(step < told for what, step in events if what == "log")
    loaded = checkpoint.load_latest(run.folder.checkpoints)
    assert (loaded is None) if not saved else (loaded is not None and loaded.step == saved[-1])


@both_ways
def test_an_interrupted_run_has_logged_before_its_checkpoint(make_run, late) -> None:
    run, events = make_run(late, log_every=5, eval_every=0, checkpoint_every=0)
    step = run.step

    def stopping(number: int, *given: Any) -> None:
        step(number, *given)
        run.stop = number + 1 == 7

    stopping.loss_fn, stopping.loss, stopping.optimizer = (  # type: ignore[attr-defined]
        step.loss_fn, step.loss, step.optimizer)  # fmt: skip
    run.step = stopping
    with pytest.raises(trainer.Interrupted, match="after step 7 of 23"):
        run._loop(Progress(show=False))
    assert without_training(events) == [("log", 5), ("save", 7)]
    loaded = checkpoint.load_latest(run.folder.checkpoints)
    assert loaded is not None and loaded.step == 7
    assert [line["step"] for line in lines_of(run)] == [5]


@both_ways
@pytest.mark.parametrize("where", ["reading", "evaluation"])
def test_a_signal_while_the_host_waits_still_saves(make_run, monkeypatch, late, where) -> None:
    """Ctrl-C mostly comes there: reading a late loss, or evaluating."""
    run, _ = make_run(late, log_every=5, eval_every=2, checkpoint_every=0)
    real = Reading.numbers

    def numbers(reading: Reading) -> tuple[float, dict[str, float]]:
        run.stop = run.stop or (where == "reading" and reading.step == 5)
        return real(reading)

    def quick(encoder: Any) -> dict[str, float]:
        run.stop = run.stop or where == "evaluation"
        return {"knn1": 0.5}

    monkeypatch.setattr(Reading, "numbers", numbers)
    run.judge.quick = quick
    with pytest.raises(trainer.Interrupted, match=f"after step {run.done or '.*'}"):
        run._loop(Progress(show=False))
    loaded = checkpoint.load_latest(run.folder.checkpoints)
    assert loaded is not None and loaded.step == run.done < STEPS
    logged = [line["step"] for line in lines_of(run)]
    assert logged[-1] >= run.done - run.done % 5


def test_late_lines_carry_their_own_time(make_run, monkeypatch) -> None:
    """Where the host is the slower one, a line read later is still of its own step."""
    run, _ = make_run(True, log_every=5, eval_every=0, checkpoint_every=0)
    step = run.step

    def slow(number: int, *given: Any) -> None:
        step(number, *given)
        time.sleep(0.02)

    slow.loss_fn, slow.loss, slow.optimizer = step.loss_fn, step.loss, step.optimizer  # type: ignore
    run.step = slow
    run._loop(Progress(show=False))
    lines = read_metrics(run.folder.path)
    for line in lines:
        assert line["seconds"] == pytest.approx(line["samples"] / line["samples_per_second"])
    assert lines[0]["seconds"] < 0.6 * lines[1]["seconds"]


@both_ways
def test_a_resumed_run_writes_the_same_lines(make_run, late) -> None:
    whole, _ = make_run(late)
    whole._loop(Progress(show=False))
    first, _ = make_run(late)
    first.total_steps = 20  # killed after step 20; its last checkpoint is of step 18
    first._lr = whole._lr
    first._loop(Progress(show=False))
    first.folder.close()
    first.folder = RunFolder.resume(first.folder.path)
    again, _ = make_run(late)
    again.folder.close()
    again.folder = first.folder
    again.device = torch.device("cpu")
    again.restore()
    again.device = first.device
    assert again.done == 18
    again._loop(Progress(show=False))
    assert lines_of(again) == lines_of(whole)
