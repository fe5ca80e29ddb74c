"""The processes of a run, as an object: who am I, and sums and votes over all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes that train one model together.

    Attributes:
        rank: This process's number.
        size: How many there are.
        device: Where this process computes.
        group: For collectives on ``device``; None when the process is alone.
        cpu_group: For small messages and checkpoints on the host; None when the process is alone.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    cpu_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors on ``device`` by their sums over all processes."""
        if self.group is None or not tensors:
            return
        flat = torch.cat([x.reshape(-1) for x in tensors])
        dist.all_reduce(flat, group=self.group)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))

    def gather(self, value: T) -> list[T]:
        """One small object of every process, in rank order, on every process."""
        if self.cpu_group is None:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value, group=self.cpu_group)
        return found

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.cpu_group is not None:
            dist.barrier(group=self.cpu_group)


@contextmanager
def start_world(device: str, processes: int | None = None) -> Iterator[World]:
    """The world that torchrun describes in the environment, or this process alone; left in order at the end.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; with several processes each takes the GPU of its local rank.
        processes: The number that must have been started, or None.

    Raises:
        ConfigError: Another number of processes was started, or the device does not exist.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if processes is not None and processes != size:
        raise ConfigError(
            f"parallel.dp={processes}, but {size} processes were started; "
            f"run torchrun --nproc-per-node {processes} -m fastfold train ..."
        )
    where = _device(device)
    if size == 1:
        yield World(0, 1, where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    try:
        cpu_group = dist.new_group(backend="gloo")
        yield World(dist.get_rank(), size, where, dist.group.WORLD, cpu_group)
    finally:
        dist.destroy_process_group()


def _device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"trainer.device must be auto, cpu or cuda, not {name!r}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError(
            "trainer.device=cuda, but no CUDA device can be used here: check nvidia-smi, or use trainer.device=cpu"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"{local + 1} processes on this machine, but {torch.cuda.device_count()} GPUs; "
            "start one process per GPU, or use trainer.device=cpu"
        )
    return torch.device("cuda", local)
