"""Jobs are folded again only without an answer, and given up when their workers keep ending."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from fastfold.inference.screen.job import JobResult, Task
from fastfold.inference.serve import dispatcher as dispatching
from fastfold.inference.serve.dispatcher import Dispatcher
from fastfold.inference.serve.metrics import Metrics
from fastfold.inference.serve.queue import FINAL, JobQueue
from fastfold.inference.serve.request import JobRequest
from fastfold.inference.serve.worker import write_answer
from tests.inference.serve.stub import InlineExecutor, fold


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Queued:
    """A dispatcher with some jobs of three residues."""

    def __init__(self, folder: Path, jobs: str) -> None:
        self.folder, self.queue = folder, JobQueue(folder / "queue.sqlite")
        self.seen: list[list[str]] = []
        self.metrics = Metrics(self.queue, lambda: 1)
        for job in jobs:
            (folder / job).mkdir()
            JobRequest("sequence", "MKV").write(folder / job)
            self.queue.admit(job, user="ada", name=job, residues=3, fingerprint="f")

    def dispatcher(self, function: Any) -> Dispatcher:
        def noted(number: int, task: Task) -> JobResult:
            if task.job.payload:
                self.seen.append([folder.name for folder in task.job.payload])
            return function(number, task)

        return Dispatcher(self.queue, self.folder, partial(InlineExecutor, noted), self.metrics)

    def run(self, function: Any = fold) -> dict[str, str]:
        dispatcher = self.dispatcher(function)
        dispatcher.start()
        wait_for(lambda: all(job.state in FINAL for job in self.queue.jobs()))
        dispatcher.stop()
        return {job.id: job.state for job in self.queue.jobs()}


def test_jobs_of_a_killed_server_are_answered_by_their_files_or_start_again(tmp_path: Path):
    queued = Queued(tmp_path, "abc")
    assert len(queued.queue.start_group(2)) == 2
    write_answer(tmp_path / "a", {"state": "failed", "text": f"{tmp_path}/a/x.pdb is invalid"})
    assert queued.run() == {"a": "failed", "b": "done", "c": "done"}
    assert queued.seen == [["b", "c"]]
    first = queued.queue.get("a")
    assert first is not None
    assert first.text == "x.pdb is invalid"
    assert b'fastfold_answers_total{state="done"} 2.0' in queued.metrics.text()
    assert b"fastfold_group_jobs_sum 2.0" in queued.metrics.text()


@pytest.mark.parametrize(
    ("status", "how"), [("lost", "killed by SIGKILL"), ("failed", "was not finished after 0:10")]
)
def test_a_job_that_ends_its_workers_is_given_up_and_the_others_are_folded(
    tmp_path: Path, status: Any, how: str
):
    def deadly(number: int, task: Task) -> JobResult:
        if any(folder.name == "b" for folder in task.job.payload):
            return JobResult(status, how)
        return fold(number, task)

    queued = Queued(tmp_path, "abc")
    assert queued.run(deadly) == {"a": "done", "b": "failed", "c": "done"}
    assert queued.seen == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    lost = queued.queue.get("b")
    assert lost is not None
    assert lost.text == f"b: its worker ended 2 times, the last time: {how}"


def test_metrics_have_the_time_of_waits_and_folds(tmp_path: Path):
    queued = Queued(tmp_path, "a")
    time.sleep(0.05)
    queued.run(partial(fold, seconds=0.05))
    values = dict(line.split() for line in queued.metrics.text().decode().splitlines() if "_sum" in line)
    assert 0.05 <= float(values["fastfold_fold_seconds_sum"]) < 5
    assert 0.05 <= float(values["fastfold_wait_seconds_sum"]) < 5


def test_after_an_error_that_is_not_a_jobs_all_wait_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatching, "PAUSE_S", 0.1)
    results = [JobResult("fatal", "the disk is full")]

    def full(number: int, task: Task) -> JobResult:
        return results.pop() if results and task.job.payload else fold(number, task)

    queued = Queued(tmp_path, "a")
    dispatcher = queued.dispatcher(full)
    dispatcher.start()
    wait_for(lambda: dispatcher.problem == "the disk is full")
    wait_for(lambda: queued.queue.counts() == {"done": 1})
    wait_for(lambda: not dispatcher.problem)
    dispatcher.stop()
