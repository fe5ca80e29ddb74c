"""What a worker sends arrives as it was, and its failures fit into one line."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.utils.workers.process import describe_failure, receive, send


@pytest.mark.parametrize("size", [0, 1, 300_000])
def test_arrays_of_any_size_arrive_as_they_were(size: int) -> None:
    """Also those that are sent in several pieces."""
    ours, theirs = multiprocessing.Pipe()
    message = {"array": np.arange(size, dtype=np.float64), "text": "x", "empty": np.zeros((0, 3))}
    sender = threading.Thread(target=send, args=(theirs, message))
    sender.start()
    found = receive(ours)
    sender.join()
    assert found.keys() == message.keys()
    assert found["text"] == "x"
    for name in ("array", "empty"):
        np.testing.assert_array_equal(found[name], message[name])
        assert found[name].flags.writeable


def test_a_side_that_has_gone_is_noticed() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(EOFError):
        receive(ours)


def test_own_errors_speak_for_themselves_and_others_name_their_place() -> None:
    assert describe_failure(InputError("is empty", path="x.pdb")) == str(InputError("is empty", path="x.pdb"))
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        said = describe_failure(error)
    assert said.startswith("ValueError: two lines (test_process.py:")
