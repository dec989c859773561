"""Progress moves with every step, tells the time left, and speaks in a pipe as well."""

from __future__ import annotations

import io
import re

import pytest

from negchain import progress
from negchain.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pipe_gets_a_line_every_half_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(True, clock) as bar:
        bar.begin(1000, "steps", "training")
        for step in range(1, 101):
            clock.now += 1.0
            bar.at(step)
    lines = capsys.readouterr().err.splitlines()
    steps = [int(re.findall(r"(\d+)/1,000", line)[0]) for line in lines]
    assert steps == [0, 1, 31, 61, 91]  # at once, after the first step, then every half minute
    assert lines[-1] == "training: 91/1,000 steps, 15 min left"


def test_one_of_something_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(True) as bar:
        for nouns in ("steps", "runs done", "encoded"):
            bar.begin(1, nouns, "training")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"training: 0/1 {noun}" for noun in ("step", "run done", "encoded")]


def test_work_between_steps_is_told_until_the_next_word(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(True, clock) as bar:
        bar.begin(9, "steps", "evaluating")
        for done in (32, 64, 96):
            clock.now += 20.0
            bar.within(f"{done}/400 texts")
        bar.say("training")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == ["evaluating 64/400 texts: 0/9 steps", "training: 0/9 steps"]


def on_screen(monkeypatch: pytest.MonkeyPatch, screen: io.StringIO, terminal: bool = True) -> None:
    real = progress.Screen
    monkeypatch.setattr(
        progress,
        "Screen",
        lambda **named: real(
            file=screen, force_terminal=terminal, width=100, **{**named, "stderr": 0}
        ),
    )


def test_a_bar_moves_with_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    on_screen(monkeypatch, screen)
    clock = Clock()
    with Progress(True, clock) as bar:
        bar.begin(12, "steps", "training")
        for step in range(1, 13):
            clock.now += 4.0
            bar.at(step, "loss [/]")
    shown = screen.getvalue()
    assert all(f"{step}/12 steps" in shown for step in range(13))
    assert "40 s left" in shown and "loss [/]" in shown


def test_a_line_stays_apart_from_the_bar(monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    """What `say` wrote stood behind the bar."""
    screen = io.StringIO()
    on_screen(monkeypatch, screen)
    with Progress(True) as bar:
        bar.begin(2, "runs done", "reproduce")
        bar.at(1)
        bar.line("one [/]: 69 s")
        bar.at(2)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "one [/]: 69 s" in [line.strip() for line in re.split(r"[\r\n]", plain)]


class Terminal(io.StringIO):
    gone = False

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        if self.gone:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), BrokenPipeError(32, "pipe")])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_closed_terminal_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, error: OSError
) -> None:
    """Nor does a pipe whose reader has gone (`negchain train 2>&1 | head`)."""
    screen, clock = Terminal(error), Clock()
    on_screen(monkeypatch, screen, terminal)
    with Progress(True, clock) as bar:
        bar.begin(3, "steps", "training")
        screen.gone = True
        for step in range(1, 4):
            clock.now += 60.0
            bar.at(step)
        bar.say("evaluating")


def test_what_was_done_before_does_not_count_as_speed() -> None:
    clock = Clock()
    bar = Progress(False, clock)
    bar.begin(100, "steps", done=50)
    assert bar.left() == ""
    clock.now = 10.0
    bar.at(60)
    assert bar.left() == "40 s left"


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(show=False) as bar:
        bar.begin(3, "steps", "training")
        bar.at(1, "loss 1.0")
        bar.say("evaluating")
    assert capsys.readouterr().err == ""
