"""Complexes of lists of proteins: every pair once, chains under their own names, mistakes named with their place."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from fastfold.data.queries.pairs import (
    Partner,
    all_against_all,
    baits_against_candidates,
    is_pair_table,
    read_pair_table,
    read_proteins,
)
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError


def proteins(**sequences: str) -> list[Target]:
    return [target_from_sequence(sequence, name) for name, sequence in sequences.items()]


def shown(targets: list[Target]) -> dict[str, str]:
    return {target.name: ":".join(chain.sequence for chain in target.chains) for target in targets}


def partners(**sequences: str) -> list[Partner]:
    return [Partner(protein) for protein in proteins(**sequences)]


PROTEINS = proteins(A="MKT", B="GSH", C="AWL")
ABC = [Partner(protein) for protein in PROTEINS]


def test_all_against_all_is_every_pair_once():
    assert shown(all_against_all(ABC)) == {"A_and_B": "MKT:GSH", "A_and_C": "MKT:AWL", "B_and_C": "GSH:AWL"}


def test_homodimers_are_added_if_asked_for():
    names = list(shown(all_against_all(ABC, homodimers=True)))
    assert names == ["A_and_A", "A_and_B", "A_and_C", "B_and_B", "B_and_C", "C_and_C"]


def test_baits_are_folded_with_all_candidates_and_no_pair_comes_twice():
    found = shown(baits_against_candidates(ABC[:2], ABC))
    assert list(found) == ["A_and_A", "A_and_B", "A_and_C", "B_and_B", "B_and_C"]


def test_lists_are_joined_in_every_way():
    d, e = partners(D="AAW"), partners(E="WAA", A="MKTA")
    ways = shown(baits_against_candidates(ABC[:2], d, e[:1]))
    assert list(ways) == ["A_and_D_and_E", "B_and_D_and_E"]
    lists = (ABC[:2], ABC[1:], [*d, ABC[2]])
    names = ["_and_".join(one) for one in itertools.product("AB", "BC", "DC")]
    assert list(shown(baits_against_candidates(*lists))) == names
    with pytest.raises(InputError, match="another sequence in an earlier list"):
        baits_against_candidates(ABC[:1], d, e)


def test_a_chain_keeps_the_name_by_which_its_alignment_is_found():
    (pair,) = all_against_all(ABC[:2])
    assert [(chain.id, chain.record) for chain in pair.chains] == [("A", "A"), ("B", "B")]


def test_a_bait_may_be_a_complex_itself():
    (found,) = baits_against_candidates(partners(AB="MKT:GSH"), partners(C="AWL"))
    chains = [(chain.sequence, chain.record, chain.record_chain) for chain in found.chains]
    assert chains == [("MKT", "AB", "A"), ("GSH", "AB", "B"), ("AWL", "C", "")]


def test_letters_that_are_read_as_x_are_kept_as_they_were_given():
    (found,) = baits_against_candidates(partners(A="MKU"), partners(B="GSH"))
    assert (found.chains[0].sequence, found.chains[0].letters) == ("MKX", "MKU")
    assert found.warnings == ("A: U at 3 read as X (unknown residue)",)


def test_one_name_with_two_sequences_is_refused():
    with pytest.raises(InputError, match="another sequence in an earlier list"):
        baits_against_candidates(partners(A="MKT"), partners(A="MKV"))


def test_names_that_make_the_same_complex_are_refused():
    with pytest.raises(InputError, match="used before"):
        baits_against_candidates(partners(A="MKT", A_and_B="MKT"), partners(B_and_C="GSH", C="GSH"))


def test_a_table_names_partners_and_may_name_the_complex(tmp_path: Path):
    path = tmp_path / "pairs.csv"
    path.write_text("chain_2,id,note,chain_1,chain_3\nB,,x,A,\nC,three,,B,A\n")
    targets, errors = read_pair_table(path, PROTEINS)
    assert errors == []
    assert shown(targets) == {"A_and_B": "MKT:GSH", "three": "GSH:AWL:MKT"}
    assert [chain.record for chain in targets[1].chains] == ["B", "C", "A"]


def test_a_table_without_a_list_of_proteins_has_sequences(tmp_path: Path):
    path = tmp_path / "pairs.tsv"
    path.write_text("id\tchain_1\tchain_2\none\tMKT\tgsh\n")
    targets, errors = read_pair_table(path)
    assert (shown(targets), errors) == ({"one": "MKT:GSH"}, [])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("x,A,D,", "the list of proteins lacks 'D'"),
        ("x,,B,", "lacks a chain in a column before another"),
        ("x,A,B", "has 3 columns"),
        ("x,,,", "lacks a chain"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_its_line_and_the_others_are_read(
    tmp_path: Path, row: str, message: str
):
    path = tmp_path / "pairs.csv"
    path.write_text(f"id,chain_1,chain_2,chain_3\ngood,A,B,\n{row}\n")
    targets, errors = read_pair_table(path, PROTEINS)
    assert list(shown(targets)) == ["good"]
    assert [error.line for error in errors] == [3]
    assert message in str(errors[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,chain_1,chain_3\nx,A,B\n", "must name the columns"),
        ("chain_1,chain_1\nA,B\n", "must name the columns"),
        ("chain_1,chain_2\n", "contains no row"),
    ],
)
def test_a_table_that_does_not_name_its_columns_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "pairs.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_pair_table(path, PROTEINS)


def test_sequences_need_a_name(tmp_path: Path):
    path = tmp_path / "pairs.csv"
    path.write_text("chain_1,chain_2\nMKT,GSH\n")
    targets, errors = read_pair_table(path)
    assert targets == []
    assert "add a column id" in str(errors[0])


def test_tables_of_partners_are_told_from_other_files(tmp_path: Path):
    for name, text, expected in (
        ("a.csv", "id,chain_1,chain_2\n", True),
        ("b.csv", "id,sequence\n", False),
        ("c.fasta", ">chain_1,chain_2\n", False),
        ("d.tsv", '"chain_1"\t"chain_2"\n', True),
    ):
        (tmp_path / name).write_text(text)
        assert is_pair_table(tmp_path / name) is expected
    assert not is_pair_table(tmp_path / "missing.csv")


def test_a_protein_that_brings_its_alignment_is_refused(tmp_path: Path):
    (tmp_path / "p.a3m").write_text(">p\nMKT\n>row\nMKV\n")
    found, errors = read_proteins(tmp_path / "p.a3m")
    assert found == []
    assert "put the alignment into the folder of alignments" in str(errors[0])


def test_partners_in_another_order_are_one_complex(tmp_path: Path):
    table = tmp_path / "pairs.csv"
    table.write_text("chain_1;chain_2\nA;B\nB;A\nA;C\nA;A\n")
    assert is_pair_table(table)
    found, errors = read_pair_table(table, PROTEINS)
    assert not errors
    assert list(shown(found)) == ["A_and_B", "A_and_C", "A_and_A"]
    assert found[0].warnings == ("line 3 of pairs.csv has the same partners as line 2; folded once",)


def test_a_complex_with_a_name_of_its_own_is_kept(tmp_path: Path):
    table = tmp_path / "pairs.csv"
    table.write_text("id,chain_1,chain_2\none,A,B\ntwo,B,A\n")
    found, errors = read_pair_table(table, PROTEINS)
    assert not errors
    assert shown(found) == {"one": "MKT:GSH", "two": "GSH:MKT"}
