"""Calls of background processes in tests, in a module that is imported quickly."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fastfold.errors import InputError


def fail(kind: str) -> None:
    if kind == "input":
        raise InputError("too long", record="a")
    if kind == "exit":
        os._exit(3)
    raise RuntimeError("bug")


def end_other_process(process: int) -> str:
    if os.getpid() != process:
        os._exit(3)
    return "called here"


def die_once(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def meet(folder: Path, names: str) -> int:
    """Wait for a call of another process, and return the niceness."""
    (folder / names[0]).touch()
    end = time.monotonic() + 30
    while not (folder / names[1]).exists():
        assert time.monotonic() < end, "the other call waits for this one"
        time.sleep(0.01)
    return os.nice(0)


def server_of(modules: Sequence[str] = ()) -> tuple[int, int, list[bool]]:
    """Return the parent's number and threads (Linux), and which modules this process has imported."""
    parent = os.getppid()
    return parent, len(os.listdir(f"/proc/{parent}/task")), [name in sys.modules for name in modules]
