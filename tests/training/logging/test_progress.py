"""What is shown of a run: numbers on lines, a bar on terminals, and nothing that stops the work."""

from __future__ import annotations

import errno
import io
import re

import pytest

from fastfold.training.logging import progress as module
from fastfold.training.logging.progress import TrainingProgress

NUMBERS = {
    "loss": 3.14159,
    "fape": 0.8,
    "distogram": 2.5,
    "lddt_ca": 0.4321,
    "residues": 200.0,
    "waited_s": 0.05,
    "seconds": 0.0,
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by a test."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_line_has_all_numbers_speed_and_expected_end(clock):
    stream = io.StringIO()
    with TrainingProgress(100, stream=stream, every_s=0) as progress:
        for step in (10, 20):
            clock[0] += 30.0
            progress.update(step, NUMBERS | {"seconds": step * 2.0})
    line = stream.getvalue().splitlines()[-1]
    for part in (
        "step 20/100",
        "loss 3.142",
        "FAPE 0.8",
        "distogram 2.5",
        "lDDT-CA 0.432",
        "2 s/step",
        "100 residues/s",
        "loader 2.5%",
        "1:00 elapsed",
        "about 4:00 left",
    ):
        assert part in line.split(", "), part
    assert re.search(r"\d\.\d GB", line)


def test_expected_end_of_a_resumed_run_counts_this_sessions_steps(clock):
    stream = io.StringIO()
    with TrainingProgress(1000, stream=stream, every_s=0) as progress:
        for step in (900, 910):
            clock[0] += 10.0
            progress.update(step, {})
    assert "about 1:30 left" in stream.getvalue().splitlines()[-1]


def test_without_a_terminal_there_is_a_line_now_and_then(clock):
    """And always the last."""
    stream = io.StringIO()
    with TrainingProgress(100, stream=stream, every_s=30) as progress:
        for step in range(1, 101):
            clock[0] += 1.0
            progress.update(step, NUMBERS)
    steps = [int(re.findall(r"step (\d+)/", line)[0]) for line in stream.getvalue().splitlines()]
    assert steps == [1, 31, 61, 91, 100]
    assert "\x1b" not in stream.getvalue()


def test_terminal_has_a_bar_and_keeps_messages(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with TrainingProgress(100, stream=stream) as progress:
        progress.update(50, NUMBERS)
        progress.say("checkpoint [red]written[/red]")
        progress.update(51, NUMBERS | {"seconds": 2.0})
    text = stream.getvalue()
    assert "\x1b[" in text
    for part in ("step 51/100", "51%", "loss 3.142", "100 residues/s", "checkpoint [red]written[/red]"):
        assert part in text


def test_narrow_terminal_keeps_one_line_each(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    with TrainingProgress(100, stream=stream) as progress:
        progress.update(50, NUMBERS)
        progress.update(51, NUMBERS | {"seconds": 2.0})
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue().split("\r")[-1])
    assert all(len(line) <= 40 for line in last.splitlines())


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with TrainingProgress(100, stream=stream) as progress:
        progress.update(50, NUMBERS)
    assert "step 50/100" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_quiet_shows_nothing(capsys):
    with TrainingProgress(100, quiet=True) as progress:
        progress.update(1, NUMBERS)
        progress.say("text")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "hung up")])
@pytest.mark.parametrize("terminal", [False, True])
def test_reader_who_goes_away_does_not_stop_the_run(terminal, error, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    class Gone(io.StringIO):
        gone = False

        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            if self.gone:
                raise error
            return len(text)

    stream = Gone()
    with TrainingProgress(100, stream=stream, every_s=0) as progress:
        progress.update(1, NUMBERS)
        stream.gone = True
        progress.say("text")
        progress.update(2, NUMBERS)
        progress.say("text")


def test_message_before_and_after_the_run_is_printed():
    stream = io.StringIO()
    progress = TrainingProgress(1, stream=stream)
    progress.say("before")
    with progress:
        pass
    progress.say("after")
    assert stream.getvalue() == "before\nafter\n"


def test_numbers_that_are_not_finite_are_shown():
    stream = io.StringIO()
    with TrainingProgress(10, stream=stream, every_s=0) as progress:
        progress.update(1, {"loss": float("nan")})
    assert "loss nan" in stream.getvalue()
