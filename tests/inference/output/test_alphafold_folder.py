"""A target's folder has the files that AlphaFold writes, whatever was there before."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.errors import PlaceError
from fastfold.inference.output.results_folder import ResultsFolder, TargetResults
from fastfold.inference.output.target_files import ranking_debug, write_alphafold_folder


def by_plddt(scores: Sequence[Mapping[str, Any]]) -> list[float]:
    return [one["plddt"] for one in scores]


def add(results: TargetResults, number: int, plddt: float, **scores: float) -> None:
    files = {".pdb": f"atoms {number}", "_pae.json": f"errors {number}"}
    listed = {"model": "model_1_multimer_v3", "seed": 3, "plddt": plddt, **scores}
    results.add(f"{number:064x}", f"key_{number}", files, listed, by_plddt)


@pytest.fixture
def results(tmp_path: Path) -> TargetResults:
    return ResultsFolder(tmp_path, output_format="colabfold").target(target_from_sequence("MKTAYIAKQR", "t"))


def contents(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in folder.iterdir()
        if path.suffix != ".json" or "pae" in path.name
    }


def test_the_folder_follows_the_ranks(results: TargetResults, monkeypatch: pytest.MonkeyPatch) -> None:
    """With links between files and without them."""
    folder = results.parent.path / "t"
    write_alphafold_folder(results)
    assert not folder.exists()
    add(results, 1, 50.0, ptm=0.5, iptm=0.5)
    for _ in range(2):  # the second time over links to the same files
        write_alphafold_folder(results)
    assert contents(folder) == {"ranked_0.pdb": "atoms 1", "pae_model_1_multimer_v3_pred_3.json": "errors 1"}

    def no_links(*arguments: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    add(results, 2, 60.0, ptm=1.0, iptm=0.75)
    write_alphafold_folder(results)
    assert contents(folder) == {
        "ranked_0.pdb": "atoms 2",
        "ranked_1.pdb": "atoms 1",
        "pae_model_1_multimer_v3_pred_3.json": "errors 2",
    }
    debug = json.loads((folder / "ranking_debug.json").read_text())
    second = "model_1_multimer_v3_pred_3_00000000"  # network and seed of the first
    assert debug == {
        "iptm+ptm": {"model_1_multimer_v3_pred_3": 0.8, second: 0.5},
        "iptm": {"model_1_multimer_v3_pred_3": 0.75, second: 0.5},
        "order": ["model_1_multimer_v3_pred_3", second],
    }
    results.remove([f"{2:064x}"])
    results.rank(by_plddt)
    write_alphafold_folder(results)
    assert contents(folder) == {"ranked_0.pdb": "atoms 1", "pae_model_1_multimer_v3_pred_3.json": "errors 1"}
    assert not list(results.parent.path.rglob("*.tmp"))


def test_single_chains_are_ranked_by_plddt(results: TargetResults) -> None:
    add(results, 1, 50.0)
    assert ranking_debug(results.records()) == {
        "plddts": {"model_1_multimer_v3_pred_3": 50.0},
        "order": ["model_1_multimer_v3_pred_3"],
    }


def test_a_folder_or_link_of_someone_else_is_refused(results: TargetResults, tmp_path: Path) -> None:
    add(results, 1, 50.0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (results.parent.path / "t").symlink_to(elsewhere)
    with pytest.raises(PlaceError, match="t was not made by FastFold; remove it"):
        write_alphafold_folder(results)
    (results.parent.path / "t").unlink()
    write_alphafold_folder(results)
    (results.parent.path / "t").rename(tmp_path / "moved")
    (results.parent.path / "t").symlink_to(elsewhere)  # after the folder was FastFold's
    with pytest.raises(PlaceError, match="t was not made by FastFold; remove it"):
        write_alphafold_folder(results)
    assert not list(elsewhere.iterdir())
