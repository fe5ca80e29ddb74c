"""A structure that is a protein passes, and each fault that is put into it is found and named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.errors import ConfigError
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.backbone import PLANAR
from fastfold.protein.protein import Protein
from fastfold.protein.validation import check_structure
from fastfold.protein.validation.covalent import measure_angles, measure_bonds
from tests.helpers.peptides import helix, twisted

SEQUENCE = "MTYKLILNGKTLKGETTTEAVDAATAEK"
"""Without proline, whose ring does not close at the torsions of the helix."""


def _moved(protein: Protein, residue: int, atom: str, by: tuple[float, float, float]) -> Protein:
    positions = protein.atom_positions.copy()
    positions[residue, rc.atom_order[atom]] += np.float32(by)
    return replace(protein, atom_positions=positions)


def test_a_helix_of_ideal_residues_has_no_fault() -> None:
    found = check_structure(helix(SEQUENCE))
    assert found.problems == ()
    assert found.figures == {
        "ramachandran_favoured": 1.0,
        "ramachandran_allowed": 0.0,
        "ramachandran_outliers": 0.0,
        "twisted_peptides": 0,
        "cis_peptides": 0,
        "bond_outliers": 0,
        "angle_outliers": 0,
        "wrong_hands": 0,
        "overlaps": found.clashes,
        "pierced_rings": 0,
    }
    assert found.peptide_bonds == len(SEQUENCE) - 1
    assert (found.regions == -1).tolist() == [True, *[False] * (len(SEQUENCE) - 2), True]


def test_numbers_of_bonds_and_angles_are_those_of_the_residues() -> None:
    """Glycylalanine: three bonds and two angles, then four bonds and four angles, and the peptide bond."""
    protein = helix("GA")
    bonds, angles = measure_bonds(protein), measure_angles(protein)
    assert len(bonds.values) == 3 + 4 + 1
    assert len(angles.values) == 2 + 4
    assert bonds.residue.tolist().count(1) == 5
    assert np.abs(bonds.values - bonds.means).max() < 0.03
    longer = measure_bonds(_moved(protein, 0, "O", (0.0, 0.0, 0.4)))
    assert longer.outliers.sum() == 1


def test_a_mirrored_structure_has_wrong_hands_and_an_unusual_plot() -> None:
    protein = helix(SEQUENCE)
    mirrored = check_structure(
        replace(protein, atom_positions=protein.atom_positions * np.float32([1, 1, -1]))
    )
    chiral = sum(letter != "G" for letter in SEQUENCE)
    assert mirrored.wrong_hands == chiral
    assert any("mirror images" in problem for problem in mirrored.problems)
    # Glycine and some others may be in a left-handed helix.
    assert mirrored.share(2) < 0.3
    assert mirrored.share(0) < check_structure(protein).share(0)


@pytest.mark.parametrize(("degrees", "counted"), [(PLANAR - 2, 0), (PLANAR + 2, 1), (-90.0, 1)])
def test_a_twisted_peptide_is_counted_from_thirty_degrees(degrees: float, counted: int) -> None:
    found = check_structure(twisted(helix(SEQUENCE), 9, degrees))
    assert (found.twisted, found.cis) == (counted, 0)


def test_cis_peptides_count_unless_before_proline() -> None:
    protein = helix("AKLIPNGKA")
    assert check_structure(twisted(protein, 4, 180.0)).cis == 0
    assert check_structure(twisted(protein, 5, 180.0)).cis == 1


def test_a_stretched_chain_names_its_bonds() -> None:
    protein = helix(SEQUENCE)
    stretched = check_structure(replace(protein, atom_positions=protein.atom_positions * np.float32(1.2)))
    assert stretched.bond_outliers > 0.9 * stretched.bonds
    assert stretched.angle_outliers == 0
    assert any("bonds have an unusual length" in problem for problem in stretched.problems)
    bent = replace(protein, atom_positions=protein.atom_positions * np.float32([1.4, 1, 1]))
    assert any("bond angles are unusual" in problem for problem in check_structure(bent).problems)


def test_chains_within_each_other_overlap() -> None:
    found = check_structure(helix(SEQUENCE, SEQUENCE, apart=1.0))
    assert found.clashes > 100
    assert any("pairs of atoms overlap" in problem for problem in found.problems)
    assert check_structure(helix(SEQUENCE, SEQUENCE)).clashes == check_structure(helix(SEQUENCE)).clashes * 2


def test_neighbours_by_number_alone_are_bonded() -> None:
    """A gap in the numbers, or another chain, has no peptide bond that could be wrong."""
    protein = helix(SEQUENCE)
    numbers = protein.residue_index.copy()
    numbers[10:] += 5
    apart = replace(protein, residue_index=numbers, atom_positions=_shifted(protein, 10))
    assert check_structure(apart).bond_outliers == 0
    assert check_structure(apart).peptide_bonds == len(SEQUENCE) - 2
    tied = replace(protein, atom_positions=_shifted(protein, 10))
    assert check_structure(tied).bond_outliers == 1


def _shifted(protein: Protein, residue: int) -> np.ndarray:
    positions = protein.atom_positions.copy()
    positions[residue:] += np.float32([40.0, 0.0, 0.0])
    return positions


def test_positions_that_are_not_finite_are_a_problem() -> None:
    protein = helix(SEQUENCE)
    lost = check_structure(replace(protein, atom_positions=protein.atom_positions * np.nan))
    assert lost.problems[:2] == (
        "100% of its bonds have an unusual length",
        "100% of its bond angles are unusual",
    )


def test_another_object_than_a_structure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"protein must be a Protein, such as .*, found str"):
        check_structure("model.pdb")  # type: ignore[arg-type]


def test_a_single_fault_of_a_short_chain_is_no_problem_yet() -> None:
    assert check_structure(twisted(helix("AAAAAA"), 3, 90.0)).problems == ()


def test_residues_without_atoms_are_left_out() -> None:
    found = check_structure(helix("AXXA"))
    assert found.share(0) is None
    assert found.figures["ramachandran_favoured"] is None
    assert found.problems == ()
