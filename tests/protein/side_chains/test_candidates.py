"""Candidates of a side chain keep known atoms and the bonds of the residue."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.candidates import RotamerCandidates, side_chain_candidates
from tests.helpers.peptides import helix

BACKBONE = ("N", "CA", "C", "CB")
HELIX = (-60.0, -45.0)


def _known(protein: Protein, *names: str) -> np.ndarray:
    return (protein.atom_mask > 0.5) & np.isin(np.array(rc.atom_types), names)


def _second(
    letter: str, *names: str, torsions: tuple[float, float] = HELIX
) -> tuple[RotamerCandidates, np.ndarray]:
    """Return the candidates of the second of three residues whose atoms have these names, and its atoms."""
    protein = helix(f"A{letter}A")
    xyz = protein.atom_positions.astype(float)
    (found,) = side_chain_candidates(
        [1], xyz, _known(protein, *names), protein.aatype, np.full((3, 2), torsions)
    )
    return found, xyz[1]


def test_missing_atoms_stand_at_their_bonds_in_every_rotamer() -> None:
    found, atoms = _second("L", *BACKBONE)
    gamma = found.points[:, found.slots.index(rc.atom_order["CG"])]
    assert len(gamma) > 1
    assert found.energies.min() == 0
    np.testing.assert_allclose(np.linalg.norm(gamma - atoms[rc.atom_order["CB"]], axis=-1), 1.53, atol=0.03)
    assert np.linalg.norm(gamma[:, None] - gamma[None], axis=-1).max() > 1.5


def test_a_known_atom_decides_its_angle() -> None:
    found, atoms = _second("M", *BACKBONE, "CG", torsions=(np.nan, np.nan))
    assert rc.atom_order["CG"] not in found.slots
    sulphur = found.points[:, found.slots.index(rc.atom_order["SD"])]
    np.testing.assert_allclose(np.linalg.norm(sulphur - atoms[rc.atom_order["CG"]], axis=-1), 1.81, atol=0.05)


def test_residues_together_have_the_candidates_of_each_alone() -> None:
    """Types, known atoms, torsions and hints differ between residues, which are built in groups."""
    protein = helix("LPMLFMLW")
    xyz = protein.atom_positions.astype(float)
    known = _known(protein, *BACKBONE)
    known[5, rc.atom_order["CG"]] = True
    torsions = np.array([[-60.0, -45.0], [-70.0, 140.0]] * 4)
    torsions[6] = np.nan
    hints = np.random.default_rng(0).uniform(-180, 180, (8, 4))
    hints[3, 0] = np.nan
    residues = [6, 0, 1, 2, 3, 4, 5, 7]
    for deviations in ([0.0], [-15.0, 0.0, 15.0]):
        rest = protein.aatype, torsions, hints
        together = side_chain_candidates(residues, xyz, known, *rest, deviations=deviations)
        assert [one.residue for one in together] == residues
        for one in together:
            (alone,) = side_chain_candidates([one.residue], xyz, known, *rest, deviations=deviations)
            assert one.slots == alone.slots
            np.testing.assert_allclose(one.points, alone.points, atol=1e-9)
            np.testing.assert_allclose(one.energies, alone.energies, atol=1e-9)
        counts = {one.residue: len(one.energies) for one in together}
        assert counts[0] == counts[6] == counts[3] + len(deviations) ** 2  # the hint


def test_chosen_candidates_get_new_energies() -> None:
    found, _ = _second("L", *BACKBONE)
    chosen = found.select(np.array([1, 0]), np.arange(len(found.energies), dtype=float))
    assert chosen.energies.tolist() == [1.0, 0.0]
    np.testing.assert_array_equal(chosen.points[0], found.points[1])
