"""Progress moves with every step, tells the time left, and speaks in a pipe as well."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from negchain.train import progress
from negchain.train.progress import Bar, Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Bar(True, 1000, count=lambda n: f"{n:.0f}/1000 steps", clock=clock) as bar:
        bar.say("training")
        for step in range(1, 101):
            clock.now += 1.0
            bar.at(step)
    lines = capsys.readouterr().err.splitlines()
    steps = [int(re.findall(r"(\d+)/1000", line)[0]) for line in lines]
    assert steps == [0, 1, 31, 61, 91]  # at once, after the first step, then every half minute
    assert lines[-1] == "training: 91/1000 steps, 15 min left"


def test_a_bar_moves_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    real = Console
    monkeypatch.setattr(
        progress,
        "Console",
        lambda **named: real(file=screen, force_terminal=True, width=100, **{**named, "stderr": 0}),
    )
    clock = Clock()
    with Bar(True, 12, count=lambda n: f"{n:.0f}/12 steps", clock=clock) as bar:
        bar.say("training")
        for step in range(1, 13):
            clock.now += 4.0
            bar.at(step, "loss [/]")
    shown = screen.getvalue()
    assert all(f"{step}/12 steps" in shown for step in range(13))
    assert "40 s left" in shown and "loss [/]" in shown


def test_what_was_done_before_does_not_count_as_speed() -> None:
    clock = Clock()
    bar = Bar(False, 100, done=50, count=str, clock=clock)
    assert bar.left() == ""
    clock.now = 10.0
    bar.at(60)
    assert bar.left() == "40 s left"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(show=False) as bar:
        bar.start(total=3, done=0)
        bar.step(1)
        bar.update(loss=1.0, rate=2.0)
        bar.say("evaluating")
    assert capsys.readouterr().err == ""
