"""Number of cores of this process."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may use, at least one."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
