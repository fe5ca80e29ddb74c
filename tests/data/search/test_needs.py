"""What a search is for, and what a line says of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.queries.pairs import read_complexes
from fastfold.data.search.needs import find_needs
from fastfold.data.search.settings import PairMode
from fastfold.data.search.store import FOLDER, SearchKey, SearchStore, publish, withdraw
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError

A, B = "MKV", "LLAA"
DIMER = target_from_sequence(f"{A}:{B}", "t")


def put(path: Path, query: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f">q\n{query}\n")
    return path


def searched(folder: Path, place: str, search: str, name: str, query: str = A) -> None:
    """Put the result of a search into a folder of alignments."""
    key = SearchKey(search, {})
    files = SearchStore(folder / FOLDER).add(query, key, {name: f">q\n{query}\n".encode()})
    publish(folder / place, key, files)


def test_everything_is_missing_from_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    needs = find_needs(tmp_path / "none", DIMER, by_colabfold=True)
    assert (needs.own, needs.pairs) == ({A, B}, {A, B})
    assert needs.line(has_pairing=True) == ""
    assert needs.is_hetero
    with pytest.raises(InputError, match="is not a folder"):
        find_needs(put(tmp_path / "file", A), DIMER, by_colabfold=True)


@pytest.mark.parametrize(
    ("pair_mode", "none", "some", "every"),
    [
        ("unpaired_paired", True, True, False),
        ("unpaired", False, False, False),
        ("paired", True, True, True),
    ],
)
def test_pairs_are_made_together_with_an_alignment_of_a_chain(
    tmp_path: Path, pair_mode: PairMode, none: bool, some: bool, every: bool
) -> None:
    found = []
    for name in ("", "t_A.a3m", "t_B.a3m"):
        if name:
            put(tmp_path / name, A if "A" in name else B)
        found.append(find_needs(tmp_path, DIMER, by_colabfold=True).has_pairing(pair_mode))
    assert found == [none, some, every]
    twins = find_needs(tmp_path, target_from_sequence(f"{A}:{A}", "x"), by_colabfold=True)
    assert not twins.has_pairing(pair_mode)


def test_uniprot_is_for_chains_without_its_hits(tmp_path: Path) -> None:
    put(tmp_path / "t_A.a3m", A)
    put(tmp_path / "t_A/uniprot_hits.a3m", A)
    needs = find_needs(tmp_path, DIMER, by_colabfold=False)
    assert [needs.wants(sequence, "uniprot") for sequence in (A, B)] == [False, True]
    assert [needs.wants(sequence, "uniref90") for sequence in (A, B)] == [False, True]
    put(tmp_path / "s.a3m", A)
    single = find_needs(tmp_path, target_from_sequence(A, "s"), by_colabfold=False)
    assert not single.wants(A, "uniprot")
    assert find_needs(tmp_path, target_from_sequence(A, "r"), by_colabfold=False).wants(A, "uniprot")


def test_uniprot_is_for_different_parts_of_one_protein(tmp_path: Path) -> None:
    """Also where the protein has an alignment; a server does not pair a protein with itself."""
    put(tmp_path / "P.a3m", B)
    (parts, copies), _ = read_complexes(
        _lines(tmp_path, "P:1-2+P:3-4\nP:2:1-2\n"), [target_from_sequence(B, "P")]
    )
    for target, is_paired in ((parts, True), (copies, False)):
        needs = find_needs(tmp_path, target, by_colabfold=False)
        assert (needs.is_paired, needs.wants(B, "uniprot"), needs.wants(B, "uniref90")) == (
            is_paired,
            is_paired,
            False,
        )
        assert not find_needs(tmp_path, target, by_colabfold=True).has_pairing("unpaired_paired")


def _lines(folder: Path, text: str) -> Path:
    path = folder / "complexes.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize("by_colabfold", [True, False])
def test_only_searches_of_another_kind_replace_one(tmp_path: Path, by_colabfold: bool) -> None:
    searched(tmp_path, "x", "uniref90", "uniref90_hits.a3m")
    searched(tmp_path, "y", "colabfold", "colabfold_hits.a3m")
    missing = [
        bool(find_needs(tmp_path, target_from_sequence(A, n), by_colabfold=by_colabfold).own) for n in "xy"
    ]
    assert missing == [not by_colabfold, by_colabfold]


def test_a_line_lists_chains_and_files(tmp_path: Path) -> None:
    files = [put(tmp_path / "t" / "A" / f"{k}.a3m", A) for k in range(5)]
    needs = find_needs(tmp_path, DIMER, by_colabfold=True)
    shown = ", ".join(map(str, files[:3]))
    assert needs.line(has_pairing=False) == f"t: chain A uses {shown} and 2 more; searching chain B"
    put(tmp_path / "t_B.a3m", B)
    needs = find_needs(tmp_path, DIMER, by_colabfold=True)
    assert needs.line(has_pairing=False).endswith(f", chain B uses {tmp_path / 't_B.a3m'}; not searched")


def test_a_withdrawn_result_leaves_files_of_others(tmp_path: Path) -> None:
    searched(tmp_path, "x", "colabfold", "colabfold_hits.a3m")
    searched(tmp_path, "x", "ur", "ur_hits.a3m")
    mine = put(tmp_path / "x" / "mine.a3m", A)
    withdraw(tmp_path / "x", "colabfold")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "mine.a3m",
        "search.json",
        "ur_hits.a3m",
    ]
    withdraw(tmp_path / "x", "ur")
    assert [*(tmp_path / "x").iterdir()] == [mine]
    searched(tmp_path, "y", "ur", "ur_hits.a3m")
    (tmp_path / "y" / "ur_hits.a3m").unlink()
    put(tmp_path / "y" / "ur_hits.a3m", B)  # changed by the user
    withdraw(tmp_path / "y", "ur")
    assert [path.name for path in (tmp_path / "y").iterdir()] == ["ur_hits.a3m"]
    searched(tmp_path, "z", "ur", "ur_hits.a3m")
    withdraw(tmp_path / "z", "ur")
    withdraw(tmp_path / "z", "ur")
    assert not (tmp_path / "z").exists()
