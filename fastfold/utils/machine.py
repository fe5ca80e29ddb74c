"""Free memory and cores of this machine, or of the part of it that this process may use."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.utils.packages import is_installed


def available_cores() -> int:
    """Return the number of cores that this process may use, at least one."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def user_cache() -> Path:
    """Return this program's folder in the user's cache: below ``XDG_CACHE_HOME``, or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fastfold"


def process_memory(field: str) -> int | None:
    """Return a size of this process in bytes, ``VmRSS`` or its peak ``VmHWM``; None where Linux does not report it."""
    return _reported_bytes("/proc/self/status", field)


def _reported_bytes(path: str, field: str) -> int | None:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def host_available_bytes() -> int:
    """Return the memory in bytes that the system can give this process now without swapping."""
    return max(0, min([_system_memory(), *_group_memory()]))


def _system_memory() -> int:
    """Return the memory that the whole machine can give, in bytes."""
    available = _reported_bytes("/proc/meminfo", "MemAvailable")
    if available is not None:
        return available
    if is_installed("psutil"):  # on macOS and Windows
        import psutil

        return int(psutil.virtual_memory().available)
    if not hasattr(os, "sysconf"):  # Windows
        raise ConfigError(
            "this system does not tell its free memory: install psutil, or give `memory_budget`"
        )
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the memory left by control groups of batch systems and containers (Linux, versions 1 and 2)."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines() if line.count(":") >= 2]
    except (OSError, ValueError):
        return []
    left = []
    for _, controllers, path in lines:
        if not controllers:
            left += _bytes_left(root, path, _VERSION_2)
        elif "memory" in controllers.split(","):
            left += _bytes_left(root / "memory", path, _VERSION_1)
    return left


# Files of limit and usage, and lines of memory.stat: pages of files, and those of them that cannot be evicted.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_VERSION_2 = ("memory.max", "memory.current", "file", "shmem")


def _bytes_left(root: Path, path: str, names: tuple[str, str, str, str]) -> list[int]:
    """Return the memory left by a group and by those above it.

    In a container, the first folders of the path may not exist.
    """
    limit_name, used_name, files, shared = names
    left = []
    folder = root / path.strip("/")
    for group in (folder, *folder.parents):
        try:
            limit = (group / limit_name).read_text().strip()
            if limit == "max":
                continue
            statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Pages of files that were read count as used, but can be evicted.
            idle = int(statistics[files]) - int(statistics[shared])
            left.append(int(limit) - int((group / used_name).read_text()) + idle)
        except (OSError, ValueError, KeyError):
            continue
    return left
