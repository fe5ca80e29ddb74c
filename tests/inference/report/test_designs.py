"""Designs and restraints on the page, from files that may be damaged."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.inference.report.details import _is_coverage, restraints_of
from fastfold.inference.report.discover import find_predictions
from fastfold.inference.report.groups import find_designs
from fastfold.products.design.saved import film_pdb
from tests.helpers.results import design_results, helix_prediction


def found(folder: Path, room: int = 10**6) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    return find_designs(folder, find_predictions(folder), room, said.append), said


def test_a_design_has_its_curve_film_and_verdicts(tmp_path: Path) -> None:
    trace = design_results(tmp_path)
    (design,), said = found(tmp_path)
    assert said == []
    assert design["rows"] == [0, 1, 2]
    assert design["loss"] == [3.0, 2.0, 1.0]
    assert design["plddt"] == [40.0, 50.0, 60.0]
    assert design["stages"] == [["soft", 0], ["hard", 2]]
    assert design["verdicts"] == {
        "d_seed_000": {"filters": "passed", "note": ""},
        "d_seed_000_mpnn_1": {"filters": "Average_pLDDT 0.4 < 0.8", "note": "charge +9, not 0 to 2"},
    }
    film = design["film"]
    assert (film["frames"], film["chains"], film["steps"]) == (3, [12, 10], [0, 1, 2])
    points = np.frombuffer(zlib.decompress(base64.b64decode(film["text"])), "<i2").reshape(3, 22, 3)
    last = points[-1] * film["step"]
    np.testing.assert_allclose(last, trace[-1] - trace[-1].mean(0), atol=0.02)


def test_a_film_of_one_frame_is_shown(tmp_path: Path) -> None:
    trace = design_results(tmp_path)[:1]
    (tmp_path / "trajectories" / "d_seed_000.pdb").write_text(film_pdb(trace, np.repeat([0, 1], [12, 10])))
    film = found(tmp_path)[0][0]["film"]
    assert (film["frames"], film["chains"], film["steps"]) == (1, [12, 10], [0])


def test_films_stay_within_their_room(tmp_path: Path) -> None:
    design_results(tmp_path)
    room = len(found(tmp_path)[0][0]["film"]["text"])
    for less, is_shown in ((0, True), (1, False)):
        (design,), said = found(tmp_path, room - less)
        assert (design["film"] is not None) == is_shown
        assert said == []


def test_a_link_to_trajectories_is_not_followed(tmp_path: Path) -> None:
    design_results(tmp_path)
    (tmp_path / "trajectories").rename(tmp_path / "others")
    (tmp_path / "trajectories").symlink_to(tmp_path / "others")
    assert found(tmp_path) == ([], [])


@pytest.mark.parametrize(
    ("name", "content", "is_listed"),
    [
        ("d_seed_000.jsonl", "{}", False),
        ("d_seed_000.jsonl", "", False),
        ("d_seed_000.jsonl", '{"loss": NaN, "mean_plddt": 1, "stage": "soft"}', False),
        ("d_seed_000.jsonl", '{"loss": 1, "mean_plddt": 1, "stage": "<b>"}', False),
        ("d_seed_000.pdb", "nothing", True),
        ("d_seed_000.pdb", film_pdb(np.zeros((5, 3, 3)), np.zeros(3, int)), True),
    ],
)
def test_damaged_files_are_left_out_with_a_line(
    tmp_path: Path, name: str, content: str, is_listed: bool
) -> None:
    design_results(tmp_path)
    (tmp_path / "trajectories" / name).write_text(content)
    designs, said = found(tmp_path)
    assert len(said) == 1
    assert "left out of the report" in said[0]
    assert [one["film"] for one in designs] == [None] * is_listed


_ATOM = "ATOM      1  CA  GLY A   1       0.000   0.000   0.000  1.00  0.00           C  \n"


@pytest.mark.parametrize(
    "film",
    [
        "nothing",
        f"MODEL 1\n{_ATOM}ENDMDL\nMODEL 2\n{_ATOM}{_ATOM.replace('A   1', 'A   2')}ENDMDL\nEND\n",
        f"MODEL 1\n{_ATOM}{_ATOM.replace('CA', 'CB')}ENDMDL\nEND\n",
    ],
    ids=["no frames", "frames of one and two residues", "two atoms of a residue"],
)
def test_frames_of_a_film_have_one_atom_for_each_residue_of_the_same_chains(
    tmp_path: Path, film: str
) -> None:
    design_results(tmp_path)
    (tmp_path / "trajectories" / "d_seed_000.pdb").write_text(film)
    (design,), (line,) = found(tmp_path)
    assert design["film"] is None
    assert line.endswith("its film has frames of different chains")


def test_other_folders_have_no_designs(tmp_path: Path) -> None:
    helix_prediction("T", 12).save(tmp_path, rank=1, plots=False)
    assert found(tmp_path) == ([], [])
    (tmp_path / "trajectories").mkdir()
    assert found(tmp_path) == ([], [])


def report(**changes: Any) -> dict[str, Any]:
    row = {
        "line": "line 2",
        "residues": [1, 3],
        "atoms": "any",
        "pairs": 4,
        "min": 0.0,
        "max": None,
        "group": "",
        "distance_before": 9.0,
        "distance": 7.0,
        "holds": True,
        "contradicts": ["line 3"],
        "plddt_gain_without": 2.0,
    }
    row |= {
        key: changes.pop(key)
        for key in ("probability", "usual_probability", "distance_without")
        if key in changes
    }
    top = {"satisfied_before": 0, "satisfied": 1, "total": 1, "steps": 5, "confidence_paid": 1.5}
    rows = [{**row, **{key: changes.pop(key) for key in list(changes) if key in row}}]
    return {"plddt": [1.0] * 3, "restraints": {**top, "leave_one_out": True, "restraints": rows, **changes}}


def test_restraints_are_shown_as_written() -> None:
    springs = {"confidence_paid": None, "evidence": -0.4, "doubtful": True, "satisfied_left_out": 1}
    scores = report(**springs, probability=0.1, usual_probability=0.2, distance_without=9.5)
    made = restraints_of(scores)
    assert made == scores["restraints"]
    assert restraints_of({"plddt": []}) is None
    earlier = report()
    for row in earlier["restraints"]["restraints"]:
        del row["atoms"], row["pairs"]
    assert restraints_of(earlier) == earlier["restraints"]


@pytest.mark.parametrize(
    "changes",
    [
        {"residues": [1, 4]},
        {"residues": [0, 1]},
        {"residues": "x"},
        {"distance": float("nan")},
        {"max": "far"},
        {"pairs": "many"},
        {"confidence_paid": "much"},
        {"evidence": "strong"},
        {"steps": "many"},
        {"restraints": 3},
        {"contradicts": 3},
    ],
)
def test_restraints_of_another_form_are_left_out(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its restraints have another form"):
        restraints_of(json.loads(json.dumps(report(**changes))))


def test_figures_of_the_table_are_shown(tmp_path: Path) -> None:
    design_results(tmp_path)
    columns = ("name", "filters", "note", "backbone_rmsd", "motif_rmsd", "seqid", "ring_gap")
    cells = ("d_seed_000", "", "", "9.29", "", "0.017", "")
    (tmp_path / "designs.tsv").write_text("\n".join(["\t".join(columns), "\t".join(cells), ""]))
    (design,), _ = found(tmp_path)
    figures = {"backbone_rmsd": "9.29", "seqid": "0.017"}
    assert design["verdicts"] == {"d_seed_000": {"filters": "", "note": ""} | figures}


def test_stages_begin_where_they_change(tmp_path: Path) -> None:
    """Losses have four decimals, pLDDT two; a stage may return."""
    design_results(tmp_path)
    path = tmp_path / "trajectories" / "d_seed_000.jsonl"
    steps = [
        {"loss": 1.00004 * n, "mean_plddt": 50.006 + n, "stage": stage}
        for n, stage in enumerate(
            ("screen", "screen", "soft", "temperature", "temperature", "soft", "mutate")
        )
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in steps))
    (design,), _ = found(tmp_path)
    assert design["stages"] == [["screen", 0], ["soft", 2], ["temperature", 3], ["soft", 5], ["mutate", 6]]
    assert design["loss"] == [0.0, 1.0, 2.0001, 3.0001, 4.0002, 5.0002, 6.0002]
    assert design["plddt"] == [50.01, 51.01, 52.01, 53.01, 54.01, 55.01, 56.01]
    # Three frames of seven steps.
    assert design["film"]["steps"] == [0, 3, 6]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"chain_lengths": [3, 1]},
        {"identity_edges": None},
        {"identity_edges": (0, 0.5, 1)},
        {"identity_edges": [0, 1]},
        {"identity_edges": [0, "0.5", 1]},
        {"depth_by_identity": None},
        {"depth_by_identity": [[1, 2, 3, 4, 5]]},
        {"depth_by_identity": [[1, 2, 3, 4, 5], [1, 2, 3, 4]]},
        {"depth_by_identity": [[1, 2, 3, 4, 5], 5]},
        {"depth_by_identity": [[1, 2, 3, 4, 5], [1, 2, 3, 4, None]]},
        {"rows": 7},
    ],
)
def test_the_coverage_of_other_chains_or_forms_is_left_out(changes: dict[str, Any]) -> None:
    value = {
        "chain_lengths": [3, 2],
        "identity_edges": [0, 0.5, 1],
        "depth_by_identity": [[1, 2, 3, 4, 5], [0, 0, 0, 0, 0]],
        "rows": [5],
    }
    assert _is_coverage(value | changes, {"sequences": ["MKV", "LA"]}) == (not changes)
