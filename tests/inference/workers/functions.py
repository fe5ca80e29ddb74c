"""What the workers of the tests do: functions that a process which was just spawned can import quickly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from fastfold.inference.workers.job import JobResult, Task


def act(number: int, task: Task) -> JobResult:
    """Do what the job's payload says: a word, and what belongs to it."""
    word, *rest = task.job.payload
    return _ACTIONS[word](*rest)


def _echo(text: str) -> JobResult:
    return JobResult("done", f"{text} by {os.getpid()}")


def _die(path: str, times: int) -> JobResult:
    """End by a signal, the first times."""
    marks = Path(path)
    with marks.open("a") as file:
        file.write("x")
    if len(marks.read_text()) <= times:
        os.kill(os.getpid(), signal.SIGKILL)
    return JobResult("done")


def _sleep(seconds: float) -> JobResult:
    time.sleep(seconds)
    return JobResult("done")


def _hold(megabytes: int) -> JobResult:
    held = b"x" * (megabytes << 20)
    time.sleep(60)
    return JobResult("done", str(len(held)))


def _raise(text: str) -> JobResult:
    raise ValueError(text)


_ACTIONS: dict[str, Any] = {"echo": _echo, "die": _die, "sleep": _sleep, "hold": _hold, "raise": _raise}


class CannotArrive:
    """A function that can be pickled, but not be made again in another process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not here")
