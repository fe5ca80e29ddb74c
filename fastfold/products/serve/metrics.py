"""Metrics of a server in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fastfold.products.serve.queue import JobQueue, QueuedJob, State

_SECONDS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_JOBS = (1, 2, 4, 8, 16, 32)


class Metrics:
    """Metrics of a queue and its workers."""

    def __init__(self, queue: JobQueue, workers: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        jobs = Gauge("fastfold_jobs", "Jobs in each state.", ["state"], registry=registry)
        for state in ("queued", "running"):
            jobs.labels(state).set_function(partial(_count, queue, state))
        pool = Gauge("fastfold_workers", "Workers that fold or wait for jobs.", registry=registry)
        pool.set_function(workers)
        self._answers = Counter("fastfold_answers", "Answered jobs.", ["state"], registry=registry)
        self._submissions = Counter("fastfold_submissions", "Submissions.", ["status"], registry=registry)
        self._residues = Counter("fastfold_residues", "Residues of answered jobs.", registry=registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._waits = seconds("fastfold_wait_seconds", "Seconds from admission to start.")
        self._folds = seconds("fastfold_fold_seconds", "Seconds from start to answer.")
        self._groups = Histogram("fastfold_group_jobs", "Jobs of a group.", buckets=_JOBS, registry=registry)

    def started(self, group: Sequence[QueuedJob]) -> None:
        """Record the start of a group."""
        self._groups.observe(len(group))
        for job in group:
            self._waits.observe(max(0.0, time.time() - job.submitted))

    def answered(self, job: QueuedJob, state: State) -> None:
        """Record an answer."""
        self._answers.labels(state).inc()
        self._residues.inc(job.residues)
        self._folds.observe(max(0.0, time.time() - (job.started or time.time())))

    def submitted(self, status: int) -> None:
        """Record a submission by the status of its answer."""
        self._submissions.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)


def _count(queue: JobQueue, state: str) -> float:
    return float(queue.counts().get(state, 0))
