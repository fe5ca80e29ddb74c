"""Secondary structure of helices, and of strands by their hydrogen bonds."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.secondary_structure import (
    HELIX,
    LOOP,
    STRAND,
    _helices,
    _strands,
    assign_secondary_structure,
)
from tests.helpers.results import helix_atoms


def test_a_helix_lacks_its_ends() -> None:
    """As in DSSP, whose helix goes from the second residue to the last but one."""
    aatype = rc.sequence_to_aatype("A" * 12)
    positions, mask = helix_atoms(aatype)
    found = assign_secondary_structure(positions, mask, aatype, np.zeros(12, int))
    assert found == LOOP + HELIX * 10 + LOOP
    mask[6, rc.atom_order["O"]] = 0  # an incomplete residue ends the chain
    broken = assign_secondary_structure(positions, mask, aatype, np.zeros(12, int))
    assert broken[6] == LOOP
    assert assign_secondary_structure(positions, mask * 0, aatype, np.zeros(12, int)) == LOOP * 12


def test_a_proline_gives_no_bond() -> None:
    aatype = rc.sequence_to_aatype("AAAAAAPPPPAA")
    found = assign_secondary_structure(*helix_atoms(aatype), aatype, np.zeros(12, int))
    assert found.count(HELIX) < 10


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([(2, 13), (13, 2), (4, 11), (11, 4)], (2, 3, 4, 11, 12, 13)),  # antiparallel ladder
        ([(2, 13), (13, 2)], ()),  # an isolated bridge
        ([(1, 12), (12, 3), (3, 14), (14, 5)], (2, 3, 4, 12, 13, 14)),  # parallel ladder
    ],
)
def test_ladders_are_strands(pairs: list[tuple[int, int]], wanted: tuple[int, ...]) -> None:
    bonds = np.zeros((16, 16), bool)
    for acceptor, donor in pairs:
        bonds[acceptor, donor] = True
    strand = _strands(bonds, np.arange(16)[::-1])
    assert tuple(np.flatnonzero(strand)) == wanted
    assert not _helices(bonds, np.arange(16)[::-1], strand).any()
    assert STRAND != HELIX
