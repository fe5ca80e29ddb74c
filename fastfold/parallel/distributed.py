"""The processes of a run: this process's rank, its samples, and messages to all."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fastfold.errors import ConfigError, LostProcessError, first_line
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.slurm import started_processes
from fastfold.utils.device import current_device

T = TypeVar("T")

_ATTEMPTS = 4  #: Number of attempts to find the other processes
_LOOK_SECONDS = 0.5  #: Seconds between two checks for a process that parts


class PartedError(RuntimeError):
    """Another process ended its groups; this one may have computed with data that never arrived."""


class Meeting:
    """Process groups of all processes, which can be ended and created again.

    ``timeout`` is the maximum wait for each other, at the beginning and in every collective, and ``message_timeout``
    that for a message on the host.

    Raises:
        ConfigError: The processes did not find each other.
    """

    def __init__(
        self, backend: str, device: torch.device | None, timeout: timedelta, message_timeout: timedelta
    ) -> None:
        self._backend, self._device = backend, device
        self._timeout, self._message_timeout = timeout, message_timeout
        self._turn = 0
        store, self._rank, self._size = _retry(lambda: next(iter(dist.rendezvous("env://", timeout=timeout))))
        # torchrun keeps one store when it starts processes again, and it still has the addresses of the dead ones.
        generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"generation/{generation}", store)
        self.begin()

    def begin(self) -> None:
        """Create the group of all processes."""
        _retry(
            lambda: dist.init_process_group(
                self._backend,
                store=dist.PrefixStore(f"fastfold/{self._turn}", self._store),
                rank=self._rank,
                world_size=self._size,
                timeout=self._timeout,
                device_id=self._device,
            )
        )

    def messages(self) -> dist.ProcessGroup:
        """Return a group of all processes for messages on the host."""
        return dist.new_group(backend="gloo", timeout=self._message_timeout)

    def part(self) -> None:
        """End all groups; processes that wait for this one in a group get an error."""
        self._turn += 1
        self.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # gloo's connections end with the last reference

    def abort(self) -> None:
        """End collectives that wait on a GPU for a missing process; gloo has none."""
        if self._backend == "nccl" and dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    @contextmanager
    def ended_by(self, reason: str) -> Iterator[None]:
        """Call :meth:`abort` inside the context as soon as another process parts with a reason.

        A separate thread checks for it, because this one may wait for a GPU that waits for the other process.

        Raises:
            PartedError: A process parted, and nothing else was raised inside.
        """
        key, left, parted = self._key, threading.Event(), threading.Event()

        def look() -> None:
            with suppress(dist.DistError):  # the store has ended, so no process can give a reason
                while not left.wait(_LOOK_SECONDS):
                    if self._store.check([key]) and self._store.get(key).decode() == reason:
                        parted.set()
                        self.abort()
                        return

        thread = threading.Thread(target=look, name="parting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            left.set()
            thread.join()
        if parted.is_set():
            raise PartedError(f"another process parted: {reason}")

    def say_why(self, reason: str) -> None:
        """Publish why this process is about to part, for those that will get an error."""
        self._store.set(self._key, reason)

    def why(self, patience: timedelta = timedelta(seconds=2)) -> str | None:
        """Wait for a process's published reason to part; None after the timeout."""
        end = time.monotonic() + patience.total_seconds()
        while not self._store.check([self._key]):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        return self._store.get(self._key).decode()

    @property
    def _key(self) -> str:
        return f"fastfold/why/{self._turn}"


@dataclass
class DistributedContext:
    """The processes that work on one model together.

    Example:
        >>> import torch
        >>> from fastfold.parallel import ParallelPlan, init_distributed, started_processes
        >>> plan = ParallelPlan(dp=started_processes())
        >>> with init_distributed(plan, torch.device("cpu")) as processes:
        ...     own = range(10)[processes.dp_rank :: processes.dp_size]  # this process's samples
        ...     counts = processes.gather(len(own))
        >>> processes.is_rank_zero, sum(counts)
        (True, 10)
    """

    rank: int  #: This process's number
    size: int  #: Number of processes
    device: torch.device  #: Device of this process
    #: The processes laid out by the run's plan
    mesh: ParallelMesh = field(default_factory=lambda: ParallelMesh(ParallelPlan()))
    #: Group for small messages and checkpoints on the host; None for a single process
    cpu_group: dist.ProcessGroup | None = None
    meeting: Meeting | None = None  #: Process groups of all processes; None for a single process

    @property
    def is_rank_zero(self) -> bool:
        """True if this process writes files and logs."""
        return self.rank == 0

    @property
    def local_size(self) -> int:
        """Number of processes on this machine."""
        return min(self.size, int(os.environ.get("LOCAL_WORLD_SIZE", self.size)))

    @property
    def dp_rank(self) -> int:
        """Index of this process's part of the samples, from 0."""
        return self.mesh.group("dp").rank

    @property
    def dp_size(self) -> int:
        """Number of parts of the samples; processes that work on one sample share a part."""
        return self.mesh.group("dp").size

    @property
    def is_leader(self) -> bool:
        """True if this process represents those that work on the same samples."""
        return self.mesh.group("dap").rank == 0

    def leaders(self, of_all: list[T]) -> list[T]:
        """Select one process's value for each part of the samples, in order, from those of :meth:`gather`."""
        return of_all[:: self.size // self.dp_size]

    def gather(self, value: T) -> list[T]:
        """Return one small object of every process, in rank order, on every process."""
        if self.cpu_group is None:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def gather_numbers(self, own: Tensor) -> Tensor:
        """Gather ``[k]`` numbers of every process to ``[size, k]`` on the device, without a wait of the host."""
        if self.size == 1:
            return own[None]
        return async_ops.gather_numbers(own, Group(dist.group.WORLD))

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.cpu_group is not None:
            dist.barrier(group=self.cpu_group)

    def regroup(self) -> None:
        """End all groups and create new ones, after a collective that not all processes finished.

        All processes call it. The mesh and its groups stay the same objects.
        """
        assert self.meeting is not None
        self.cpu_group = None
        self.mesh.leave()
        self.meeting.part()
        self.meeting.begin()
        self.mesh.take(ParallelMesh(self.mesh.plan, self.mesh.device_type))
        self.cpu_group = self.meeting.messages()


@contextmanager
def init_distributed(
    plan: ParallelPlan,
    device: torch.device,
    *,
    timeout: timedelta = timedelta(minutes=30),
    message_timeout: timedelta | None = None,
) -> Iterator[DistributedContext]:
    """Join the processes that torchrun describes in the environment, or this one alone.

    They part at the end of the context. A GPU is PyTorch's current device inside.

    Args:
        plan: Layout of the processes.
        device: Device to compute on; on CUDA each process takes the GPU of its local rank.
        timeout: Maximum wait for other processes, at the beginning and in every collective.
        message_timeout: Maximum wait for a message on the host; by default ``timeout``.

    Raises:
        ConfigError: The plan needs another number of processes, or differs between them; or there are fewer GPUs than
            processes; or the processes did not find each other.
        LostProcessError: Another process ended, or did not answer in time. If all processes wait for a GPU that waits
            for such a process, NCCL ends them itself after ``timeout``.

    Example:
        >>> import torch
        >>> from fastfold.parallel import ParallelPlan, init_distributed, started_processes
        >>> plan = ParallelPlan(dp=started_processes())
        >>> with init_distributed(plan, torch.device("cpu")) as processes:
        ...     processes.rank, processes.size, processes.mesh.group("dp")
        (0, 1, Group(dp, rank 0 of 1))
    """
    size = started_processes()
    if device.type == "cuda" and (size > 1 or device.index is None):
        device = _local_gpu()
    if size == 1:
        with current_device(device):
            yield DistributedContext(0, 1, device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    meeting = Meeting(backend, own, timeout, message_timeout or timeout)
    try:
        mesh = ParallelMesh(plan, device.type)
        yield DistributedContext(dist.get_rank(), size, device, mesh, meeting.messages(), meeting)
    except BaseException as error:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
        meeting.abort()  # otherwise parting would wait for collectives that others have not joined
        if async_ops.is_lost(error):
            raise LostProcessError(
                f"rank {rank} of {size} lost another process, which ended or did not answer within {timeout} "
                f"({first_line(error)}). Look for the first error in its output, and start all of them again"
            ) from error
        raise
    finally:
        # Also after an error, so that waiting processes notice.
        if dist.is_initialized():
            dist.destroy_process_group()


def _retry(connect: Callable[[], T]) -> T:
    """Return the result of a connection; retry it if it fails while machines of a job still start."""
    for attempt in range(_ATTEMPTS):
        try:
            return connect()
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            failure = error
        if attempt + 1 < _ATTEMPTS:
            time.sleep(2.0**attempt)
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    raise ConfigError(
        f"rank {os.environ.get('RANK', '?')} of {started_processes()} did not find the other processes at {where} "
        f"({first_line(failure)}); check that all were started, that the address is that of the machine of rank 0, "
        "and that no other program uses the port (MASTER_ADDR, MASTER_PORT)"
    ) from failure


def _local_gpu() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise ConfigError(
            f"found {local + 1} processes on this machine, but {torch.cuda.device_count()} GPUs; start one process for "
            "each GPU, or compute on the CPU"
        )
    return torch.device("cuda", local)
