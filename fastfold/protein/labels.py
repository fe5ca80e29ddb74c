"""Names of a structure's chains and residues in files and messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein, chain_name
from fastfold.protein.structure import Structure


@dataclass(frozen=True)
class AuthorNames:
    """Names of chains and residues by the authors of a structure."""

    chain_ids: tuple[str, ...]  #: Name of each chain
    #: Number of each residue with its insertion code, ``52`` or ``52A``; empty if unknown (only for residues without
    #: atoms)
    numbers: tuple[str, ...]
    #: Name of each residue in the file, for messages; empty for one without atoms
    residues: tuple[str, ...] = field(default=(), compare=False)

    def split_number(self, residue: int) -> tuple[int, str]:
        """Return number and insertion code of a residue; the code may be empty."""
        match = re.fullmatch(r"(-?\d+)(.*)", self.numbers[residue])
        if match is None:
            raise ValueError(f"residue {residue}: expected a number, found {self.numbers[residue]!r}")
        return int(match[1]), match[2]


def author_names(structure: Structure) -> AuthorNames:
    """Return the names in a structure's file, in the order of its chains."""
    return AuthorNames(
        chain_ids=tuple(chain.chain_id for chain in structure.chains),
        numbers=tuple(number for chain in structure.chains for number in fill_numbers(chain.author_numbers)),
        residues=tuple(name for chain in structure.chains for name in chain.residue_names),
    )


def fill_numbers(known: Sequence[str]) -> list[str]:
    """Return numbers of all residues of a chain; empty ones continue a neighbour's number if it is unused."""
    numbers = list(known)
    used = set(numbers)
    last = len(numbers) - 1
    for places, step in ((range(1, last + 1), 1), (range(last - 1, -1, -1), -1)):
        for i in places:
            if not numbers[i] and (match := re.match(r"-?\d+", numbers[i - step])):
                number = str(int(match[0]) + step)
                if number not in used:
                    numbers[i] = number
    return numbers


def default_names(protein: Protein) -> AuthorNames:
    """Return chains named A, B, ... and the structure's own residue numbers."""
    return AuthorNames(
        chain_ids=tuple(chain_name(chain) for chain in range(len(protein.chains))),
        numbers=tuple(str(number) for number in protein.residue_index.tolist()),
    )


def shifted_numbers(residue_index: np.ndarray, first: str) -> np.ndarray:
    """Return the residue index ``[N]`` of a chain, shifted so that its first residue has its number.

    Gaps stay, so these are the numbers of a file wherever its numbers agree with the index.
    """
    match = re.match(r"-?\d+", first)
    return residue_index if match is None else residue_index - residue_index[0] + int(match[0])


def residue_ranges(numbers: np.ndarray) -> list[list[int]]:
    """Return first and last number of each run of consecutive numbers in ``[N]`` ascending ones; N is at least 1."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [[int(part[0]), int(part[-1])] for part in np.split(numbers, breaks)]


def numbers_of_ranges(ranges: Any, length: int) -> np.ndarray:
    """Return ``[N]`` int32 residue numbers of ranges; inverse of :func:`residue_ranges`.

    Args:
        ranges: Pairs of a first and a last number, ascending; may come from a file.
        length: Number of residues ``N``.

    Raises:
        ValueError: The ranges are not such pairs, or have another number of residues.
    """
    numbers: list[int] = []
    for one in ranges if isinstance(ranges, list) else [None]:
        if not (isinstance(one, list) and len(one) == 2 and all(type(number) is int for number in one)):
            raise ValueError("residue ranges are not pairs of numbers")
        first, last = one
        if not (numbers[-1] if numbers else -(2**31)) < first <= last < 2**31 or last - first >= length:
            raise ValueError(f"{first}-{last} does not follow the residue range before it, or is too long")
        numbers += range(first, last + 1)
    if len(numbers) != length:
        raise ValueError(f"residue ranges have {len(numbers)} residues, the chain has {length}")
    return np.array(numbers, np.int32)


def residue_label(protein: Protein, residue: int, names: AuthorNames | None = None) -> str:
    """Return the name of a residue for messages: ``LYS 15 of chain A``.

    Without names, chains are A, B, ... and numbers those of ``protein.residue_index``.
    """
    chain = int(protein.chain_index[residue])
    if names is None:
        chain_id, number = chain_name(chain), str(int(protein.residue_index[residue]))
    else:
        chain_id, number = names.chain_ids[chain], names.numbers[residue]
    own_name = names.residues[residue] if names and names.residues else ""
    return f"{own_name or rc.resnames[protein.aatype[residue]]} {number} of chain {chain_id}"
