"""Decisions on PDB records: sequence and numbering, alternates, modified residues, what is left out."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_reader import RECORD_NAMES, parse_pdb
from fastfold.protein.io.read import read_structure
from tests.helpers.structure_texts import atom_line, chain_lines, read_lines, residue_lines, seqres_lines

CA, CB, SD, OG = (rc.atom_order[name] for name in ("CA", "CB", "SD", "OG"))


def one(folder, lines):
    (chain,) = read_lines(folder, lines).chains
    return chain


def test_missing_residues_of_seqres_are_masked(tmp_path):
    """Residues 3 and 4 of six are not observed: they keep their places and have no atoms."""
    lines = seqres_lines("GLY", "ALA", "SER", "THR", "VAL", "LEU")
    lines += chain_lines(("GLY", 11), ("ALA", 12), ("VAL", 15), ("LEU", 16), breaks=(2,))
    chain = one(tmp_path, lines)
    assert chain.sequence == "GASTVL"
    assert chain.mask.any(1).tolist() == [True, True, False, False, True, True]
    assert chain.residue_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert not chain.positions[2:4].any()


def test_first_missing_residue_is_known_from_remark_465(tmp_path):
    """A sequence of alanines fits everywhere; the numbers of missing residues say where it begins."""
    lines = ["REMARK 465     ALA A     5", *seqres_lines(*["ALA"] * 4), *chain_lines(("ALA", 6), ("ALA", 7))]
    assert one(tmp_path, lines).mask.any(1).tolist() == [False, True, True, False]


def test_numbers_from_one_are_positions(tmp_path):
    """Without REMARK 465, residue number 3 is the third of the sequence where this fits as well."""
    lines = [*seqres_lines(*["ALA"] * 5), *chain_lines(("ALA", 3), ("ALA", 4))]
    assert one(tmp_path, lines).mask.any(1).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    "numbers",
    [(101, 102, 205, 206, 3, 4), (7, 7, 7, 7, 7, 7), (9, 8, 7, 6, 5, 4)],
    ids=["jumps", "insertion codes", "downwards"],
)
def test_odd_numbers_are_placed_by_alignment(tmp_path, numbers):
    """Whatever the numbers are, equal residues meet and the unobserved loop stays where it is."""
    names = ["GLY", "ALA", "TRP", "THR", "VAL", "LEU", "CYS", "MET", "LYS"]
    seen = [0, 1, 2, 6, 7, 8]
    lines = seqres_lines(*names)
    codes = "ABCDEF" if len(set(numbers)) == 1 else " " * 6
    for i, (place, number) in enumerate(zip(seen, numbers, strict=True)):
        lines += residue_lines(names[place], number, place, insertion=codes[i])
    assert np.flatnonzero(one(tmp_path, lines).mask.any(1)).tolist() == seen


def test_alignment_keeps_bonded_residues_together(tmp_path):
    """Of equal residues on both sides of an unobserved loop the bonded ones are neighbours."""
    names = ["GLY", "ALA", "TRP", "TRP", "VAL"]
    lines = seqres_lines(*names)
    lines += chain_lines(("ALA", 90), ("TRP", 20), ("VAL", 30), breaks=(2,))
    assert np.flatnonzero(one(tmp_path, lines).mask.any(1)).tolist() == [1, 2, 4]
    lines = seqres_lines(*names) + chain_lines(("ALA", 90), ("TRP", 20), ("VAL", 30), breaks=(1,))
    assert np.flatnonzero(one(tmp_path, lines).mask.any(1)).tolist() == [1, 3, 4]


def test_conflict_with_seqres_is_taken_as_observed(tmp_path):
    """A residue of another type than in SEQRES stays beside its bonded neighbour, and its own type is used."""
    first = ["GLY", "ALA", "TRP", "THR", "VAL", "LEU", "CYS", "MET", "SER", "PRO"]
    lines = seqres_lines(*first, "ALA", "GLY", "LYS")
    lines += chain_lines(*((name, i) for i, name in enumerate([*first, "LYS"], start=1)))
    structure = read_lines(tmp_path, lines)
    assert structure.chains[0].sequence == "GAWTVLCMSPKGK"
    assert structure.chains[0].mask.any(1).tolist() == [True] * 11 + [False] * 2
    assert "at 1 places" in structure.warnings[0]


def test_sequence_that_does_not_fit_is_not_used(tmp_path):
    """A SEQRES of another protein must not label the atoms; a warning says so."""
    structure = read_lines(
        tmp_path, [*seqres_lines("TRP", "TRP", "TRP"), *chain_lines(("ALA", 1), ("GLY", 2))]
    )
    assert structure.chains[0].sequence == "AG"
    assert "SEQRES" in structure.warnings[0]


def test_index_without_seqres(tmp_path):
    """Numbers are followed over gaps, insertion codes shift what follows, bonds overrule numbers."""
    lines = [
        *residue_lines("ALA", 10, 0),
        *residue_lines("ALA", 10, 1, insertion="A"),
        *residue_lines("ALA", 10, 2, insertion="B"),
        *residue_lines("ALA", 11, 3),
        *residue_lines("ALA", 15, 8),
        *residue_lines("ALA", 20, 9),
        *residue_lines("ALA", 1, 20),
    ]
    assert one(tmp_path, lines).residue_index.tolist() == [10, 11, 12, 13, 17, 18, 19]


def test_conformer_with_highest_mean_occupancy_is_taken_whole(tmp_path):
    """B is better as a whole although A has the best single atom; only what B lacks comes from A."""
    lines = [
        atom_line("N", "SER"),
        atom_line("CA", "SER", x=1, alternate="A", occupancy=0.7),
        atom_line("CB", "SER", x=1, alternate="A", occupancy=0.1),
        atom_line("OG", "SER", x=1, alternate="A", occupancy=0.1),
        atom_line("CA", "SER", x=2, alternate="B", occupancy=0.6),
        atom_line("CB", "SER", x=2, alternate="B", occupancy=0.6),
    ]
    chain = one(tmp_path, lines)
    assert chain.positions[0, [CA, CB, OG], 0].tolist() == [2, 2, 1]


def test_equal_occupancies_take_the_first_conformer(tmp_path):
    lines = [atom_line("CA", x=i, alternate=letter, occupancy=0.5) for i, letter in ((3, "B"), (4, "A"))]
    assert one(tmp_path, lines).positions[0, CA, 0] == 3


def test_two_amino_acids_at_one_place(tmp_path):
    """Microheterogeneity: the more frequent amino acid, with none of the other one's atoms."""
    lines = [
        atom_line("CA", "SER", alternate="A", occupancy=0.4),
        atom_line("CB", "SER", alternate="A", occupancy=0.4),
        atom_line("CA", "ALA", x=5, alternate="B", occupancy=0.6),
    ]
    chain = one(tmp_path, lines)
    assert chain.sequence == "A"
    assert np.flatnonzero(chain.mask[0]).tolist() == [CA]


def test_selenomethionine_is_methionine(tmp_path):
    lines = [*chain_lines(("ALA", 1)), *residue_lines("MSE", 2, 1, record="HETATM")]
    lines.append(atom_line("SE", "MSE", 2, 7.5, record="HETATM"))
    chain = one(tmp_path, lines)
    assert chain.sequence == "AM"
    assert chain.mask[1, SD] == 1
    assert chain.positions[1, SD, 0] == np.float32(7.5)


def test_modres_names_the_parent(tmp_path):
    """A residue that no table knows gets the type that MODRES states, and only that type's atoms."""
    lines = [
        "MODRES 1ABC ZZZ A    2  SER",
        *chain_lines(("ALA", 1)),
        *residue_lines("ZZZ", 2, 1, record="HETATM"),
    ]
    lines += [atom_line(name, "ZZZ", 2, 4, record="HETATM") for name in ("OG", "CG")]
    chain = one(tmp_path, lines)
    assert chain.sequence == "AS"
    assert chain.mask[1].sum() == 5
    assert chain.mask[1, OG] == 1


def test_unknown_residue_keeps_its_backbone(tmp_path):
    """A bonded residue of unknown name is X with N, CA, C, O and CB."""
    lines = [*chain_lines(("ALA", 1)), *residue_lines("ZZZ", 2, 1, record="HETATM")]
    lines += [atom_line(name, "ZZZ", 2, 4, record="HETATM") for name in ("CB", "OG", "P")]
    chain = one(tmp_path, lines)
    assert chain.sequence == "AX"
    assert chain.mask[1].sum() == 5
    (warning,) = read_lines(tmp_path, lines).warnings
    assert warning == "Chain 'A' has residues of unknown type, read as X with backbone and CB: ZZZ 2."


def test_ligands_waters_hydrogens_and_nucleic_acids_are_left_out(tmp_path):
    lines = [
        *chain_lines(("ALA", 1)),
        atom_line("H", "ALA", 1),
        atom_line("CG", "ALA", 1),
        *residue_lines("ZZZ", 50, 30, record="HETATM"),
        "TER",
        *residue_lines("GLY", 2, 1, record="HETATM"),
        atom_line("CA", " CA", 70, record="HETATM"),
        atom_line("O", "HOH", 71, record="HETATM"),
        *(atom_line("O", " DA", n, chain="B") for n in range(3)),
    ]
    chain = one(tmp_path, lines)
    assert (chain.chain_id, chain.sequence, chain.mask.sum()) == ("A", "A", 4)


def names_and_sequences(folder, lines: list[str]) -> list[tuple[str, str]]:
    return [(chain.chain_id, chain.sequence) for chain in read_lines(folder, lines).chains]


@pytest.mark.parametrize("chain", ["A", ""])
@pytest.mark.parametrize("first", [1, 3])
def test_molecules_that_only_ter_tells_apart_are_chains(tmp_path, chain, first):
    """OpenMM and Amber: one name for all, the numbers going on or beginning anew."""
    one = chain_lines(("ALA", 1), ("GLY", 2), chain=chain)
    two = chain_lines(("MSE", first), ("SER", first + 1), chain=chain)
    two = [line.replace("ATOM  ", "HETATM") if "MSE" in line else line for line in two]
    lines = [*one, "TER", *two, "TER", atom_line("N", "GLU", 9, record="HETATM", chain=chain)]
    assert names_and_sequences(tmp_path, lines) == [(chain, "AG"), ("B" if chain else "A", "MS")]
    assert "with different TER records or segments" in read_lines(tmp_path, lines).warnings[0]


def test_a_chain_goes_on_behind_ter_where_the_file_says_so(tmp_path):
    """By SEQRES, a peptide bond, or a gap in the numbers; not beyond a C-terminus or the reach of the gap."""
    bonded = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 3))
    gap = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 9), breaks=(2,))
    apart = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 3), breaks=(2,))
    for lines, sequences in (
        (bonded, ["AGS"]),
        (gap, ["AGS"]),
        (apart, ["AG", "S"]),
        (chain_lines(("ALA", 1), ("GLY", 2), ("SER", 4), breaks=(2,)), ["AG", "S"]),
        ([*seqres_lines("ALA", "GLY", "SER"), *apart], ["AGS"]),
        ([*gap[:8], atom_line("OXT", "GLY", 2), *gap[8:]], ["AG", "S"]),
    ):
        split = [*lines[:-4], "TER", *lines[-4:]]
        assert [sequence for _, sequence in names_and_sequences(tmp_path, split)] == sequences
        assert read_lines(tmp_path, split).warnings or split[0].startswith("SEQRES")


@pytest.mark.parametrize(
    ("columns", "chains"),
    [
        (("PROA", "PROB"), 2),  # CHARMM and NAMD
        (("1ABC", "1ABC"), 1),  # id of the entry, in old files
        (("0.12", ".345"), 1),  # charges
        (("N", "C"), 1),  # elements
    ],
)
def test_molecules_that_only_segments_tell_apart_are_chains(tmp_path, columns, chains):
    lines = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 9), ("TRP", 10), chain="", breaks=(2,))
    for i, line in enumerate(lines):
        column = columns[i // 8] if columns[0] != "N" else line[13]
        lines[i] = f"{line[:72]}{column:<4}{line[76:]}"
    found = [sequence for _, sequence in names_and_sequences(tmp_path, lines)]
    assert found == (["AG", "SW"] if chains == 2 else ["AGSW"])


def test_molecules_that_nothing_tells_apart_are_one_chain_with_a_warning(tmp_path):
    """No TER, no segment, and the numbers go on: 20 Å lie between the two."""
    lines = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 3), ("TRP", 4), breaks=(2,))
    structure = read_lines(tmp_path, lines)
    assert structure.chains[0].sequence == "AGSW"
    assert "breaks between GLY 2 and SER 3 with consecutive numbers;" in structure.warnings[0]
    gap = chain_lines(("ALA", 1), ("GLY", 2), ("SER", 9), ("TRP", 10), breaks=(2,))
    assert not read_lines(tmp_path, gap).warnings


def test_a_free_name_is_one_that_the_file_does_not_use(tmp_path):
    one = chain_lines(("ALA", 1), ("GLY", 2))
    lines = [*one, "TER", *one, "TER", *chain_lines(("SER", 1), chain="B")]
    assert sorted(names_and_sequences(tmp_path, lines)) == [("A", "AG"), ("B", "S"), ("C", "AG")]


def test_rna_with_an_amino_acid_is_no_protein(tmp_path):
    lines = [*chain_lines(("ALA", 1)), *seqres_lines("A", "C", "G", "PHE", chain="R")]
    lines += [atom_line("C", "  A", 1, chain="R"), atom_line("C", "  C", 2, chain="R")]
    lines += residue_lines("PHE", 4, 1, chain="R")
    assert one(tmp_path, lines).chain_id == "A"


def test_first_model_is_read(tmp_path):
    lines = [
        "MODEL        1",
        *chain_lines(("ALA", 1)),
        "ENDMDL",
        "MODEL        2",
        *chain_lines(("GLY", 1)),
        "ENDMDL",
    ]
    structure = read_lines(tmp_path, lines)
    assert structure.chains[0].sequence == "A"
    assert "several models" in structure.warnings[0]


@pytest.mark.parametrize("swapped", [False, True])
def test_arginine_nitrogens_are_named_by_distance(tmp_path, swapped):
    """NH1 is the one near CD; its B-factor and position go together."""
    near, far = ("NH2", "NH1") if swapped else ("NH1", "NH2")
    lines = [atom_line("CD", "ARG"), atom_line(near, "ARG", x=2), atom_line(far, "ARG", x=3)]
    chain = one(tmp_path, lines)
    assert [chain.positions[0, rc.atom_order[name], 0] for name in ("NH1", "NH2")] == [2, 3]


def test_header_is_read(tmp_path):
    lines = [
        "HEADER    DNA BINDING PROTEIN                     28-MAY-07   2Q2K",
        "EXPDTA    X-RAY DIFFRACTION",
        "REVDAT   2   24-FEB-09 2Q2K    1       VERSN",
        "REVDAT   1   13-NOV-07 2Q2K    0",
        "REMARK   2 RESOLUTION.    3.00 ANGSTROMS.",
        *chain_lines(("ALA", 1)),
    ]
    structure = read_lines(tmp_path, lines)
    assert (structure.resolution, structure.method, structure.release_date) == (
        3.0,
        "x-ray diffraction",
        "2007-11-13",
    )
    assert not structure.warnings
    assert "truncated" in read_lines(tmp_path, lines, end="").warnings[0]


def test_ca_only_chain_is_read_with_a_warning(tmp_path):
    structure = read_lines(tmp_path, [atom_line("CA", "ALA", n, 3.8 * n) for n in range(1, 4)])
    assert structure.chains[0].mask.sum() == 3
    assert structure.warnings == ("Chain 'A' has only CA atoms of its backbone.",)


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        ([atom_line("CA")[:40]], 1, "columns"),
        ([atom_line("CA").replace("A   1 ", "A1A00 ")], 1, "columns"),
        ([atom_line("CA", x=float("nan"))], 1, "not finite"),
        ([atom_line("CA"), atom_line("CA")], 2, "twice"),
        ([atom_line("CA"), atom_line("CB", "GLY")], 2, "ALA in an earlier record and GLY here"),
        (["MODEL        1", atom_line("CA")], 2, "ends within a model"),
    ],
)
def test_malformed_records_are_named_by_line(tmp_path, lines, line, message):
    path = tmp_path / "x.pdb"
    with pytest.raises(InputError, match=message) as caught:
        read_lines(tmp_path, lines, end="")
    assert (caught.value.path, caught.value.line) == (path, line)


def test_every_cut_within_the_atoms_is_noticed_or_harmless(tmp_path):
    """A file cut at any byte of its last atom's numbers is refused; never is a number read that is cut short."""
    text = "\n".join([*chain_lines(("ALA", 1), ("GLY", 2)), ""])
    start = text.rindex("ATOM")
    for cut in range(start + 6, start + 78):
        (tmp_path / "cut.pdb").write_text(text[:cut])
        with pytest.raises(InputError, match=r"download or copy it again|columns"):
            read_structure(tmp_path / "cut.pdb")


def test_records_are_handed_over_as_the_file_has_them():
    """Before any decision: alternates, waters, modified residues, what is missing, and the head of the file."""
    lines = [
        "HEADER    HYDROLASE                               01-JAN-00   1ABC",
        "REVDAT   2   24-FEB-09 1ABC    1       VERSN",
        "REVDAT   1   03-MAR-98 1ABC    0",
        "EXPDTA    X-RAY DIFFRACTION; NEUTRON",
        "EXPDTA   2 DIFFRACTION",
        "REMARK   2 RESOLUTION.    1.85 ANGSTROMS.",
        "REMARK 465     GLY A    -1",
        "REMARK 465     ALA A     4A",
        "MODRES 1ABC MSE A    2  MET  SELENOMETHIONINE",
        *seqres_lines("GLY", "MSE", "ALA"),
        atom_line("CA", "MSE", 2, 1.5, record="HETATM", alternate="A", occupancy=0.25),
        atom_line("CA", "MSE", 2, 2.5, record="HETATM", alternate="B", y=-3.0),
        atom_line("HA", "MSE", 2),
        atom_line("N", "ALA", 3, insertion="C"),
        atom_line("O", "HOH", 90, record="HETATM"),
        "TER",
        atom_line("C", "ACT", 91, record="HETATM"),
        atom_line("CA", "SER", 7, chain="B"),
        "END",
        "",
    ]
    found = parse_pdb(lines, path="x.pdb")
    assert (found.resolution, found.method) == (1.85, "x-ray diffraction; neutron diffraction")
    assert (found.release_date, found.waters, found.warnings) == ("1998-03-03", 1, [])
    assert found.parents == {"MSE": "MET"}
    assert list(found.chains) == ["A", "B"]
    chain = found.chains["A"]
    assert (chain.sequence, chain.missing) == (["GLY", "MSE", "ALA"], [-1, 4])
    assert list(chain.residues) == [(2, ""), (3, "C")]
    first = chain.residues[2, ""]
    assert (first.number, first.insertion, first.hetero, first.names) == (2, "", True, ["MSE"])
    assert first.atoms == [
        ("MSE", "A", "CA", 0.25, 1.5, 0.0, 0.0, 9.0),
        ("MSE", "B", "CA", 1.0, 2.5, -3.0, 0.0, 9.0),
    ]
    assert not chain.residues[3, "C"].hetero
    assert (found.chains["B"].sequence, found.chains["B"].missing) == (None, [])


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        ([atom_line("CA"), atom_line("CA")], 2, "has its atom CA twice"),
        ([atom_line("CA"), atom_line("N").replace("0.000", "x.000", 1)], 2, "are not in the columns"),
        ([atom_line("CA").replace("   0.000", "  1_0.00", 1)], 1, "are not in the columns"),
        ([atom_line("CA")[:22] + " 1_0" + atom_line("CA")[26:]], 1, "are not in the columns"),
        ([atom_line("CA")[:60] + "  1_0 " + atom_line("CA")[66:]], 1, "are not in the columns"),
        (["", atom_line("CA").replace("   0.000", " 1.0e+20", 1)], 2, "not finite or too large"),
        ([atom_line("N"), atom_line("CA")[:70]], 2, "ends within this line"),
        (["MODEL        1", atom_line("CA"), ""], 2, "ends within a model"),
    ],
)
def test_errors_name_the_line(lines, line, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_pdb(lines, path="x.pdb")
    assert str(caught.value).startswith(f"x.pdb:{line}: ")


def test_first_words_of_pdb_lines_are_known():
    assert {"HEADER", "ATOM", "HETATM", "PARENT", "MTRIX3"} <= RECORD_NAMES
    assert "data_" not in RECORD_NAMES
    assert max(map(len, RECORD_NAMES)) == 6
