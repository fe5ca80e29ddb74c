"""Residues of structure files by chain and number, as people write them: ``A10-25,A40``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastfold.errors import InputError
from fastfold.protein.structure import ChainStructure


def residue_places(text: str, chains: Sequence[ChainStructure], path: Path) -> np.ndarray:
    """Return the places ``[K]`` int64 of residues in the joined chains, increasing, without repeats.

    ``text`` has residues and ranges by the numbers of the file, such as ``A10-25,A40``. The chain's name may be left
    out if there is one chain.

    Raises:
        InputError: A part cannot be read, or names a missing chain or residue.
    """
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = _match(part, chains)
        if match is None:
            raise InputError(
                f"expected residues such as {chains[0].chain_id}10-25, found {part!r}; the file's chains are "
                f"{', '.join(chain.chain_id for chain in chains)}",
                path=path,
            )
        number, first, last = match
        start = sum(len(chain) for chain in chains[:number])
        places = [_place(chains[number], one, path) for one in (first, last)]
        if places[1] < places[0]:
            raise InputError(f"{part}: the last residue comes before the first", path=path)
        found.update(range(start + places[0], start + places[1] + 1))
    return np.array(sorted(found), np.int64)


def _match(part: str, chains: Sequence[ChainStructure]) -> tuple[int, str, str] | None:
    """Return chain, first and last number of ``A10-25``; the longest chain name that fits."""
    for number in sorted(range(len(chains)), key=lambda i: -len(chains[i].chain_id)):
        name = chains[number].chain_id
        rest = part[len(name) :] if part.startswith(name) else part if len(chains) == 1 else ""
        match = re.fullmatch(r"(-?\d+[A-Z]?)(?:-(-?\d+[A-Z]?))?", rest)
        if match:
            return number, match[1], match[2] or match[1]
    return None


def _place(chain: ChainStructure, number: str, path: Path) -> int:
    try:
        return chain.author_numbers.index(number)
    except ValueError:
        known = [one for one in chain.author_numbers if one]
        raise InputError(
            f"chain {chain.chain_id} has no residue {number} with coordinates; its numbers go from {known[0]} to "
            f"{known[-1]}",
            path=path,
        ) from None
