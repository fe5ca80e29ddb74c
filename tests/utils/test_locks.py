"""A lock is held by one, and a place that has none says so."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from fastfold.errors import WriteError
from fastfold.utils.locks import held


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(FileLock(path)), pytest.raises(Timeout), held(FileLock(path, timeout=0)):
        pass
    with held(FileLock(path, timeout=0)):
        pass


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_place_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        lock = FileLock(tmp_path / "lock", timeout=0, is_singleton=True)
        with pytest.raises(WriteError, match="does not support locks"), held(lock):
            pass


def test_an_older_filelock_says_so_by_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(tmp_path / "lock")

    def acquire(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(lock, "acquire", acquire)
    with pytest.raises(WriteError, match="does not support locks"), held(lock):
        pass


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot lock"), held(FileLock(tmp_path / "file" / "lock")):
        pass
