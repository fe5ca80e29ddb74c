"""Databases have the names that AlphaFold's searches have, and bad files are refused at once."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from fastfold.data.msa import find
from fastfold.data.search.database import SequenceDatabase, content_digest, parse_databases
from fastfold.errors import ConfigError, InputError
from fastfold.utils import hashing


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("/data/uniref90.fasta", "uniref90"),
        ("UniRef90_2023_01.fasta.gz", "uniref90"),
        ("mgy_clusters_2022_05.fa", "mgnify"),
        ("bfd-first_non_consensus_sequences.fasta", "small_bfd"),
        ("uniprot_sprot.fasta", "uniprot"),
        ("uniref90=/data/x.fa", "uniref90"),
        ("mine=a=b.fasta", "mine"),
        ("/data/my proteins.v2.fasta.gz", "my_proteins.v2"),
    ],
)
def test_the_name_follows_from_the_file_or_stands_before_it(given: str, name: str) -> None:
    (database,) = parse_databases([given])
    assert database.name == name
    assert "=" not in given or str(database.path) == given.partition("=")[2]


def test_nucleic_acids_that_are_marked_do_not_make_a_file_one_of_nucleotides(tmp_path: Path) -> None:
    path = tmp_path / "pdb_seqres.txt"
    path.write_text(f">1abc_A mol:na length:400\n{'ACGT' * 100}\n>2abc_B mol:protein length:3\nMKV\n")
    SequenceDatabase("pdb", path).check()
    path.write_text(f">1abc_A mol:na length:400\n{'ACGT' * 100}\n")
    with pytest.raises(InputError, match="contains nucleotides"):
        SequenceDatabase("pdb", path).check()


def test_a_file_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a=b.fasta"
    path.write_text(">a\nMKV\n")
    (database,) = parse_databases([path])
    assert (database.path, database.name) == (path, "a_b")


def test_known_databases_count_in_alphafolds_order() -> None:
    names = ["uniref90.fasta", "bfd-first_non_consensus_sequences.fasta", "mgy_clusters.fa"]
    stems = [f"{database.name}_hits" for database in parse_databases(names)]
    assert [find._order(stem)[0] for stem in stems] == [0, 1, 2]
    assert stems[0] in find.MAX_ROWS
    assert stems[2] in find.MAX_ROWS


def test_two_databases_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"uniref90\.fa and b/uniref90\.fa would both be named uniref90"):
        parse_databases(["uniref90.fa", "b/uniref90.fa"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"MKV\n>a\nMKV\n", "is not FASTA"),
        (b"\x28\xb5\x2f\xfd", "is not FASTA"),
        (gzip.compress(b"hello", mtime=0), "is not FASTA"),
        (gzip.compress(b">a\nMKV\n" * 99, mtime=0)[:-9], "damaged gzip"),
        (b">a\n>b\n", "names without sequences"),
        (b">a\n" + b"ACGTTGCAAN" * 20, "contains nucleotides"),
        (b">a\n" + b"acguugcaan" * 20, "contains nucleotides"),
    ],
)
def test_what_cannot_be_a_database_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "db.fasta"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        SequenceDatabase("db", path).check()
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such database"):
        SequenceDatabase("db", tmp_path / "none.fasta").check()
    with pytest.raises(InputError, match="is a folder"):
        SequenceDatabase("db", tmp_path).check()


def test_proteins_pass_plain_and_compressed(tmp_path: Path) -> None:
    text = b">a\n" + b"MKVLAAGIT" * 20
    for content in (text, gzip.compress(text)):
        (tmp_path / "db").write_bytes(content)
        SequenceDatabase("db", tmp_path / "db").check()


def test_the_digest_is_of_the_contents_and_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = SequenceDatabase("db", tmp_path / "db")
    database.path.write_text(">a\nMKV\n")
    os.utime(database.path, ns=(1, 1))
    digest = content_digest(database, tmp_path / "store")
    assert digest == hashing.file_digest(database.path)
    with monkeypatch.context() as patch:
        patch.setattr("fastfold.data.search.database.file_digest", lambda path: pytest.fail("read again"))
        assert content_digest(database, tmp_path / "store") == digest
    database.path.write_text(">a\nMKA\n")
    os.utime(database.path, ns=(2, 2))
    assert content_digest(database, tmp_path / "store") != digest
