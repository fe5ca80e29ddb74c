"""Candidates of a side chain keep known atoms and the bonds of the residue."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.side_chains.candidates import side_chain_candidates
from tests.helpers.peptides import helix


def _atoms(letter: str, *names: str) -> tuple[int, dict[int, np.ndarray]]:
    protein = helix(f"A{letter}A")
    slots = [rc.atom_order[name] for name in names]
    return int(protein.aatype[1]), {slot: protein.atom_positions[1, slot].astype(float) for slot in slots}


def test_missing_atoms_stand_at_their_bonds_in_every_rotamer() -> None:
    aatype, atoms = _atoms("L", "N", "CA", "C", "CB")
    found = side_chain_candidates(1, aatype, atoms, np.array([-60.0, -45.0]))
    gamma = found.points[:, found.slots.index(rc.atom_order["CG"])]
    assert len(gamma) > 1
    assert found.energies.min() == 0
    np.testing.assert_allclose(np.linalg.norm(gamma - atoms[rc.atom_order["CB"]], axis=-1), 1.53, atol=0.03)
    assert np.linalg.norm(gamma[:, None] - gamma[None], axis=-1).max() > 1.5


def test_a_known_atom_decides_its_angle() -> None:
    aatype, atoms = _atoms("M", "N", "CA", "C", "CB", "CG")
    found = side_chain_candidates(1, aatype, atoms, np.array([np.nan, np.nan]))
    assert rc.atom_order["CG"] not in found.slots
    sulphur = found.points[:, found.slots.index(rc.atom_order["SD"])]
    np.testing.assert_allclose(np.linalg.norm(sulphur - atoms[rc.atom_order["CG"]], axis=-1), 1.81, atol=0.05)


def test_chosen_candidates_get_new_energies() -> None:
    aatype, atoms = _atoms("L", "N", "CA", "C", "CB")
    found = side_chain_candidates(1, aatype, atoms, np.array([-60.0, -45.0]))
    chosen = found.select(np.array([1, 0]), np.arange(len(found.energies), dtype=float))
    assert chosen.energies.tolist() == [1.0, 0.0]
    np.testing.assert_array_equal(chosen.points[0], found.points[1])
