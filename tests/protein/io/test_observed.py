"""Structures as targets: the index shows every gap, names stay, and chains of CA alone are refused by the purpose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gemmi
import numpy as np
import pytest

from fastfold.data.targets import structure_chains
from fastfold.errors import InputError
from fastfold.inference.relax.prepare import segments
from fastfold.inference.relax.stereo import open_breaks
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.observed import (
    BINDING_SITE,
    BREAK_STEP,
    COMPARISON,
    FIXED_BACKBONE,
    INITIAL_GUESS,
    MOTIF,
    RELAXATION,
    SCORE,
    TEMPLATE,
    ObservedStructure,
    Purpose,
    all_residues,
    check_backbone,
    observed_chain,
    read_observed,
)
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure
from fastfold.protein.labels import AuthorNames
from tests.helpers.peptides import helix
from tests.helpers.structure_texts import atom_line, chain_lines, seqres_lines

N, C = rc.atom_order["N"], rc.atom_order["C"]
SEQUENCE = "MTYKLILNGKTLKGETTTEAVDAATAEKVFKQYANDNG"


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "x.pdb"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def index_of(path: Path) -> list[int]:
    (chain,) = read_observed(path, SCORE).chains
    return chain.residue_index.tolist()


def test_numbers_that_rise_are_the_index(tmp_path: Path) -> None:
    lines = chain_lines(*(("ALA", n) for n in (310, 311, 346, 347)), breaks=(2,))
    assert index_of(write(tmp_path, lines)) == [310, 311, 346, 347]


def test_breaks_are_gaps_where_numbers_are_consecutive(tmp_path: Path) -> None:
    path = write(tmp_path, chain_lines(*(("ALA", n) for n in range(1, 5)), breaks=(2,)))
    assert index_of(path) == [1, 2, 2 + BREAK_STEP, 3 + BREAK_STEP]
    found = read_observed(path, SCORE)
    assert found.warnings == (
        "Chain 'A' breaks between ALA 2 and ALA 3 with consecutive numbers; if these are two molecules, give each a "
        "separate chain name.",
    )


def test_bonded_residues_are_neighbours_whatever_their_numbers(tmp_path: Path) -> None:
    lines = [
        *chain_lines(("ALA", 20), chain="E"),
        *(line[:26] + "A" + line[27:] for line in chain_lines(("ALA", 20), ("SER", 20), chain="E")[4:]),
        *chain_lines(("ALA", 1), ("ALA", 2), ("GLY", 21), chain="E")[8:],
    ]
    (chain,) = read_observed(write(tmp_path, lines), SCORE).chains
    assert chain.author_numbers == ("20", "20A", "21")
    assert chain.residue_index.tolist() == [20, 21, 22]


def test_residues_without_coordinates_are_gaps(tmp_path: Path) -> None:
    letters = ["MET", "THR", "TYR", "LYS", "LEU", "ILE", "LEU", "ASN"]
    kept = [1, 2, 5, 6, 7]
    lines = [*seqres_lines(*letters), *chain_lines(*((letters[i], 31 + i) for i in kept), breaks=(2,))]
    found = read_observed(write(tmp_path, lines), SCORE)
    (chain,) = found.chains
    assert chain.residue_index.tolist() == chain.places.tolist() == kept
    assert (chain.sequence, chain.whole) == ("TYILN", "MTYKLILN")
    assert chain.author_numbers == ("32", "33", "36", "37", "38")
    assert found.warnings == ("Chain 'A': 3 residues without coordinates left out; networks see the gaps.",)
    whole = all_residues(chain)
    assert (whole.sequence, whole.residue_index.tolist()) == ("MTYKLILN", list(range(8)))
    assert whole.author_numbers == ("", "32", "33", "", "", "36", "37", "38")
    (same,) = read_observed(write(tmp_path, lines), SCORE, whole=True).chains
    assert (same.sequence, same.whole, same.author_numbers) == (whole.sequence, "", whole.author_numbers)
    np.testing.assert_array_equal(whole.positions, read_structure(write(tmp_path, lines)).chains[0].positions)


def test_a_listed_sequence_does_not_close_a_gap_of_the_numbers(tmp_path: Path) -> None:
    """As in files of predictions, whose sequence has the folded residues alone."""
    numbers = (310, 311, 346, 347)
    for breaks, expected in (((2,), [0, 1, 36, 37]), ((), [0, 1, 2, 3])):
        lines = [*seqres_lines(*["ALA"] * 4), *chain_lines(*(("ALA", n) for n in numbers), breaks=breaks)]
        assert index_of(write(tmp_path, lines)) == expected
    lines = [*seqres_lines(*["ALA"] * 4), *chain_lines(*(("ALA", n) for n in range(1, 5)), breaks=(2,))]
    assert index_of(write(tmp_path, lines)) == [0, 1, 2, 3]  # a poor bond


def test_cut_helices_have_the_numbers_that_gemmi_reads(tmp_path: Path) -> None:
    """Random cuts: the index has a step over 1 at each, and nowhere else; numbers are gemmi's."""
    rng = np.random.default_rng(0)
    protein = helix(SEQUENCE, SEQUENCE[::-1])
    text = to_pdb(protein, names=AuthorNames(("D", "e"), tuple(str(i + 301) for i in range(len(protein)))))
    atoms = [line for line in text.splitlines() if line.startswith("ATOM")]
    for _ in range(10):
        cut = {start + k for start in rng.integers(301, 370, 4) for k in range(int(rng.integers(1, 8)))}
        path = write(tmp_path, [line for line in atoms if int(line[22:26]) not in cut])
        read = gemmi.read_structure(str(path))[0]
        for chain in read_observed(path, SCORE).chains:
            numbers = [residue.seqid.num for residue in read[chain.chain_id]]
            assert chain.author_numbers == tuple(map(str, numbers))
            assert chain.residue_index.tolist() == numbers


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [atom_line("CA", "ALA", n, 3.8 * n) for n in range(1, 6)],
            "cannot fix a backbone: 5 of 5 residues have CA alone",
        ),
        (
            [
                atom_line(name, "ALA", n, 3.8 * n + k)
                for n in range(1, 4)
                for k, name in enumerate(("CA", "CB"))
            ],
            "cannot fix a backbone: 3 of 3 residues lack N or C",
        ),
        (
            [atom_line("N", "ALA", n, 3.8 * n) for n in range(1, 4)],
            "chain 'A' lacks CA atoms; remove the chain",
        ),
    ],
)
def test_chains_without_backbone_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_observed(write(tmp_path, lines), FIXED_BACKBONE)


@pytest.mark.parametrize(
    "purpose",
    [FIXED_BACKBONE, MOTIF, BINDING_SITE, SCORE, TEMPLATE, INITIAL_GUESS, RELAXATION, COMPARISON],
    ids=lambda purpose: purpose.what,
)
def test_every_purpose_is_named_for_chains_of_ca_alone(tmp_path: Path, purpose: Purpose) -> None:
    path = write(tmp_path, [atom_line("CA", "ALA", n, 3.8 * n) for n in range(1, 6)])
    with pytest.raises(InputError, match=f"cannot {purpose.what}: 5 of 5 residues have CA alone"):
        read_observed(path, purpose)


def test_some_residues_of_ca_alone_are_counted(tmp_path: Path) -> None:
    alone = [atom_line("CA", "ALA", n, 3.8 * (n - 1)) for n in (3, 4)]
    path = write(tmp_path, [*chain_lines(("ALA", 1), ("ALA", 2)), *alone])
    assert read_observed(path, SCORE).warnings == (
        "2 of 4 residues have CA alone; no network sees their backbone.",
    )
    with pytest.raises(InputError, match="cannot relax a structure: 2 of 4 residues have CA alone"):
        check_backbone(read_structure(path).chains, RELAXATION, path=path)


def test_missing_chains_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, [*chain_lines(("ALA", 1)), *chain_lines(("ALA", 1), chain="B")])
    assert [chain.chain_id for chain in read_observed(path, SCORE, chain_ids=["B"]).chains] == ["B"]
    with pytest.raises(InputError, match="has no chain 'X', only A, B"):
        read_observed(path, SCORE, chain_ids=["X"])


def test_all_residues_have_the_index_of_those_with_coordinates(tmp_path: Path) -> None:
    """A gap of the numbers that the listed sequence does not have."""
    letters, numbers = ["ALA"] * 7, (312, 313, 346, 348)
    lines = [*seqres_lines(*letters), *chain_lines(*(("ALA", n) for n in numbers), breaks=(2, 3))]
    chain = read_structure(write(tmp_path, lines)).chains[0]
    places = [1, 2, 3, 5]
    mask = np.zeros_like(chain.mask)
    mask[places], positions = 1, np.zeros_like(chain.positions)
    positions[places] = chain.positions[chain.mask.any(1)]
    named = ["", "312", "313", "346", "", "348", ""]
    moved = replace(chain, mask=mask, positions=positions, author_numbers=tuple(named))
    seen = observed_chain(moved)
    assert seen.residue_index.tolist() == [1, 2, 35, 37]
    assert all_residues(seen).residue_index.tolist() == [0, 1, 2, 35, 36, 37, 38]


def test_labels_are_those_of_the_file_unless_numbers_are_too_few(tmp_path: Path) -> None:
    lines = [*seqres_lines(*["ALA"] * 3), *chain_lines(("ALA", 1), ("ALA", 2), breaks=(1,))]
    chain = read_structure(write(tmp_path, lines)).chains[0]
    mask = chain.mask.copy()
    mask[[1, 2]] = mask[[2, 1]]
    for numbers, expected in ((("1", "", "2"), ()), (("1", "", "3"), ("1", "2", "3"))):
        whole = all_residues(observed_chain(replace(chain, mask=mask, author_numbers=numbers)))
        (labeled,) = structure_chains(ObservedStructure("x", (whole,)))
        assert labeled.labels == expected


def test_alpha_carbons_decide_about_breaks_where_c_or_n_is_missing(tmp_path: Path) -> None:
    lines = chain_lines(*(("ALA", n) for n in range(1, 5)), breaks=(2,))
    kept = [line for line in lines if not (line[12:16].strip() == "C" and int(line[22:26]) in (2, 3))]
    assert index_of(write(tmp_path, kept)) == [1, 2, 2 + BREAK_STEP, 3 + BREAK_STEP]


@pytest.mark.parametrize(("distance", "is_bonded"), [(1.33, True), (2.4, True), (2.6, False)])
def test_one_limit_decides_for_networks_relaxation_and_the_reader(
    tmp_path: Path, distance: float, is_bonded: bool
) -> None:
    protein = helix("AAAA")
    apart = protein.atom_positions[2, N] - protein.atom_positions[1, C]
    xyz = protein.atom_positions.copy()
    xyz[2:] += apart / np.linalg.norm(apart) * (distance - np.linalg.norm(apart))
    protein = replace(protein, atom_positions=xyz)
    lines = [line for line in to_pdb(protein).splitlines() if line.startswith("ATOM")]
    step, numbers = 1 if is_bonded else BREAK_STEP, {1: 1, 2: 2, 3: 8, 4: 9}
    assert index_of(write(tmp_path, lines)) == [1, 2, 2 + step, 3 + step]
    assert segments(open_breaks(protein)) == ([[0, 1, 2, 3]] if is_bonded else [[0, 1], [2, 3]])
    jump = [f"{line[:22]}{numbers[int(line[22:26])]:>4}{line[26:]}" for line in lines]
    assert index_of(write(tmp_path, jump)) == ([1, 2, 3, 4] if is_bonded else [1, 2, 8, 9])
