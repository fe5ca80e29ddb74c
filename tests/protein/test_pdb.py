"""PDB files: right columns, nothing lost on the way back, and no file at all for what does not fit."""

from __future__ import annotations

import gzip
import io
import re
import warnings

import numpy as np
import pytest
from Bio import SeqIO
from Bio.PDB import PDBParser
from Bio.PDB.parse_pdb_header import parse_pdb_header
from Bio.PDB.Structure import Structure
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.errors import InputError, OutputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.pdb import PdbLimitError, from_pdb, to_pdb
from fastfold.protein.protein import PDB_CHAIN_IDS, Protein
from tests.conftest import require_shared
from tests.protein.structures import assert_same_structure, make_protein, protein_from_biopython, proteins


@settings(max_examples=60, deadline=None)
@given(proteins())
def test_reading_back_gives_the_structure(protein):
    assert_same_structure(from_pdb(to_pdb(protein)), protein)


@settings(max_examples=30, deadline=None)
@given(proteins())
def test_biopython_reads_the_same_structure(protein):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structure = PDBParser(PERMISSIVE=False, QUIET=False).get_structure("x", io.StringIO(to_pdb(protein)))
    assert_same_structure(protein_from_biopython(structure, protein, PDB_CHAIN_IDS), protein)


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
    assert from_pdb(text).sequences == protein.sequences


def test_missing_residues_listed_twice_or_with_atoms_count_once():
    lines = to_pdb(make_protein("XAX")).splitlines()
    lines[5:5] = [lines[5], "REMARK 465     ALA A     2", "REMARK 465      DA B     1"]
    assert from_pdb("\n".join(lines)).sequences == ("XAX",)


def test_a_title_becomes_printable_lines_and_never_a_record():
    text = to_pdb(make_protein("A"), title="näme\nATOM      1 " + "x" * 200)
    titles = [line for line in text.splitlines() if line.startswith("TITLE")]
    assert titles[0].startswith("TITLE     n?me?ATOM")
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
    assert_same_structure(from_pdb(to_pdb(protein)), protein)


def test_values_that_are_not_finite_are_not_written():
    with pytest.raises(OutputError, match="no finite position"):
        to_pdb(_moved(np.nan))


ATOM = "ATOM      1  N   ALA A   1      11.104   6.134  -6.504  1.00 12.50           N"


def _edited(start: int, text: str) -> str:
    return ATOM[: start - 1] + text + ATOM[start - 1 + len(text) :]


def test_only_known_atoms_of_the_first_model_are_read():
    text = "\r\n".join(
        [
            "MODEL        1",
            ATOM,
            _edited(13, " H  "),
            ATOM.replace("ATOM  ", "HETATM").replace("ALA", "HOH"),
            _edited(18, " DA").replace(" N  ", " P  ").replace("A   1", "B   1"),
            "ENDMDL",
            "MODEL        2",
            _edited(23, "   9"),
        ]
    )
    protein = from_pdb(text)
    assert protein.sequences == ("A",)
    assert protein.atom_mask.sum() == 1
    np.testing.assert_allclose(protein.atom_positions[0, 0], [11.104, 6.134, -6.504], atol=1e-5)
    assert protein.b_factors[0, 0] == 12.5


def test_of_alternate_locations_the_most_occupied_is_taken():
    atoms = [
        _edited(17, letter)[:30] + f"{x:8.3f}" + ATOM[38:54] + f"{occupancy:6.2f}" + ATOM[60:]
        for letter, x, occupancy in (("A", 1.0, 0.3), ("B", 2.0, 0.5), ("C", 3.0, 0.2))
    ]
    assert from_pdb("\n".join(atoms)).atom_positions[0, 0, 0] == 2.0


def test_other_residue_types_become_unknown_with_their_atoms():
    protein = from_pdb(ATOM.replace("ALA", "MSE"))
    assert protein.sequences == ("X",)
    assert protein.atom_mask.sum() == 1


def test_short_lines_without_occupancy_are_read():
    assert from_pdb(ATOM[:54]).b_factors[0, 0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x.pdb: no protein atoms"),
        ("<html>not found</html>\n", "x.pdb: no protein atoms"),
        ("\n" + _edited(31, "   *****"), "x.pdb:2: ATOM record whose numbers"),
        ("\n" + ATOM[:40], "x.pdb:2: ATOM record whose numbers"),
        (_edited(23, "   A"), "x.pdb:1: ATOM record whose numbers"),
        (_edited(31, "     nan"), "x.pdb:1: .* not finite or too large"),
        (_edited(31, "    1e39"), "x.pdb:1: .* not finite or too large"),
        (_edited(27, "B"), "x.pdb:1: residue 1B has an insertion code"),
        (f"{ATOM}\n{ATOM}", "x.pdb:2: atom N of residue 1 of chain 'A' is given twice"),
        (f"{ATOM}\n{_edited(18, 'GLY')}", "x.pdb:2: residue 1 of chain 'A' is ALA before and GLY here"),
    ],
)
def test_bad_records_are_refused_with_file_and_line(text, message):
    with pytest.raises(InputError, match=message):
        from_pdb(text, path="x.pdb")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_files_give_a_structure_or_an_input_error(data):
    """Nothing but InputError comes out, whatever characters are overwritten, lines doubled or dropped."""
    lines = to_pdb(make_protein("XAG", "XC")).splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.integers(0, len(lines) - 1))
        column = data.draw(st.integers(0, 79))
        patch = data.draw(st.text(alphabet=" -.0123456789ABCXUNK\x00é\r\n", max_size=6))
        action = data.draw(st.sampled_from(["patch", "double", "drop", "cut"]))
        if action == "patch":
            lines[row] = lines[row][:column] + patch + lines[row][column + len(patch) :]
        elif action == "double":
            lines.insert(data.draw(st.integers(0, len(lines))), lines[row])
        elif action == "cut":
            lines[row] = lines[row][:column]
        elif len(lines) > 1:
            del lines[row]
    try:
        protein = from_pdb("\n".join(lines))
    except InputError:
        return
    assert np.isfinite(protein.atom_positions).all()


def test_experimental_structures_read_as_biopython_reads_them():
    folder = require_shared("data", "structures", "valid")
    read = 0
    for path in sorted(folder.glob("*.pdb.gz"))[:40]:
        text = gzip.decompress(path.read_bytes()).decode("ascii")
        if re.search(r"(?m)^ATOM.{22}[A-Z]", text):
            with pytest.raises(InputError, match="insertion code"):
                from_pdb(text, path=path)
            continue
        protein = from_pdb(text, path=path)
        structure = PDBParser(QUIET=True).get_structure("x", io.StringIO(text))
        expected = _positions_by_biopython(structure, protein)
        np.testing.assert_allclose(protein.atom_positions, expected, atol=1e-4)
        assert_same_structure(from_pdb(to_pdb(protein)), protein)
        read += 1
    assert read >= 30


def _positions_by_biopython(structure: Structure, protein: Protein) -> np.ndarray:
    """Positions ``[N, 37, 3]`` of the protein's residues as Biopython has them, 0 where there is no atom."""
    chain = next(structure.get_chains())  # these files have one
    positions = np.zeros_like(protein.atom_positions)
    for i, number in enumerate(protein.residue_index):
        for atom in chain[" ", int(number), " "]:
            if atom.get_name() in rc.atom_order:
                positions[i, rc.atom_order[atom.get_name()]] = atom.coord
    return positions
