"""What a command does with its process: its standard output, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


def silence_stdout() -> None:
    """After the reader of our output went away, so that Python does not complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """Let a batch system that ends the program (SIGTERM) leave no temporary files behind, as Ctrl-C does."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    except ValueError:  # not in the main thread, which alone hears of signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
