"""``RecordedArray``, an array of the official program and ours, and a check for files that a record needs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastfold.errors import InputError


class MissingInputError(InputError):
    """A record without one of the files that it needs."""


class RecordedArray(NamedTuple):
    """An array of the official program beside ours.

    Attributes:
        name: Its name in the record.
        ours: Ours, of any shape.
        theirs: The recorded one; where that depends on a sort which is not stable, the one of a stable sort if
            ours is not the recorded one.
    """

    name: str
    ours: np.ndarray
    theirs: np.ndarray


def check_present(*paths: Path, message: str = "no such file") -> None:
    """Refuse a record that lacks a file.

    Args:
        *paths: The files.
        message: What to say.

    Raises:
        MissingInputError: The first of them that is not there.
    """
    for path in paths:
        if not path.is_file():
            raise MissingInputError(message, path=path)
