"""Objects of Biotite, Biopython and MDAnalysis are read as their files are, and structures become such objects."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from Bio.PDB import MMCIFParser, PDBParser

import fastfold
from fastfold.data.templates.options import TemplateOptions
from fastfold.errors import ConfigError, InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.prepare import check_request
from fastfold.inference.request import RunOptions
from fastfold.protein import read_structure, to_biopython, to_biotite, to_mdanalysis
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import as_protein, read_objects
from fastfold.protein.objects.records import library_of, object_name, object_records
from fastfold.protein.objects.write import _models
from fastfold.protein.protein import Protein
from fastfold.protein.structure import Structure
from tests.helpers.results import helix_prediction
from tests.helpers.structures import make_protein

PROTEIN = make_protein("MKVHG", "SHMW", first_number=7)
PDB = "".join(
    f"{line}\n"
    for line in (
        "ATOM      1  N   MSE A   1       1.000   2.000   3.000  1.00 10.00           N",
        "ATOM      2  CA  MSE A   1       2.000   2.000   3.000  1.00 11.00           C",
        "ATOM      3 SE   MSE A   1       4.000   2.000   3.000  1.00 12.00          SE",
        "ATOM      4  CA AGLY A   2A      5.000   2.000   3.000  0.30 13.00           C",
        "ATOM      5  CA BGLY A   2A      6.000   2.000   3.000  0.70 14.00           C",
        "ATOM      6  H   GLY A   2A      6.500   2.000   3.000  1.00 14.00           H",
        "TER       7      GLY A   2A",
        "ATOM      8  N   ALA B   5       8.000   2.000   3.000  1.00 15.00           N",
        "ATOM      9  CA  ALA B   5       9.000   2.000   3.000  1.00 15.00           C",
        "TER      10      ALA B   5",
        "HETATM   11  O   HOH A 101      20.000   2.000   3.000  1.00 30.00           O",
        "HETATM   12 ZN    ZN A 102      21.000   2.000   3.000  1.00 30.00          ZN",
        "END",
    )
)
"""Selenomethionine, an insertion code, alternate locations, a hydrogen, a water and an ion."""


def biopython(text: str) -> Any:
    return PDBParser(QUIET=True).get_structure("given", io.StringIO(text))


def biotite(text: str) -> Any:
    pdb = pytest.importorskip("biotite.structure.io.pdb")
    fields = ["b_factor", "occupancy"]
    return pdb.PDBFile.read(io.StringIO(text)).get_structure(model=1, altloc="all", extra_fields=fields)


def mdanalysis(text: str) -> Any:
    package = pytest.importorskip("MDAnalysis")
    stream = package.lib.util.NamedStream(io.StringIO(text), "given.pdb")
    return package.Universe(stream, format="PDB")


LIBRARIES = {"Bio": biopython, "biotite": biotite, "MDAnalysis": mdanalysis}
WRITERS = {"Bio": to_biopython, "biotite": to_biotite, "MDAnalysis": to_mdanalysis}


def same(found: Structure, expected: Structure) -> None:
    assert [chain.chain_id for chain in found.chains] == [chain.chain_id for chain in expected.chains]
    for one, other in zip(found.chains, expected.chains, strict=True):
        assert one.sequence == other.sequence
        assert one.author_numbers == other.author_numbers
        assert one.residue_names == other.residue_names
        for field in ("positions", "mask", "b_factors", "residue_index"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_object_is_read_as_its_file(library: str, tmp_path: Path) -> None:
    (tmp_path / "given.pdb").write_text(PDB)
    expected = read_structure(tmp_path / "given.pdb")
    assert [chain.sequence for chain in expected.chains] == ["MG", "A"]
    assert expected.chains[0].positions[1, 1].tolist() == [6, 2, 3]
    source = LIBRARIES[library](PDB)
    assert library_of(source) == library
    assert object_name(source) == ("structure" if library == "biotite" else "given")
    same(read_structure(source), expected)
    assert object_records(source).waters == 1
    same(read_structure(source, chain_ids="B"), replace(expected, chains=expected.chains[1:]))
    with pytest.raises(InputError, match="lacks the protein chain 'C'; its protein chains are 'A', 'B'"):
        read_structure(source, chain_ids="C")


@pytest.mark.parametrize("library", WRITERS)
def test_a_structure_becomes_an_object_and_comes_back(library: str, tmp_path: Path) -> None:
    """Exactly, with all positions and B-factors; residues without atoms are left out of objects."""
    if library != "Bio":
        pytest.importorskip(library)
    write = WRITERS[library]
    back = as_protein(write(PROTEIN))
    for field in ("aatype", "chain_index", "atom_mask", "residue_index"):
        np.testing.assert_array_equal(getattr(back, field), getattr(PROTEIN, field), err_msg=field)
    present = PROTEIN.atom_mask[..., None] > 0
    np.testing.assert_array_equal(back.atom_positions * present, PROTEIN.atom_positions * present)
    np.testing.assert_array_equal(back.b_factors * present[..., 0], PROTEIN.b_factors * present[..., 0])
    (tmp_path / "given.pdb").write_text(PDB)
    named = read_structure(write(tmp_path / "given.pdb"))
    assert named.chains[0].author_numbers == ("1", "2A")
    assert [chain.chain_id for chain in named.chains] == ["A", "B"]


def test_what_libraries_read_of_our_files_is_what_we_make() -> None:
    """Names, numbers, chains and elements."""
    struc = pytest.importorskip("biotite.structure.io.pdb")
    read = struc.PDBFile.read(io.StringIO(to_pdb(PROTEIN))).get_structure(model=1, extra_fields=["b_factor"])
    made = to_biotite(PROTEIN)
    for name in ("chain_id", "res_id", "ins_code", "res_name", "atom_name", "element", "hetero"):
        assert made.get_annotation(name).tolist() == read.get_annotation(name).tolist(), name
    np.testing.assert_allclose(made.coord, read.coord, atol=1e-3)
    universe = mdanalysis(to_pdb(PROTEIN))
    ours = to_mdanalysis(PROTEIN)
    for name in ("names", "resnames", "resids", "chainIDs", "elements", "record_types", "icodes"):
        assert getattr(ours.atoms, name).tolist() == getattr(universe.atoms, name).tolist(), name
    assert len(ours.segments) == 2


def test_several_models() -> None:
    """The first of an object is read, and a list becomes models, a stack or frames."""
    moved = Protein(**{**PROTEIN.__dict__, "atom_positions": PROTEIN.atom_positions + 1})
    structure = to_biopython([PROTEIN, moved], "two")
    assert [model.id for model in structure] == [0, 1]
    read = read_structure(structure)
    assert read.name == "two"
    assert read.warnings[0] == "The structure has several models; the first one is read."
    same(read, read_structure(structure[0]))
    assert [chain.chain_id for chain in read_structure(structure[0]["B"]).chains] == ["B"]
    with pytest.raises(ConfigError, match="number 2 has other atoms than the first"):
        _models([PROTEIN, make_protein("MKV")])
    with pytest.raises(ConfigError, match="an empty list"):
        to_biopython([])
    pytest.importorskip("biotite")
    stack = to_biotite([PROTEIN, moved])
    assert stack.stack_depth() == 2
    np.testing.assert_allclose(stack.coord[1] - stack.coord[0], 1, atol=1e-4)
    assert read_structure(stack).warnings[0] == "The stack has several models; the first one is read."
    pytest.importorskip("MDAnalysis")
    universe = to_mdanalysis((PROTEIN, moved))
    assert len(universe.trajectory) == 2
    universe.trajectory[1]
    np.testing.assert_allclose(as_protein(universe).atom_positions[0, 1], moved.atom_positions[0, 1])


def test_invalid_objects_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="an object of Biotite, Biopython or MDAnalysis; found int"):
        read_structure(3)
    structure = biopython(PDB)
    with pytest.raises(ConfigError, match="Structure, Model or Chain, found Residue"):
        read_structure(next(structure.get_residues()))
    next(structure.get_atoms()).coord[0] = np.nan
    with pytest.raises(InputError, match="given: atom N of MSE 1 has a value that is not finite"):
        read_structure(structure)
    monkeypatch.setattr("fastfold.utils.packages.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="to_biotite needs the package biotite"):
        to_biotite(PROTEIN)
    with pytest.raises(ConfigError, match="to_mdanalysis needs the package MDAnalysis"):
        helix_prediction("t", 6).to_mdanalysis()


def test_objects_stand_for_files(tmp_path: Path) -> None:
    """As references, initial guesses and templates, with names of their own; not in runs into a folder."""
    cif = to_modelcif(PROTEIN, entry_id="x", title="x", software_version="1", model_name="m", plddt=None)
    structure = MMCIFParser(QUIET=True).get_structure("x", io.StringIO(cif))
    scores = fastfold.compare_structures(structure, PROTEIN)
    assert scores.aligned_residues == 9
    assert scores.rmsd_ca < 1e-3
    assert fastfold.compare_structures(PROTEIN, structure[0]).tm_score == pytest.approx(1, abs=1e-4)
    guess = InferConfig(initial_guess=structure).initial_guess
    assert guess.name == "x"
    options = TemplateOptions(structures=(structure, structure, tmp_path / "x.cif"))
    assert [getattr(one, "stem", one.name) for one in options.structures] == ["x", "x_2", "x"]
    assert read_objects([tmp_path]) == (tmp_path,)
    for config, run in (
        (InferConfig(initial_guess=structure), RunOptions()),
        (InferConfig(), RunOptions(templates=options)),
    ):
        with pytest.raises(ConfigError, match="reads structures from files, and 'x' is an object"):
            check_request(config, run)
