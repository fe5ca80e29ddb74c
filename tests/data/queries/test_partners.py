"""Copies and parts of proteins in AlphaPulldown's notation."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.queries.pairs import (
    Partner,
    baits_against_candidates,
    parse_partner,
    read_complexes,
    read_pair_table,
    read_partners,
)
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError

PROTEINS = {
    name: target_from_sequence(sequence, name)
    for name, sequence in {"P": "MKVLAAGITU", "Q": "GSHMWLPEK", "sp:Q1": "AWL", "PQ": "MKV:GSH"}.items()
}


def parse(text: str) -> Partner:
    return parse_partner(text, PROTEINS, path="list.txt", line=3)


def chains(target: Target) -> list[tuple[str, str, str, list[int]]]:
    return [(chain.id, chain.record, chain.sequence, chain.numbers) for chain in target.chains]


@pytest.mark.parametrize(
    ("text", "name", "sequences", "numbers"),
    [
        ("P", "P", ["MKVLAAGITX"], [list(range(1, 11))]),
        ("P:2", "P_x2", ["MKVLAAGITX"] * 2, [list(range(1, 11))] * 2),
        ("P:8-10", "P_8-10", ["ITX"], [[8, 9, 10]]),
        ("P:2:1-2:4-5", "P_1-2_4-5_x2", ["MKLA"] * 2, [[1, 2, 4, 5]] * 2),
        ("P:1-10", "P", ["MKVLAAGITX"], [list(range(1, 11))]),
        ("sp:Q1:2-3", "sp:Q1_2-3", ["WL"], [[2, 3]]),
        ("PQ:2", "PQ_x2", ["MKV", "GSH"] * 2, [[1, 2, 3]] * 4),
    ],
)
def test_copies_and_parts(text: str, name: str, sequences: list[str], numbers: list[list[int]]) -> None:
    partner = parse(text)
    assert partner.name == name
    assert [chain.sequence for chain in partner.chains] == sequences
    assert [chain.numbers for chain in partner.chains] == numbers


def test_a_part_knows_its_whole_protein() -> None:
    (chain,) = parse("P:8-10").chains
    assert (chain.letters, chain.record) == ("ITU", "P")
    whole = PROTEINS["P"].chains[0]
    assert (
        (chain.uncut.sequence, chain.uncut.letters)
        == (whole.sequence, whole.letters)
        == ("MKVLAAGITX", "MKVLAAGITU")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Z:1-3", "the list of proteins lacks 'Z'"),
        ("P:0", "expected 1 to 100 copies, found 0"),
        ("P:1-11", "expected ranges from 1 to 10, the length of P, in order and without overlap, found 1-11"),
        ("P:3-2", "found 3-2"),
        ("P:1-5:5-6", "found 5-6"),
        ("P:1-5:2", "expected a range such as 1-100 after the number of copies, found '2'"),
        ("PQ:1-3", "PQ has several chains"),
    ],
)
def test_what_does_not_fit_the_protein_is_refused_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as caught:
        parse(text)
    assert "list.txt:3: " in str(caught.value)


def test_lists_and_tables_take_copies_and_parts(tmp_path: Path) -> None:
    names, table, complexes = (tmp_path / name for name in ("names.txt", "pairs.csv", "complexes.txt"))
    names.write_text("# baits\nP:1-5\n\nP:6-10\nZ\n")
    baits, errors = read_partners(names, list(PROTEINS.values()))
    assert [str(error).partition(": ")[0] for error in errors] == [f"{names}:5"]
    found = baits_against_candidates(baits, [Partner(PROTEINS["Q"], 2)])
    assert [target.name for target in found] == ["P_1-5_and_Q_x2", "P_6-10_and_Q_x2"]
    assert chains(found[1])[0] == ("A", "P", "AGITX", [6, 7, 8, 9, 10])
    assert [chain.id for chain in found[1].chains] == ["A", "B", "C"]
    table.write_text("chain_1,chain_2\nP:2:1-3,Q\nQ,P:2:1-3\nP:1-3,Q\n")
    targets, errors = read_pair_table(table, list(PROTEINS.values()))
    assert ([target.name for target in targets], errors) == (["P_1-3_x2_and_Q", "P_1-3_and_Q"], [])
    complexes.write_text("P:2 + Q:1-4\nQ:1-4+P+P\nP\n")
    targets, errors = read_complexes(complexes, list(PROTEINS.values()))
    assert ([target.name for target in targets], errors) == (["P_x2_and_Q_1-4", "P"], [])
    with pytest.raises(InputError, match="give proteins=FILE"):
        read_complexes(complexes, None)
