"""How much memory this machine, or the part of it that this process may use, has free."""

from __future__ import annotations

import os
from pathlib import Path


def host_available_bytes() -> int:
    """Memory in bytes that the system can give this process now without swapping."""
    return max(0, min([_system_memory(), *_group_memory()]))


def _system_memory() -> int:
    """What the whole machine can give."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the control groups leave this process, as batch systems and containers set them (Linux, version 2)."""
    left = []
    try:
        path = next(line for line in own.read_text().splitlines() if line.startswith("0::"))
        folder = root / path.removeprefix("0::").strip("/")
        for group in (folder, *folder.parents):
            limit = (group / "memory.max").read_text().strip() if (group / "memory.max").is_file() else "max"
            if limit != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # Pages of files that were read count as used, but give way.
                idle = int(statistics["file"]) - int(statistics["shmem"])
                left.append(int(limit) - int((group / "memory.current").read_text()) + idle)
    except (OSError, StopIteration, ValueError, KeyError):
        pass
    return left
