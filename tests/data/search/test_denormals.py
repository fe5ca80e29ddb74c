"""Denormal numbers are zeros within the block, and numbers again behind it."""

from __future__ import annotations

import platform
import sys
import threading

import pytest

from fastfold.data.search.shard_pool import flushed_denormals

HERE = sys.platform == "linux" and platform.machine() == "x86_64"


def _half(number: float) -> float:
    return number * 0.5


@pytest.mark.skipif(not HERE, reason="only Linux on x86-64 can switch the mode from here")
def test_the_mode_holds_within_the_block_alone() -> None:
    smallest = sys.float_info.min
    assert _half(smallest) > 0
    with flushed_denormals():
        assert _half(smallest) == 0
    assert _half(smallest) > 0
    with pytest.raises(KeyError), flushed_denormals():
        raise KeyError
    assert _half(smallest) > 0


@pytest.mark.skipif(not HERE, reason="only Linux on x86-64 can switch the mode from here")
def test_other_threads_keep_their_numbers() -> None:
    inside, seen = threading.Event(), threading.Event()

    def work() -> None:
        with flushed_denormals():
            inside.set()
            seen.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    number = _half(sys.float_info.min)
    seen.set()
    thread.join()
    assert number > 0


def test_elsewhere_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.data.search.shard_pool.platform.machine", lambda: "other")
    with flushed_denormals():
        assert _half(sys.float_info.min) > 0
