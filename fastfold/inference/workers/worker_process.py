"""Workers on this machine: processes that are replaced after they end, and killed at the limits of a job."""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastfold.errors import spelled
from fastfold.inference.workers.job import Event, Executor, Finished, JobResult, Ready, Task, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.utils.units import GIB, clock
from fastfold.utils.workers.process import FunctionProcess, LimitPassed, ProcessEnded, pack_function

Function = Callable[[int, Task], JobResult]
_FAILED_STARTS = 3


class WorkerProcess:
    """Process that runs one function on a job at a time.

    It is started with the first job, and again after it has ended. It ends when its parent ends in any way. The
    function is packed for :class:`~fastfold.utils.workers.process.FunctionProcess`, and this process does not load it.
    Limits are those of time and memory.
    """

    def __init__(self, packed: bytes, limits: ScreenOptions) -> None:
        self._packed, self._limits = packed, limits
        self._process: FunctionProcess | None = None
        self._closed = False

    def run(self, task: Task) -> JobResult:
        """Run a job; return a result even if its process ends.

        It is ``lost`` if its process ended, ``failed`` if a limit ended it, ``fatal`` if no process can be started.
        """
        begin = time.monotonic()
        result = self._ensure_running() or self._run_task(task)
        return replace(result, seconds=time.monotonic() - begin)

    def close(self) -> None:
        """End the process at once, from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def join(self) -> None:
        """Wait for the end of the process; no other thread may run a job."""
        if self._process is not None:
            self._process.end()
        self._process = None

    def _ensure_running(self) -> JobResult | None:
        """Start the process if needed; return an error if it cannot start."""
        if self._process is not None and self._process.process.is_alive():
            return None
        reason: str | None = ""
        for _ in range(_FAILED_STARTS):
            self.join()
            context = multiprocessing.get_context("spawn")
            self._process = FunctionProcess(context, self._packed, "fastfold-worker", daemon=False)
            if self._closed:  # closed meanwhile
                self._process.kill()
            try:
                _, reason = self._process.answer()
            except ProcessEnded as ended:
                reason = str(ended)
            if self._closed:
                return JobResult("lost", "the run ends")
            if not reason:
                return None
            self._process.kill()
        return JobResult("fatal", f"a worker process cannot start, {_FAILED_STARTS} times in a row: {reason}")

    def _run_task(self, task: Task) -> JobResult:
        assert self._process is not None
        watched = task.job.kind != "search" and self._limits.has_limits
        limit = partial(self._beyond, self._process.process.pid, time.monotonic()) if watched else None
        try:
            result, failure = self._process.call(task.job.id, task, limit)
        except LimitPassed as ended:
            failure = str(ended)
            self.join()
        except ProcessEnded as ended:
            self.join()
            return JobResult("lost", str(ended))
        return JobResult("failed", f"{task.job.name}: {failure}") if failure is not None else result

    def _beyond(self, pid: int, start: float) -> str:
        """Return the limit that a job has passed, in words; empty for none."""
        seconds_limit, memory_limit = self._limits.time_limit, self._limits.memory_limit
        if seconds_limit is not None and time.monotonic() - start > seconds_limit:
            return spelled(
                f"was not finished after {clock(seconds_limit)}, its `time_limit`; give it more time"
            )
        if memory_limit is not None and (held := resident_bytes(pid)) > memory_limit:
            return spelled(
                f"its process held {held / GIB:,.2f} GiB of memory, more than its `memory_limit` of "
                f"{memory_limit / GIB:,.2f} GiB; give it more memory"
            )
        return ""


def resident_bytes(pid: int) -> int:
    """Return the bytes of memory that a process holds (Linux); 0 if it does not exist."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class LocalExecutor(Executor):
    """Runner of workers on this machine: each has its function, a process, and a thread that waits for it.

    A lost process is replaced with its worker's next job.
    """

    def __init__(self, workers: Sequence[tuple[Worker, Function]], limits: ScreenOptions) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._processes: dict[str, WorkerProcess] = {}
        self._threads = ThreadPoolExecutor(len(workers))
        for worker, function in workers:
            self._processes[worker.id] = WorkerProcess(pack_function(function), limits)
            self._events.put(Ready(worker))

    def start(self, worker: str, task: Task) -> None:
        self._threads.submit(self._run, worker, task)

    def wait(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._threads.shutdown()
        for process in self._processes.values():
            process.join()

    def _run(self, worker: str, task: Task) -> None:
        try:
            result = self._processes[worker].run(task)
        except Exception as error:  # the run would wait for a result without end
            result = JobResult("fatal", f"a worker process cannot be started or reached: {error}")
        self._events.put(Finished(worker, result))
