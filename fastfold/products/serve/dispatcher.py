"""Thread that sends groups of waiting jobs to workers, and records their answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastfold.errors import InputError, first_line
from fastfold.inference.workers.job import (
    MAX_LOSSES,
    Event,
    Executor,
    Finished,
    Gone,
    Job,
    JobResult,
    Ready,
    ScreenError,
    Task,
)
from fastfold.products.serve.metrics import Metrics
from fastfold.products.serve.queue import JobQueue, QueuedJob, QueueUnavailableError, State
from fastfold.products.serve.request import JobAnswer, read_answer

PAUSE_S = 10.0  #: Seconds without new groups after an error that is not a job's, for example a full disk
_RETRY_S = 1.0  # until the queue's file is tried again
_POLL_S = 0.05


@dataclass
class Dispatcher:
    """Dispatcher of a queue's jobs, each with its own folder, to workers.

    Jobs that were running when the server ended are answered by the files that their worker wrote, or return to their
    places in the queue. ``memory`` limits the bytes of each fold; None if the worker decides. ``problem`` tells why no
    job can be folded at present; empty if there is none. While the queue's file is locked or the disk is full, results
    wait in memory.
    """

    queue: JobQueue
    folder: Path
    executor: Callable[[], Executor]
    observer: Metrics
    group: int = 8
    memory: int | None = None
    say: Callable[[str], None] = lambda _: None
    problem: str = ""

    def __post_init__(self) -> None:
        self._running: dict[str, list[QueuedJob]] = {}
        self._idle: list[str] = []
        self._ended: list[tuple[list[QueuedJob], JobResult]] = []
        self._numbers = 0
        self._is_recovered = False
        self._queue_problem = ""
        self._paused_until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fastfold-dispatcher", daemon=True)

    def start(self) -> None:
        """Recover the jobs of an earlier server, and start the thread."""
        self._with_queue(self._recover)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and end the workers; running jobs start again with the next server."""
        self._stop.set()
        self._thread.join()

    @property
    def num_workers(self) -> int:
        """Number of workers that are ready or fold."""
        return len(self._idle) + len(self._running)

    def _run(self) -> None:
        executor = None
        try:
            executor = self.executor()
            while not self._stop.is_set():
                for event in executor.wait(_POLL_S):
                    self._handle(executor, event)
                self._with_queue(lambda: self._use_queue(executor))
        except ScreenError as error:
            self._fail(f"{error}; start the server again")
        except Exception as error:
            self._fail(f"the dispatcher failed, {type(error).__name__}: {error}; start the server again")
        finally:
            if executor is not None:
                executor.close()

    def _with_queue(self, action: Callable[[], None]) -> None:
        """Do something with the queue; wait a moment, and say why, if its file cannot be used."""
        try:
            action()
        except QueueUnavailableError as error:
            if self.problem != str(error):
                self._fail(str(error))
            self._queue_problem = str(error)
            self._stop.wait(_RETRY_S)
        else:
            if self._queue_problem and self.problem == self._queue_problem:
                self.problem = ""
            self._queue_problem = ""

    def _recover(self) -> None:
        """Answer the jobs of an earlier server by their files, or return them to the queue."""
        before = self.queue.jobs(state="running", limit=1 << 30)
        self.queue.requeue([job.id for job in before if not self._answer(job)])
        self._is_recovered = True

    def _use_queue(self, executor: Executor) -> None:
        """Record answers and results, and start waiting jobs; failed records are tried again."""
        if not self._is_recovered:
            self._recover()
        for group in self._running.values():
            for job in list(group):
                if self._answer(job):
                    group.remove(job)
        while self._ended:
            self._close(*self._ended[0])
            del self._ended[0]
        self._send(executor)

    def _fail(self, problem: str) -> None:
        self.problem = problem
        self.say(f"error: {problem}")

    def _send(self, executor: Executor) -> None:
        if time.monotonic() < self._paused_until:
            return
        while self._idle:
            group = self.queue.start_group(self.group)
            if not group:
                return
            self.observer.started(group)
            self._start(executor, self._idle.pop(0), group)

    def _start(self, executor: Executor, worker: str, group: list[QueuedJob]) -> None:
        self._numbers += 1
        folders = [self.folder / job.id for job in group]
        name = ", ".join(job.name for job in group)
        residues = sum(job.residues for job in group)
        self._running[worker] = list(group)
        executor.start(worker, Task(Job(self._numbers, name, "fold", folders, float(residues)), self.memory))

    def _handle(self, executor: Executor, event: Event) -> None:
        if isinstance(event, Ready):
            self._start(executor, event.worker.id, [])  # loads the networks
        elif isinstance(event, Gone):
            if event.worker in self._idle:
                self._idle.remove(event.worker)
            self._ended.append((self._running.pop(event.worker, []), JobResult("lost", event.reason)))
        elif isinstance(event, Finished):
            self._idle.append(event.worker)
            self._ended.append((self._running.pop(event.worker), event.result))

    def _close(self, group: Sequence[QueuedJob], result: JobResult) -> None:
        """Record the answers of a finished group, and requeue jobs without one.

        Steps that were recorded change nothing when they are repeated.
        """
        left = [job for job in group if not self._answer(job)]
        if result.status == "fatal":
            self._paused_until = time.monotonic() + PAUSE_S
            self.queue.requeue([job.id for job in left])
            if self.problem != result.text:
                self._fail(result.text)
            return
        if result.status in ("done", "failed"):
            self.problem = ""
        for job in left:
            losses = job.losses + 1
            if losses < MAX_LOSSES:
                self.queue.requeue([job.id], lost=True)
                continue
            text = f"its worker ended {losses} times, the last time: {result.text or 'without an answer'}"
            self._record(job, "failed", f"{job.name}: {text}", "{}")

    def _answer(self, job: QueuedJob) -> bool:
        """Record the answer that a worker has written; return False if there is none yet."""
        try:
            answer = read_answer(self.folder / job.id)
        except (OSError, InputError) as error:  # a disk failed, or a file was changed
            text = f"{job.name}: its answer cannot be read ({first_line(error)}); send the job again"
            answer = JobAnswer("failed", text)
        if answer is None:
            return False
        result = json.dumps({"scores": answer.scores, "files": answer.files})
        self._record(job, answer.state, answer.text, result)
        return True

    def _record(self, job: QueuedJob, state: State, text: str, result: str) -> None:
        # Paths of the server mean nothing to its users.
        if self.queue.finish(job.id, state, text.replace(f"{self.folder / job.id}/", ""), result):
            self.observer.answered(job, state)
