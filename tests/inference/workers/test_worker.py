"""What a worker says of a target: done, finished before, being folded elsewhere, failed, or a reason to stop."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import WriteError
from fastfold.inference.config import InferConfig
from fastfold.inference.output.results_folder import ResultsFolder, TargetResults
from fastfold.inference.progress import Progress
from fastfold.inference.request import RunOptions
from fastfold.inference.workers.job import FoldedJob, Job, JobResult, Task
from fastfold.inference.workers.search import ChainQuery
from fastfold.inference.workers.worker import FinishWorker, FoldWorker
from tests.helpers.command_line import CommandLine
from tests.helpers.screens import predictions

CONFIG = InferConfig(num_recycles=0, plots=False, device="cpu")
TARGET = target_from_sequence("MKTAYIAKQR", "T1")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A worker sets the number of its process's threads, which here is that of all tests."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def worker(cli: CommandLine, **changes: object) -> FoldWorker:
    """A worker as it arrives in its process."""
    given = FoldWorker(cli.out, (cli.weights(),), CONFIG, RunOptions(quiet=True))
    return pickle.loads(pickle.dumps(replace(given, **changes)))


def fold(one: FoldWorker, target: Target = TARGET, memory: int | None = None) -> JobResult:
    return one(0, Task(Job(0, target.name, "fold", target, 1.0), memory))


def test_a_target_is_done_once_and_finished_afterwards_and_networks_are_loaded_once(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
):
    from fastfold.inference import models

    loads: list[Path] = []
    load_model = models.load_model
    monkeypatch.setattr(
        models, "load_model", lambda path, **given: loads.append(path) or load_model(path, **given)
    )
    one = worker(cli)
    other = target_from_sequence("GSHMAWLPE", "T2")
    results = [fold(one), fold(one, other), fold(one)]
    assert [result.status for result in results] == ["done", "done", "finished"]
    assert results[0].text.startswith("pLDDT ")
    assert results[0].text.endswith("by model_1_ptm_seed_0, best of 1 prediction")
    assert predictions(cli.out) == [("T1", 0), ("T2", 0)]
    assert len(loads) == 1


def test_a_target_that_another_process_folds_is_left_to_it(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    one = worker(cli)
    assert fold(one).status == "done"
    claimed = TargetResults.claimed

    def taken(self: TargetResults, prediction: str) -> object:
        """As if another process held the lock; a lock of this one would be its own."""
        return contextlib.nullcontext(False)

    monkeypatch.setattr(TargetResults, "claimed", taken)
    assert fold(one).status == "in_progress"
    monkeypatch.setattr(TargetResults, "claimed", claimed)
    assert fold(one).status == "finished"


def test_a_target_that_does_not_fit_fails_with_what_would(cli: CommandLine):
    result = fold(worker(cli), target_from_sequence("MKTAYIAKQR" * 50, "long"), memory=45 << 20)
    assert result.status == "failed"
    assert "record 'long'" in result.text
    assert "too small for 500 residues" in result.text


def test_the_memory_that_is_granted_is_of_one_target_alone(cli: CommandLine):
    one = worker(cli)
    long = target_from_sequence("MKTAYIAKQR" * 50, "long")
    assert fold(one, long, memory=30 << 20).status == "failed"
    assert fold(one, TARGET).status == "done"


def test_warnings_come_with_the_result(cli: CommandLine):
    result = fold(worker(cli), target_from_sequence("MKTAYIAKQU", "U"))
    assert result.status == "done"
    assert any("read as X" in line for line in result.lines)


def test_weights_that_cannot_be_used_stop_everything(cli: CommandLine):
    path = cli.folder / "params_model_2_ptm.npz"
    path.write_bytes(b"nothing")
    result = fold(worker(cli, weights=(path,)))
    assert result.status == "fatal"
    assert str(path) in result.text


def test_a_disk_that_cannot_be_written_to_stops_everything(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object, **__: object) -> None:
        raise WriteError("cannot write: the disk is full")

    one = worker(cli)
    monkeypatch.setattr(ResultsFolder, "target", full)
    assert fold(one) == JobResult("fatal", "cannot write: the disk is full")


@dataclass
class Publisher:
    """Remembers what was published."""

    names: list[str] = field(default_factory=list)

    def search(self, queries: Sequence[ChainQuery]) -> None:
        raise AssertionError("a fold does not search")

    def publish(self, target: Target) -> None:
        self.names.append(target.name)


def test_alignments_that_were_searched_are_published_before_the_fold(cli: CommandLine):
    one = worker(cli, search=Publisher())
    brought = replace(TARGET, name="T2", alignments=(([], []),))
    assert [fold(one, target).status for target in (TARGET, brought)] == ["done", "done"]
    assert one.search.names == ["T1"]


def test_a_worker_of_the_second_gpu_makes_it_current_first(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else PyTorch would take memory of the first GPU for every worker."""
    chosen: list[torch.device] = []
    monkeypatch.setattr("fastfold.inference.workers.worker.choose_device", lambda name: torch.device(name))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    _, device = worker(cli, config=replace(CONFIG, device="cuda:1")).open_networks()
    assert chosen == [device] == [torch.device("cuda:1")]


def test_targets_of_a_group_share_passes_and_one_fails_alone(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastfold.inference.folding.predictor import TargetPredictor

    made = TargetPredictor.target_fold

    def broken(self: TargetPredictor, *arguments: object) -> object:
        if self.target.name == "bad":
            raise ValueError("broken features")
        return made(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TargetPredictor, "target_fold", broken)
    targets = [target_from_sequence("MKTAYIAKQR", name) for name in ("T1", "bad", "T2")]
    members = tuple(Job(i, target.name, "fold", target, 1.0) for i, target in enumerate(targets))
    one = worker(cli)
    found = one(0, Task(Job(3, "group", "fold", None, 3.0, members=members), None))
    assert [result.status for result in found.members] == ["done", "failed", "done"]
    assert "broken features" in found.members[1].text
    assert {cli.config(name)["batch"] for name in ("T1", "T2")} == {2}


@pytest.mark.long
def test_a_finished_fold_has_the_files_of_a_whole_one(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    relaxed: list[Path] = []

    def relax(folder: Path, _: str, target: tuple[str, Path], predictions: list[str], *__: object) -> list:
        assert len(predictions) == 1
        return relaxed.append(folder) or [("model", "not relaxed", False)]

    monkeypatch.setattr("fastfold.inference.relax.files.relax_in_folder", relax)
    msa = cli.folder / "msa"
    msa.mkdir()
    (msa / "T1.a3m").write_text(">T1\nMKTAYIAKQR\n>b\nMKTAYIAKQK\n")
    options = RunOptions(quiet=True, msa_dir=msa, zip_results=True)
    config = replace(CONFIG, plots=True, relax="best")
    whole = worker(cli, output=cli.folder / "whole", config=config, options=options)
    parts = worker(cli, output=cli.folder / "parts", config=config, options=options, leaves_rest=True)
    finisher = pickle.loads(pickle.dumps(FinishWorker(parts)))
    assert fold(whole).status == "done"
    folded = fold(parts)
    assert not list(parts.output.glob("*.png"))
    job = Job(2, "T1", "finish", FoldedJob(TARGET, folded), 1.0)
    done = finisher(2, Task(job, None))
    assert (done.status, done.text) == ("done", folded.text)
    *warnings, last = done.lines
    assert last == "T1 model: not relaxed"
    assert all("is not physical" in line for line in warnings)  # of a random network
    assert relaxed == [whole.output, parts.output]
    names = [sorted(path.name for path in one.output.iterdir() if path.is_file()) for one in (whole, parts)]
    assert names[0] == names[1]
    assert sum(name.endswith(".png") for name in names[0]) == 2
    coverage = [next(one.output.glob("*_coverage.png")).read_bytes() for one in (whole, parts)]
    assert coverage[0] == coverage[1]

    before = {path: path.stat().st_mtime_ns for path in parts.output.iterdir()}
    again = replace(job, payload=FoldedJob(TARGET, fold(parts)))
    monkeypatch.setattr("fastfold.inference.relax.files.relax_in_folder", lambda *_: [])
    assert finisher(2, Task(again, None)).status == "finished"
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_fold_that_cannot_be_finished_fails_with_its_reason(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastfold.inference.target_runner import TargetRunner

    parts = worker(cli, config=replace(CONFIG, plots=True), leaves_rest=True)
    job = Job(2, "T1", "finish", FoldedJob(TARGET, fold(parts)), 1.0)
    for error, status in ((ValueError("broken"), "failed"), (WriteError("the disk is full"), "fatal")):
        monkeypatch.setattr(TargetRunner, "finish", lambda *_, error=error, **__: raise_(error))
        done = FinishWorker(parts)(2, Task(job, None))
        assert done.status == status
        assert str(error) in done.text


def raise_(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("status", ["done", "finished"])
@pytest.mark.parametrize("is_changed", [False, True])
def test_a_fold_that_was_made_or_changed_is_done(status: str, is_changed: bool) -> None:
    """A fold that was there before, and that nothing was added to, is finished; lines of both steps are kept."""
    calls: list[Any] = []

    def finish(target: Target, predictions: tuple[str, ...], *, made: bool) -> bool:
        calls.append((target, predictions, made))
        runner.progress.line("relaxed", important=True)
        return is_changed

    runner: Any = SimpleNamespace(
        progress=Progress(0.0, quiet=True), options=SimpleNamespace(reference=None), finish=finish
    )
    finisher = FinishWorker(None)  # type: ignore[arg-type]
    finisher._runner = runner
    folded = JobResult(status, "text", ("folded",), 3.0, predictions=("p",))  # type: ignore[arg-type]
    found = finisher(0, Task(Job(1, "t", "finish", FoldedJob(TARGET, folded), 1.0), None))
    assert calls == [(TARGET, ("p",), status == "done")]
    assert found.status == ("done" if status == "done" or is_changed else "finished")
    assert (found.text, list(found.lines), found.seconds) == ("text", ["folded", "relaxed"], 3.0)
