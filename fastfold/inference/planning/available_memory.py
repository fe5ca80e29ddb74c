"""Free memory of a device, its host and a disk for a fold."""

from __future__ import annotations

import os
import shutil
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from fastfold.errors import ConfigError
from fastfold.memory import HostBuffers, disk_buffers
from fastfold.utils.machine import host_available_bytes

_SHARERS = ContextVar("processes of this machine that fold", default=1)


def share_host_memory(processes: int) -> None:
    """Set the number of processes on this machine that fold at the same time."""
    _SHARERS.set(max(1, processes))


def host_memory_bytes(device: str) -> int:
    """Return the bytes of host memory for offloaded tensors of this process: most of the free memory; 0 on a CPU."""
    return 0 if device == "cpu" else available_bytes(torch.device("cpu")) * 4 // (5 * _SHARERS.get())


def available_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes; for a CPU, the memory available without swapping."""
    if device.type == "cuda":
        # PyTorch's unused cache of an earlier target is available to the next one.
        return torch.cuda.mem_get_info(device)[0] + _reusable_bytes(device)
    return host_available_bytes()


def _reusable_bytes(device: torch.device) -> int:
    """Return the unused bytes of PyTorch's common memory pool; that of a kept CUDA graph serves only the graph."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )


@dataclass(frozen=True)
class FoldMemory:
    """Free bytes of one process on the device, and for offloaded tensors on the host and then on a disk."""

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
        """Return the memory of each of the ``processes`` that fold one target on this machine, or raise ConfigError.

        ``host_memory`` limits the bytes of offloaded tensors; None for most of the free memory, and for none on a CPU.
        Tensors beyond it are in ``offload_dir`` on a disk; None for no disk.
        """
        sharers = _SHARERS.get()
        host = host_memory_bytes(device.type) if host_memory is None else host_memory // sharers
        free = available_bytes(device) // (processes if device.type == "cpu" else 1)
        disk = 0
        if offload_dir is not None:
            if not offload_dir.is_dir() or not os.access(offload_dir, os.W_OK):
                raise ConfigError(
                    f"offload_dir {str(offload_dir)!r} is not a writable folder; create it first"
                )
            disk = shutil.disk_usage(offload_dir).free * 9 // 10
        return cls(free, host // processes, disk // (processes * sharers))


def offload_buffers(host: int, offload_dir: Path | None) -> HostBuffers:
    """Return buffers for offloaded tensors in ``host`` bytes of its memory, and in a folder on a disk if given."""
    return HostBuffers(limit=host, overflow=None if offload_dir is None else disk_buffers(offload_dir))
