"""How much memory a device, its host and a disk have free for a fold."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from fastfold.errors import ConfigError
from fastfold.memory import HostBuffers, disk_buffers
from fastfold.utils.host_memory import host_available_bytes

_sharers = 1


def share_host_memory(processes: int) -> None:
    """Tell this process that it is one of several of its machine that fold at the same time."""
    global _sharers
    _sharers = max(1, processes)


def host_memory_bytes(device: str) -> int:
    """Bytes of the host's memory for what leaves a device: most of what is free; 0 where the device is the host.

    Processes that fold at the same time (:func:`share_host_memory`) have equal parts of it.
    """
    return 0 if device == "cpu" else available_bytes(torch.device("cpu")) * 4 // (5 * _sharers)


def available_bytes(device: torch.device) -> int:
    """Memory in bytes that is free on a device now; for a CPU, what the system can give without swapping."""
    if device.type == "cuda":
        # What PyTorch holds from an earlier target without using it is free for the next one.
        return torch.cuda.mem_get_info(device)[0] + _reusable_bytes(device)
    return host_available_bytes()


def _reusable_bytes(device: torch.device) -> int:
    """Return the bytes of PyTorch's common pool that nothing uses.

    A kept CUDA graph has a pool of its own, of which only the graph can use what is free.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )


@dataclass(frozen=True)
class FoldMemory:
    """What one process has for a fold.

    Attributes:
        free: Bytes of the device.
        host: Bytes of the host's memory for what leaves the device.
        disk: Bytes of a disk for what finds no room there.
    """

    free: int
    host: int = 0
    disk: int = 0

    @classmethod
    def here(
        cls,
        device: torch.device,
        *,
        host_memory: int | None = None,
        offload_dir: Path | None = None,
        processes: int = 1,
    ) -> FoldMemory:
        """What there is now.

        Args:
            device: Where to fold.
            host_memory: Most bytes of this machine's for what leaves the device; None for most of what is free, and on
                a CPU for none.
            offload_dir: Folder on a disk for what finds no room there; None for no disk.
            processes: How many of this machine fold one target together; each has an equal part.

        Raises:
            ConfigError: The folder cannot be used.
        """
        host = host_memory_bytes(device.type) if host_memory is None else host_memory // _sharers
        free = available_bytes(device)
        shared = free // processes if device.type == "cpu" else free
        return cls(shared, host // processes, free_disk_bytes(offload_dir) // (processes * _sharers))


def free_disk_bytes(folder: Path | None) -> int:
    """Bytes for what leaves a device of those that are free on a folder's disk: nine tenths; 0 for no folder.

    Raises:
        ConfigError: There is no such folder, or nothing may be written there.
    """
    if folder is None:
        return 0
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"offload_dir {str(folder)!r} is no folder that can be written to; create it first")
    return shutil.disk_usage(folder).free * 9 // 10


def offload_buffers(host: int, offload_dir: Path | None) -> HostBuffers:
    """Where a fold's tensors wait: in the host's memory, and in a folder on a disk if one is given.

    Args:
        host: Bytes of the host's memory.
        offload_dir: The folder.
    """
    return HostBuffers(limit=host, overflow=None if offload_dir is None else disk_buffers(offload_dir))
