"""Progress of a run: a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fastfold.errors import spelled
from fastfold.utils.units import clock

LOG = "log.txt"  #: Name of the log in a folder of results


def wrapped(text: str, stream: IO[str]) -> str:
    """Return text broken at the width of a terminal, without breaking paths; unchanged for other streams."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        width = 0
    if width < 20:
        return text
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(fill, text.split("\n")))


def print_line(line: str, *, quiet: bool = False) -> None:
    """Print a line for the user on the standard error at once, unless it is quiet."""
    if not quiet:
        print(spelled(line), file=sys.stderr, flush=True)


class RunLog:
    """Log of the runs in a folder, in memory until the folder is known; a failed write does not stop the run."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting = ""

    def open(self, path: Path) -> None:
        """Write the lines so far to a file, and each further line at once."""
        self._path, waiting, self._waiting = path, self._waiting, ""
        self._write(waiting)

    def append(self, text: str) -> None:
        """Append a line with the time."""
        self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _write(self, text: str) -> None:
        if self._path is None:
            self._waiting += text
            return
        with (
            contextlib.suppress(OSError),
            self._path.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(text)


@dataclass
class Progress:
    """Progress over all targets, in passes of the network weighted by their cost; a context manager.

    A terminal shows one bar, other streams (standard error by default) a line for each event without control
    characters. A closed pipe or terminal does not stop the work. ``quiet`` shows only important lines.
    """

    total: float
    stream: IO[str] | None = None
    quiet: bool = False

    def __enter__(self) -> Progress:
        self._stream: IO[str] | None = self.stream or sys.stderr
        self._warned: dict[str, int] = {}
        self.log = RunLog()
        self._start, self._done = time.monotonic(), 0.0
        self._bar: Any = _bar(self._stream) if self._stream.isatty() and not self.quiet else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total or None, status="", remaining="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for text, number in self._warned.items():
            if number > 1:
                more = "1 more target" if number == 2 else f"{number - 1:,} more targets"
                self.line(f"warning for {more}: {text}", important=True)
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str, *, important: bool = False) -> None:
        """Print a permanent line; with :attr:`quiet` only if it is important.

        Of equal warnings, ``warning: <target>: <text>``, the first is printed and the others are counted at the end.
        """
        text = spelled(text)
        self.log.append(text)
        if self.quiet and not important:
            return
        if text.startswith("warning: ") and text.count(": ") > 1:
            problem = text.split(": ", 2)[2]
            self._warned[problem] = self._warned.get(problem, 0) + 1
            if self._warned[problem] > 1:
                return
        if self._bar is not None:
            assert self._stream is not None
            text = wrapped(text, self._stream)
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            try:
                print(wrapped(text, self._stream), file=self._stream, flush=True)
            except OSError:
                self._stream = None

    def begin(self, work: str) -> None:
        """Show the current work, target and network, on the bar, but not as a line."""
        if self._bar is not None:
            self._bar.update(self._task, description=work, status="", refresh=True)

    def note(self, work: str) -> None:
        """Show the progress of a long piece of work, on the bar or as a line."""
        if self._bar is not None:
            self.begin(work)
        else:
            self.line(work)

    def step(self, work: str, status: str, cost: float) -> None:
        """Record one finished pass with its recycle and pLDDT, and its part of ``total``."""
        self._done += cost
        elapsed = time.monotonic() - self._start
        left = f"about {clock(self.remaining(elapsed))} left"
        line = f"{work} {status}, elapsed {clock(elapsed)}, {left}"
        if self._bar is not None:
            self._bar.update(self._task, advance=cost, description=work, status=status, remaining=left)
            self.log.append(line)
        else:
            self.line(line)

    @contextmanager
    def passes(
        self, work: str, recycles: int, cost: float
    ) -> Iterator[Callable[[int, dict[str, Any]], None]]:
        """Yield a callback for the passes of one network, called with the number and ``mean_plddt``.

        Passes of an attempt that ran out of memory are subtracted, and passes that were not needed are skipped.
        """
        self.begin(work)
        one, done = cost / (recycles + 1), 0

        def on_cycle(cycle: int, results: dict[str, Any]) -> None:
            nonlocal done
            if cycle == 0:
                self.skip(-one * done)
                done = 0
            done += 1
            self.step(work, f"recycle {cycle}/{recycles} pLDDT {results['mean_plddt']:.1f}", one)

        yield on_cycle
        self.skip(cost - one * done)

    def skip(self, cost: float) -> None:
        """Skip work of a target that failed, was finished before, or stopped early."""
        self.total -= cost
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def remaining(self, elapsed: float) -> float:
        """Return the expected remaining seconds, if the work so far took ``elapsed`` seconds."""
        return elapsed / self._done * max(0.0, self.total - self._done) if self._done > 0 else 0.0


def _bar(stream: IO[str]) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    console = Console(file=stream)
    if console.is_dumb_terminal:
        return None

    def column(text: str, **layout: Any) -> TextColumn:
        return TextColumn(text, table_column=Column(no_wrap=True, **layout))

    return Progress(
        # Long names are cut, so that the bar stays on one line and shows all numbers.
        column("{task.description}", ratio=1, overflow="ellipsis"),
        column("{task.fields[status]}"),
        BarColumn(bar_width=8),
        column("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        column("{task.fields[remaining]}"),
        console=console,
        expand=True,
    )
