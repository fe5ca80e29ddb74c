"""Scheduler of jobs for workers on any machines, which share the memory of each and are replaced if they are lost."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastfold.inference.workers.job import (
    MAX_LOSSES,
    Event,
    Executor,
    Gone,
    Job,
    JobResult,
    Kind,
    Ready,
    ScreenError,
    Task,
    Worker,
)

FIRST_DELAY_S, LONGEST_DELAY_S = 1.0, 30.0
"""Seconds until a job that another process is working on is tried again: first, and at most."""
PROCESS_BYTES = 512 << 20  #: Memory of an idle worker: Python, PyTorch and its cache
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class MemoryPlan:
    """Distribution of the host's memory.

    Every worker has :func:`worker_bytes` in addition to its folds. The budget for each fold is the user's; None to
    share the free memory. ``limit`` is the largest number of bytes of a fold.
    """

    per_worker: int = PROCESS_BYTES
    budget: int | None = None
    limit: int | None = None

    def total(self, memory: int, workers: int) -> int:
        """Return the bytes for all folds on a machine, from its free memory before its workers started."""
        return max(1, memory * 9 // 10 - workers * self.per_worker)

    def share(self, total: int, workers: int) -> int:
        """Return the bytes that every fold gets at least."""
        share = max(1, total // workers) if self.budget is None else self.budget
        return share if self.limit is None else min(share, self.limit)

    def grant(self, smallest: int, total: int, workers: int) -> int:
        """Return the bytes for a fold: its share, or its smallest memory if that is more and available."""
        share = self.share(total, workers)
        most = min(x for x in (self.budget or total, self.limit) if x is not None)
        return max(share, min(smallest, most))


class Scheduler:
    """Scheduler that dispatches jobs to workers, most expensive first.

    A job is sent when a worker is idle, so workers do not queue jobs. If workers share the memory of a machine, a job
    waits until enough is free, and cheaper ones may run first. Searches pause while ``ahead`` searched targets wait.
    ``report`` is called once for each job with its result, unless another job continues it, which ``follow`` returns.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        executor: Executor,
        report: Callable[[Job, JobResult], None],
        memory: MemoryPlan | None = None,
        *,
        ahead: int = 16,
        follow: Callable[[Job, JobResult], Job | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._report, self._follow, self._clock = executor, report, follow, clock
        self._memory, self._ahead = memory or MemoryPlan(), ahead
        self._open = {job.id: job for job in jobs}
        self._needs = {job.id: {need for need in job.needs if need in self._open} for job in jobs}
        self._dependents: dict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            for need in self._needs[job.id]:
                self._dependents[need].append(job)
        self._ready: dict[Kind, list[tuple[float, int]]] = {"search": [], "fold": [], "finish": []}
        self._searched: set[int] = set()
        self._later: list[tuple[float, int]] = []
        self._delays: dict[int, float] = {}
        self._losses: dict[int, int] = defaultdict(int)
        self._workers: dict[str, Worker] = {}
        self._running: dict[str, Task] = {}
        for job in jobs:
            if not self._needs[job.id]:
                self._push(job)

    def run(self) -> None:
        """Run all jobs, or raise ScreenError if none can succeed."""
        while self._open:
            self._wake()
            for worker in list(self._workers.values()):
                pauses = worker.kind == "search" and len(self._searched) >= self._ahead
                if worker.id in self._running or pauses:
                    continue
                if (task := self._choose(worker)) is not None:
                    self._running[worker.id] = task
                    self._searched.discard(task.job.id)
                    self._executor.start(worker.id, task)
            later = [max(0.0, self._later[0][0] - self._clock())] if self._later else []
            for event in self._executor.wait(min([_PATIENCE_S, *later])):
                self._handle(event)

    def _push(self, job: Job) -> None:
        heapq.heappush(self._ready[job.kind], (-job.cost, job.id))
        if job.needs:
            self._searched.add(job.id)

    def _wake(self) -> None:
        """Reactivate the jobs that waited for another process."""
        while self._later and self._later[0][0] <= self._clock():
            self._push(self._open[heapq.heappop(self._later)[1]])

    def _choose(self, worker: Worker) -> Task | None:
        """Choose the most expensive job for which the machine has memory."""
        ready: list[tuple[float, int]] = self._ready[worker.kind]
        if worker.kind != "fold" or worker.memory is None:
            return Task(self._open[heapq.heappop(ready)[1]], None) if ready else None
        there = [w for w in self._workers.values() if w.host == worker.host and w.kind == worker.kind]
        used = [self._running[w.id].memory or 0 for w in there if w.id in self._running]
        plan, count = self._memory, len(there)
        total = plan.total(max(w.memory or 0 for w in there), count)
        free = total - sum(used)
        left: list[tuple[float, int]] = []
        chosen = None
        while ready and chosen is None:
            job = self._open[ready[0][1]]
            memory = plan.grant(job.smallest, total, count)
            if memory <= free or not used:  # a job alone on the machine gets all free memory
                chosen = Task(job, memory)
                heapq.heappop(ready)
            elif free < plan.share(total, count):  # too little for any job
                break
            else:
                left.append(heapq.heappop(ready))
        for entry in left:
            heapq.heappush(ready, entry)
        return chosen

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ready):
            self._workers[event.worker.id] = event.worker
        elif isinstance(event, Gone):
            self._workers.pop(event.worker, None)
            if (task := self._running.pop(event.worker, None)) is not None:
                self._finished(task.job, JobResult("lost", event.reason))
        else:
            self._finished(self._running.pop(event.worker).job, event.result)

    def _finished(self, job: Job, result: JobResult) -> None:
        if job.members and result.status != "fatal":
            self._finished_together(job, result)
        elif result.status == "fatal":
            raise ScreenError(f"{result.text}. The run ends here; finished results are kept")
        elif result.status == "lost":
            self._lost(job, result)
        elif result.status == "in_progress":
            delay = self._delays.get(job.id, FIRST_DELAY_S)
            self._delays[job.id] = min(2 * delay, LONGEST_DELAY_S)
            heapq.heappush(self._later, (self._clock() + delay, job.id))
        else:
            self._close(job, result)

    def _finished_together(self, job: Job, result: JobResult) -> None:
        """Finish the members of a job; without their results, each becomes a job of its own."""
        members = self._split(job)
        if not result.members:
            for one in members:
                self._push(one)
            return
        seconds = result.seconds / len(members)
        for one, own in zip(members, result.members, strict=True):
            self._finished(one, replace(own, seconds=seconds))

    def _split(self, job: Job) -> Sequence[Job]:
        """Replace a job by its members, and return them; a job of its own is kept."""
        if not job.members:
            return [job]
        del self._open[job.id]
        for one in job.members:
            self._open[one.id], self._needs[one.id] = one, set()
        return job.members

    def _lost(self, job: Job, result: JobResult) -> None:
        self._losses[job.id] += 1
        if self._losses[job.id] < MAX_LOSSES:
            self._push(job)
            return
        text = f"{job.name}: its worker ended twice, the last time: {result.text}; it is not tried again in this run"
        self._close(job, JobResult("failed", text, result.lines, result.seconds))

    def _close(self, job: Job, result: JobResult) -> None:
        """Close a job permanently; dependent jobs may start, or fail."""
        del self._open[job.id]
        following = None if self._follow is None else self._follow(job, result)
        if following is None:
            self._report(job, result)
        else:
            self._open[following.id] = following
            self._push(following)
        for dependent in self._dependents.pop(job.id, ()):
            if dependent.id not in self._open:
                continue
            if result.status == "failed":
                for one in self._split(dependent):
                    self._close(one, JobResult("failed", f"{one.name}: {job.name}: {result.text}"))
                continue
            self._needs[dependent.id].discard(job.id)
            if not self._needs[dependent.id]:
                self._push(dependent)
