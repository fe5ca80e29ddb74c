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
    assert [target.name for target in targets] == ["A", "B", "B_and_A", "A_and_B", "C_and_A", "C_and_B"]
    assert errors == []


def test_a_target_that_two_lists_name_is_reported_and_folded_once(tmp_path: Path):
    ab = fasta(tmp_path, "ab.fasta", A="MKT", B="GSH")
    lists = TargetLists(all_vs_all=ab, baits=ab, candidates=(ab,))
    targets, errors = screen_targets(lists)
    assert [target.name for target in targets] == ["A_and_B", "A_and_A", "B_and_B"]
    (error,) = errors
    assert (
        str(error)
        == f"{ab} (record 'A_and_B'): the identifier was used before, at {ab}; rename one of the two"
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
