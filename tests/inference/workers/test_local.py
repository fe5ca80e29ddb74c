"""Workers on this machine: several at once, results as they come, and all of them gone at the end."""

from __future__ import annotations

import multiprocessing
import time

from fastfold.inference.workers.job import Finished, Job, JobResult, Ready, Task, Worker
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.scheduler import MemoryPlan, Scheduler
from fastfold.inference.workers.worker_process import LocalExecutor
from tests.inference.workers.functions import act


def job(number: int, *payload: object) -> Job:
    return Job(number, f"job {number}", "fold", payload, float(number))


def test_jobs_are_shared_by_the_workers_and_a_lost_one_is_done_again(tmp_path):
    jobs = [job(k, "echo", str(k)) for k in range(10)]
    jobs += [job(10, "die", str(tmp_path / "once"), 1), job(11, "die", str(tmp_path / "always"), 99)]
    executor = LocalExecutor([(Worker(f"w{k}", "fold"), act) for k in range(2)], ScreenOptions())
    results: dict[int, JobResult] = {}
    try:
        Scheduler(jobs, executor, lambda j, r: results.update({j.id: r}), MemoryPlan()).run()
    finally:
        executor.close()
    assert {k: r.status for k, r in results.items()} == {
        k: "failed" if k == 11 else "done" for k in range(12)
    }
    assert len((tmp_path / "always").read_text()) == 2
    assert len((tmp_path / "once").read_text()) == 2
    assert not multiprocessing.active_children()


def test_a_process_that_the_system_refuses_ends_the_run(monkeypatch):
    executor = LocalExecutor([(Worker("w", "fold"), act)], ScreenOptions())

    def refuse(self: object, task: Task) -> JobResult:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("fastfold.inference.workers.worker_process.WorkerProcess.run", refuse)
    assert executor.wait(1) == [Ready(Worker("w", "fold"))]
    executor.start("w", Task(job(0, "echo", "ready"), None))
    (event,) = executor.wait(60)
    executor.close()
    assert isinstance(event, Finished)
    assert (event.result.status, "no more processes" in event.result.text) == ("fatal", True)


def test_closing_ends_jobs_at_once():
    executor = LocalExecutor([(Worker("w", "fold"), act)], ScreenOptions())
    assert executor.wait(1) == [Ready(Worker("w", "fold"))]
    executor.start("w", Task(job(0, "echo", "ready"), None))
    while not (events := executor.wait(60)):
        pass
    assert isinstance(events[0], Finished)
    executor.start("w", Task(job(1, "sleep", 600), None))
    assert executor.wait(0.2) == []
    start = time.monotonic()
    executor.close()
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()
