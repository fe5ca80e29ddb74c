"""Every submitted task has one outcome; what workers survive is in ``test_loader``."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from fastfold.errors import ConfigError, InputError
from fastfold.utils.workers.pool import InlinePool, WorkerOutcome, WorkerPool


def _work(key: int, argument: int) -> int:
    if argument < 0:
        raise InputError("is negative")
    return key * argument


def test_without_processes_tasks_run_in_their_order() -> None:
    pool = InlinePool(_work)
    for key, argument in enumerate((5, -1, 7)):
        pool.submit(key, argument)
    outcomes = [pool.next_outcome() for _ in range(3)]
    assert outcomes == [
        WorkerOutcome(0, 0, None),
        WorkerOutcome(1, None, "is negative"),
        WorkerOutcome(2, 14, None),
    ]


def test_a_closed_pool_forgets_its_tasks() -> None:
    pool = InlinePool(_work)
    pool.submit(0, 1)
    pool.close()
    with pytest.raises(IndexError):
        pool.next_outcome()


def test_a_function_that_cannot_be_sent_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes.*set workers=0"):
        WorkerPool(lambda key, argument: None, 1)


def _pause(key: int, seconds: float) -> None:
    time.sleep(seconds)


def _interrupted(function: Callable[[], WorkerOutcome], line: int) -> WorkerOutcome | KeyboardInterrupt:
    """Call a function, with Ctrl-C before the ``line``-th line of Python that it executes."""
    lines = itertools.count()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(before)


def test_an_interrupt_at_any_line_is_one_error_and_the_pool_works_on() -> None:
    """A person sees the traceback of Ctrl-C alone, wherever the main thread was while it waited."""
    with contextlib.closing(WorkerPool(_pause, 1)) as pool:
        for line in itertools.count():
            pool.submit(-1, 0.0)
            while pool.next_outcome().key != -1:  # an outcome that was left by the interrupt comes first
                pass
            pool.submit(line, 0.02)
            found = _interrupted(pool.next_outcome, line)
            if isinstance(found, WorkerOutcome):
                break
            assert found.__context__ is None
    assert found.key == line > 2
