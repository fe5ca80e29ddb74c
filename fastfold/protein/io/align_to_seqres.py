"""Align the observed residues of a chain with its full sequence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from fastfold.protein.io.altlocs import Conformer, bonded
from fastfold.protein.io.residue_names import UNKNOWN

_MATCH, _UNKNOWN, _MISMATCH = 2.0, 0.0, -4.0
_BROKEN_BOND, _ODD_NUMBER, _FIRST_PLACE = 10.0, 3.0, 1.0
_MAX_TABLE = 50_000_000
_LEAST_IDENTITY = 0.9


def place_in_sequence(
    residues: Sequence[Conformer], sequence: str, missing: Sequence[int] = ()
) -> list[int] | None:
    """Return strictly increasing positions of observed residues in the sequence.

    Residue numbers are used if they lead to equal residues everywhere. Otherwise an alignment assigns a place to every
    observed residue. Equal residues raise its score. Residues of another type, a gap between residues joined by a
    peptide bond, and a distance in the sequence that differs from the residue numbers lower it.

    The sequence has one-letter residues of the polymer. ``missing`` has the residue numbers that the file lists as
    missing.

    Returns:
        A position for each residue, or None if they do not fit: more residues than the sequence has, or fewer than 90%
        of those of known type equal it.
    """
    if len(residues) > len(sequence):
        return None
    numbers = [residue.record.number for residue in residues]
    # Position 0 has the lowest number if the missing ones are known, otherwise probably number 1.
    lowest = min([*numbers, *missing])
    offsets = (-lowest, -1) if missing else (-1, -lowest)
    for offset in offsets:
        places = [number + offset for number in numbers]
        if _fits(residues, places, sequence):
            return places
    if len(residues) * len(sequence) > _MAX_TABLE:
        return None
    places = _align(residues, sequence, first_place=numbers[0] + offsets[0])
    pairs = [(r.letter, sequence[p]) for r, p in zip(residues, places, strict=True)]
    known = [a == b for a, b in pairs if UNKNOWN not in (a, b)]
    return places if sum(known) >= _LEAST_IDENTITY * len(known) else None


def _fits(residues: Sequence[Conformer], places: Sequence[int], sequence: str) -> bool:
    if places[0] < 0 or places[-1] >= len(sequence):
        return False
    if any(after <= before for before, after in itertools.pairwise(places)):
        return False
    return all(residue.letter == sequence[place] for residue, place in zip(residues, places, strict=True))


def _align(residues: Sequence[Conformer], sequence: str, first_place: int) -> list[int]:
    """Find the best increasing places, by dynamic programming with a row of scores per residue."""
    letters = np.frombuffer(sequence.encode("ascii"), np.uint8)
    n = len(letters)
    came_from = np.zeros((len(residues), n), np.int32)
    here = np.arange(n)
    score = _match(residues[0], letters)
    if 0 <= first_place < n:
        score[first_place] += _FIRST_PLACE
    for i in range(1, len(residues)):
        before, after = residues[i - 1], residues[i]
        joined = bonded(before, after)
        step = after.record.number - before.record.number
        expected = 1 if joined or step < 1 else step
        # The best place further left, with the penalty of an unexpected distance ...
        best = np.maximum.accumulate(score)
        at = np.maximum.accumulate(np.where(score == best, here, 0))
        far = np.full(n, -np.inf)
        far[1:] = best[:-1] - (_BROKEN_BOND if joined else _ODD_NUMBER)
        source = np.zeros(n, np.int32)
        source[1:] = at[:-1]
        # ... against the place at the expected distance.
        if expected < n:
            near = np.full(n, -np.inf)
            near[expected:] = score[: n - expected]
            source = np.where(near >= far, here - expected, source)
            far = np.maximum(near, far)
        came_from[i] = source
        score = far + _match(after, letters)
    places = [int(np.argmax(score))]
    for i in range(len(residues) - 1, 0, -1):
        places.append(int(came_from[i, places[-1]]))
    return places[::-1]


def _match(residue: Conformer, letters: np.ndarray) -> np.ndarray:
    score = np.where(letters == ord(residue.letter), _MATCH, _MISMATCH)
    score[letters == ord(UNKNOWN)] = _UNKNOWN
    return score if residue.letter != UNKNOWN else np.full(len(letters), _UNKNOWN)
