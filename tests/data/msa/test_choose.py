"""Files of the user come before results of searches, for rows of a chain and for pairs separately."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.data.msa.choose import ChosenRows, PlaceFiles, choose_files
from fastfold.data.msa.find import chosen_files, load_alignments
from fastfold.data.msa.search_listing import LISTING, search_of
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.utils.hashing import file_digest

A, B = "MKV", "LLAA"


def put(path: Path, query: str, search: str = "", *, first: str = "") -> Path:
    """Write an alignment, and list it as a result of a search of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first or '>' + path.name}\n{query}\n")
    if search:
        listing = path.parent / LISTING
        record = json.loads(listing.read_text()) if listing.exists() else {}
        record[search] = {"settings": {}, "files": {path.name: file_digest(path)}, "replaced": {}}
        listing.write_text(json.dumps(record))
    return path


def joined(path: Path, search: str = "") -> Path:
    """Write ColabFold's alignment of the dimer, with a row of each chain alone."""
    return put(path, f"{A}{B}\n>a\n{A}----\n>b\n---{B}", search, first="#3,4\t1,1\n>1\t2")


PLACES: list[tuple[str, Callable[[Path], Path]]] = [
    ("the user's file of the chain", lambda folder: put(folder / "t_A.a3m", A)),
    ("the user's alignment of the complex", lambda folder: joined(folder / "t.a3m")),
    ("a result for the chain", lambda folder: put(folder / "t/A/ur_hits.a3m", A, "ur")),
    ("a result for the complex", lambda folder: joined(folder / "t/colabfold_hits.a3m", "colabfold")),
    ("a result under another name", lambda folder: put(folder / "t_A/ur_hits.a3m", A, "ur")),
]


@pytest.mark.parametrize("first", range(len(PLACES)))
def test_rows_of_a_chain_are_from_the_first_of_these(tmp_path: Path, first: int) -> None:
    wanted, *_ = [write(tmp_path) for _, write in PLACES[first:]]
    chosen = chosen_files(tmp_path, target_from_sequence(f"{A}:{B}", "t"))
    assert chosen.own[A].files == (wanted,)
    assert chosen.own[A].of_complex == ("complex" in PLACES[first][0])


def test_pairs_are_from_a_source_that_has_them_of_all_chains(tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "t")

    def sources() -> list[tuple[Path, ...]]:
        return [rows.files for rows in chosen_files(tmp_path, target).pairs.values()]

    whole = joined(tmp_path / "t/colabfold_hits.a3m", "colabfold")
    assert sources() == [(whole,)] * 2
    mine = put(tmp_path / "t_A/uniprot_hits.a3m", A)  # not enough
    assert sources() == [(whole,)] * 2
    searched = put(tmp_path / "t/B/uniprot_hits.a3m", B, "uniprot")
    assert sources() == [(mine,), (searched,)]
    other = joined(tmp_path / "t/colabfold_pairs.a3m")
    assert sources() == [(other,)] * 2
    of_b = put(tmp_path / "t_B/uniprot_hits.a3m", B)
    assert sources() == [(mine,), (of_b,)]


def test_uniprot_hits_of_some_chains_are_kept_without_another_source(tmp_path: Path) -> None:
    mine = put(tmp_path / "t_A/uniprot_hits.a3m", A)
    chosen = chosen_files(tmp_path, target_from_sequence(f"{A}:{B}", "t"))
    assert chosen.pairs == {A: ChosenRows((mine,)), B: ChosenRows()}


def test_uniprot_hits_hide_no_rows_of_the_chain(tmp_path: Path) -> None:
    put(tmp_path / "t/A/uniprot_hits.a3m", A, "uniprot")
    put(tmp_path / "t_A.a3m", A)
    ((own, paired), _) = load_alignments(tmp_path, target_from_sequence(f"{A}:{B}", "t"))
    assert [msa.descriptions for msa in (*own, *paired)] == [("t_A.a3m",), ("uniprot_hits.a3m",)]


def test_a_file_of_the_complex_serves_chains_without_one(tmp_path: Path) -> None:
    put(tmp_path / "t/A.a3m", A)
    joined(tmp_path / "t/mine.a3m")
    first, second = load_alignments(tmp_path, target_from_sequence(f"{A}:{B}", "t"))
    assert [msa.descriptions for msa in (*first[0], *second[0])] == [("A.a3m",), ("b",)]
    assert first[1][0].sequences == (A,)


def test_a_file_that_serves_no_chain_is_refused_if_one_has_none(tmp_path: Path) -> None:
    target = target_from_sequence(f"{A}:{B}", "t")
    put(tmp_path / "t/A.a3m", A)
    put(tmp_path / "t/other.a3m", B)
    with pytest.raises(InputError, match="one alignment for 2 different chains"):
        load_alignments(tmp_path, target)
    put(tmp_path / "t/B.a3m", B)
    assert [len(own) for own, _ in load_alignments(tmp_path, target)] == [1, 1]


def test_places_of_a_single_chain_are_those_of_its_target() -> None:
    place = PlaceFiles((Path("x.a3m"),), (Path("x/uniprot_hits.sto"),))
    chosen = choose_files({A: []}, [place], is_complex=False, is_joined=lambda path: False)
    assert chosen.files(A) == [Path("x.a3m"), Path("x/uniprot_hits.sto")]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"ur": 3}', '{"ur": {"files": [], "replaced": {"a.a3m": 1}}}']
)
def test_a_damaged_listing_lists_nothing(tmp_path: Path, content: str) -> None:
    path = put(tmp_path / "a.a3m", A)
    (tmp_path / LISTING).write_text(content)
    assert search_of(path) is None


def test_a_result_that_was_changed_is_the_user_s(tmp_path: Path) -> None:
    path = put(tmp_path / "ur_hits.a3m", A, "ur")
    assert search_of(path) == "ur"
    path.write_text(">mine\nMKV\n")
    assert search_of(path) is None
    listing = json.loads((tmp_path / LISTING).read_text())
    listing["ur"]["replaced"] = {path.name: [file_digest(path)]}  # the file of an interrupted search
    (tmp_path / LISTING).write_text(json.dumps(listing))
    assert search_of(path) == "ur"
    path.unlink()
    assert search_of(path) is None
