"""A thread for some functions in a row."""

from __future__ import annotations

import threading

from fastfold.memory.gemini.optimizer.worker import Worker


def test_functions_run_in_order_in_a_thread_that_ends() -> None:
    worker, found = Worker("of-a-test", 1 << 10), []
    for round_ in range(3):
        for i in range(5):
            worker.put(lambda i=i: found.append((i, threading.current_thread().name)), 1)  # type: ignore[misc]
        assert worker.finish() is None
        assert found == [(i, "of-a-test") for i in range(5)] * (round_ + 1)
        assert "of-a-test" not in [thread.name for thread in threading.enumerate()]


def test_what_is_raised_is_kept_and_nothing_follows() -> None:
    worker, found = Worker("of-a-test", 0), []
    error = KeyError("first")

    def fail() -> None:
        raise error

    for task in (lambda: found.append(1), fail, lambda: found.append(2), fail):
        worker.put(task, 1)
    assert worker.finish() is error
    assert found == [1]
    worker.put(lambda: found.append(3), 1)
    assert worker.finish() is None
    assert found == [1, 3]


def test_no_more_waits_than_may() -> None:
    """Two units may wait and one more; the fourth is put when the first is done."""
    worker, go = Worker("of-a-test", 2), threading.Event()
    put = []

    def fill() -> None:
        for i in range(4):
            worker.put(lambda: go.wait(60), 1)
            put.append(i)

    other = threading.Thread(target=fill)
    other.start()
    other.join(0.2)
    assert put == [0, 1, 2]
    go.set()
    other.join(60)
    assert put == [0, 1, 2, 3]
    assert worker.finish() is None
