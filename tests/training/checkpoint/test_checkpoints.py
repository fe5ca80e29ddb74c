"""Checkpoints are whole or not there; damage is told; a full disk costs a checkpoint, not the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import FileRecord, Manifest
from fastfold.utils.hashing import file_digest
from tests.helpers.forked import Forked


class Run:
    """Checkpoints in a folder, with what they reported."""

    def __init__(self, place: Path | str, keep_last: int = 3, keep_every: int | None = None) -> None:
        self.said: list[str] = []
        self.folder = Path(place)
        self.checkpoints = Checkpoints(
            str(place),
            DistributedContext(0, 1, torch.device("cpu")),
            keep_last=keep_last,
            keep_every=keep_every,
            report=self.said.append,
        )

    def save(self, step: int) -> None:
        self.checkpoints.save(step, tensors(float(step)), {"step": step})
        self.checkpoints.wait()

    def found(self) -> Path | None:
        path = self.checkpoints.find("auto")
        return None if path is None else Path(path)

    def load(self, path: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        found = tensors(-1.0)
        return found, self.checkpoints.load(path, found)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 2), value),
        "adam.a.step": torch.tensor(value),
        "ema.b": torch.full((5,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_what_is_saved_comes_back(run: Run):
    run.save(7)
    path = run.checkpoints.find("auto")
    assert path is not None
    found, state = run.load(path)
    assert state == {"step": 7}
    assert all(torch.equal(found[name], x) for name, x in tensors(7.0).items())


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch):
    goes_on, save = threading.Event(), dcp.save

    def slow(*args: object, **named: object) -> None:
        assert goes_on.wait(60)
        save(*args, **named)

    monkeypatch.setattr(dcp, "save", slow)
    values, state = tensors(1.0), {"progress": {"step": 1}, "names": ["a"]}
    run.checkpoints.save(1, values, state)
    values["model.a"].zero_()  # training goes on while it is written
    state["progress"]["step"] = 2
    state["names"].append("b")
    goes_on.set()
    run.checkpoints.wait()
    found, loaded = run.load(run.checkpoints.find("auto"))
    assert torch.equal(found["model.a"], torch.ones(3, 2))
    assert loaded == {"progress": {"step": 1}, "names": ["a"]}


def test_no_file_is_a_pickle(run: Run):
    run.save(1)
    names = sorted(path.suffix for path in run.found().iterdir())
    assert names == [".json", ".safetensors"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"), [(2, None, [5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])]
)
def test_the_newest_and_every_so_many_th_are_kept(tmp_path: Path, keep_last, keep_every, kept):
    run = Run(tmp_path, keep_last, keep_every)
    for step in range(1, 7):
        run.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:08d}" for step in kept]


def _shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def _flip(path: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: _shard(path).unlink(), "shard .* is missing"),
        (lambda path: _shard(path).write_bytes(_shard(path).read_bytes()[:-4]), "bytes instead of"),
        (lambda path: _flip(_shard(path), -3), "was changed after it was written"),
        (lambda path: _flip(_shard(path), 20), "was changed after it was written"),
        (
            lambda path: _flip(path / "state.json", (path / "state.json").read_bytes().index(b"2")),
            "(state.json was changed after it was written|expected format)",
        ),
        (
            lambda path: _flip(path / "state.json", (path / "state.json").read_bytes().rindex(b": 2\n") + 2),
            "state.json was changed after it was written",
        ),
        (lambda path: (path / "state.json").unlink(), "has no state.json"),
        (lambda path: (path / "state.json").write_text("{"), "cannot be read"),
        (
            lambda path: (path / "state.json").write_text(
                json.dumps({"format": 99, "files": {}, "step": 1, "state": {}})
            ),
            "found 99",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(run: Run, damage, problem):
    run.save(1)
    run.save(2)
    newest = run.folder / "step_00000002"
    damage(newest)
    assert run.found().name == "step_00000001"
    (said,) = run.said
    assert said.startswith(f"checkpoint {newest} is left out: ")
    assert "\n" not in said
    with pytest.raises(ConfigError, match=problem):
        run.checkpoints.find(str(newest))


def test_checkpoints_without_hashes_of_an_earlier_version_are_read(run: Run):
    run.save(4)
    manifest = run.found() / "state.json"
    content = json.loads(manifest.read_text())
    files = {name: file["size"] for name, file in content["files"].items()}
    manifest.write_text(json.dumps({"format": 1, "step": 4, "files": files, "state": content["state"]}))
    found, state = run.load(str(run.found()))
    assert state == {"step": 4}
    assert torch.equal(found["model.a"], tensors(4.0)["model.a"])
    _shard(run.found()).write_bytes(b"")
    assert run.found() is None


def test_training_hears_of_a_failure_when_it_happens(run: Run, monkeypatch: pytest.MonkeyPatch):
    goes_on = threading.Event()

    def full(*_: object, **__: object) -> None:
        assert goes_on.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp, "save", full)
    run.checkpoints.save(1, tensors(1.0), {})
    run.checkpoints.poll()
    assert run.said == []  # it is still being written, and training goes on
    goes_on.set()
    end = time.monotonic() + 60
    while not run.said:
        assert time.monotonic() < end
        run.checkpoints.poll()
        time.sleep(0.01)
    assert run.checkpoints.problem == run.said[0]
    run.checkpoints.wait()
    assert len(run.said) == 1
    monkeypatch.undo()
    run.save(2)
    assert run.checkpoints.problem is None
    assert len(run.said) == 1


def test_what_a_killed_writer_left_is_no_checkpoint(run: Run):
    run.save(1)
    (run.folder / ".step_00000002.tmp").mkdir()
    assert run.found().name == "step_00000001"
    run.save(2)
    assert run.found().name == "step_00000002"


def test_a_full_disk_is_reported_with_the_last_good_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch):
    run.save(1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp, "save", full)
    run.save(2)
    assert "No space left on device" in run.said[0]
    assert "step_00000001" in run.said[0]
    assert [path.name for path in run.folder.iterdir()] == ["step_00000001"]


def test_a_checkpoint_of_another_network_is_refused(run: Run):
    run.save(1)
    path = run.checkpoints.find("auto")
    with pytest.raises(ConfigError, match="does not fit this run"):
        run.checkpoints.load(path, {"model.a": torch.zeros(3, 3)})
    with pytest.raises(ConfigError, match="does not fit this run"):
        run.checkpoints.load(path, {"model.other": torch.zeros(3, 2)})


def test_resuming_can_be_forbidden_and_nothing_is_found_in_nothing(run: Run):
    assert run.found() is None
    assert run.checkpoints.find("never") is None
    run.save(1)
    with pytest.raises(ConfigError, match=r"has checkpoints of a run; to start again, remove them"):
        run.checkpoints.find("never")


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_of_a_new_one(tmp_path: Path):
    run = Run(tmp_path, keep_last=1, keep_every=4)
    run.save(4)
    run.save(8)
    (run.folder / "step_00000008" / "state.json").write_text("{")
    assert run.found().name == "step_00000004"
    run.save(5)
    assert run.found().name == "step_00000005"


def test_going_back_in_a_run_is_refused_while_it_has_later_checkpoints(run: Run, tmp_path: Path):
    """``auto`` would find them, and the new ones would be removed as old."""
    for step in (2, 4, 6):
        run.save(step)
    first = run.folder / "step_00000002"
    with pytest.raises(ConfigError, match=r"of later steps than .*step_00000002, the last is step_00000006"):
        run.checkpoints.find(str(first))
    assert run.checkpoints.find(str(run.folder / "step_00000006")) is not None
    other = Run(tmp_path / "other")
    assert other.checkpoints.find(str(first)) == str(first)
    other.save(3)
    with pytest.raises(ConfigError, match="the last is step_00000003"):
        other.checkpoints.find(str(first))
    for step in (4, 6):
        shutil.rmtree(run.folder / f"step_{step:08d}")
    assert run.checkpoints.find(str(first)) == str(first)


def _fails_beside_a_checkpoint(folder: Path) -> None:
    def write(*_: object) -> None:
        print("writing", file=sys.stderr, flush=True)
        time.sleep(3600)  # as one that waits for the other processes

    run = Run(folder)
    run.checkpoints._write = write  # type: ignore[method-assign, assignment]
    run.checkpoints.save(1, tensors(1.0), {})
    raise KeyError("the reason")


def test_a_process_that_fails_does_not_wait_for_its_checkpoint(tmp_path: Path):
    """Others would wait for it in vain: it has to end for them to hear of it."""
    process = Forked(_fails_beside_a_checkpoint, tmp_path)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the reason" in said


@pytest.mark.parametrize("is_url", [False, True])
def test_a_foreign_checkpoint_touches_no_file_elsewhere(tmp_path: Path, is_url: bool):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    folder = tmp_path / "run" / "step_00000001"
    folder.mkdir(parents=True)
    name = str(victim) if is_url else "../../victim"
    files = {name: FileRecord(4, file_digest(victim))}
    (folder / "state.json").write_bytes(Manifest(1, files, {}).to_json())
    with pytest.raises(ConfigError, match="names the file"):
        Run(tmp_path / "own").checkpoints.find(f"file://{folder}" if is_url else str(folder))
    assert victim.read_bytes() == b"mine"


def test_a_shard_without_a_hash_is_not_read(run: Run):
    run.save(1)
    os.mkfifo(run.found() / "more.safetensors")
    assert run.found() is None
    assert "does not list; remove that file" in run.said[-1]


def test_a_pipe_as_manifest_is_not_waited_for(run: Run):
    run.save(1)
    manifest = run.found() / "state.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert run.found() is None
