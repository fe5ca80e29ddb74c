"""Ensembles on the page, from files that may be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.inference.report.discover import find_predictions
from fastfold.inference.report.groups import find_ensembles
from tests.helpers.results import helix_prediction


def written(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[str]]:
    for rank in (1, 2, 3):
        helix_prediction("T", 12, seed=rank).save(folder, rank=rank, plots=False)
    predictions = find_predictions(folder)
    names = [one.stem for one in predictions]
    motion = {"rotation": np.eye(3).tolist(), "translation": [0.0, 0.0, 0.0]}
    values: dict[str, Any] = {
        "samples": [names[2], names[0], "gone"],
        "clusters": [1, 1, 2],
        "components": [[1.0, 2.0, 3.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
        "variance": [0.7, 0.2, 0.1],
        "representatives": [names[0], "gone"],
        "motions": [motion, motion],
    }
    (folder / "T_ensemble.json").write_text(json.dumps(values | changes))
    (folder / "T_ensemble_pairs.png").write_bytes(b"")
    said: list[str] = []
    return find_ensembles(folder, predictions, 10**6, said.append), said


def test_members_are_matched_by_name(tmp_path: Path):
    (found,), said = written(tmp_path)
    assert said == []
    assert found["members"] == [
        {"row": 2, "cluster": 1, "x": 1.0, "y": 2.0},
        {"row": 0, "cluster": 1, "x": -1.0, "y": 0.0},
    ]
    assert found["shares"] == [0.7, 0.2]
    assert found["files"] == ["T_ensemble.json", "T_ensemble_pairs.png"]
    assert [(one["row"], one["cluster"]) for one in found["overlay"]] == [(0, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"clusters": [1, 1]},
        {"clusters": [0, 1, 1]},
        {"components": [[1.0, 2.0]]},
        {"components": [["x"], [0.0], [0.0]]},
        {"samples": ["gone", "gone", "gone"]},
        {"variance": [float("nan")]},
        {"motions": [{"rotation": [[2.0, 0, 0], [0, 1, 0], [0, 0, 1]], "translation": [0, 0, 0]}]},
    ],
)
def test_a_damaged_file_is_left_out_with_a_line(tmp_path: Path, changes: dict[str, Any]):
    found, said = written(tmp_path, **changes)
    assert found == []
    assert len(said) == 1
    assert said[0].startswith("T_ensemble.json: left out of the report, ")
