"""A command that is ended by a batch system leaves through its exits, and the handlers are as they were."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fastfold.cli.process import orderly_termination


def test_sigterm_runs_what_stands_in_finally() -> None:
    before = signal.getsignal(signal.SIGTERM)
    tidied = []

    def ended() -> None:
        with orderly_termination():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                tidied.append(True)

    with pytest.raises(SystemExit) as stopped:
        ended()
    assert tidied
    assert stopped.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_threads_which_hear_of_no_signals_go_on() -> None:
    done = []

    def run() -> None:
        with orderly_termination():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done
