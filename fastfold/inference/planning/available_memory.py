"""How much memory a device and its host have free."""

from __future__ import annotations

import torch

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
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    return host_available_bytes()
