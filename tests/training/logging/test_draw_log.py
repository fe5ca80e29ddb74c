"""What a run consumed: replayed in order, counted by chains, whatever a killed process left."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import WriteError
from fastfold.training.logging.draw_log import DrawLog, consumed_chains


def test_chains_are_counted_once_over_processes_and_restarts(tmp_path: Path):
    for rank, draws in enumerate(([(0, "a"), (2, "b")], [(1, "a"), (3, "c")])):
        log = DrawLog(tmp_path, rank, 2)
        log.write(0, draws)
        log.close()
    assert consumed_chains(tmp_path) == {"a", "b", "c"}


def test_a_torn_line_is_passed_over(tmp_path: Path):
    log = DrawLog(tmp_path, 0, 1)
    log.write(0, [(0, "a"), (1, "b")])
    log.close()
    path = tmp_path / "order_rank_0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    log = DrawLog(tmp_path, 0, 1)
    log.write(1, [(2, "c")])
    assert log.replay() == [0, 2]
    assert consumed_chains(tmp_path) == {"a", "c"}
    log.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path):
    (tmp_path / "order_rank_0.jsonl").symlink_to("/dev/full")
    log = DrawLog(tmp_path, 0, 1)
    with pytest.raises(WriteError, match=r"order_rank_0.*the disk is full"):
        log.write(0, [(0, "a")])
    log.close()
