"""Progress of training: a bar with numbers on a terminal, occasional lines on other streams."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from fastfold.utils.machine import process_memory
from fastfold.utils.units import clock

_PARTS = {
    "fape": "FAPE",
    "sidechain_fape": "side chains",
    "chain_center_of_mass": "centers of mass",
    "smooth_lddt": "smooth lDDT",
    "ca_trace": "CA trace",
    "distogram": "distogram",
    "masked_msa": "MSA",
    "predicted_lddt": "pLDDT",
}
"""Parts of the loss to show, in this order, if they are logged."""


class TrainingProgress:
    """Context manager that shows the progress of a run.

    A terminal shows a bar and two lines in place. Other streams get one line every ``every_s`` seconds, without control
    characters. A closed pipe or terminal does not stop the run. The processes but the first are ``quiet``.
    """

    def __init__(
        self, steps: int, *, quiet: bool = False, stream: IO[str] | None = None, every_s: float = 30.0
    ) -> None:
        self._steps, self._every_s = steps, every_s
        self._stream: IO[str] | None = None if quiet else stream or sys.stderr
        self._bar: Any = None
        self._started = time.monotonic()
        self._first: tuple[int, float] | None = None  # step and time of the first update
        self._last: tuple[int, float] | None = None  # step and seconds of training at the previous update
        self._shown = -float("inf")

    def __enter__(self) -> TrainingProgress:
        self._started = time.monotonic()
        if self._stream is not None and self._stream.isatty():
            self._bar = _bar(self._stream, self._steps)
            if self._bar is not None:
                self._guarded(self._bar.start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._guarded(self._bar.stop)
            self._bar = None

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self._bar is not None:
            self._guarded(self._bar.console.print, text, markup=False, highlight=False, soft_wrap=True)
        elif self._stream is not None:
            self._guarded(print, text, file=self._stream, flush=True)

    def _guarded(self, write: Callable[..., None], *values: Any, **options: Any) -> None:
        """Write, and stop all output after the stream is closed."""
        try:
            write(*values, **options)
        except (OSError, ValueError):  # ValueError: the stream is closed
            bar, self._stream, self._bar = self._bar, None, None
            if bar is not None:
                bar.console.quiet = True
                bar.stop()

    def update(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the state of the run after ``step`` steps.

        The numbers of the last step are all optional: ``loss`` and its parts, ``lddt_ca`` (0 to 1), ``residues`` of the
        step, ``tflops_per_s``, ``waited_s`` for the loader in the step, and ``seconds`` of training so far, from which
        speeds are computed.
        """
        now = time.monotonic()
        pace = self._pace(step, numbers.get("seconds", now - self._started), numbers)
        if self._first is None:
            self._first = step, now
        if self._stream is None:
            return
        losses, state, times = _losses(numbers), [*pace, *_memory()], self._times(step, now)
        if self._bar is not None:
            self._bar.lines = [", ".join(part) for part in (losses, state) if part]
            self._guarded(self._bar.update, self._bar.task_ids[0], completed=step, times=", ".join(times))
        elif now - self._shown >= self._every_s or step >= self._steps:
            self._shown = now
            self.say(", ".join([f"step {step}/{self._steps}", *losses, *state, *times]))

    def _pace(self, step: int, seconds: float, numbers: Mapping[str, float]) -> list[str]:
        """Return the speed and the loader's share of the time since the previous update."""
        last, self._last = self._last, (step, seconds)
        if last is None or step <= last[0] or seconds <= last[1]:
            return []
        per_step = (seconds - last[1]) / (step - last[0])
        pace = [f"{per_step:.3g} s/step"]
        if "residues" in numbers:
            pace.append(f"{numbers['residues'] / per_step:,.0f} residues/s")
        if "tflops_per_s" in numbers:
            pace.append(f"{numbers['tflops_per_s']:.3g} TFLOP/s")
        if "waited_s" in numbers:
            pace.append(f"loader {min(1.0, numbers['waited_s'] / per_step):.1%}")
        return pace

    def _times(self, step: int, now: float) -> list[str]:
        """Return elapsed and expected time; the latter includes validations."""
        times = [f"{clock(now - self._started)} elapsed"]
        if self._first is not None and step > self._first[0]:
            left = (now - self._first[1]) / (step - self._first[0]) * max(0, self._steps - step)
            times.append(f"about {clock(left)} left")
        return times


def _losses(numbers: Mapping[str, float]) -> list[str]:
    shown = [f"loss {numbers['loss']:.4g}"] if "loss" in numbers else []
    shown += [f"{name} {numbers[key]:.3g}" for key, name in _PARTS.items() if key in numbers]
    return shown + ([f"lDDT-CA {numbers['lddt_ca']:.3f}"] if "lddt_ca" in numbers else [])


def _memory() -> list[str]:
    if torch.cuda.is_initialized():
        return [f"{torch.cuda.memory_allocated() / 1e9:.1f} GB of GPU"]
    used = process_memory("VmRSS")
    return [] if used is None else [f"{used / 1e9:.1f} GB"]


def _bar(stream: IO[str], steps: int) -> Any:
    """Return a bar with lines of numbers under it, or None on a terminal without cursor control."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.text import Text

    class Enduring(Console):
        """Console that survives a broken pipe, on which Rich's ends the program."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    class Bar(Progress):
        """Bar with ``lines`` under it, which are cut because wrapped ones would make the display jump."""

        lines: Sequence[str] = ()

        def get_renderables(self) -> Iterator[Any]:
            yield from super().get_renderables()
            yield from (Text(line, no_wrap=True, overflow="ellipsis") for line in self.lines)

    console = Enduring(file=stream)
    if console.is_dumb_terminal:
        return None
    bar = Bar(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[times]}"),
        console=console,
        expand=True,
        refresh_per_second=2,
    )
    bar.add_task("", total=steps, times="")
    return bar
