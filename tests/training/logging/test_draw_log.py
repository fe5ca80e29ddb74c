"""What a run consumed: replayed in order, counted by chains, whatever a killed process left."""

from __future__ import annotations

from pathlib import Path

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
