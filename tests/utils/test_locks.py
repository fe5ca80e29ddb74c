"""A lock is held by one, and a place that has none says so."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from filelock import Timeout

from fastfold.errors import WriteError
from fastfold.utils.locks import held


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held(path), pytest.raises(Timeout), held(path, timeout=0):
        pass
    with held(path, timeout=0):
        pass
    with held(path, is_reentrant=True), held(path, is_reentrant=True):
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_place_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with (
            pytest.raises(WriteError, match="does not support locks"),
            held(tmp_path / "lock", timeout=0, is_reentrant=True),
        ):
            pass


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot lock"), held(tmp_path / "file" / "lock"):
        pass
