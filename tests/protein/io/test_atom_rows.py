"""Atoms of a file: hydrogens after the heavy atoms of their residue, with its B-factor; read back by others."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from Bio.PDB import MMCIFParser, PDBParser

from fastfold.errors import OutputError
from fastfold.protein.io.atom_rows import atom_rows, residue_b_factors
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Hydrogens
from tests.helpers.peptides import helix

HYDROGENS = Hydrogens(np.array([0, 1, 1]), ("HA", "HG21", "H"), np.arange(9.0).reshape(3, 3))
NAMES = AuthorNames(("q", "R"), ("-5", "10A", "10B"))


def test_hydrogens_follow_the_heavy_atoms_of_their_residue() -> None:
    rows = atom_rows(helix("GV", "G"), HYDROGENS)
    assert [row.residue for row in rows] == sorted(row.residue for row in rows)
    assert [row.name for row in rows[:6]] == ["N", "CA", "C", "O", "HA", "N"]
    assert rows[4].b_factor == 50
    assert [row.name for row in rows if row.residue == 1][-2:] == ["HG21", "H"]


def test_b_factors_of_residues_are_those_of_their_ca_or_first_atom() -> None:
    protein = helix("GV")
    b = protein.b_factors.copy()
    b[:, 0], b[:, 1] = 7, 8
    mask = protein.atom_mask.copy()
    mask[1, 1] = 0
    assert residue_b_factors(replace(protein, b_factors=b, atom_mask=mask)).tolist() == [8, 7]


def test_biopython_reads_hydrogens_names_and_insertion_codes() -> None:
    protein = helix("GV", "G")
    pdb = to_pdb(protein, hydrogens=HYDROGENS, names=NAMES)
    cif = to_modelcif(
        protein,
        entry_id="x",
        title="x",
        software_version="1",
        model_name="m",
        plddt=None,
        refinement="by hand",
        hydrogens=HYDROGENS,
        names=NAMES,
    )
    assert all(len(line) == 80 for line in pdb.splitlines())
    assert "ATOM     13 HG21 VAL q  10A" in pdb
    for parser, text in ((PDBParser(PERMISSIVE=False), pdb), (MMCIFParser(QUIET=True), cif)):
        model = next(parser.get_structure("x", io.StringIO(text)).get_models())
        assert [chain.id for chain in model] == ["q", "R"]
        assert [r.id[1:] for r in model.get_residues()] == [(-5, " "), (10, "A"), (10, "B")]
        hydrogens = [atom for atom in model.get_atoms() if atom.element == "H"]
        assert [atom.name for atom in hydrogens] == ["HA", "HG21", "H"]
        np.testing.assert_allclose([atom.coord for atom in hydrogens], HYDROGENS.positions)
    assert "Ab initio model" not in cif
    assert "Structure prediction" not in cif


def test_what_cannot_be_written_is_refused() -> None:
    protein = helix("GX")
    with pytest.raises(OutputError, match="the position of a hydrogen is not finite"):
        atom_rows(protein, Hydrogens(np.array([0]), ("HA",), np.full((1, 3), np.nan)))
    with pytest.raises(ValueError, match="without atoms"):
        atom_rows(protein, Hydrogens(np.array([1]), ("HA",), np.zeros((1, 3))))
    with pytest.raises(ValueError, match="lacks"):
        atom_rows(protein, Hydrogens(np.array([2]), ("HA",), np.zeros((1, 3))))
    with pytest.raises(PdbLimitError, match="residue number 10000"):
        to_pdb(protein, names=AuthorNames(("A",), ("10000", "2")))
