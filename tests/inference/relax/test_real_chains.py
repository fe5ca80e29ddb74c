"""Real chains with missing atoms: every hand right and no bond over a gap, or the residue is named."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.inference.relax import RelaxConfig, RelaxResult, relax
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.protein import Protein
from fastfold.protein.structure import structure_to_protein
from tests.conftest import require_shared

CENTERS = {
    **{(letter, "CA"): ("N", "C", "CB") for letter in "ACDEFHIKLMNPQRSTVWY"},
    ("T", "CB"): ("CA", "OG1", "CG2"),
    ("I", "CB"): ("CA", "CG1", "CG2"),
}
"""Neighbours of chiral atoms whose triple product is positive."""


def incomplete_chains() -> Iterator[tuple[str, Protein]]:
    """Yield chains that lack heavy atoms, the shortest first."""
    with require_shared("data", "structures", "index.tsv").open(newline="") as index:
        rows = sorted(
            csv.DictReader(index, delimiter="\t"), key=lambda row: (int(row["residues"]), row["name"])
        )
    for row in rows:
        path = require_shared("data", "structures", row["split"], f"{row['name']}.pdb.gz")
        protein = structure_to_protein(read_structure(path))
        present = protein.atom_mask > 0.5
        expected = np.array(rc.restype_atom37_mask)[protein.aatype] > 0.5
        if (expected & ~present)[present.any(-1)].any():
            yield row["name"], protein


def wrong_residues(protein: Protein) -> set[int]:
    """Return the residues with a carbon of the wrong hand."""
    found = set()
    for i, letter in enumerate("".join(protein.sequences)):
        atoms = {
            rc.atom_types[slot]: protein.atom_positions[i, slot]
            for slot in np.flatnonzero(protein.atom_mask[i])
        }
        for (residue, center), neighbors in CENTERS.items():
            if residue == letter and {center, *neighbors} <= atoms.keys():
                a, b, c = (atoms[name].astype(float) - atoms[center] for name in neighbors)
                if np.dot(np.cross(a, b), c) <= 0:
                    found.add(i)
    return found


def bond_lengths(protein: Protein) -> dict[int, float]:
    """Return the distance in Å of each residue's N from C of the residue before it in the arrays."""
    c, n = rc.atom_order["C"], rc.atom_order["N"]
    pairs = itertools.pairwise(np.flatnonzero((protein.atom_mask > 0.5).any(-1)).tolist())
    return {
        j: float(np.linalg.norm(protein.atom_positions[j, n] - protein.atom_positions[i, c]))
        for i, j in pairs
        if protein.chain_index[i] == protein.chain_index[j]
        and protein.atom_mask[i, c] * protein.atom_mask[j, n]
    }


def check(name: str, protein: Protein, result: RelaxResult) -> None:
    named = {violation.index for violation in result.violations}
    before, after = bond_lengths(protein), bond_lengths(result.protein)
    wrong = wrong_residues(result.protein)
    tied = {j for j, length in before.items() if length > 2.5 and after[j] < 2.0}
    stretched = {j for j, length in before.items() if length < 2.0 and abs(after[j] - 1.33) > 0.2}
    assert result.minimized, (name, result.reason)
    assert not tied, (name, "a bond over a gap", tied)
    assert (wrong | stretched) <= named, (name, wrong, stretched, result.reason)
    assert result.relaxed == (not named and (result.energy_after or 0) < 0), (name, result.reason)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_real_chains_with_missing_atoms_come_out_right_or_are_named(count: int) -> None:
    checked, relaxed, atoms, refused = 0, 0, 0, 0
    for name, protein in incomplete_chains():
        try:
            result = relax(protein, RelaxConfig(platform="CPU"))
        except InputError as error:
            refused += 1
            print(f"{name}: {error}")
            continue
        check(name, protein, result)
        checked, relaxed, atoms = checked + 1, relaxed + result.relaxed, atoms + result.atoms_added
        print(f"{name}: {result}", flush=True)
        if checked == count:
            break
    assert checked == count
    print(f"{relaxed} of {checked} chains relaxed, {atoms} heavy atoms added, {refused} chains refused")


CASES = {"relax_inverts_chirality": ["bb_only.pdb", "trunc.pdb", "few_nocb.pdb"]}
CASES["relax_bridges_gap"] = [
    "loop_deleted_renumbered.pdb",
    "modelangelo.cif",
    "loop_deleted_numbers_kept.pdb",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "file"), [(folder, file) for folder, files in CASES.items() for file in files]
)
def test_recorded_files_are_relaxed(folder: str, file: str) -> None:
    protein = structure_to_protein(read_structure(require_shared("cases", "structures", folder, file)))
    result = relax(protein, RelaxConfig(platform="CPU"))
    check(file, protein, result)
    assert result.relaxed, result.reason
    if folder == "relax_bridges_gap":
        assert result.energy_after == pytest.approx(-4839, rel=0.01)
        assert (result.heavy_atom_rmsd or 9) < 0.2
