"""A run's folder takes one run at a time."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from fastfold.errors import ConfigError, FastFoldError
from fastfold.parallel import DistributedContext
from fastfold.training.lifecycle.process import LOCK, OWNER, owned
from tests.helpers.forked import Forked

ALONE = DistributedContext(0, 1, torch.device("cpu"))


def _hold(folder: Path) -> None:
    with owned(folder, ALONE):
        print("held", flush=True)
        time.sleep(600)


def test_a_second_run_is_refused_with_the_place_of_the_first_until_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    other = Forked(_hold, out)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = (out / OWNER).read_text()
        with (
            pytest.raises(
                ConfigError, match=rf"in use by another run \(process {other.pid} on .*, started 2"
            ),
            owned(out, ALONE),
        ):
            pass
        assert (out / OWNER).read_text() == before
    finally:
        other.kill()
        other.wait()
    with owned(out, ALONE):  # what a killed run left does not count
        assert json.loads((out / OWNER).read_text())["pid"] == os.getpid()


def test_one_run_after_the_other(tmp_path: Path) -> None:
    for _ in range(2):
        with owned(tmp_path, ALONE):
            pass


def test_an_unreadable_owner_is_no_reason_to_fail_otherwise(tmp_path: Path) -> None:
    with owned(tmp_path, ALONE):
        (tmp_path / OWNER).write_text("{")
        with (
            pytest.raises(ConfigError, match="in use by another run; choose another"),
            owned(tmp_path, ALONE),
        ):
            pass


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FastFoldError, match="file"), owned(tmp_path / "file" / "run", ALONE):
        pass


class _Second(DistributedContext):
    """The second of two processes, whose first was refused."""

    def gather(self, value):  # type: ignore[no-untyped-def]
        assert value is None
        return [ConfigError("refused"), value]


def test_other_processes_are_refused_with_the_first_and_leave_the_folder_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refused"), owned(tmp_path / "run", _Second(1, 2, ALONE.device)):
        pass
    assert not (tmp_path / "run" / LOCK).exists()
