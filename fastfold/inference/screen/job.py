"""What passes between the scheduler, its workers, and whatever runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from fastfold.errors import FastFoldError

Kind = Literal["search", "fold"]
Status = Literal["done", "finished", "elsewhere", "failed", "lost", "fatal"]


class ScreenError(FastFoldError):
    """Nothing can go on: workers cannot start, or what they all need is missing."""


@dataclass(frozen=True)
class Job:
    """A piece of work for one worker.

    Attributes:
        id: Its number, which no other job has.
        name: What a person calls it.
        kind: Which workers can do it.
        payload: What they are given: a :class:`~fastfold.data.targets.Target` to fold, or sequences to search for.
        cost: Work in arbitrary units; of two jobs that could be started, the one that costs more is.
        smallest: Bytes of the host's memory without which it cannot be done; 0 if that is unknown or none of its
            memory is the host's.
        needs: Jobs that have to be done before.
    """

    id: int
    name: str
    kind: Kind
    payload: Any = field(repr=False)
    cost: float
    smallest: int = 0
    needs: frozenset[int] = frozenset()


class Task(NamedTuple):
    """A job as a worker gets it.

    Attributes:
        job: The job.
        memory: Bytes that it may take; None where the worker decides.
    """

    job: Job
    memory: int | None


@dataclass(frozen=True)
class JobResult:
    """What became of a job.

    Attributes:
        status: ``done``; ``finished`` before, so that there was nothing to do; ``elsewhere``, another process is
            working on it; ``failed`` for a reason that would be there again; ``lost``, because its worker ended; or
            ``fatal``, when every other job would fail too.
        text: The result in words, or the reason, which names the job if it failed.
        lines: What people should know besides, in order.
        seconds: How long it took.
    """

    status: Status
    text: str = ""
    lines: Sequence[str] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Worker:
    """A process that does one job at a time.

    Attributes:
        id: What it is called; one that takes the place of a lost one has another name.
        kind: Of the jobs that it does.
        host: The machine that it runs on.
        memory: Bytes of that machine's memory that were free before the workers came; None if its jobs take their
            memory elsewhere, on a GPU for example.
    """

    id: str
    kind: Kind
    host: str = "localhost"
    memory: int | None = None


class Ready(NamedTuple):
    """A new worker can take jobs."""

    worker: Worker


class Finished(NamedTuple):
    """A worker is through with its job, and can take another one."""

    worker: str
    result: JobResult


class Gone(NamedTuple):
    """A worker has ended, with its job if it had one. Another :class:`Ready` tells of the one in its place."""

    worker: str
    reason: str


Event = Ready | Finished | Gone


class Executor(Protocol):
    """Runs workers somewhere."""

    def start(self, worker: str, task: Task) -> None:
        """Give a job to a worker that has none."""

    def wait(self, timeout: float) -> list[Event]:
        """What has happened since the last call; waits for something, at most ``timeout`` seconds.

        Raises:
            ScreenError: No worker can be had.
        """

    def close(self) -> None:
        """End all workers, at once."""
