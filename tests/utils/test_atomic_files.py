"""Files are whole or absent, and errors say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastfold.errors import OutputError
from fastfold.utils.atomic_files import prepare_output_directory, temporary_name, write_atomic


@pytest.fixture
def forbidden(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not write to, also where the tests run as root."""
    folder = tmp_path / "forbidden"
    folder.mkdir(mode=0o555)
    root = os.geteuid() == 0
    if root:
        os.chmod(tmp_path, 0o755)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        os.chmod(folder, 0o755)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("data", "written"), [("Å\n", b"\xc3\x85\n"), (b"\x00\r\n", b"\x00\r\n"), ("", b"")])
def test_write_atomic_writes_exactly_the_data_and_nothing_else(tmp_path, data, written):
    write_atomic(tmp_path / "a", "old contents")
    write_atomic(tmp_path / "a", data)
    assert (tmp_path / "a").read_bytes() == written
    assert names(tmp_path) == ["a"]


def test_results_have_the_permissions_of_ordinary_files(tmp_path):
    write_atomic(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_name_as_long_as_the_file_system_takes_can_be_written(tmp_path):
    write_atomic(tmp_path / ("n" * 255), "x")
    assert names(tmp_path) == ["n" * 255]


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file may grow beyond ``size``: writing fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_keeps_the_old_file_and_no_temporary_one(tmp_path):
    write_atomic(tmp_path / "a", "old")
    with file_size_limit(1000), pytest.raises(OutputError, match=r"cannot write '.*/a': the file is larger"):
        write_atomic(tmp_path / "a", b"x" * 100_000)
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "disk is full; free some space"),
        (errno.EDQUOT, "quota is used up"),
        (errno.EROFS, "read-only; choose another"),
        (errno.EIO, "; choose another output folder"),
    ],
)
def test_each_failure_of_the_disk_has_its_remedy(tmp_path, monkeypatch, number, remedy):
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=remedy):
        write_atomic(tmp_path / "a", "x")
    assert names(tmp_path) == []


def test_an_interrupt_while_writing_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    write_atomic(tmp_path / "a", "old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_places_that_cannot_be_written_are_named_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for place, remedy in (
        ("missing/a", "folder does not exist"),
        ("file/a", "part of the path is a file"),
        ("folder", "a folder has the file's name"),
        ("n" * 256, "name is too long"),
        ("nul\0", "null"),
    ):
        with pytest.raises(OutputError, match=remedy) as caught:
            write_atomic(tmp_path / place, "x")
        assert repr(str(tmp_path / place)) in str(caught.value)
    assert names(tmp_path) == ["file", "folder"]


def test_a_folder_without_permission_is_named_with_the_remedy(forbidden):
    with pytest.raises(OutputError, match="permission denied"):
        write_atomic(forbidden / "a", "x")
    with pytest.raises(OutputError, match="permission denied"):
        prepare_output_directory(forbidden)
    with pytest.raises(OutputError, match="permission denied"):
        prepare_output_directory(forbidden / "sub" / "folder")


def test_prepare_output_directory_creates_it_and_leaves_it_empty(tmp_path):
    folder = prepare_output_directory(tmp_path / "a" / "b")
    assert prepare_output_directory(str(folder)) == folder
    assert names(folder) == []


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="it is a file, not a folder"):
        prepare_output_directory(tmp_path / "file")
    with pytest.raises(OutputError, match="part of the path is a file"):
        prepare_output_directory(tmp_path / "file" / "sub")


def test_the_first_file_in_a_folder_removes_those_of_killed_processes(tmp_path):
    own, foreign = tmp_path / temporary_name(), tmp_path / "a.tmp"
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    left = tmp_path / temporary_name().replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    for path in (own, foreign, left):
        path.touch()
    write_atomic(tmp_path / "a", "x")
    assert names(tmp_path) == sorted([own.name, foreign.name, "a"])
