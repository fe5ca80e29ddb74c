"""Records that HMMER cannot search are told apart by their headers and letters, and counted."""

from __future__ import annotations

import pytest

from fastfold.data.search.database import (
    MAX_RESIDUES,
    SkippedRecords,
    record_problem,
    searchable_records,
)

PROTEIN = b">1abc_A mol:protein length:5  X\nMKVLA\n"
NUCLEIC = b">2abc_B mol:na length:4  X\nACGT\n"
ODD = b">7ooo_A mol:na length:4  X\nG0C?\n"


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (b"a words 0?-\nMKV*\r\nmkvbzjuox._~\n", ""),
        (b"a\n", ""),
        (b"a\nMK0V\n", "illegal character 0"),
        (b"a\nMK\n-V\n", "illegal character -"),
        (b"\nMKV\n", "no FASTA name found"),
        (b" a\nMKV\n", "no FASTA name found"),
        (b"a\n" + b"MK\n" * (MAX_RESIDUES // 2), ""),
        (b"a\n" + b"MK\n" * (MAX_RESIDUES // 2) + b"V\n", "100,001 residues, HMMER compares up to 100,000"),
    ],
)
def test_a_record_is_searchable_by_its_name_letters_and_length(record: bytes, problem: str) -> None:
    assert record_problem(record) == problem


def test_other_molecules_go_or_stay_and_are_counted_alike() -> None:
    """Those that HMMER cannot read never stay."""
    text = NUCLEIC + PROTEIN + ODD + b">bad\nM1\n>plain\nMKV\n"
    counts = SkippedRecords(2, 1, "'bad': illegal character 1")
    assert searchable_records(text) == (PROTEIN + b">plain\nMKV\n", counts)
    kept, skipped = searchable_records(text, keep_others=True)
    assert [record.split()[0] for record in kept.split(b">")[1:]] == [b"2abc_B", b"1abc_A", b"plain"]
    assert skipped == counts


def test_a_word_of_a_description_makes_no_other_molecule() -> None:
    text = b">a binds mol:na\nMKV\n>b mol:proteins\nMKV\n>c\tmol:na\nACG\n"
    kept, skipped = searchable_records(text)
    assert kept.count(b">") == 1
    assert skipped == (2, 0, "")


def test_counts_add_up_and_the_first_example_stays() -> None:
    total = sum(
        [SkippedRecords(1, 0), SkippedRecords(0, 1, "x"), SkippedRecords(2, 3, "y")], SkippedRecords()
    )
    assert total == (3, 4, "x")
    assert str(total) == (
        "records left out of the search: 3 that are not proteins (mol:na) and 4 that cannot be read (x)"
    )
    assert str(SkippedRecords()) == "records left out of the search: none"
