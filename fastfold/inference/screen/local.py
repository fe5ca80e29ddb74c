"""Workers on this machine: one process each, and a thread that waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from fastfold.inference.screen.job import Event, Executor, Finished, Ready, Task, Worker
from fastfold.inference.screen.worker_process import Function, Limits, WorkerProcess, pack_function


class LocalExecutor(Executor):
    """Runner of workers on this machine, each with its function.

    A lost process is replaced with its worker's next job.
    """

    def __init__(self, workers: Sequence[tuple[Worker, Function]], limits: Limits) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._tasks: dict[str, queue.SimpleQueue[Task | None]] = {}
        self._processes: list[WorkerProcess] = []
        self._threads: list[threading.Thread] = []
        for worker, function in workers:
            process = WorkerProcess(pack_function(function), limits)
            tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(worker, process, tasks), name=worker.id, daemon=True
            )
            self._processes.append(process)
            self._tasks[worker.id] = tasks
            self._threads.append(thread)
            self._events.put(Ready(worker))
            thread.start()

    def start(self, worker: str, task: Task) -> None:
        self._tasks[worker].put(task)

    def wait(self, timeout: float) -> list[Event]:
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            return events

    def close(self) -> None:
        for tasks in self._tasks.values():
            tasks.put(None)
        for process in self._processes:
            process.close()
        for thread in self._threads:
            thread.join()
        for process in self._processes:
            process.join()

    def _serve(self, worker: Worker, process: WorkerProcess, tasks: queue.SimpleQueue[Task | None]) -> None:
        while (task := tasks.get()) is not None:
            self._events.put(Finished(worker.id, process.run(task)))
