"""Entries are found by their ids, obsolete ones under their successors."""

from __future__ import annotations

import gzip
from datetime import date
from pathlib import Path

import pytest

from fastfold.data.templates.database import MmcifFolder, parse_date, read_obsolete, read_release_dates
from fastfold.data.templates.hits import TemplateSkipped
from fastfold.errors import InputError
from tests.helpers.template_files import QUERY, entry, write_entries

OBSOLETE = """LIST OF OBSOLETE COORDINATE ENTRIES AND SUCCESSORS
OBSLTE    31-JUL-94 1OLD     1NEW
OBSLTE    26-SEP-06 2OLD
OBSLTE    26-SEP-06 3OLD     2NEW 3NEW
"""


def test_entries_lie_in_the_folder_or_divided_plain_or_packed(tmp_path: Path) -> None:
    folder = write_entries(tmp_path / "mmcif", {"1abc": entry({"A": QUERY})})
    (folder / "de").mkdir()
    (folder / "de" / "2def.cif.gz").write_bytes(gzip.compress(entry({"B": QUERY}).encode()))
    (folder / "3bad.cif").write_text("data_X\nloop_\n")
    found = MmcifFolder(folder)
    assert found.entry("1abc") is found.entry("1abc")
    assert list(found.entry("2def").sequences) == ["B"]
    for pdb_id, reason, message in (
        ("9zzz", "missing file", "9zzz.cif and 9zzz.cif.gz are missing in"),
        ("3bad", "unreadable", "3bad.cif:3: is not valid CIF: unexpected end"),
    ):
        for _ in range(2):
            with pytest.raises(TemplateSkipped, match=message) as skipped:
                found.entry(pdb_id)
            assert skipped.value.reason == reason


def test_obsolete_entries_have_successors_or_are_withdrawn(tmp_path: Path) -> None:
    folder = write_entries(tmp_path / "mmcif", {})
    (tmp_path / "obsolete.dat").write_text(OBSOLETE)
    (tmp_path / "dates.txt").write_text("3old:2001-02-03\n\n")
    found = MmcifFolder(folder, release_dates=tmp_path / "dates.txt")
    assert found.current_id("1old") == "1new"
    assert found.current_id("3old") == "3old"  # a listed date says that it is there
    assert found.current_id("1abc") == "1abc"
    with pytest.raises(TemplateSkipped, match="withdrawn"):
        found.current_id("2old")
    assert read_obsolete(tmp_path / "obsolete.dat") == {"1old": "1new", "2old": None, "3old": "2new"}
    assert read_release_dates(tmp_path / "dates.txt") == {"3old": date(2001, 2, 3)}


def test_successors_are_followed_to_the_last(tmp_path: Path) -> None:
    """An entry may be made obsolete twice, and ids in a circle end."""
    folder = write_entries(tmp_path / "mmcif", {"7new": entry({"A": QUERY})})
    twice, circles = ("1old 2old", "2old 7new", "3old 4old", "4old"), ("5old 6old", "6old 7old", "7old 5old")
    pairs = (*twice, *circles, "8old 8old")
    (tmp_path / "obsolete.dat").write_text("".join(f"OBSLTE    31-JUL-94 {pair}\n" for pair in pairs))
    (tmp_path / "dates.txt").write_text("2old:2001-02-03\n")
    found = MmcifFolder(folder)
    assert [found.current_id(name) for name in ("1old", "2old", "7new")] == ["7new"] * 3
    assert list(found.entry(found.current_id("1old")).sequences) == ["A"]
    with pytest.raises(TemplateSkipped, match="withdrawn 4old") as skipped:
        found.current_id("3old")
    assert skipped.value.reason == "withdrawn"
    assert [found.current_id(name) for name in ("5old", "6old", "8old")] == ["7old", "5old", "8old"]
    assert MmcifFolder(folder, release_dates=tmp_path / "dates.txt").current_id("1old") == "2old"


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder; give the folder of the PDB's mmCIF files"):
        MmcifFolder(tmp_path / "none")
    (tmp_path / "list").write_text("1abc:2001-13-03\n")
    with pytest.raises(InputError, match="lines 'OBSLTE'"):
        MmcifFolder(tmp_path, obsolete=tmp_path / "list")
    with pytest.raises(InputError, match=":1: expected a line such as 1abc:2001-02-03"):
        MmcifFolder(tmp_path, release_dates=tmp_path / "list")


def test_dates_are_whole() -> None:
    assert parse_date(" 2021-11-01") == date(2021, 11, 1)
    for text in ("2021-11-1", "2021-02-30", "", "2021-11-01T00", "٢٠٢١-11-01"):
        assert parse_date(text) is None


def test_release_dates_of_openfolds_table(tmp_path: Path) -> None:
    """``mmcif_cache.json`` has them too; what is no such table is refused."""
    path = tmp_path / "mmcif_cache.json"
    path.write_text('{"1ABC": {"release_date": "2001-02-03", "seqs": ["MKV"]}}')
    assert read_release_dates(path) == {"1abc": date(2001, 2, 3)}
    for text, message in (
        ("[1]", "must map PDB ids to objects"),
        ("{", "not valid JSON"),
        ('{"1abc": {"release_date": null}}', "record '1abc'.*lacks a release_date"),
        ('{"1abc": "2001-02-03"}', "lacks a release_date"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_release_dates(path)


def test_release_date_of_an_entry(tmp_path: Path) -> None:
    """The listed date counts, else the file's; an entry without a file has none even if it is listed."""
    folder = write_entries(tmp_path / "mmcif", {"1abc": entry({"A": "MKV"}, dates=["2002-03-04"])})
    (tmp_path / "dates.txt").write_text("1abc:2001-01-01\n2abc:2001-01-01\n")
    listed = MmcifFolder(folder, release_dates=tmp_path / "dates.txt")
    assert listed.released("1abc") == date(2001, 1, 1)
    assert MmcifFolder(folder).released("1abc") == date(2002, 3, 4)
    for one in (listed, MmcifFolder(folder)):
        with pytest.raises(TemplateSkipped, match=r"2abc\.cif and 2abc\.cif\.gz are missing"):
            one.released("2abc")


def test_as_many_entries_are_kept_as_asked_for(tmp_path: Path) -> None:
    folder = write_entries(tmp_path / "mmcif", {name: entry({"A": "MKV"}) for name in ("1abc", "2abc")})
    for kept, same in ((1, False), (2, True)):
        found = MmcifFolder(folder, kept=kept)
        first = found.entry("1abc")
        found.entry("2abc")
        assert (found.entry("1abc") is first) == same


def test_a_date_is_read_without_the_rest_of_its_file(tmp_path: Path) -> None:
    """Where the PDB has it, at the top; elsewhere all of the file is read."""
    text = entry({"A": QUERY}, dates=["2005-01-01", "2003-02-01"])
    late = text.replace(
        "data_TEST\n#\n", f"data_TEST\n#\n{'# remark' * 9}\n" * 1 + f"_late.text\n;{'x' * 70000}\n;\n#\n"
    )
    folder = write_entries(tmp_path / "mmcif", {"1abc": text, "2abc": late, "3abc": text[:-2000]})
    (folder / "4abc.cif.gz").write_bytes(gzip.compress(text.encode())[:-20])
    found = MmcifFolder(folder)
    read = []
    whole, found._read_entry = found._read_entry, lambda pdb_id: read.append(pdb_id) or whole(pdb_id)
    assert [found.released(name) for name in ("1abc", "2abc", "3abc", "1abc")] == [date(2003, 2, 1)] * 4
    assert read == ["2abc"]
    with pytest.raises(TemplateSkipped, match="damaged gzip"):
        found.released("4abc")
