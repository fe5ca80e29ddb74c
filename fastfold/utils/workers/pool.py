"""Worker processes that run one function on many tasks, robust against failures of tasks.

A task that raises gives a failure instead of a value. A worker that dies is replaced, and its task is tried once more.
If the parent dies, the workers end. Each worker has a separate pipe, so that a process killed within a message does not
affect others. A thread of the parent receives values while the main thread computes, assigns new tasks at once, and is
the only one that accesses workers. The two threads share queues whose operations are atomic: Ctrl-C in the main thread
may interrupt any line, and would leave a ``threading.Condition`` in the wrong state.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NamedTuple

from fastfold.errors import ConfigError
from fastfold.utils.workers.process import (
    Function,
    describe_end,
    describe_failure,
    pack,
    pack_function,
    receive,
    send_packed,
    start_worker,
)

_ATTEMPTS = 2  # tries of a task whose worker dies; the first death may have another cause
_FAILED_STARTS = 3
_GRACE_S = 1.0

_log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """Result of a task."""

    key: int  #: Number of the task
    value: Any  #: Result of the function; None if it failed
    failure: str | None  #: Reason of a failure in one line; None for success


@dataclass
class _Task:
    key: int
    argument: Any
    deaths: int = 0


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: Connection
    ready: bool = False
    task: _Task | None = None
    deadline: float | None = None
    killed_for: str | None = None


class InlinePool:
    """Pool without processes: a task runs when its outcome is requested, oldest first."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._waiting: deque[tuple[int, Any]] = deque()

    def submit(self, key: int, argument: Any) -> None:
        """Add a task."""
        self._waiting.append((key, argument))

    def next_outcome(self) -> Outcome:
        """Run the oldest task."""
        key, argument = self._waiting.popleft()
        try:
            return Outcome(key, self._function(key, argument), None)
        except Exception as error:
            return Outcome(key, None, describe_failure(error))

    def close(self) -> None:
        """Drop the waiting tasks."""
        self._waiting.clear()


class WorkerPool:
    """Pool that runs ``function(key, argument)`` for submitted tasks in ``workers`` spawned processes.

    Args:
        function: Function to run; it, its arguments and its values must be picklable.
        workers: Number of processes, at least 1.
        timeout_s: Limit in seconds for a task, after which its worker is killed; None for no limit.

    Raises:
        ConfigError: The function cannot be pickled.
    """

    def __init__(self, function: Function, workers: int, *, timeout_s: float | None = None) -> None:
        try:
            self._function = pack_function(function)
        except Exception as error:  # any error of a foreign __reduce__
            raise ConfigError(
                f"the function that prepares samples cannot be sent to worker processes ({error}); define it at the "
                "top level of a module, or set workers=0"
            ) from None
        self._timeout_s = timeout_s
        self._context = multiprocessing.get_context("spawn")
        self._waiting: deque[_Task] = deque()
        self._finished: SimpleQueue[Outcome | BaseException] = SimpleQueue()
        self._closing = False
        self._failed_starts = 0
        self._workers: list[_Worker] = []
        self._wake_receiver, self._wake_sender = self._context.Pipe(duplex=False)
        self._thread = threading.Thread(
            target=self._manage_workers, args=(workers,), name="worker-pool", daemon=True
        )
        self._thread.start()

    def submit(self, key: int, argument: Any) -> None:
        """Add a task; tasks begin in the order of submission."""
        self._waiting.append(_Task(key, argument))
        self._wake()

    def next_outcome(self) -> Outcome:
        """Return the next task to finish, or raise ConfigError if no worker can start."""
        outcome = self._finished.get()
        if isinstance(outcome, Outcome):
            return outcome
        self._finished.put(outcome)  # for every later call
        raise outcome

    def close(self) -> None:
        """End the workers, killing busy ones; idempotent and thread-safe."""
        self._closing = True
        self._finished.put(RuntimeError("the pool is closed"))
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has ended and closed the pipe
            self._wake_sender.send_bytes(b"!")

    # The following methods run in the pool's own thread.

    def _manage_workers(self, workers: int) -> None:
        try:
            _block_interrupts()
            for _ in range(workers):
                self._start()
            while not self._closing:
                self._assign()
                self._receive()
        except BaseException as error:  # kept for the consumer, which would wait forever otherwise
            self._finished.put(error)
        finally:
            self._end_workers()

    def _start(self) -> None:
        self._workers.append(_Worker(*start_worker(self._context, self._function, "sample-worker")))

    def _assign(self) -> None:
        for worker in self._workers:
            if worker.task is not None or not worker.ready:
                continue
            if not self._waiting:
                return
            worker.task = task = self._waiting.popleft()
            if self._timeout_s is not None:
                worker.deadline = time.monotonic() + self._timeout_s
            try:
                message = pack((task.key, task.argument))
            except Exception as error:
                worker.task = None
                self._finished.put(Outcome(task.key, None, describe_failure(error)))
                continue
            with contextlib.suppress(OSError):  # the worker just died, which is handled below
                send_packed(worker.pipe, message)

    def _receive(self) -> None:
        """Wait for an event and handle it."""
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        handles: list[Any] = [self._wake_receiver]
        for worker in self._workers:
            handles += [worker.pipe, worker.process.sentinel]
        happened = set(wait(handles, timeout))
        if self._wake_receiver in happened:
            while self._wake_receiver.poll():
                self._wake_receiver.recv_bytes()
        for worker in list(self._workers):
            # The last message of an ended worker counts, so the pipe is read first.
            if worker.pipe in happened:
                self._read_message(worker)
            elif worker.process.sentinel in happened:
                self._replace(worker)
            elif worker.deadline is not None and time.monotonic() > worker.deadline:
                worker.killed_for, worker.deadline = f"no result after {self._timeout_s:g} s", None
                worker.process.kill()

    def _read_message(self, worker: _Worker) -> None:
        try:
            key, value, failure = receive(worker.pipe)
        except (EOFError, OSError):
            self._replace(worker)
            return
        if key is not None:
            worker.task, worker.deadline = None, None
            self._finished.put(Outcome(key, value, failure))
        elif failure is not None:
            raise ConfigError(f"a worker process cannot load the function that prepares samples: {failure}")
        else:
            worker.ready, self._failed_starts = True, 0

    def _replace(self, worker: _Worker) -> None:
        """Report a worker's end, resubmit its task, and start another worker."""
        self._workers.remove(worker)
        task = worker.task
        end = describe_end(worker.process)
        cause = worker.killed_for or end
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise ConfigError(
                    f"worker processes end before they are ready ({cause}), {_FAILED_STARTS} times in a row; guard "
                    "the code of your own script with: if __name__ == '__main__', or work without worker processes "
                    "(workers=0, for a search num_workers=1)"
                )
        _log.warning(
            "a worker process (pid %s) ended: %s%s; starting another one",
            worker.process.pid,
            cause,
            f", at task {task.key}" if task else "",
        )
        if task is not None:
            task.deaths += 1
            if task.deaths < _ATTEMPTS:
                self._waiting.appendleft(task)
            else:
                failure = f"its worker process ended {_ATTEMPTS} times: {cause}"
                self._finished.put(Outcome(task.key, None, failure))
        worker.pipe.close()
        self._start()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.pipe.close()  # an idle worker reads the end of the tasks and exits
            if worker.task is not None or not worker.ready:
                worker.process.kill()
        end = time.monotonic() + _GRACE_S
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        self._wake_receiver.close()
        self._wake_sender.close()


def _block_interrupts() -> None:
    """Block Ctrl-C in this thread and in the processes that it starts, because the main thread handles it."""
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker  # exists on systems where signals can be blocked

        resource_tracker.ensure_running()  # starting it together with the first process would unblock them
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
