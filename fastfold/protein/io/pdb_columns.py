"""Read columns 18-27 of PDB atoms, which programs write differently: residue name, chain and number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from fastfold.protein import residue_constants as rc
from fastfold.protein.io.records import WATERS

_HYBRID = re.compile(r"[A-Z][0-9A-Z]{3}|[a-z][0-9a-z]{3}")
_ATOMS = ("ATOM  ", "HETATM")
_MOST_LONG_NAMES = 4
"""Largest number of different long names in a row; with more, column 21 belongs to the chain name."""


class ResidueId(NamedTuple):
    """Residue name, chain name, residue number and insertion code."""

    name: str
    chain_id: str
    number: int
    insertion: str


def residue_id(line: str, long_names: frozenset[str]) -> ResidueId:
    """Read columns 18 to 27 of an ATOM, HETATM or TER record.

    ``long_names`` are those of :func:`find_long_names`.

    Raises:
        ValueError: The residue number is not a number.
    """
    columns = line[17:27]
    return _decode(columns, 4 if columns in long_names else 3)


@lru_cache(maxsize=64)  # consecutive atoms share a residue
def _decode(columns: str, name_length: int) -> ResidueId:
    name, chain_id = columns[:name_length].strip(), columns[name_length:5].strip()
    number, insertion = columns[5:9], columns[9:].strip()
    if insertion.isdigit() and number.isdigit():  # 10000 and more, written over the insertion code
        number, insertion = number + insertion, ""
    return ResidueId(name, chain_id, _decode_number(number), insertion)


def chain_id_of(line: str, long_names: frozenset[str]) -> str:
    """Read the chain name of an ATOM, HETATM or TER record, of one or two letters."""
    return line[21:22].strip() if line[17:27] in long_names else line[20:22].strip()


def segment_of(line: str) -> str:
    """Read CHARMM's segment name in columns 73 to 76; empty if they hold an element or a charge."""
    segment = line[72:76].strip()
    is_name = segment.isalnum() and not segment.isdigit() and segment != line[12:16].strip()[:1]
    return segment if is_name else ""


def _decode_number(text: str) -> int:
    """Decode a residue number, which is in hybrid-36 beyond 9999."""
    if text[:1].isalpha() and _HYBRID.fullmatch(text):
        return int(text, 36) + 10_000 + (16 if text[0].islower() else -10) * 36**3
    return int(text)


def find_long_names(lines: Sequence[str]) -> frozenset[str]:
    """Return columns 18 to 27 of residues with names of four letters, which use column 21.

    ``ARGAA`` is ARG of chain AA (ChimeraX), and ``NARGA`` is NARG of chain A (Amber). ``HISEA`` is HISE of chain A
    (GROMACS) if its number follows a residue of chain A.
    """
    if not any(line[20:21].strip() and line.startswith(_ATOMS) for line in lines):
        return frozenset()
    segments: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("TER"):
            segments.append([])
        elif line.startswith(_ATOMS) and segments[-1][-1:] != [line[17:27]]:
            segments[-1].append(line[17:27])
    found: set[str] = set()
    for residues in segments:
        residues = [residue for residue in residues if residue[:3] not in WATERS]
        if any(residue[3:4].strip() for residue in residues):
            found.update(residue for residue in residues if _has_terminal_name(residue))
            _follow(residues, +1, found)
            _follow(residues[::-1], -1, found)
    return frozenset(residue for residue in found if residue[3:4].strip())


def _has_terminal_name(residue: str) -> bool:
    """Return True if the name is Amber's for a residue at an end of a chain."""
    name = residue[:4].upper()
    return name[:1] in "NC" and name[1:] in rc.restype_3to1 and name[:3] not in rc.restype_3to1


def _follow(residues: Sequence[str], step: int, found: set[str]) -> None:
    """Add runs of long names that continue the numbers of a chain with a one-letter name."""
    last = ""
    for letters, run in groupby(residues, key=lambda residue: residue[3:5]):
        members = list(run)
        names = {residue[:3] for residue in members}
        if last[4:5] == letters[1:] and _counts_on(last, members[0], step) and len(names) <= _MOST_LONG_NAMES:
            found.update(members)
        last = members[-1] if letters.startswith(" ") or members[-1] in found else ""


def _counts_on(before: str, after: str, step: int) -> bool:
    try:
        return _decode_number(after[5:9]) - _decode_number(before[5:9]) == step
    except ValueError:
        return False
