"""A residue is what its name, its file and its atoms say; a name has other meanings in other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.io.records import amino_acid
from tests.helpers.structure_texts import BACKBONE, atom_line, chain_lines, read_lines

WHOLE = {
    letter: [name for name in names if name]
    for letter, names in zip(rc.restypes, rc.restype_atom14_names[:20], strict=True)
}
HOMOSERINE = [*BACKBONE, "CB", "C3", "O3"]


@pytest.mark.parametrize(
    ("name", "letter"),
    [("ALA", "A"), ("Ala", "A"), ("UNK", "X"), ("MSE", "M"), ("NEW", "W"), ("LIG", None), ("hie", "H")],
)
def test_the_file_says_what_a_residue_is_before_the_general_table(name: str, letter: str | None) -> None:
    assert amino_acid(name, {"NEW": "TRP", "ALA": "GLY"}) == letter


@pytest.mark.parametrize("letter", sorted(set(rc.restypes) - set("AGP")))
def test_a_complete_side_chain_tells_the_type_whatever_the_name(letter: str) -> None:
    """Names unknown to every table, and one that means glycine in the PDB (NLY)."""
    for name in ("QQQ", "NLY"):
        assert amino_acid(name, {}, [*WHOLE[letter], "OXT"]) == letter


@pytest.mark.parametrize(
    ("names", "letter"),
    [
        ("HID HIE HIP HSD HSE HSP HISE HISD NHIE CHID NHI CHI NHIS", "H"),
        ("CYX CYM CYS2 NCYX CCYS CCY", "C"),
        ("ASH ASPH CASP CAS NAS", "D"),
        ("GLH GLUH NGLH NGLU NGL CGL", "E"),
        ("LYN LYSH NLYS NLY CLY", "K"),
        ("NALA CALA NAL CAL", "A"),
        ("NGLY CGLY NGL CGL", "G"),
        ("NPRO CPR", "P"),
        ("CSER CSE", "S"),
        ("NTRP NTR", "W"),
        ("NPHE NPH", "F"),
        ("CMET CME", "M"),
    ],
)
def test_names_of_force_fields(names: str, letter: str) -> None:
    """Amber cuts NALA to NAL; CAS, CME, CSE, NAL, NLY, NPH and NTR are other residues in the PDB."""
    for name in names.split():
        assert amino_acid(name, {}, WHOLE[letter]) == letter, name


def test_a_name_of_the_pdb_with_its_own_atoms_stays_what_it_is() -> None:
    assert amino_acid("HSE", {}, HOMOSERINE) == "S"
    assert amino_acid("HSE", {"HSE": "SER"}, [*BACKBONE, "CB"]) == "S"  # MODRES
    assert amino_acid("MSE", {"MSE": "LEU"}, [*BACKBONE, "CB", "CG", "SE", "CE"]) == "L"
    assert amino_acid("CME", {}, [*BACKBONE, "CB", "SG", "SD", "CE", "CZ", "OH"]) == "C"
    assert amino_acid("CME", {}, [*BACKBONE, "CB"]) == "C"
    assert amino_acid("NVA", {}, [*BACKBONE, "CB", "CG", "CD"]) == "V"  # norvaline has proline's names
    assert amino_acid("PTR", {}, [*BACKBONE, "CB", "CG", "CD1", "CD2"]) == "Y"  # unfinished, no leucine
    assert amino_acid("SEP", {}, [*WHOLE["S"], "P", "O1P"]) == "S"


def test_an_unfinished_side_chain_goes_by_the_force_field_where_all_atoms_fit() -> None:
    assert amino_acid("HSE", {}, [*BACKBONE, "CB"]) == "H"
    assert amino_acid("NGL", {}, [*BACKBONE, "CB"]) is None  # glutamine or glutamate
    assert amino_acid("QQQ", {}, [*BACKBONE, "CB"]) is None  # not alanine
    assert amino_acid("QQQ", {}, ["CB", "OG"]) is None  # a ligand


def residue(name: str, letter: str, number: int, other: tuple[str, ...] = ()) -> list[str]:
    """A whole residue of a straight chain under another name."""
    sides = [one for one in WHOLE[letter] if one not in BACKBONE]
    lines = chain_lines((name, number))
    return lines + [atom_line(one, name, number, 0.0, y=1.5) for one in (*sides, *other)]


def test_force_field_names_keep_their_side_chains(tmp_path: Path) -> None:
    """Hydrogens do not hide the type; the record keeps the file's own name."""
    hydrogens = ("HE2", "1HB", "HB3", "HA")
    lines = [*residue("HSE", "H", 7, hydrogens), *residue("Glh", "E", 8, hydrogens), *residue("NLY", "K", 9)]
    structure = read_lines(tmp_path, lines)
    (chain,) = structure.chains
    assert chain.sequence == "HEK"
    assert chain.mask.sum(1).tolist() == [len(WHOLE[letter]) for letter in "HEK"]
    assert chain.residue_names == ("HSE", "Glh", "NLY")
    (warning,) = structure.warnings
    assert warning.endswith("are read by their atoms: HSE 7 as HIS, Glh 8 as GLU, NLY 9 as LYS.")


def test_atom_names_of_charmm_are_kept(tmp_path: Path) -> None:
    """CD of isoleucine, and both oxygens of the C-terminus."""
    names = ["N", "CA", "C", "OT1", "OT2", "CB", "CG1", "CG2", "CD"]
    (chain,) = read_lines(tmp_path, [atom_line(name, "ILE") for name in names]).chains
    present = {rc.atom_types[slot] for slot in chain.mask[0].nonzero()[0]}
    assert present == {*WHOLE["I"], "OXT"}


@pytest.mark.parametrize("residue", [" DA", "DA5", "ADE", "URA"])
def test_dna_alone_is_named(tmp_path: Path, residue: str) -> None:
    """By the names of the PDB, Amber and CHARMM."""
    lines = [atom_line(name, residue, chain="D") for name in ("P", "C1'", "N9")]
    path = tmp_path / "x.pdb"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"no protein chain, only DNA or RNA \(chains 'D'\)"):
        read_structure(path)
