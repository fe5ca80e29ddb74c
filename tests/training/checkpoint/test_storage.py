"""Checkpoints lie in folders and behind URLs; what fails in the middle of a file costs the checkpoint, not the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fastfold.errors import ConfigError, NetworkError, OutputError
from fastfold.training.checkpoint.storage import Storage, is_url
from tests.training.checkpoint.failing_files import FailingFiles, failing_files
from tests.training.checkpoint.test_checkpoints import Run, tensors

__all__ = ["failing_files"]


@pytest.fixture(params=["folder", "file", "failing"])
def place(request: pytest.FixtureRequest, tmp_path: Path, failing_files: FailingFiles) -> str:
    """A folder, its URL, and a store that knows no folders and renames nothing."""
    return {
        "folder": str(tmp_path / "a"),
        "file": f"file://{tmp_path}/a",
        "failing": "failing://bucket/a",
    }[request.param]


@pytest.fixture
def storage(place: str) -> Storage:
    return Storage(place)


def test_files_are_written_published_and_removed(storage: Storage, place: str):
    assert storage.names() == []
    storage.prepare()
    assert storage.names() == []
    final = storage.join("step_00000001")
    staging = storage.staging(final)
    for data in (b"first", b"second"):
        storage.remove(staging)
        with storage.create(f"{staging}/x") as file:
            file.write(data)
        storage.publish(staging, final)
        assert storage.names() == ["step_00000001"]
        assert storage.read(f"{final}/x", limit=6) == data
        assert storage.size(f"{final}/x") == len(data)
    assert storage.size(f"{final}/y") is None
    with pytest.raises(FileNotFoundError):
        storage.read(f"{final}/y", limit=6)
    storage.remove(final)
    storage.remove(final)
    assert storage.names() == []


@pytest.mark.parametrize("place", ["file", "failing"], indirect=True)
def test_a_file_comes_to_this_machine(storage: Storage, tmp_path: Path):
    with storage.create(storage.join("a", "x")) as file:
        file.write(b"data")
    (tmp_path / "copy").write_bytes(b"da of an earlier copy")
    storage.fetch(storage.join("a", "x"), tmp_path / "copy", size=4)
    assert (tmp_path / "copy").read_bytes() == b"data"
    with pytest.raises(NetworkError, match="a/x: ends within copy: it is truncated"):
        storage.fetch(storage.join("a", "x"), tmp_path / "copy", size=5)
    with pytest.raises(OSError, match="expected at most 3 bytes, found 4"):
        storage.read(storage.join("a", "x"), limit=3)


def test_checkpoints_lie_behind_urls(place: str):
    run = Run(place, keep_last=2)
    for step in (1, 2, 3):
        run.save(step)
    assert run.said == []
    path = Run(place).checkpoints.find("auto")
    assert path is not None
    assert path.endswith("step_00000003")
    again = Run(place)
    for where in ("auto", path):
        found = again.checkpoints.find(where)
        assert found is not None
        filled, state = again.load(found)
        assert state == {"step": 3}
        assert all(torch.equal(filled[name], x) for name, x in tensors(3.0).items())
    assert sorted(Storage(place).names()) == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize("after", [0, 10, 300])
def test_a_store_that_fails_in_the_middle_of_a_file_leaves_the_checkpoint_before(
    failing_files: FailingFiles, after: int
):
    run = Run("failing://bucket/a")
    run.save(1)
    failing_files.left = after
    run.save(2)
    (said,) = run.said
    assert "the store is gone" in said
    assert "the last good one is failing://bucket/a/step_00000001" in said
    failing_files.left = None
    again = Run("failing://bucket/a")
    assert again.checkpoints.find("auto") == "failing://bucket/a/step_00000001"
    again.save(2)
    assert again.checkpoints.find("auto") == "failing://bucket/a/step_00000002"


def test_a_flipped_bit_behind_a_url_is_found(failing_files: FailingFiles):
    run = Run("failing://bucket/a")
    run.save(1)
    run.save(2)
    (name,) = [path for path in failing_files.store if "step_00000002" in path and path.endswith("tensors")]
    failing_files.store[name].getbuffer()[-1] ^= 4
    assert run.checkpoints.find("auto") == "failing://bucket/a/step_00000001"
    (said,) = run.said
    assert "step_00000002 is left out: its shard" in said
    assert "was changed after it was written" in said


def test_a_place_that_takes_nothing_is_refused_before_training(failing_files: FailingFiles, tmp_path: Path):
    failing_files.left = 0
    with pytest.raises(
        ConfigError, match=r"cannot write checkpoints to failing://bucket/a: the store is gone"
    ):
        Run("failing://bucket/a")
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another output folder"):
        Run(tmp_path / "file")


def test_no_folder_is_made_in_a_store_without_folders(
    failing_files: FailingFiles, monkeypatch: pytest.MonkeyPatch
):
    """Of a misspelt bucket that would make a new one."""
    monkeypatch.setattr(failing_files, "makedirs", None)
    run = Run("failing://bucket/a")
    run.save(1)
    assert run.said == []


def test_what_is_not_installed_is_said_with_its_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r'pip install "fastfold\[s3\]"'):
        Storage("s3://bucket/run")
    with pytest.raises(ConfigError, match=r"cannot write checkpoints to nowhere://x: .*nowhere"):
        Storage("nowhere://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r'pip install "fastfold\[fsspec\]"'):
        Storage("memory://x")


@pytest.mark.parametrize(
    ("place", "url"), [("s3://a/b", True), ("file:///a", True), ("/a/b", False), ("C:\\a", False)]
)
def test_urls_are_told_from_paths(place: str, url: bool):
    assert is_url(place) == url
