"""A worker folds each job of a group into its own folder, as ``fastfold infer`` does, and answers by a file."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from fastfold.inference.config import InferConfig
from fastfold.inference.request import RunOptions
from fastfold.inference.runner import Summary, fold_targets
from fastfold.inference.workers.job import Job, JobResult, Task
from fastfold.inference.workers.worker import FoldWorker
from fastfold.products.serve.request import ANSWER, PROGRESS, RESULTS, JobRequest
from fastfold.products.serve.worker import GroupWorker

SETTINGS = {"num_recycles": 0, "plots": False}


def run(worker: GroupWorker, *folders: Path) -> JobResult:
    return worker(1, Task(Job(1, "group", "fold", folders, 1.0), None))


def request(folder: Path, text: str, **settings: object) -> Path:
    folder.mkdir()
    JobRequest("sequence", text, "x", settings=SETTINGS | settings).write(folder)
    return folder


def answer(folder: Path) -> dict[str, object]:
    return json.loads((folder / ANSWER).read_text())


@pytest.fixture(scope="module")
def worker() -> GroupWorker:
    return GroupWorker(FoldWorker(Path("unused"), (), InferConfig(device="cpu"), RunOptions()))


def test_jobs_of_a_group_are_folded_into_their_folders(worker: GroupWorker, tmp_path: Path):
    first, second = request(tmp_path / "a", "MKVLAAGIVG"), request(tmp_path / "b", "MKV", seeds=[3])
    assert run(worker, first, second).status == "done"
    found = answer(first)
    assert found["state"] == "done"
    assert "pLDDT" in str(found["text"])
    assert {"x_rank_001_mini_seed_0.pdb", "report.html", "summary.tsv", "log.txt"} <= set(found["files"])  # type: ignore[call-overload]
    assert "x_rank_001_mini_seed_3.cif" in answer(second)["files"]  # type: ignore[operator]
    assert "recycle 0/0" in (first / PROGRESS).read_text()
    log = (first / RESULTS / "log.txt").read_text().splitlines()
    assert log[0].endswith(": 1 target on cpu")
    assert log[-1].endswith(" 1 folded")
    assert not Path("unused").exists()


@pytest.mark.parametrize("memory", [None, 5 << 30])
def test_a_fold_has_the_memory_that_its_task_grants(
    memory: int | None, worker: GroupWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets: list[object] = []

    def cost(target: object, networks: object, config: InferConfig) -> float:
        budgets.append(config.memory_budget)
        return 1.0

    monkeypatch.setattr("fastfold.products.serve.worker.target_cost", cost)
    folder = request(tmp_path / "a", "MKV")
    worker(1, Task(Job(1, "group", "fold", (folder,), 1.0), memory))
    assert budgets == [memory]


@pytest.mark.long
def test_short_jobs_of_similar_length_share_passes_and_equal_single_folds(
    worker: GroupWorker, tmp_path: Path
):
    texts = {"a": "MKVLAAGIVG", "bad": "MKVLAAGI1G", "b": "MKVLAAGIVGA", "long": "MKV" * 7}
    folders = {name: request(tmp_path / name, text) for name, text in texts.items()}
    assert run(worker, *folders.values()).status == "done"
    assert {name: answer(folder)["state"] for name, folder in folders.items()} == {
        name: "failed" if name == "bad" else "done" for name in texts
    }
    assert "digit '1'" in str(answer(folders["bad"])["text"])
    assert {name: shared(folders[name]) for name in ("a", "b", "long")} == {"a": 2, "b": 2, "long": None}
    for name in ("a", "b"):
        alone = request(tmp_path / f"{name}-alone", texts[name])
        assert run(worker, alone).status == "done"
        assert shared(alone) is None
        np.testing.assert_allclose(atoms(folders[name]), atoms(alone), atol=2e-3)
        assert answer(folders[name])["files"] == answer(alone)["files"]


def shared(folder: Path) -> int | None:
    """Number of targets in the passes of a job."""
    (record,) = (folder / RESULTS).glob("*_config.json")
    return json.loads(record.read_text()).get("batch")


def atoms(folder: Path) -> np.ndarray:
    """Positions of a job's structure."""
    (path,) = (folder / RESULTS).glob("*.pdb")
    lines = [line for line in path.read_text().splitlines() if line.startswith("ATOM")]
    return np.array([[float(line[start : start + 8]) for start in (30, 38, 46)] for line in lines])


def test_a_job_that_was_answered_is_not_folded_again(worker: GroupWorker, tmp_path: Path):
    folder = request(tmp_path / "a", "MKV")
    (folder / ANSWER).write_text("{}")
    assert run(worker, folder).status == "done"
    assert not (folder / RESULTS).exists()


def test_a_job_waits_for_the_worker_of_a_killed_server(worker: GroupWorker, tmp_path: Path):
    folder = request(tmp_path / "a", "MKV")
    earlier = FileLock(folder / ".lock", thread_local=False)
    with earlier:
        thread = threading.Thread(target=run, args=(worker, folder))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        (folder / ANSWER).write_text("{}")
    thread.join(30)
    assert not thread.is_alive()
    assert not (folder / RESULTS).exists()


def test_a_job_that_fails_is_answered_and_the_others_are_folded(worker: GroupWorker, tmp_path: Path):
    bad, good = request(tmp_path / "a", "MKV", num_recycles=-1), request(tmp_path / "b", "MKV")
    assert run(worker, bad, good).status == "done"
    text = "x: num_recycles must be from 0 to 1000, found -1"
    assert answer(bad) == {"state": "failed", "text": text, "scores": {}, "files": []}
    assert answer(good)["state"] == "done"


def test_a_job_that_fails_in_part_is_not_done_and_keeps_its_files(
    worker: GroupWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(*arguments: Any) -> Summary:
        return replace(fold_targets(*arguments), failed=(("x", "x: out of memory"),))

    monkeypatch.setattr("fastfold.products.serve.worker.fold_targets", failing)
    folder = request(tmp_path / "a", "MKV")
    assert run(worker, folder).status == "done"
    found = answer(folder)
    assert (found["state"], found["text"]) == ("failed", "x: out of memory")
    assert "x_rank_001_mini_seed_0.pdb" in found["files"]  # type: ignore[operator]


def test_networks_that_cannot_be_opened_are_not_a_jobs_fault(tmp_path: Path):
    missing = GroupWorker(
        FoldWorker(tmp_path, (tmp_path / "x.npz",), InferConfig(device="cpu"), RunOptions())
    )
    assert run(missing, request(tmp_path / "a", "MKV")).status == "fatal"
    assert not (tmp_path / "a" / ANSWER).exists()
