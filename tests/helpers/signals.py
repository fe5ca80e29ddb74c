"""Children that can be interrupted, wherever the tests run."""

from __future__ import annotations

import signal


def interruptible() -> None:
    """Undo an ignored SIGINT, which the children of a background job inherit; for ``Popen(preexec_fn=...)``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
