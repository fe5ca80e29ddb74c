"""PDB files: right columns, nothing lost on the way back, and no file at all for what does not fit."""

from __future__ import annotations

import io

import gemmi
import numpy as np
import pytest
from Bio import SeqIO
from Bio.PDB import PDBParser
from Bio.PDB.parse_pdb_header import parse_pdb_header
from hypothesis import given, settings

from fastfold.errors import OutputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import PdbLimitError, to_pdb
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein
from tests.helpers.structures import assert_same_structure, make_protein, proteins, read_by_biopython


@settings(max_examples=60, deadline=None)
@given(proteins())
def test_biopython_reads_the_same_structure(protein):
    assert_same_structure(read_by_biopython(to_pdb(protein), protein), protein)


def test_every_value_stands_in_its_column():
    positions = np.zeros((2, 37, 3))
    positions[0, 1] = [-1.2344, 123.4567, -999.9994]
    mask = np.zeros((2, 37))
    mask[0, rc.atom_order["CA"]] = mask[1, rc.atom_order["CZ"]] = 1
    b_factors = np.full((2, 37), 91.237)
    protein = make_protein("K", "R", atom_positions=positions, atom_mask=mask, b_factors=b_factors)
    assert to_pdb(protein, title="a title").splitlines() == [
        line.ljust(80)
        for line in (
            "TITLE     a title",
            "SEQRES   1 A    1  LYS",
            "SEQRES   1 B    1  ARG",
            "MODEL        1",
            "ATOM      1  CA  LYS A   1      -1.234 123.457-999.999  1.00 91.24           C",
            "TER       2      LYS A   1",
            "ATOM      3  CZ  ARG B   1       0.000   0.000   0.000  1.00 91.24           C",
            "TER       4      ARG B   1",
            "ENDMDL",
            "END",
        )
    ]


def test_serial_numbers_count_atoms_and_chain_ends_without_a_gap():
    lines = to_pdb(make_protein("ACDEF", "GHI", "X", "K")).splitlines()
    serials = [int(line[6:11]) for line in lines if line.startswith(("ATOM", "TER"))]
    assert serials == list(range(1, len(serials) + 1))
    assert sum(line.startswith("TER") for line in lines) == 3  # the chain without atoms has no end


def test_disulfide_bonds_are_records_that_gemmi_reads():
    protein = make_protein("CAC", "C")
    sg = rc.atom_order["SG"]
    protein.atom_positions[0, sg], protein.atom_positions[3, sg] = [0, 0, 0], [0, 0, 2.04]
    text = to_pdb(protein, disulfides=[(0, 3)])
    (line,) = (line for line in text.splitlines() if line.startswith("SSBOND"))
    # The example of the format's description, with other names.
    expected = "SSBOND   1 CYS A    1    CYS B    1                          1555   1555  2.04"
    assert line == expected.ljust(80)
    names = AuthorNames(("H", "L"), ("22", "23", "96A", "-5"))
    structure = gemmi.read_pdb_string(to_pdb(protein, disulfides=[(0, 2), (0, 3)], names=names))
    assert [(link.type, str(link.partner1), str(link.partner2)) for link in structure.connections] == [
        (gemmi.ConnectionType.Disulf, "H/CYS 22/SG", "H/CYS 96A/SG"),
        (gemmi.ConnectionType.Disulf, "H/CYS 22/SG", "L/CYS -5/SG"),
    ]


def test_no_value_prints_as_minus_zero():
    protein = make_protein(
        "A", atom_positions=np.full((1, 37, 3), -0.0004), b_factors=np.full((1, 37), -0.001)
    )
    assert "-0.0" not in to_pdb(protein)


def test_unknown_residues_keep_their_place_without_atoms():
    protein = make_protein("XACX", "XX", "DX")
    text = to_pdb(protein)
    assert [str(record.seq) for record in SeqIO.parse(io.StringIO(text), "pdb-seqres")] == [
        "XACX",
        "XX",
        "DX",
    ]
    missing = parse_pdb_header(io.StringIO(text))["missing_residues"]
    assert [(m["res_name"], m["chain"], m["ssseq"]) for m in missing] == [
        ("UNK", "A", 1), ("UNK", "A", 4), ("UNK", "B", 1), ("UNK", "B", 2), ("UNK", "C", 2)
    ]  # fmt: skip
    assert {(line[21], int(line[22:26])) for line in text.splitlines() if line.startswith("ATOM")} == {
        ("A", 2), ("A", 3), ("C", 1)
    }  # fmt: skip


def test_a_title_becomes_printable_lines_and_never_a_record():
    text = to_pdb(make_protein("A"), title="näme\nATOM      1 " + "x" * 200)
    titles = [line for line in text.splitlines() if line.startswith("TITLE")]
    assert titles[0].startswith("TITLE     name?ATOM")
    assert titles[1].startswith("TITLE    2 ")
    assert all(len(line) == 80 and line.isascii() for line in text.splitlines())
    assert sum(line.startswith("ATOM") for line in text.splitlines()) == 5


def _changed(**changes: object) -> Protein:
    return make_protein("ACD", **changes)


def _moved(value: float) -> Protein:
    protein = _changed()
    protein.atom_positions[1, 0, 2] = value
    return protein


def _warmed(value: float) -> Protein:
    protein = _changed()
    protein.b_factors[1, 0] = value
    return protein


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_protein(*["G"] * 63), "63 chains, at most 62"),
        (lambda: make_protein(*["W" * 7150] * 1), r"100,101 atom and TER records, at most 99,999"),
        (lambda: make_protein("G" * 10_000), "a chain of 10,000 residues"),
        (lambda: _changed(residue_index=[1, 2, 10_000]), "residue number 10000"),
        (lambda: _changed(residue_index=[-1000, 2, 3]), "residue number -1000"),
        (lambda: _moved(9999.9996), "a coordinate of 10000.000 Å"),
        (lambda: _moved(-999.9996), "a coordinate of -1000.000 Å"),
        (lambda: _warmed(999.996), "a B-factor of 1000.00"),
        (lambda: _warmed(-99.996), "a B-factor of -100.00"),
    ],
)
def test_what_does_not_fit_is_refused_and_points_to_the_cif(make, message):
    with pytest.raises(PdbLimitError, match=message) as caught:
        to_pdb(make())
    assert ".cif" in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: make_protein(*["G"] * 62),
        lambda: make_protein("W" * 7142),  # 99,988 atoms and one TER
        lambda: _changed(residue_index=[-999, 2, 9999]),
        lambda: _moved(9999.999),
        lambda: _moved(-999.999),
        lambda: _warmed(999.99),
    ],
)
def test_what_just_fits_reads_back(make):
    protein = make()
    assert_same_structure(read_by_biopython(to_pdb(protein), protein), protein)


def test_values_that_are_not_finite_are_not_written():
    with pytest.raises(OutputError, match="without a finite position"):
        to_pdb(_moved(np.nan))


def test_longer_chain_names_become_free_letters_and_are_told():
    protein = make_protein("ACD", "GHI", "K", first_number=310)
    names = AuthorNames(("AAA", "A", "B-2"), tuple(str(310 + k) for k in (*range(3), *range(3), 0)))
    text = to_pdb(protein, names=names)
    assert [line.rstrip() for line in text.splitlines() if line.startswith("REMARK 999")] == [
        "REMARK 999 CHAIN B IS CHAIN AAA OF THE MMCIF FILE",
        "REMARK 999 CHAIN C IS CHAIN B-2 OF THE MMCIF FILE",
    ]
    model = PDBParser(QUIET=True, PERMISSIVE=False).get_structure("x", io.StringIO(text))[0]
    assert [(chain.id, next(iter(chain)).id[1]) for chain in model] == [("B", 310), ("A", 310), ("C", 310)]
