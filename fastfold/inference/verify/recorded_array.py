"""``RecordedArray``, an array of AlphaFold and FastFold's, and a check for a record's files."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastfold.errors import InputError


class MissingInputError(InputError):
    """Record that lacks a required file."""


class RecordedArray(NamedTuple):
    """Array of FastFold and its recorded counterpart.

    Attributes:
        name: Name in the record.
        ours: FastFold's array, of any shape.
        theirs: Recorded array. If it depends on an unstable sort, the result of a stable sort unless ``ours`` equals
            the recorded one.
    """

    name: str
    ours: np.ndarray
    theirs: np.ndarray


def check_present(*paths: Path, message: str = "no such file") -> None:
    """Check that a record has its files.

    Args:
        *paths: The files.
        message: Text of the error.

    Raises:
        MissingInputError: A file is missing; names the first one.
    """
    for path in paths:
        if not path.is_file():
            raise MissingInputError(message, path=path)
