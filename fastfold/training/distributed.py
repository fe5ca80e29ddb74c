"""The processes of a run, as an object: who am I, which samples are mine, and messages to all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan
from fastfold.training.parallel_config import ParallelConfig, plan_of

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes that train one model together.

    Attributes:
        rank: This process's number.
        size: How many there are.
        device: Where this process computes.
        mesh: The processes laid out by the run's plan.
        cpu_group: For small messages and checkpoints on the host; None when the process is alone.
    """

    rank: int
    size: int
    device: torch.device
    mesh: ParallelMesh = field(default_factory=lambda: ParallelMesh(ParallelPlan()))
    cpu_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """Which share of the samples this process has, from 0."""
        return self.mesh.group("dp").rank

    @property
    def shares(self) -> int:
        """How many shares there are; processes that work on one sample together have the same."""
        return self.mesh.group("dp").size

    @property
    def is_leader(self) -> bool:
        """Whether this process speaks for those that have its share."""
        return self.mesh.group("dap").rank == 0

    def leaders(self, of_all: list[T]) -> list[T]:
        """Of what :meth:`gather` gave, that of one process for each share, in their order."""
        return of_all[:: self.size // self.shares]

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
def start_world(device: str, parallel: ParallelConfig) -> Iterator[World]:
    """The world that torchrun describes in the environment, or this process alone; left in order at the end.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``; with several processes each takes the GPU of its local rank.
        parallel: Group ``parallel``.

    Raises:
        ConfigError: The plan needs another number of processes, is impossible, or differs between them; or the device
            does not exist.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    plan = plan_of(parallel, size)
    where = _device(device)
    if size == 1:
        yield World(0, 1, where)
        return
    if where.type == "cuda":
        torch.cuda.set_device(where)
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=30))
    mesh = ParallelMesh(plan, where.type)
    yield World(dist.get_rank(), size, where, mesh, dist.new_group(backend="gloo"))
    # Not after an error: the others may be waiting, and notice when this process ends.
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
