"""Ensembles on the page, from files that may be damaged."""

from __future__ import annotations

import base64
import json
import zlib
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
        {"variance": [0.5, float("nan")]},
        {"components": [[1.0, 2.0], [1.0, float("inf")], [0.0, 0.0]]},
        {"motions": [{"rotation": [[2.0, 0, 0], [0, 1, 0], [0, 0, 1]], "translation": [0, 0, 0]}]},
    ],
)
def test_a_damaged_file_is_left_out_with_a_line(tmp_path: Path, changes: dict[str, Any]):
    found, said = written(tmp_path, **changes)
    assert found == []
    assert len(said) == 1
    assert said[0].startswith("T_ensemble.json: left out of the report, ")


@pytest.mark.parametrize("ending", [".cif", ".pdb"])
def test_the_overlay_reads_either_kind_of_structure(tmp_path: Path, ending: str):
    written(tmp_path)
    for path in tmp_path.glob(f"*_seed_?{ending}"):
        path.unlink()
    said: list[str] = []
    (found,) = find_ensembles(tmp_path, find_predictions(tmp_path), 10**6, said.append)
    assert said == []
    assert [one["row"] for one in found["overlay"]] == [0]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_components_are_shown_and_missing_ones_are_zero(tmp_path: Path, number: int):
    components = [[float(10 * row + column) for column in range(1, number + 1)] for row in range(3)]
    (found,), said = written(tmp_path, components=components, variance=[0.5, 0.25, 0.125][:number])
    assert said == []
    assert [(one["x"], one["y"]) for one in found["members"]] == [
        (1.0, 2.0 if number > 1 else 0.0),
        (11.0, 12.0 if number > 1 else 0.0),
    ]
    assert found["shares"] == [0.5, 0.25 if number > 1 else 0.0]


@pytest.mark.parametrize(
    "damage", [{"clusters": [1.0, 1.0, 2.0]}, {"clusters": [[1, 1, 2]]}, {"samples": []}]
)
def test_clusters_are_whole_numbers_of_samples(tmp_path: Path, damage: dict[str, Any]):
    found, said = written(tmp_path, **damage)
    assert (found, len(said)) == ([], 1)


def test_the_overlay_has_the_first_eight_clusters_within_its_room(tmp_path: Path):
    """Representatives that are gone have no structure, and keep the number of their cluster; motions turn the atoms."""
    predictions = []
    for rank in range(1, 10):
        helix_prediction("T", 12, seed=rank).save(tmp_path, rank=rank, plots=False)
    predictions = find_predictions(tmp_path)
    names = [one.stem for one in predictions]
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    motion = {"rotation": turn.tolist(), "translation": [1.0, 2.0, 3.0]}
    values = {
        "samples": names,
        "clusters": [*range(1, 10)],
        "components": [[0.0]] * 9,
        "variance": [1.0],
        "representatives": [names[0], "gone", 5, *names[3:]],
        "motions": [motion] * 9,
    }
    (tmp_path / "T_ensemble.json").write_text(json.dumps(values))
    (found,) = find_ensembles(tmp_path, predictions, 10**9, print)
    assert [(one["row"], one["cluster"]) for one in found["overlay"]] == [
        (i, i + 1) for i in (0, 3, 4, 5, 6, 7)
    ]
    first = found["overlay"][0]
    atoms = helix_prediction("T", 12, seed=1)
    data = zlib.decompress(base64.b64decode(first["text"]))[12 * 5 :]
    points = np.frombuffer(data, "<i2").reshape(-1, 3) * first["structure"]["step"]
    expected = atoms.atom_positions[atoms.atom_mask > 0] @ turn.T + [1.0, 2.0, 3.0]
    np.testing.assert_allclose(points, expected, atol=0.01)
    room = sum(len(one["text"]) for one in found["overlay"])
    for less, shown in ((0, 6), (1, 0)):
        (found,) = find_ensembles(tmp_path, predictions, room - less, print)
        assert len(found["overlay"]) == shown
