"""Alignment databases: their files are read like files of their own, and what is no index is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.msa.find import read_msa, sorted_alignments, sorted_hits
from fastfold.data.training.index_tables import AlignmentDatabase
from fastfold.errors import InputError
from fastfold.utils.text_files import FileSlice, read_text_bytes
from tests.helpers.small_sets import a3m, alignment_database

FILES = {
    "1abc_A": {
        "mgnify_hits.a3m": a3m("MKV", "MRV"),
        "uniref90_hits.a3m": a3m("MKV"),
        "uniprot_hits.a3m": a3m("MKV", "LKV"),
        "hmmsearch_output.sto": "",
        "pdb70_hits.hhr": "Query 1abc",
    },
    "2abc_B": {"bfd_uniclust_hits.a3m": a3m("WWHH")},
}


def test_files_are_read_from_the_database(tmp_path: Path) -> None:
    """With AlphaFold's order of searches; template hits are told apart."""
    database = AlignmentDatabase(alignment_database(tmp_path, FILES))
    assert list(database) == ["1abc_A", "2abc_B"]
    found = sorted_alignments(database["1abc_A"])
    assert [file.name for file in found.unpaired] == ["uniref90_hits.a3m", "mgnify_hits.a3m"]
    assert [file.name for file in found.paired] == ["uniprot_hits.a3m"]
    assert [file.name for file in sorted_hits(database["1abc_A"])] == [
        "hmmsearch_output.sto",
        "pdb70_hits.hhr",
    ]
    assert read_msa(found.unpaired[1]).sequences == ("MKV", "MRV")
    assert read_msa(sorted_alignments(database["2abc_B"]).unpaired[0], query="WWHH").sequences == ("WWHH",)
    assert "3abc_A" not in database


def test_slices_have_the_errors_of_files(tmp_path: Path) -> None:
    packed = gzip.compress(b"text")
    (tmp_path / "large").write_bytes(b"..." + packed + b"ending")

    def read(name: str, start: int, size: int, limit: int = 100) -> bytes:
        return read_text_bytes(FileSlice(tmp_path / "large", name, start, size), limit=limit)

    assert read("a.gz", 3, len(packed)) == b"text"
    assert read("a", 3 + len(packed), 6) == b"ending"
    with pytest.raises(InputError, match=r"large/a: large is cut off at byte \d+; copy it again"):
        read("a", 3 + len(packed), 7)
    with pytest.raises(InputError, match=r"large/b.*larger than 5 bytes"):
        read("b", 3 + len(packed), 6, limit=5)
    with pytest.raises(InputError, match=r"gone/c: no such file"):
        read_text_bytes(FileSlice(tmp_path / "gone", "c", 0, 1), limit=5)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not valid JSON"),
        ([1], "must map names of chains"),
        ({"1abc_A": {"db": "x.db"}}, "record '1abc_A'.*must have a database"),
        ({"1abc_A": {"db": "x.db", "files": [["a.a3m", 0]]}}, "each with name, start and size"),
        ({"1abc_A": {"db": "x.db", "files": [["a.a3m", -1, 4]]}}, "each with name, start and size"),
        ({"1abc_A": {"db": "x.db", "files": [["../a.a3m", 0, 4]]}}, "each with name, start and size"),
        (
            {"1abc_A": {"db": "gone.db", "files": []}},
            "the database 'gone.db' is missing in the folder of the index",
        ),
        ({"1abc_A": {"db": "../x.db", "files": []}}, "the database .* is missing"),
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    folder = tmp_path / "databases"
    folder.mkdir()
    (folder / "x.db").touch()
    (tmp_path / "x.db").touch()
    (folder / "x.index").write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(InputError, match=message):
        AlignmentDatabase(folder / "x.index")
