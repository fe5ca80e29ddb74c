"""Signals that ask a run to stop are noted, and have their usual effect otherwise."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fastfold.training.lifecycle.process import SIGNALS, Interrupts


@pytest.fixture(autouse=True)
def _handlers():
    """Ctrl-C works, although the tests may run in a background job; all is as before afterwards."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted(number: int) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.received is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received == number
    assert signal.getsignal(number) is before
    assert interrupts.received == number


def test_a_second_ctrl_c_stops_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("press Ctrl-C again to stop at once") == 1


def test_other_processes_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts(quiet=True) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
    assert (interrupts.received, capfd.readouterr().err) == (signal.SIGINT, "")


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.received is None
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_other_threads_train_without_signals() -> None:
    found: list[Interrupts] = []

    def enter() -> None:
        with Interrupts() as interrupts:
            found.append(interrupts)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found[0].received is None
