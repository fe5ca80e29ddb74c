"""``RecordedArray``: what the official program recorded, and what we make of the same."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
