"""Secondary structure of helices, and of strands by their hydrogen bonds."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.secondary_structure import (
    HELIX,
    LOOP,
    STRAND,
    _bonds,
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


def energy(distance: float) -> float:
    """Kabsch and Sander's energy in kcal/mol of C=O and H-N on a line, by the distance of O and H in Å."""
    c_o, n_h = 1.24, 1.01
    terms = 1 / (distance + n_h) + 1 / (distance + c_o) - 1 / distance - 1 / (distance + c_o + n_h)
    return 0.084 * 332 * terms


@pytest.mark.parametrize("distance", [1.9, 3.5, 3.9, 4.1, 4.3, 4.6])
def test_bonds_are_weaker_than_half_a_kilocalorie(distance: float) -> None:
    """The CO of the first residue and the NH of the last, whose hydrogen lies against the CO before it."""
    places = {
        "c": [(-1.24, 0, 0), (30, 0, 0), (20, 5, 0), (60, 0, 0)],
        "o": [(0, 0, 0), (31, 0, 0), (21, 5, 0), (61, 0, 0)],
        "n": [(-3, 2, 0), (28, 0, 0), (19, 5, 0), (distance + 1.01, 0, 0)],
        "ca": [(-2, 1, 0), (29, 0, 0), (20, 4, 0), (distance + 2, 1, 0)],
    }
    n, ca, c, o = (np.array(places[name], float) for name in ("n", "ca", "c", "o"))
    bonds = _bonds(n, ca, c, o, np.array([False, True, True, True]), np.ones(4, bool))
    assert bonds[0, 3] == (energy(distance) < -0.5)
    assert bonds.sum() == bonds[0, 3]


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
