"""Worker processes that run one function on many tasks, robust against failures of tasks.

A task that raises gives a failure instead of a value. A worker that dies is replaced, and its task is tried once more.
If the parent dies, the workers end. Each worker has a separate pipe, so that a process killed within a message does not
affect others. Each has a thread of the parent, which receives values while the main thread computes, and assigns the
next task at once. Threads share queues whose operations are atomic: Ctrl-C in the main thread may interrupt any line,
and would leave a ``threading.Condition`` in the wrong state.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from fastfold.errors import ConfigError
from fastfold.utils.workers.process import (
    Function,
    FunctionProcess,
    ProcessEnded,
    describe_end,
    describe_failure,
    pack_function,
)

_ATTEMPTS = 2  # tries of a task whose worker dies; the first death may have another cause
_FAILED_STARTS = 3

_log = logging.getLogger(__name__)


class WorkerOutcome(NamedTuple):
    """Result of a task."""

    key: int  #: Number of the task
    value: Any  #: Result of the function; None if it failed
    failure: str | None  #: Reason of a failure in one line; None for success


class _PoolClosed(Exception):
    """End of a worker's thread."""


class InlinePool:
    """Pool without processes: a task runs when its outcome is requested, oldest first."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._waiting: deque[tuple[int, Any]] = deque()

    def submit(self, key: int, argument: Any) -> None:
        """Add a task."""
        self._waiting.append((key, argument))

    def next_outcome(self) -> WorkerOutcome:
        """Run the oldest task."""
        key, argument = self._waiting.popleft()
        try:
            return WorkerOutcome(key, self._function(key, argument), None)
        except Exception as error:
            return WorkerOutcome(key, None, describe_failure(error))

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
        self._tasks: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._finished: SimpleQueue[WorkerOutcome | BaseException] = SimpleQueue()
        self._closing = False
        self._failed_starts = 0
        self._workers: dict[FunctionProcess, bool] = {}  # and whether each is busy
        self._threads = [
            threading.Thread(target=self._serve, name="worker-pool", daemon=True) for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, argument: Any) -> None:
        """Add a task; tasks begin in the order of submission."""
        self._tasks.put((key, argument))

    def next_outcome(self) -> WorkerOutcome:
        """Return the next task to finish, or raise ConfigError if no worker can start."""
        outcome = self._finished.get()
        if isinstance(outcome, WorkerOutcome):
            return outcome
        self._finished.put(outcome)  # for every later call
        raise outcome

    def close(self) -> None:
        """End the workers, killing busy ones; idempotent and thread-safe."""
        self._closing = True
        self._finished.put(RuntimeError("the pool is closed"))
        for worker, is_busy in list(self._workers.items()):
            if is_busy:
                worker.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # The following methods run in the thread of a worker.

    def _serve(self) -> None:
        """Start a worker, and give it tasks until the pool is closed."""
        try:
            _block_interrupts()
            worker = self._start()
            while (task := self._tasks.get()) is not None and not self._closing:
                worker = self._run(worker, *task)
            worker.end()
        except _PoolClosed:
            pass
        except BaseException as error:  # kept for the consumer, which would wait forever otherwise
            self._finished.put(error)

    def _start(self) -> FunctionProcess:
        """Start a worker, and wait until it is ready, or raise _PoolClosed."""
        while not self._closing:
            worker = FunctionProcess(self._context, self._function, "sample-worker")
            try:
                with self._in_use(worker):
                    _, failure = worker.answer()
            except ProcessEnded as ended:
                self._failed_starts += 1
                if self._failed_starts >= _FAILED_STARTS and not self._closing:
                    raise ConfigError(
                        f"worker processes end before they are ready ({ended}), {_FAILED_STARTS} times in a row; guard "
                        "the code of your own script with: if __name__ == '__main__', or work without worker "
                        "processes (workers=0, for a search num_workers=1)"
                    ) from None
                self._remove(worker, str(ended))
                continue
            if failure is not None:
                raise ConfigError(
                    f"a worker process cannot load the function that prepares samples: {failure}"
                )
            self._failed_starts = 0
            return worker
        raise _PoolClosed

    def _run(self, worker: FunctionProcess, key: int, argument: Any) -> FunctionProcess:
        """Run a task, and return the worker for the next one, or raise _PoolClosed."""
        if not worker.process.is_alive():  # it ended while it was idle
            self._remove(worker, describe_end(worker.process))
            worker = self._start()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self._in_use(worker):
                    outcome = WorkerOutcome(key, *worker.call(key, argument, self._passed_limit()))
            except ProcessEnded as ended:
                self._remove(worker, f"{ended}, at task {key}")
                if attempt == _ATTEMPTS:
                    failure = f"its worker process ended {_ATTEMPTS} times: {ended}"
                    self._finished.put(WorkerOutcome(key, None, failure))
                worker = self._start()
                continue
            except Exception as error:  # the argument or the value cannot be sent
                outcome = WorkerOutcome(key, None, describe_failure(error))
            self._finished.put(outcome)
            break
        return worker

    @contextlib.contextmanager
    def _in_use(self, worker: FunctionProcess) -> Iterator[None]:
        """Kill a worker if the pool is closed inside."""
        self._workers[worker] = True
        if self._closing:
            worker.kill()
        try:
            yield
        finally:
            self._workers[worker] = False

    def _passed_limit(self) -> Callable[[], str] | None:
        """Return a function that tells when a task that begins has taken too long; None without a limit."""
        if (seconds := self._timeout_s) is None:
            return None
        end = time.monotonic() + seconds
        return lambda: f"no result after {seconds:g} s" if time.monotonic() > end else ""

    def _remove(self, worker: FunctionProcess, cause: str) -> None:
        """Remove an ended worker, and report it unless the pool is closed."""
        del self._workers[worker]
        worker.end()
        if not self._closing:
            _log.warning(
                "a worker process (pid %s) ended: %s; starting another one", worker.process.pid, cause
            )


def _block_interrupts() -> None:
    """Block Ctrl-C in this thread and in the processes that it starts, because the main thread handles it."""
    if hasattr(signal, "pthread_sigmask"):
        from multiprocessing import resource_tracker  # exists on systems where signals can be blocked

        resource_tracker.ensure_running()  # starting it together with the first process would unblock them
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
