"""Workers on the machines of a Ray cluster: an actor each, which watches a process of its machine.

Ray is imported only if requested. Nothing is uploaded to the cluster: FastFold must be installed on its machines, and
the folders must be the same on all of them. Ray's usage statistics are disabled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastfold._version import __version__
from fastfold.errors import ConfigError, first_line
from fastfold.inference.workers.job import (
    Event,
    Executor,
    Finished,
    Gone,
    JobResult,
    Kind,
    Ready,
    ScreenError,
    Task,
    Worker,
)
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.worker_process import Function, WorkerProcess
from fastfold.utils.machine import host_available_bytes
from fastfold.utils.workers.process import pack_function

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise the working folder of `uv run` is uploaded
    "RAY_raylet_start_wait_time_s": "180",
}
_STORE_BYTES = 200 << 20  # for targets and results in words, but no features
_FAILED_STARTS = 3
_PATIENCE_S = 60.0


class Machine(NamedTuple):
    """Name, free memory in bytes and version of FastFold of an actor's machine."""

    host: str
    memory: int
    version: str


class WorkerActor:
    """Actor on a machine of the cluster, with the arguments of its :class:`WorkerProcess`."""

    def __init__(self, packed: bytes, limits: ScreenOptions) -> None:
        self._process = WorkerProcess(packed, limits)

    def describe(self) -> Machine:
        """Return the machine's data before any work."""
        import ray

        return Machine(ray.get_runtime_context().get_node_id(), host_available_bytes(), __version__)

    def run(self, task: Task) -> JobResult:
        """Run a job."""
        return self._process.run(task)


@dataclass(frozen=True)
class WorkerGroup:
    """Group of equal workers: kind of their jobs, function for a job, and exclusive CPUs and GPUs of each."""

    kind: Kind
    count: int
    function: Function
    cpus: float = 1
    gpus: float = 0


class RayExecutor(Executor):
    """Runner of workers in a Ray cluster, which replaces lost ones, and tells the user about waiting."""

    def __init__(
        self,
        groups: Sequence[WorkerGroup],
        limits: ScreenOptions,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._ray = import_ray()
        self._limits, self._say = limits, say
        self._numbers = itertools.count(1)
        self._actors: dict[str, Any] = {}
        self._groups: dict[str, WorkerGroup] = {}
        self._calls: dict[Any, str] = {}
        self._starting: set[str] = set()
        self._failed_starts = 0
        self._said = time.monotonic()
        for group in groups:
            for _ in range(group.count):
                self._add(group)

    def start(self, worker: str, task: Task) -> None:
        self._calls[self._actors[worker].run.remote(task)] = worker

    def wait(self, timeout: float) -> list[Event]:
        ray = self._ray
        try:
            ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            if not ready:
                ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        except ray.exceptions.RayError as error:
            raise ScreenError(f"lost the connection to the Ray cluster: {_first_line(error)}") from error
        if len(self._starting) < len(self._actors):
            self._said = time.monotonic()
        elif time.monotonic() - self._said > _PATIENCE_S:
            self._said = time.monotonic()
            self._say("no worker of the Ray cluster is ready yet; waiting for a machine with room")
        return [self._event(call) for call in ready]

    def close(self) -> None:
        for actor in self._actors.values():
            with contextlib.suppress(Exception):  # the cluster may have ended
                self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._calls.clear()
        self._ray.shutdown()

    def _add(self, group: WorkerGroup) -> None:
        worker = f"{group.kind}-{next(self._numbers)}"
        remote = self._ray.remote(num_cpus=group.cpus, num_gpus=group.gpus, max_restarts=0)(WorkerActor)
        self._actors[worker] = remote.remote(pack_function(group.function), self._limits)
        self._groups[worker] = group
        self._starting.add(worker)
        self._calls[self._actors[worker].describe.remote()] = worker

    def _event(self, call: Any) -> Event:
        worker = self._calls.pop(call)
        group = self._groups[worker]
        try:
            answer = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            self._replace(worker, error)
            return Gone(worker, _first_line(error))
        if worker not in self._starting:
            return Finished(worker, answer)
        self._starting.discard(worker)
        self._failed_starts = 0
        if answer.version != __version__:
            raise ScreenError(
                f"a machine of the Ray cluster has FastFold {answer.version}, this one has {__version__}; install the "
                "same version on all machines"
            )
        return Ready(Worker(worker, group.kind, answer.host, None if group.gpus else answer.memory))

    def _replace(self, worker: str, error: Exception) -> None:
        if worker in self._starting:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise ScreenError(
                    f"workers cannot start in the Ray cluster, {_FAILED_STARTS} times in a row: {_first_line(error)}"
                ) from error
        self._starting.discard(worker)
        with contextlib.suppress(Exception):  # it has usually ended
            self._ray.kill(self._actors[worker], no_restart=True)
        del self._actors[worker]
        self._add(self._groups.pop(worker))


class Resources(NamedTuple):
    """Number of a cluster's machines, its CPUs, the fewest of a machine, and its GPUs."""

    machines: int
    cpus: int
    smallest: int
    gpus: int


def connect(address: str) -> Resources:
    """Connect to a Ray cluster, or raise ConfigError.

    The address is ``HOST:PORT``, ``auto`` for the cluster of this machine, or ``local`` to start one for this run.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"`ray={address}`: Ray's client connection is not supported; run the command on a machine of the cluster, "
            "with `ray=auto`"
        )
    ray = import_ray()
    here: dict[str, Any] = {}
    if address == "local":
        here = {"include_dashboard": False, "object_store_memory": _STORE_BYTES}
    for attempt in range(1, _FAILED_STARTS + 1):
        try:
            ray.init(
                address=address, logging_level="error", log_to_driver=False, configure_logging=False, **here
            )
            break
        except Exception as error:  # Ray raises many types
            if address == "local" and "timed out during startup" in str(error) and attempt < _FAILED_STARTS:
                ray.shutdown()  # the machine is busy: try again
                continue
            raise ConfigError(
                f"`ray={address}`: {_first_line(error)}; start a cluster with 'ray start --head', or use `ray=local`"
            ) from error
    sizes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    cpus = [int(size["CPU"]) for size in sizes]
    gpus = sum(int(size.get("GPU", 0)) for size in sizes)
    return Resources(len(cpus), sum(cpus), min(cpus, default=0), gpus)


def import_ray() -> Any:
    """Import Ray with its settings, or raise ConfigError if it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise ConfigError("`ray` needs Ray, which is not installed: pip install 'fastfold[ray]'") from None
    return ray


def _first_line(error: Exception) -> str:
    """Return an error's message without Ray's tracebacks, or the reason why an actor could not start."""
    first = first_line(error)
    return str(error).strip().splitlines()[-1].strip() if "creation task" in first else first
