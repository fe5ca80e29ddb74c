"""Signals that ask a run to save its state and stop."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

_NAMES = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals of batch systems before the time limit, of a closing terminal, and Ctrl-C."""

_AGAIN = b"stopping with a checkpoint after this step; press Ctrl-C again to stop at once\n"


class Interrupts:
    """Context manager that records the first of :data:`SIGNALS` in ``received``.

    Ignored signals stay ignored, such as Ctrl-C in background jobs. A second Ctrl-C has its usual effect. ``quiet``
    prints nothing at Ctrl-C, for all processes but the first.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.received: signal.Signals | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        with suppress(ValueError):  # only the main thread may set handlers
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            if not self._quiet:
                with suppress(OSError):
                    os.write(2, _AGAIN)
