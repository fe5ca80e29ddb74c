"""Searches for templates: what the programs are given, and what they find."""

from __future__ import annotations

import gzip
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa, parse_a3m
from fastfold.data.search.programs import find_program
from fastfold.data.templates import search
from fastfold.data.templates.hits import parse_hmmsearch
from fastfold.data.templates.search import (
    _collinear,
    align_to_profile,
    hhsearch,
    hmmsearch,
    is_profile_database,
    to_a3m,
    to_stockholm,
)
from fastfold.errors import ConfigError, InputError
from tests.helpers.template_files import FAMILY, HOMOLOGUE, QUERY, hhr

A3M = f">query\n{QUERY}\n>a\n{HOMOLOGUE[:10]}ggs{HOMOLOGUE[10:]}\n>b\n{HOMOLOGUE}\n>c\n{FAMILY[2][:-2]}--\n"


@pytest.fixture
def msa() -> Msa:
    return parse_a3m("".join(f">row_{i}\n{row}\n" for i, row in enumerate(FAMILY)))


def test_rows_that_repeat_another_are_left_out_and_insertions_counted() -> None:
    """Rows count as equal by the query's columns, whatever they have between them."""
    found = parse_a3m(A3M)
    assert to_stockholm(found).splitlines() == [
        "# STOCKHOLM 1.0",
        f"row_0 {QUERY[:10]}...{QUERY[10:]}",
        f"row_1 {HOMOLOGUE[:10]}xxx{HOMOLOGUE[10:]}",
        f"row_2 {FAMILY[2][:10]}...{FAMILY[2][10:-2]}--",
        f"#=GC RF {'x' * 10}...{'x' * 30}",
        "//",
    ]
    assert to_a3m(found).splitlines()[:4] == [">query", QUERY, ">a", f"{HOMOLOGUE[:10]}xxx{HOMOLOGUE[10:]}"]


def test_hmmsearch_finds_homologues_and_tells_what_is_no_protein(tmp_path: Path, msa: Msa) -> None:
    database = tmp_path / "pdb_seqres.txt"
    other = "GPLGSEEDKRNNWWPYHHCCDDFFMMTTGGSSPPQQRRLL"
    records = {"1abc_A": f"GS{HOMOLOGUE}GG", "2abc_B": other, "3abc_C": QUERY[5:35]}
    text = "".join(f">{name} mol:protein length:{len(row)}  TEST\n{row}\n" for name, row in records.items())
    database.write_text(text)
    hits = parse_hmmsearch(hmmsearch(msa, database), QUERY)
    assert {hit.name for hit in hits} >= {"1abc_A", "3abc_C"}
    best = next(hit for hit in hits if hit.name == "1abc_A")
    assert (best.indices_hit[0], best.letters, best.aligned_cols) == (2, HOMOLOGUE, 40)
    packed = tmp_path / "pdb_seqres.txt.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert hmmsearch(msa, packed) == hmmsearch(msa, database)
    database.write_text(f">2abc_B mol:protein length:8 TEST\n{other[:8]}\n")
    assert hmmsearch(msa, database) == "" or parse_hmmsearch(hmmsearch(msa, database), QUERY)


def test_a_database_that_cannot_be_read_is_refused(tmp_path: Path, msa: Msa) -> None:
    with pytest.raises(InputError, match="cannot be searched for templates"):
        hmmsearch(msa, tmp_path / "none.txt")
    (tmp_path / "odd.txt").write_text(">x mol:protein\nAC1!DE\n")
    with pytest.raises(InputError, match="cannot be searched for templates"):
        hmmsearch(msa, tmp_path / "odd.txt")


def test_sequences_are_aligned_with_the_profile(msa: Msa) -> None:
    """What is unrelated has no place."""
    found = align_to_profile(msa, [f"GG{HOMOLOGUE}", "W" * 50])
    assert found == [{place: place + 2 for place in range(40)}, {}]
    assert align_to_profile(msa, []) == []


def test_domains_in_the_same_order_in_both_are_joined() -> None:
    """The largest counts, then those that do not cross what is joined."""
    query, sequence = "A" * 80, "A" * 140
    large = {place: place + 50 for place in range(20, 60)}
    before = {place: place for place in range(10)}
    crossing = {place: place for place in range(70, 80)}
    assert _collinear([before, crossing, large], query, sequence) == before | large
    assert list(_collinear([large, before], query, sequence)) == [*range(10), *range(20, 60)]
    assert _collinear([], query, sequence) == {}


def test_overlapping_domains_meet_where_most_letters_are_equal() -> None:
    query = "A" * 30 + "C" * 50
    sequence = "A" * 30 + "G" * 100 + "C" * 50
    first = {place: place for place in range(34)}
    second = {place: place + 100 for place in range(25, 80)}
    whole = {place: place + 100 * (place >= 30) for place in range(80)}
    assert _collinear([first, second], query, sequence) == whole
    copy = {place: place + 80 for place in range(80)}  # of a repeat that is joined already
    assert _collinear([{place: place for place in range(80)}, copy], query, query * 2) == dict(
        enumerate(range(80))
    )


@pytest.mark.parametrize("length", [20, 160])
def test_both_sides_of_an_inserted_domain_are_aligned(length: int) -> None:
    """A receptor with lysozyme in a loop is a template of the whole receptor."""
    rng = np.random.default_rng(0)
    letters = list("ACDEFGHIKLMNPQRSTVWY")
    query, inserted = ("".join(rng.choice(letters, count)) for count in (120, length))
    for place in (30, 60, 90):
        (aligned,) = align_to_profile(
            Msa((query,), np.zeros((1, 120), np.int32), ("query",)),
            [query[:place] + inserted + query[place:]],
        )
        right = [mine for mine, theirs in aligned.items() if theirs == mine + length * (mine >= place)]
        assert len(right) >= 118
        assert len(aligned) - len(right) <= 2


def test_a_single_row_is_a_profile_too() -> None:
    alone = Msa((QUERY,), np.zeros((1, 40), np.int32), ("query",))
    assert align_to_profile(alone, [f"AA{QUERY}"])[0][0] == 2


def program(folder: Path, text: str) -> Path:
    """A stand-in for hhsearch."""
    path = folder / "hhsearch"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_hhsearch_is_run_with_the_alignment(
    tmp_path: Path, msa: Msa, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = hhr([("1ABC_A x", QUERY, HOMOLOGUE, 30.0)])
    (tmp_path / "answer").write_text(text)
    path = program(
        tmp_path, f'echo "$@" > {tmp_path}/arguments; cp "$2" {tmp_path}/query; cp {tmp_path}/answer "$4"'
    )
    (tmp_path / "db_hhm.ffdata").touch()
    assert is_profile_database(tmp_path / "db")
    assert not is_profile_database(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_program("hhsearch") == str(path)
    assert hhsearch(msa, [tmp_path / "db"]) == text
    assert (tmp_path / "query").read_text() == to_a3m(msa)
    arguments = (tmp_path / "arguments").read_text()
    assert re.search(rf"-maxseq 1000000 -cpu 1 -d {tmp_path}/db$", arguments.strip())


def test_hhsearch_that_fails_or_is_not_there_is_one_error(
    tmp_path: Path, msa: Msa, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = program(tmp_path, "echo database is broken >&2; exit 3")
    monkeypatch.setattr(search, "find_program", lambda name: str(path))
    with pytest.raises(InputError, match="hhsearch failed with exit code 3: database is broken"):
        hhsearch(msa, [tmp_path / "db"])
    monkeypatch.setattr(search, "find_program", lambda name: str(tmp_path / "none"))
    with pytest.raises(InputError, match="cannot be run"):
        hhsearch(msa, [tmp_path / "db"])
    monkeypatch.setattr(search, "find_program", lambda name: None)
    with pytest.raises(
        ConfigError, match="hhsearch is not installed: install HH-suite or the Python package"
    ):
        hhsearch(msa, [tmp_path / "db"])


def test_records_that_hmmsearch_cannot_read_are_left_out_with_a_count(
    tmp_path: Path, msa: Msa, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nucleic acids, with letters of the PDB's file or without, change no hit; nor do parts."""
    database = tmp_path / "pdb_seqres.txt"
    proteins = "".join(
        f">{number}abc_A mol:protein length:40  TEST\n{row}\n"
        for number, row in enumerate((*FAMILY, HOMOLOGUE), 1)
    )
    database.write_text(proteins)
    expected = hmmsearch(msa, database)
    assert expected.count("#=GS") > 3
    database.write_text(
        f">7ooo_A mol:na length:12  RNA\nGG00CCAUUGCC\n{proteins}>8xyz_A mol:na length:3  DNA\nAC?\n"
        f">9bad_A mol:protein length:4  TEST\nMK?V\n>9dna_A mol:na length:4  DNA\nACGT\n"
    )
    said: list[str] = []
    assert hmmsearch(msa, database, say=said.append) == expected
    assert said == [
        "pdb_seqres.txt: records left out of the search: 3 that are not proteins (mol:na) and 1 that cannot be read "
        "('9bad_A': illegal character ?)"
    ]
    monkeypatch.setattr(search, "_PART_BYTES", 100)
    assert hmmsearch(msa, database) == expected
