"""Columns 18 to 27 of PDB atoms as ChimeraX, Amber, GROMACS and writers of large files fill them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.protein.io.pdb_reader import find_long_names, residue_id
from tests.helpers.structure_texts import atom_line, chain_lines, read_lines, seqres_lines


def test_chains_have_names_of_two_letters(tmp_path: Path) -> None:
    """ChimeraX: chains AA and BA are two, next to a chain A; SEQRES and REMARK 465 name them too."""
    lines = [
        "REMARK 465     GLYAA     0",
        *seqres_lines("GLY", "ALA", chain="AA"),
        *chain_lines(("SER", 5), ("GLY", 6)),
        *chain_lines(("ALA", 1), chain="AA"),
        *chain_lines(("TRP", 1), ("MSE", 2), chain="BA"),
    ]
    found = [(chain.chain_id, chain.sequence) for chain in read_lines(tmp_path, lines).chains]
    assert sorted(found) == [("A", "SG"), ("AA", "GA"), ("BA", "WM")]


@pytest.mark.parametrize(
    "residues",
    [
        [("NALA", 1), ("SER", 2), ("CGLY", 3)],  # Amber; 'NAL' and 'CAS' are names of the PDB's, too
        [("NALA", 1), ("CASP", 2)],
        [("HISE", 1), ("SER", 2), ("LYSH", 3), ("ASPH", 4)],  # GROMACS
        [("SER", 1), ("HISE", 2), ("HISE", 3), ("GLY", 4)],
    ],
)
def test_residues_have_names_of_four_letters(residues: list[tuple[str, int]]) -> None:
    lines = chain_lines(*residues)
    found = dict.fromkeys(residue_id(line, find_long_names(lines)) for line in lines)
    assert list(found) == [(name, "A", number, "") for name, number in residues]


def test_a_second_letter_that_many_residues_have_is_the_chain_s() -> None:
    """Chain AA counts on from chain A without a TER record between them."""
    names = ["ALA", "SER", "GLY", "TRP", "LEU"]
    lines = chain_lines(("PRO", 1)) + chain_lines(*((n, i) for i, n in enumerate(names, 2)), chain="AA")
    assert find_long_names(lines) == frozenset()


@pytest.mark.parametrize(
    ("number", "insertion", "expected"),
    [
        ("9999", " ", (9999, "")),
        ("A000", " ", (10_000, "")),
        ("A001", " ", (10_001, "")),
        ("ZZZZ", " ", (1_223_055, "")),
        ("a000", " ", (1_223_056, "")),
        ("1000", "3", (10_003, "")),
        (" 100", "A", (100, "A")),
        ("-999", " ", (-999, "")),
    ],
)
def test_numbers_beyond_the_four_columns(number: str, insertion: str, expected: tuple[int, str]) -> None:
    """Hybrid-36, and five digits that reach into the column of insertion codes."""
    line = atom_line("CA", number=number, insertion=insertion)
    assert residue_id(line, frozenset())[2:] == expected


def test_numbers_in_hybrid_36_keep_the_residues_apart(tmp_path: Path) -> None:
    lines = chain_lines(("ALA", 9999), ("GLY", "A000"), ("SER", "A001"))
    (chain,) = read_lines(tmp_path, [line.replace("    1  ", "A000H  ", 1) for line in lines]).chains
    assert chain.author_numbers == ("9999", "10000", "10001")
    assert chain.residue_index.tolist() == [9999, 10_000, 10_001]


@pytest.mark.parametrize("number", ["A 00", "1A00", "Aa00", "    "])
def test_other_letters_are_no_number(number: str) -> None:
    with pytest.raises(ValueError, match="int"):
        residue_id(atom_line("CA", number=number), frozenset())
