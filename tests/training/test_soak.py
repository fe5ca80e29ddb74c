"""A run of two processes that is killed and whose disk is full ends as one that is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.soak import Soak


@pytest.mark.slow
def test_a_run_that_was_killed_equals_one_that_was_not(tmp_path: Path):
    figures = Soak(tmp_path, 20).run()
    assert (figures["kills"], figures["full_disks"]) == (20, 1)
    assert figures["kills_of_both"] > 0
