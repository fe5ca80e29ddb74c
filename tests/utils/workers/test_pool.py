"""Every submitted task has one outcome; what workers survive is in ``test_loader``."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.utils.workers.pool import InlinePool, Outcome, WorkerPool


def _work(key: int, argument: int) -> int:
    if argument < 0:
        raise InputError("is negative")
    return key * argument


def test_without_processes_tasks_run_in_their_order() -> None:
    pool = InlinePool(_work)
    for key, argument in enumerate((5, -1, 7)):
        pool.submit(key, argument)
    outcomes = [pool.next_outcome() for _ in range(3)]
    assert outcomes == [Outcome(0, 0, None), Outcome(1, None, "is negative"), Outcome(2, 14, None)]
    assert pool.deaths == []


def test_a_closed_pool_forgets_its_tasks() -> None:
    pool = InlinePool(_work)
    pool.submit(0, 1)
    pool.close()
    with pytest.raises(IndexError):
        pool.next_outcome()


def test_a_function_that_cannot_be_sent_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes.*set workers=0"):
        WorkerPool(lambda key, argument: None, 1)
