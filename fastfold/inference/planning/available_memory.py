"""How much memory a device and its host have free."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def host_memory_bytes(device: str) -> int:
    """Bytes of the host's memory for what leaves a device: most of what is free; 0 where the device is the host."""
    return 0 if device == "cpu" else available_bytes(torch.device("cpu")) * 4 // 5


def available_bytes(device: torch.device) -> int:
    """Memory in bytes that is free on a device now; for a CPU, what the system can give without swapping."""
    if device.type == "cuda":
        # What PyTorch holds from an earlier target without using it is free for the next one.
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    limits = [_system_memory(), *_group_memory()]
    return max(0, min(limits))


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
