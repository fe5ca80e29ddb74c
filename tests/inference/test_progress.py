"""Progress: one bar on a terminal, plain lines elsewhere, and never the reason why work stops."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import termios
from fcntl import ioctl
from pathlib import Path
from typing import IO

import pytest

from fastfold.inference import progress as module
from fastfold.inference.progress import Progress, wrapped
from fastfold.utils.units import clock
from tests.helpers.forked import fork_command

RECYCLE_ONCE = ("--num-recycles", "1", "--no-plots")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal of some width, and what a program wrote to it."""

    def __init__(self, columns: int = 100) -> None:
        self.master, self.slave = pty.openpty()
        ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def stream(self) -> IO[str]:
        return open(os.dup(self.slave), "w", encoding="utf-8")

    def read(self) -> str:
        """All that was written; call it when every writer is closed."""
        os.close(self.slave)
        found = b""
        try:
            while piece := os.read(self.master, 65536):
                found += piece
        except OSError:  # Linux says so at the end of a terminal
            pass
        os.close(self.master)
        return found.decode("utf-8")

    def shown(self) -> list[str]:
        """Its lines as they appeared, without colours and cursor movements."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", ESCAPE.sub("", self.read())) if line.strip()]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the person who runs the tests has set must not decide what is printed."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the module sees, to be set."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_each_event_is_a_plain_line(seconds):
    stream = io.StringIO()
    with Progress(4.0, stream) as progress:
        progress.line("T1: no alignment")
        progress.begin("1/2 T1 model_1")
        seconds[0] += 30
        progress.step("1/2 T1 model_1", "recycle 0/1 pLDDT 71.2", 1.0)
        progress.skip(1.0)
        progress.line("[bold]brackets[/bold] stay")
    assert stream.getvalue().splitlines() == [
        "T1: no alignment",
        "1/2 T1 model_1 recycle 0/1 pLDDT 71.2, elapsed 0:30, about 1:30 left",
        "[bold]brackets[/bold] stay",
    ]


def test_a_terminal_shows_one_bar_with_target_recycle_plddt_elapsed_and_expected_time(seconds):
    terminal = Terminal()
    with terminal.stream() as stream, Progress(4.0, stream) as progress:
        progress.begin("1/2 T1 model_1")
        seconds[0] += 65
        progress.step("1/2 T1 model_1", "recycle 0/1 pLDDT 71.2", 1.0)
        progress.line("a line [1/2] that stays")
    shown = terminal.shown()
    assert "a line [1/2] that stays" in shown
    assert re.fullmatch(
        r"1/2 T1 model_1 +recycle 0/1 pLDDT 71\.2 ━+\S* +25% +\d:\d\d:\d\d about 3:15 left", shown[-1]
    )
    assert any(re.match(r"1/2 T1 model_1 .* 0% ", line) for line in shown[:-1])


def test_a_long_name_leaves_the_bar_on_one_line_of_a_narrow_terminal():
    terminal = Terminal(columns=80)
    with terminal.stream() as stream, Progress(2.0, stream) as progress:
        progress.step(f"1/2 {'n' * 100} model_1", "recycle 10/20 pLDDT 71.2", 1.0)
    bar = terminal.shown()[-1]
    assert len(bar) <= 80
    assert re.fullmatch(r"1/2 n+… recycle 10/20 pLDDT 71\.2 .* 50% .* left", bar)


def test_a_terminal_breaks_lines_between_words_and_a_file_has_whole_lines() -> None:
    """Paths stay in one piece, so that they can be copied."""
    text = "error: a long message with a path /" + "p" * 60 + " and words after it"
    terminal = Terminal(columns=40)
    with terminal.stream() as stream, Progress(2.0, stream) as progress:
        progress.line(text)
        assert wrapped(text, stream).split("\n")[1] == "/" + "p" * 60
    shown = terminal.shown()
    assert "error: a long message with a path" in shown
    assert "and words after it" in shown
    assert wrapped(text, io.StringIO()) == text


def test_a_log_waits_for_its_folder_and_never_stops_a_run(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    with Progress(2.0, io.StringIO(), quiet=True) as progress:
        progress.line("before")
        progress.log.open(path)
        progress.step("1/2 T1", "recycle 0/1", 1.0)
    with Progress(2.0, io.StringIO()) as progress:
        progress.log.open(path)
        progress.line("the next run")
        progress.log.open(tmp_path)  # a folder
        progress.line("lost")
    lines = [line.split(" ", 2)[2] for line in path.read_text().splitlines()]
    assert lines == ["before", "1/2 T1 recycle 0/1, elapsed 0:00, about 0:00 left", "the next run"]


def test_a_terminal_that_can_only_print_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with terminal.stream() as stream, Progress(2.0, stream) as progress:
        progress.step("1/2 T1", "recycle 0/1 pLDDT 71.2", 1.0)
    written = terminal.read()
    assert "1/2 T1 recycle 0/1 pLDDT 71.2, elapsed 0:00" in written
    assert "\x1b" not in written


def test_a_reader_who_goes_away_does_not_stop_the_work():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Progress(2.0, Closed()) as progress:
        progress.line("nobody hears")
        progress.step("1/2 T1", "recycle 0/1", 1.0)
        progress.skip(1.0)
    assert progress.remaining(1.0) == 0.0


def test_the_bar_ends_with_the_run_also_when_it_fails():
    """The cursor, which a bar hides, comes back."""
    terminal = Terminal()
    with terminal.stream() as stream, pytest.raises(RuntimeError), Progress(2.0, stream):
        raise RuntimeError
    written = terminal.read()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_the_expected_time_follows_the_work_that_is_left(seconds):
    with Progress(10.0, io.StringIO()) as progress:
        assert progress.remaining(5.0) == 0.0
        progress.step("1/2 T1", "recycle 0/1", 2.0)
        assert progress.remaining(8.0) == pytest.approx(32.0)
        progress.skip(4.0)
        assert progress.remaining(8.0) == pytest.approx(16.0)
        progress.skip(100.0)
        assert progress.remaining(8.0) == 0.0


def test_clock():
    assert [clock(s) for s in (0, 59.4, 60, 3599.6, 36000)] == ["0:00", "0:59", "1:00", "1:00:00", "10:00:00"]


def test_the_command_draws_a_bar_on_a_terminal_and_prints_its_result(cli, ended):
    fasta, weights = cli.fasta({"T1": "MKTAYIAKQR", "T2": "GSHMAWLPE"}), cli.weights()
    terminal = Terminal()
    with terminal.stream() as stream:
        arguments = ["infer", fasta, "--out", cli.out, "--weights", weights, *RECYCLE_ONCE]
        process = fork_command(*arguments, stdout=stream, stderr=stream)
        ended.append(process)
        assert process.wait(timeout=120) == 0
    shown = terminal.shown()
    assert any(re.match(r"2/2 T2 model_1_ptm +recycle 1/1 pLDDT \d\d\.\d .*%.*left", line) for line in shown)
    assert any(line.startswith("1/2 T1: pLDDT") for line in shown)
    assert shown[-1] == f"2 folded; open {cli.out / 'report.html'}"


def test_a_note_is_a_line_or_the_text_of_the_bar() -> None:
    stream = io.StringIO()
    with Progress(1, stream) as progress:
        progress.note("T1: relaxing, round 1")
    assert stream.getvalue() == "T1: relaxing, round 1\n"
    terminal = Terminal()
    with terminal.stream() as output, Progress(1, output) as progress:
        progress.note("T1: relaxing, round 2")
    assert any(line.startswith("T1: relaxing, round 2") for line in terminal.shown())


def test_a_warning_of_several_targets_is_printed_once_and_counted() -> None:
    stream = io.StringIO()
    with Progress(0.0, stream=stream, quiet=True) as progress:
        for name in ("a", "b", "c"):
            progress.line(f"warning: {name}: no alignment of 'P'", important=True)
            progress.line(f"warning: {name}: U at {name}", important=True)
            progress.line(f"error: {name}: gone", important=True)
    said = stream.getvalue().splitlines()
    assert said[:3] == ["warning: a: no alignment of 'P'", "warning: a: U at a", "error: a: gone"]
    assert said[3:] == [
        *("warning: b: U at b", "error: b: gone", "warning: c: U at c", "error: c: gone"),
        "warning for 2 more targets: no alignment of 'P'",
    ]
