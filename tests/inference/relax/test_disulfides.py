"""Disulfide bonds of the force field are those of the input or of its backbones, and the record lists them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest

from fastfold.inference.relax import RelaxConfig, relax_file
from fastfold.inference.relax.prepare import PreparedStructure, prepare
from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import Protein
from tests.conftest import require_shared
from tests.helpers.peptides import helix

SG = rc.atom_order["SG"]
CPU = RelaxConfig(platform="CPU", threads=1)


def near_sulphurs(distance: float) -> Protein:
    """Return two helices 9 Å apart, whose sulphurs are nevertheless near each other, halfway."""
    protein = helix("ACA", "ACA", apart=9.0)
    xyz = protein.atom_positions.copy()
    middle = xyz[[1, 4], SG].mean(0)
    half = np.array([distance / 2, 0, 0])
    xyz[1, SG], xyz[4, SG] = middle - half, middle + half
    return replace(protein, atom_positions=xyz)


def bonded_sulphurs(prepared: PreparedStructure) -> list[tuple[int, ...]]:
    return [
        tuple(sorted(int(prepared.residue_of[atom.index]) for atom in bond))
        for bond in prepared.topology.bonds()
        if all(atom.name == "SG" for atom in bond)
    ]


def has_hydrogen(prepared: PreparedStructure) -> bool:
    return any(atom.name == "HG" for atom in prepared.topology.atoms())


def test_sulphurs_that_are_near_by_accident_are_not_bonded() -> None:
    """OpenMM and pdbfixer would bond them, by their distance alone."""
    prepared = prepare(near_sulphurs(2.6))
    assert prepared.disulfides == ()
    assert bonded_sulphurs(prepared) == []
    assert has_hydrogen(prepared)


def test_sulphurs_at_the_distance_of_a_bond_keep_it() -> None:
    prepared = prepare(near_sulphurs(2.05))
    assert prepared.disulfides == ((1, 4),)
    assert bonded_sulphurs(prepared) == [(1, 4)]
    assert not has_hydrogen(prepared)


@pytest.mark.long
def test_cysteines_without_sulphurs_get_the_bonds_of_their_protein(tmp_path: Path) -> None:
    """The PDB entry 5du1 has these four bonds; six of its eight sulphurs are removed."""
    path = require_shared("cases", "relax", "relax_false_disulfide", "in.pdb")
    result, files = relax_file(path, tmp_path, CPU)
    assert result.relaxed, result.reason
    expected = [(3, 19), (12, 37), (41, 49), (50, 55)]
    record = result.to_dict()["disulfides"]
    assert [tuple(bond["residues"]) for bond in record] == [
        (f"CYS {i} of chain A", f"CYS {j} of chain A") for i, j in expected
    ]
    assert "disulfide bonds CYS 3 of chain A - CYS 19 of chain A, CYS 12" in str(result)
    structure = gemmi.read_structure(str(files["pdb"]))
    written = [
        (link.partner1.res_id.seqid.num, link.partner2.res_id.seqid.num) for link in structure.connections
    ]
    assert written == expected
    sulphurs = {r.seqid.num: r["SG"][0].pos for r in structure[0]["A"] if r.name == "CYS"}
    near = [(i, j) for i in sulphurs for j in sulphurs if i < j and sulphurs[i].dist(sulphurs[j]) < 2.5]
    assert near == expected
    np.testing.assert_allclose([sulphurs[i].dist(sulphurs[j]) for i, j in expected], 2.04, atol=0.06)
