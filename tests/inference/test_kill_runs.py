"""Runs that are killed with SIGKILL at random moments lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference.kill_runs import SEEDS, SEQUENCES, kill_runs


@pytest.mark.slow
def test_fifty_kills_over_two_processes_lose_nothing(tmp_path: Path):
    assert kill_runs(tmp_path, 50) == {"targets": len(SEQUENCES), "predictions": len(SEQUENCES) * len(SEEDS)}
