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

    If the latter depends on an unstable sort, it is the result of a stable one unless ``ours`` equals the recorded one.
    """

    name: str
    ours: np.ndarray
    theirs: np.ndarray


def check_present(*paths: Path, message: str = "no such file") -> None:
    """Raise MissingInputError for the first file that a record lacks."""
    for path in paths:
        if not path.is_file():
            raise MissingInputError(message, path=path)
