"""The lists of a screen together."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.workers.options import ScreenOptions, TargetLists
from fastfold.products.screen.targets import screen_targets


def fasta(folder: Path, name: str, **records: str) -> Path:
    path = folder / name
    path.write_text("".join(f">{key}\n{value}\n" for key, value in records.items()))
    return path


def test_all_lists_count_together_under_unique_names(tmp_path: Path):
    ab = fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    table = tmp_path / "pairs.csv"
    table.write_text("chain_1,chain_2\nB,A\n")
    lists = TargetLists(
        inputs=(ab, table),
        proteins=ab,
        all_vs_all=ab,
        baits=fasta(tmp_path, "c.fasta", C="AWL"),
        candidates=(ab,),
    )
    targets, errors = screen_targets(lists)
    assert [target.name for target in targets] == ["A", "B", "B_and_A", "C_and_A", "C_and_B"]
    assert errors == []


def test_a_complex_that_two_lists_name_is_folded_once(tmp_path: Path):
    ab = fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    complexes = tmp_path / "complexes.txt"
    complexes.write_text("B+A\nA:2\nB:1-2+A\n")
    lists = TargetLists(inputs=(complexes,), proteins=ab, all_vs_all=ab, baits=ab, candidates=(ab,))
    targets, errors = screen_targets(lists)
    assert [target.name for target in targets] == ["B_and_A", "A_x2", "B_1-2_and_A", "B_and_B"]
    assert errors == []


@pytest.mark.parametrize("place", ["inputs", "all_vs_all", "baits", "candidates"])
def test_names_without_their_proteins_say_what_is_missing(tmp_path: Path, place: str):
    names, ab = tmp_path / "names.txt", fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    names.write_text("A\nB\n")
    lists = {
        "inputs": TargetLists(inputs=(names,)),
        "all_vs_all": TargetLists(all_vs_all=names),
        "baits": TargetLists(baits=names, candidates=(ab,)),
        "candidates": TargetLists(baits=ab, candidates=(names,)),
    }
    targets, (error,) = screen_targets(lists[place])
    assert targets == []
    assert "is a list of names, because it has no '>' header; give proteins=FILE" in str(error)


def test_complexes_with_names_of_their_own_are_kept(tmp_path: Path):
    ab = fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    table = tmp_path / "pairs.csv"
    table.write_text("id,chain_1,chain_2\nfirst,A,B\nsecond,B,A\n")
    targets, errors = screen_targets(TargetLists(inputs=(table,), proteins=ab, all_vs_all=ab))
    assert [target.name for target in targets] == ["first", "second", "A_and_B"]
    assert errors == []


def test_complexes_of_one_name_with_other_sequences_are_reported(tmp_path: Path):
    ab = fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    other = fasta(tmp_path, "other.fasta", A="MKV")
    b = fasta(tmp_path, "b.fasta", B="GSH")
    targets, (error,) = screen_targets(TargetLists(all_vs_all=ab, baits=other, candidates=(b,)))
    assert [target.name for target in targets] == ["A_and_B"]
    assert (
        str(error)
        == f"{other} (record 'A_and_B'): the identifier was used before, at {ab}; rename one of the two"
    )


def test_errors_of_every_list_are_kept_and_the_rest_is_used(tmp_path: Path):
    table = tmp_path / "pairs.csv"
    table.write_text("chain_1,chain_2\nA,Z\nA,B\n")
    bad = tmp_path / "bad.csv"
    bad.write_text("chain_1,chain_3\nA,B\n")
    proteins = fasta(tmp_path, "p.fasta", A="MKT", B="GSH", C="M1")
    targets, errors = screen_targets(TargetLists(inputs=(table, bad), proteins=proteins))
    assert [target.name for target in targets] == ["A_and_B"]
    assert len(errors) == 3


def test_lists_that_make_no_sense_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="no targets"):
        TargetLists()
    with pytest.raises(ConfigError, match="need each other"):
        TargetLists(baits=tmp_path)
    with pytest.raises(ConfigError, match="cpus_per_worker"):
        ScreenOptions(cpus_per_worker=0)
