"""The queue keeps order, limits and each job's single answer, also when it is opened again."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.products.serve import queue as queues
from fastfold.products.serve.queue import (
    JobQueue,
    QueuedJob,
    QueueFullError,
    QueueUnavailableError,
    RepeatedKeyError,
)


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    return JobQueue(tmp_path / "queue.sqlite")


def admit(queue: JobQueue, job: str, residues: int = 100, **more: object) -> QueuedJob:
    given = {"user": "ada", "name": job, "fingerprint": "f", **more}
    return queue.admit(job, residues=residues, **given)  # type: ignore[arg-type]


def started(queue: JobQueue, size: int = 1) -> list[str]:
    return [job.id for job in queue.start_group(size)]


def test_jobs_start_by_priority_and_then_in_order_of_admission(queue: JobQueue):
    for job, priority in (("a", 0), ("b", 0), ("c", 5), ("d", -1)):
        admit(queue, job, priority=priority)
    last = queue.get("d")
    assert last is not None
    assert queue.position(last) == 3
    assert [started(queue) for _ in range(5)] == [["c"], ["a"], ["b"], ["d"], []]


def test_a_group_has_the_first_job_and_others_of_similar_length_and_equal_settings(queue: JobQueue):
    admit(queue, "first", 100)
    admit(queue, "long", 126)
    admit(queue, "near", 125)
    admit(queue, "short", 79)
    admit(queue, "other", 100, fingerprint="g")
    admit(queue, "urgentless", 100, priority=-1)
    admit(queue, "near2", 80)
    assert started(queue, 8) == ["first", "near", "near2"]
    assert started(queue, 8) == ["long"]


def test_a_group_is_not_larger_than_asked_for(queue: JobQueue):
    for job in "abcde":
        admit(queue, job)
    assert [started(queue, 2) for _ in range(3)] == [["a", "b"], ["c", "d"], ["e"]]


def test_each_job_is_answered_once(queue: JobQueue):
    admit(queue, "a")
    assert not queue.finish("a", "done", "before its start")
    started(queue)
    assert queue.finish("a", "done", "first")
    assert not queue.finish("a", "failed", "second")
    found = queue.get("a")
    assert found is not None
    assert (found.state, found.text, found.answer) == ("done", "first", 1)
    queue.requeue(["a"])
    assert started(queue) == []


def test_returned_jobs_keep_their_places_and_lost_ones_start_alone(queue: JobQueue, tmp_path: Path):
    for job in "abc":
        admit(queue, job)
    assert started(queue, 2) == ["a", "b"]
    queue.requeue(["b"])
    queue.requeue(["a"], lost=True)
    queue.close()
    queue = JobQueue(tmp_path / "queue.sqlite")
    assert started(queue, 8) == ["a"]
    assert started(queue, 8) == ["b", "c"]


def test_a_repeated_submission_is_the_same_job_of_its_user(queue: JobQueue):
    assert admit(queue, "a", key="k").id == admit(queue, "b", key="k").id == "a"
    assert admit(queue, "c", key="k", user="bob").id == "c"
    assert queue.known("ada", "k") == queue.get("a")
    assert queue.known("ada", "other") is None


def test_limits_count_unfinished_jobs(queue: JobQueue):
    admit(queue, "a", max_jobs=1)
    with pytest.raises(QueueFullError, match="ada has 1 unfinished jobs, the limit of a user"):
        admit(queue, "b", max_jobs=1)
    admit(queue, "c", user="bob", max_jobs=1)
    with pytest.raises(QueueFullError, match="the queue has 2 unfinished jobs"):
        admit(queue, "d", user="eve", max_queue=2)
    started(queue)
    queue.finish("a", "done", "")
    admit(queue, "e", max_jobs=1)
    assert queue.counts() == {"done": 1, "queued": 2}


def test_waiting_jobs_are_cancelled_and_answered_ones_removed(queue: JobQueue):
    admit(queue, "a")
    admit(queue, "b")
    started(queue)
    assert not queue.cancel("a")
    assert not queue.remove("a")
    assert queue.cancel("b")
    assert queue.remove("b")
    assert queue.get("b") is None
    queue.finish("a", "failed", "reason")
    assert [job.id for job in queue.finished_before(1e12)] == ["a"]
    assert queue.finished_before(0) == []


def test_other_users_and_states_are_left_out_of_a_list(queue: JobQueue):
    for job, user in (("a", "ada"), ("b", "bob"), ("c", "ada")):
        admit(queue, job, user=user)
    started(queue)
    assert [job.id for job in queue.jobs("ada")] == ["a", "c"]
    assert [job.id for job in queue.jobs("ada", state="queued")] == ["c"]
    assert [job.id for job in queue.jobs(limit=2)] == ["b", "c"]
    assert queue.get("b", "ada") is None


def test_a_file_that_is_not_a_queue_is_refused(tmp_path: Path):
    path = tmp_path / "queue.sqlite"
    path.write_bytes(b"no database at all, " * 100)
    with pytest.raises(InputError, match="cannot be used as a queue"):
        JobQueue(path)


def test_reading_waits_for_no_writer_and_writing_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(queues, "_BUSY_S", 2.0)
    queue = JobQueue(tmp_path / "queue.sqlite")
    admit(queue, "a")
    backup = sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None)
    backup.execute("BEGIN IMMEDIATE")
    refused: list[Exception] = []

    def write() -> None:
        try:
            admit(queue, "b")
        except QueueUnavailableError as error:
            refused.append(error)

    writing = threading.Thread(target=write)
    writing.start()
    assert [job.id for job in queue.jobs()] == ["a"]
    assert queue.counts() == {"queued": 1}
    assert writing.is_alive()
    writing.join()
    assert len(refused) == 1
    with pytest.raises(QueueUnavailableError, match=r"database is locked\); try again later") as caught:
        queue.cancel("a")
    assert not caught.value.is_full
    backup.execute("ROLLBACK")
    assert queue.cancel("a")
    queue.close()


def test_a_full_disk_is_told_apart(queue: JobQueue):
    admit(queue, "a")
    (pages,) = queue._connection.execute("PRAGMA page_count").fetchone()
    queue._connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(QueueUnavailableError, match="database or disk is full") as caught:
        admit(queue, "b", name="x" * 100_000)
    assert caught.value.is_full
    assert queue.get("a") is not None


def test_a_queue_of_the_first_version_is_read(tmp_path: Path):
    """It has no hashes of submissions, so that a key belongs to any body."""
    path = tmp_path / "queue.sqlite"
    queue = JobQueue(path)
    admit(queue, "a", key="k", body="hash")
    with pytest.raises(RepeatedKeyError, match="belongs to the job a"):
        queue.known("ada", "k", "other")
    queue._connection.execute("ALTER TABLE jobs DROP COLUMN body")
    queue._connection.execute("PRAGMA user_version=1")
    queue.close()
    again = JobQueue(path)
    job = again.known("ada", "k", "other")
    assert job is not None
    assert (job.id, job.body) == ("a", "")
    assert admit(again, "b", key="l", body="x").body == "x"
