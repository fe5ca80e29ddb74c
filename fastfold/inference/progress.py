"""What a person sees while targets are folded: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any


@dataclass
class Progress:
    """Progress over all targets, in passes of the network weighted by their cost.

    Use as a context manager. On a terminal there is one bar with target, recycle, pLDDT so far, elapsed and
    expected time; elsewhere each event is a line.

    Args:
        total: Cost of all passes, in any unit.
        stream: Where to write; standard error by default.
    """

    total: float
    stream: IO[str] | None = None

    def __enter__(self) -> Progress:
        self._stream = self.stream or sys.stderr
        self._start, self._done = time.monotonic(), 0.0
        self._bar: Any = None
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[remaining]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total, remaining="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, description: str, cost: float) -> None:
        """One pass of the network is done.

        Args:
            description: Target, network, recycle and pLDDT.
            cost: What the pass adds towards ``total``.
        """
        self._done += cost
        elapsed = time.monotonic() - self._start
        remaining = elapsed / self._done * max(0.0, self.total - self._done) if self._done else 0.0
        if self._bar is not None:
            self._bar.update(
                self._task,
                advance=cost,
                description=description,
                remaining=f"about {clock(remaining)} left",
            )
        else:
            self.line(f"{description}, elapsed {clock(elapsed)}, about {clock(remaining)} left")

    def skip(self, cost: float) -> None:
        """Work that will not be done, because the target failed, was finished before, or stopped early."""
        self.total -= cost
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03`` of a number of seconds."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
