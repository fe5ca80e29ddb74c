"""Hydrogen bonds of a helix and of single atoms."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.hydrogen_bonds import hydrogen_bonds, polar_atoms
from tests.helpers.results import helix_atoms


def test_a_helix_binds_four_residues_on() -> None:
    aatype = rc.sequence_to_aatype("A" * 15)
    bonds = hydrogen_bonds(*helix_atoms(aatype), aatype)
    n, o = rc.atom_order["N"], rc.atom_order["O"]
    assert {(donor, acceptor) for donor, _, acceptor, _ in bonds.tolist()} >= {(i + 4, i) for i in range(11)}
    assert all(donor - acceptor in (3, 4) for donor, _, acceptor, _ in bonds.tolist())
    assert {(slot, other) for _, slot, _, other in bonds.tolist()} == {(n, o)}
    proline = aatype.copy()
    proline[8] = rc.restype_order["P"]
    assert 8 not in hydrogen_bonds(*helix_atoms(proline), proline)[:, 0]


@pytest.mark.parametrize(
    ("place", "count"), [((2.9, 0, 0), 1), ((3.6, 0, 0), 0), ((-2.0, 2.0, 0), 0), ((0.2, 2.9, 0), 1)]
)
def test_distance_and_angle_at_a_lysine(place: tuple[float, float, float], count: int) -> None:
    """Its NZ is at the origin, CE at -1.5 Å on x; an oxygen of another residue is somewhere."""
    positions, mask = np.zeros((2, 37, 3)), np.zeros((2, 37))
    for name, x in (("NZ", (0, 0, 0)), ("CE", (-1.5, 0, 0))):
        positions[0, rc.atom_order[name]], mask[0, rc.atom_order[name]] = x, 1
    positions[1, rc.atom_order["O"]], mask[1, rc.atom_order["O"]] = place, 1
    aatype = rc.sequence_to_aatype("KG")
    assert len(hydrogen_bonds(positions, mask, aatype)) == count


def test_polar_atoms_of_side_chains() -> None:
    gives, takes = polar_atoms(rc.sequence_to_aatype("PSD"))
    assert not gives[0].any()
    assert gives[1, rc.atom_order["OG"]]
    assert takes[1, rc.atom_order["OG"]]
    assert takes[2, rc.atom_order["OD2"]]
    assert not gives[2, rc.atom_order["OD2"]]
