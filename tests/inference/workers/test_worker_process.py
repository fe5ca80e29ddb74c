"""A worker's process: lost, replaced, and ended for the limits of a job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastfold.inference.workers.job import Job, JobResult, Kind, Task
from fastfold.inference.workers.options import ScreenOptions
from fastfold.inference.workers.worker_process import WorkerProcess, pack_function, resident_bytes
from tests.inference.workers.functions import CannotArrive, act

MIB = 1 << 20


def task(*payload: object, kind: Kind = "fold") -> Task:
    return Task(Job(0, "T1", kind, payload, 1.0), None)


def process(limits: ScreenOptions | None = None) -> WorkerProcess:
    return WorkerProcess(pack_function(act), limits or ScreenOptions())


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    one = process()
    yield one
    one.close()
    one.join()


def test_one_process_does_one_job_after_the_other(worker: WorkerProcess):
    first, second = worker.run(task("echo", "a")), worker.run(task("echo", "b"))
    assert (first.status, second.status) == ("done", "done")
    assert first.text.split()[-1] == second.text.split()[-1] != str(os.getpid())


def test_an_error_of_the_function_is_the_jobs(worker: WorkerProcess):
    result = worker.run(task("raise", "no such thing"))
    assert result.status == "failed"
    assert "ValueError: no such thing" in result.text
    assert worker.run(task("echo", "a")).status == "done"


def test_a_process_that_is_killed_loses_its_job_and_is_replaced(worker: WorkerProcess, tmp_path: Path):
    job = task("die", str(tmp_path / "marks"), 1)
    lost = worker.run(job)
    assert (lost.status, lost.text) == ("lost", "killed by SIGKILL; by the system, if memory ran out")
    assert worker.run(job).status == "done"


def test_a_job_that_takes_longer_than_its_limit_is_ended():
    worker = process(ScreenOptions(time_limit=0.5))
    start = time.monotonic()
    result = worker.run(task("sleep", 60))
    assert time.monotonic() - start < 30
    assert result.status == "failed"
    assert "was not finished after 0:00, its time_limit=" in result.text
    assert worker.run(task("echo", "next")).status == "done"
    assert worker.run(task("sleep", 0.9, kind="search")).status == "done"  # limits are those of targets
    worker.close()
    worker.join()


def test_a_job_whose_process_holds_more_than_its_limit_is_ended():
    worker = process(ScreenOptions(memory_limit=200 * MIB))
    assert worker.run(task("echo", "small")).status == "done"
    result = worker.run(task("hold", 400))
    assert result.status == "failed"
    assert "more than its memory_limit= of 0.20 GiB" in result.text
    worker.close()
    worker.join()


def test_what_cannot_be_loaded_in_another_process_is_said_once_and_for_all():
    worker = WorkerProcess(pack_function(CannotArrive()), ScreenOptions())  # type: ignore[arg-type]
    result = worker.run(task("echo", "a"))
    assert result.status == "fatal"
    assert "cannot start, 3 times in a row: RuntimeError: not here" in result.text


def test_memory_of_a_process_is_read_and_none_of_one_that_is_not_there():
    assert 10 * MIB < resident_bytes(os.getpid()) < 1 << 40
    assert resident_bytes(2**22 + 1) == 0


def test_results_tell_how_long_they_took(worker: WorkerProcess):
    assert 0.3 < worker.run(task("sleep", 0.3)).seconds < 60
    assert JobResult("done").seconds == 0
