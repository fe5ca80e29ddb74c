"""Numbers that rank predictions and end a run, and plots of coverages that are missing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.data.msa.msa import parse_a3m
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError
from fastfold.inference.config import InferConfig
from fastfold.inference.output import writer
from fastfold.inference.output.results_folder import PredictionRecord
from fastfold.inference.output.writer import (
    draw_missing_coverage,
    draw_plot,
    find_coverage,
    ranking_scores,
    stops,
)
from tests.helpers.results import helix_prediction

ROWS: list[dict[str, Any]] = [
    {"plddt": 90.0, "ptm": 0.5, "iptm": 0.25, "has_clash": False},
    {"plddt": 80.0, "ptm": 0.75, "iptm": 0.5, "has_clash": True},
    {"plddt": 70.0, "ptm": 1.0, "iptm": None},
]


@pytest.mark.parametrize(
    ("by", "rows", "expected"),
    [
        ("auto", ROWS[:2], [0.3, 0.55 - 100]),  # 0.8 · ipTM + 0.2 · pTM
        ("auto", ROWS, [90.0, -20.0, 70.0]),
        ("multimer", ROWS, [0.3, 0.55 - 100, -math.inf]),
        ("plddt", ROWS, [90.0, -20.0, 70.0]),
        ("ptm", ROWS, [0.5, -99.25, 1.0]),
        ("iptm", ROWS, [0.25, -99.5, -math.inf]),
        ("multimer", [{"multimer": 0.4, "ptm": None, "iptm": 0.5}], [0.4]),
    ],
)
def test_clashes_and_missing_scores_rank_last(
    by: str, rows: list[dict[str, Any]], expected: list[float]
) -> None:
    assert ranking_scores(by, rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sequence", "limit", "is_enough"),
    [
        ("MKV", None, False),
        ("MKV", 90.0, True),
        ("MKV", 90.1, False),
        ("MKV", 31.0, True),
        ("MKV:MKV", 30.0, True),  # a hundred times the confidence of a complex
        ("MKV:MKV", 30.1, False),
    ],
)
def test_a_score_that_is_reached_ends_a_run(sequence: str, limit: float | None, is_enough: bool) -> None:
    row = {"plddt": 90.0, "ptm": 0.5, "iptm": 0.25}
    assert stops(InferConfig(stop_at_score=limit), row, target_from_sequence(sequence)) is is_enough


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize("has_picture", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_coverages_are_drawn_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool, has_picture: bool, again: bool
) -> None:
    written: dict[str, bytes] = {}
    results: Any = SimpleNamespace(shared=lambda ending: tmp_path / f"t{ending}", write_shared=written.update)
    monkeypatch.setattr(
        writer, "coverage_png", lambda coverage, title: f"{title} {coverage['rows']}".encode()
    )
    if has_file:
        (tmp_path / "t_coverage.json").write_text(json.dumps({"rows": 3}))
    if has_picture:
        (tmp_path / "t_coverage.png").write_bytes(b"")
    is_drawn = has_file and (again or not has_picture)
    assert draw_missing_coverage(results, "n" * 101, again=again) is is_drawn
    assert written == ({"_coverage.png": b"Alignments of " + b"n" * 100 + b" 3"} if is_drawn else {})


def test_a_damaged_coverage_is_named(tmp_path: Path) -> None:
    (tmp_path / "t_coverage.json").write_text("[")
    results: Any = SimpleNamespace(shared=lambda ending: tmp_path / f"t{ending}")
    with pytest.raises(InputError, match=r"t_coverage\.json"):
        draw_missing_coverage(results, "t")


def test_targets_have_a_coverage_with_any_row() -> None:
    """Numbers of residues are those of parts of chains."""
    target = target_from_sequence("MKVL:MKVL")
    msa, empty = parse_a3m(">q\nMKVL\n>h\nM-VL\n"), ([], [])
    assert find_coverage([empty, empty], target) is None
    found = find_coverage([empty, ([msa], [])], target)
    assert found is not None
    assert "residue_ranges" not in found


@pytest.mark.parametrize("has_errors", [True, False])
def test_a_plot_is_drawn_from_the_files_of_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_errors: bool
) -> None:
    """Residues and chains are those of the file; aligned errors are left out where there is no file of them."""
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        writer, "confidence_png", lambda *arrays, **more: drawn.append((*arrays, more)) or b""
    )
    prediction = helix_prediction("t", 6, 4)
    files = {
        end: text for end, text in prediction.files(plots=False).items() if has_errors or end != "_pae.json"
    }
    for ending, text in files.items():
        (tmp_path / f"t{ending}").write_bytes(text if isinstance(text, bytes) else text.encode())
    results: Any = SimpleNamespace(path=lambda record, ending: tmp_path / f"t{ending}")
    draw_plot(results, PredictionRecord("0" * 64, "t", dict.fromkeys(files, (0, "")), {}))
    ((plddt, chain, more),) = drawn
    assert plddt == pytest.approx(prediction.plddt, abs=0.01)
    assert chain.tolist() == [0] * 6 + [1] * 4
    title = "Predicted structure of t by model_1_multimer_v3"
    assert (more["ptm"], more["iptm"], more["title"]) == (0.71, 0.62, title)
    if has_errors:
        assert more["pae"] == pytest.approx(prediction.pae, abs=0.01)
        assert more["max_pae"] == 31.75
    else:
        assert (more["pae"], more["max_pae"]) == (None, None)
