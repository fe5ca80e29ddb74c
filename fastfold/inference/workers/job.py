"""Messages between the scheduler, its workers, and their executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from fastfold.errors import FastFoldError

Kind = Literal["search", "fold", "finish"]
Status = Literal["done", "finished", "in_progress", "failed", "lost", "fatal"]
MAX_LOSSES = 2  #: Number of lost workers after which a job is given up, because it may be the cause


class ScreenError(FastFoldError):
    """Error after which a screen cannot continue: workers cannot start, or a common input is missing."""


@dataclass(frozen=True)
class Job:
    """Piece of work for one worker."""

    id: int  #: Unique number
    name: str  #: Name for users
    kind: Kind  #: Kind of workers that can do it
    #: Input of the worker: a :class:`~fastfold.data.targets.Target` to fold, a :class:`FoldedJob` to finish, or
    #: sequences to search for
    payload: Any = field(repr=False)
    cost: float  #: Work in arbitrary units; more expensive jobs start first
    #: Smallest sufficient host memory in bytes; 0 if it is unknown or no host memory is used
    smallest: int = 0
    needs: frozenset[int] = frozenset()  #: Jobs that must be finished first
    #: Jobs that are done together as this one, with the same ``needs``; empty for a job of its own
    members: tuple[Job, ...] = ()


class Task(NamedTuple):
    """Job with its memory limit in bytes, as sent to a worker; None if the worker decides."""

    job: Job
    memory: int | None


@dataclass(frozen=True)
class JobResult:
    """Result of a job."""

    #: ``done``; ``finished`` before, so nothing was done; ``in_progress``, another process is working on it;
    #: ``failed`` for a permanent reason; ``lost``, because its worker ended; or ``fatal``, if every other job would
    #: fail too
    status: Status
    text: str = ""  #: Result in words, or the reason, which names a failed job
    lines: Sequence[str] = ()  #: Further lines for users, in order
    seconds: float = 0.0  #: Duration in seconds
    members: tuple[JobResult, ...] = ()  #: Results of the members of a job; empty for a job of its own
    #: See :class:`fastfold.inference.target_runner.FoldedTarget`
    predictions: tuple[str, ...] = field(default=(), compare=False)


class FoldedJob(NamedTuple):
    """Folded target without plots, whose predictions are not relaxed yet, and the result of its fold."""

    target: Any
    result: JobResult


@dataclass(frozen=True)
class Worker:
    """Process that does one job at a time, on a host.

    ``memory`` is the free memory of that machine in bytes before the workers started; None if its jobs use other
    memory, for example on a GPU.
    """

    id: str
    kind: Kind
    host: str = "localhost"
    memory: int | None = None


class Ready(NamedTuple):
    """Event: a new worker can take jobs."""

    worker: Worker


class Finished(NamedTuple):
    """Event: a worker has finished its job, and can take another one."""

    worker: str
    result: JobResult


class Gone(NamedTuple):
    """Event: a worker has ended, together with its job. Another :class:`Ready` follows for its replacement."""

    worker: str
    reason: str


Event = Ready | Finished | Gone


class Executor(Protocol):
    """Runner of workers."""

    def start(self, worker: str, task: Task) -> None:
        """Send a job to an idle worker."""

    def wait(self, timeout: float) -> list[Event]:
        """Return the events since the last call; wait for one, at most ``timeout`` seconds.

        A ScreenError tells that no worker can be started.
        """

    def close(self) -> None:
        """End all workers at once."""
