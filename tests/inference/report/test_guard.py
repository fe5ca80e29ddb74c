"""A prediction that cannot be shown is left out of the page with a reason; the others are shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastfold.errors import InputError
from fastfold.inference.output.score_files import MAX_SCORES_BYTES
from fastfold.inference.report import write_report
from fastfold.inference.report.discover import find_predictions, leaving_out
from tests.helpers.results import helix_prediction
from tests.inference.report.test_report import meta_of

HUGE = int("9" * 401)

pytestmark = pytest.mark.usefixtures("no_viewer")


def targets_of(folder: Path, said: list[str]) -> list[str]:
    """Targets on the page of a folder."""
    return [row["target"] for row in meta_of(write_report(folder, say=said.append))["rows"]]


def change(path: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("plddt", [HUGE] * 6),
        ("plddt", [1.0] * 5 + [-HUGE]),
        ("name", "n" * 5000),
    ],
    ids=["huge-plddt", "huge-negative", "long-name"],
)
def test_bad_scores_leave_out_one_prediction(tmp_path: Path, entry: str, value: Any) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    paths = helix_prediction("bad", 6).save(tmp_path, plots=False)
    change(paths["scores"], lambda scores: scores.update({entry: value}))
    said: list[str] = []
    assert targets_of(tmp_path, said) == ["good"]
    assert len(said) == 1
    assert said[0].startswith(f"{paths['scores'].stem.removesuffix('_scores')}")
    assert "left out of the report, " in said[0]


@pytest.mark.parametrize("largest", [HUGE, 31.75], ids=["maximum", "element"])
def test_a_huge_aligned_error_leaves_out_its_file_alone(tmp_path: Path, largest: float) -> None:
    paths = helix_prediction("bad", 6).save(tmp_path, plots=False)

    def edit(pae: Any) -> None:
        pae[0]["max_predicted_aligned_error"] = largest
        pae[0]["predicted_aligned_error"][2][3] = HUGE

    change(paths["pae"], edit)
    said: list[str] = []
    assert targets_of(tmp_path, said) == ["bad"]
    assert said == [f"{paths['pae'].name}: left out of the report, it is not an aligned error"]


@pytest.mark.parametrize("depth", [450, 700, 980, 100_000])
@pytest.mark.parametrize("ending", ["scores", "config"])
def test_deep_json_leaves_out_what_it_is_in(tmp_path: Path, ending: str, depth: int) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    path = helix_prediction("bad", 6).save(tmp_path, plots=False, settings={"x": 1})[ending]
    content = path.read_text().rstrip().removesuffix("}")
    path.write_text(f'{content}, "interfaces": {"[" * depth}{"]" * depth}}}')
    said: list[str] = []
    targets = targets_of(tmp_path, said)
    assert "good" in targets
    if said:  # how deep is too deep depends on the interpreter
        assert " left out of the report, " in said[0]
    assert ("bad" in " ".join(targets)) == (ending == "config" or not said)
    assert said or depth < 100_000


def test_an_error_that_nobody_thought_of_leaves_out_one_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    helix_prediction("bad", 7).save(tmp_path, plots=False)

    def row(prediction: Any, pairs: Any) -> dict[str, Any]:
        if prediction.target.startswith("bad"):
            raise ZeroDivisionError("division by zero")
        return {"target": prediction.target}

    monkeypatch.setattr("fastfold.inference.report.write._row", row)
    said: list[str] = []
    assert targets_of(tmp_path, said) == ["good"]
    assert "division by zero" in said[0]


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    with (tmp_path / "large_scores.json").open("wb") as file:
        file.truncate(MAX_SCORES_BYTES + 1)
    paths = helix_prediction("wide", 6).save(tmp_path, plots=False)
    with paths["pae"].open("rb+") as file:
        file.truncate(2**25)
    said: list[str] = []
    assert targets_of(tmp_path, said) == ["good", "wide"]
    assert [line.split(":")[0] for line in said] == ["large_scores.json", paths["pae"].name]
    assert all("expected at most" in line for line in said)


def test_files_that_vanish_after_the_listing_are_left_out(tmp_path: Path) -> None:
    helix_prediction("good", 6).save(tmp_path, plots=False)
    paths = helix_prediction("bad", 6).save(tmp_path, plots=False)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        for path in paths.values():
            path.unlink(missing_ok=True)

    (tmp_path / "a_scores.json").write_text("{")  # its line is said while files are read
    assert [one.target for one in find_predictions(tmp_path, say)] == ["good"]
    assert said[1:] == [
        f"{paths['scores'].name}: left out of the report, it cannot be read: No such file or directory"
    ]


def test_an_error_of_any_kind_leaves_one_item_out_with_its_reason(tmp_path: Path) -> None:
    said: list[str] = []
    errors = (
        ValueError("expected an object"),
        RecursionError("too deep"),
        OverflowError("int too large"),
        InputError("is damaged"),
        FileNotFoundError(2, "No such file or directory"),
    )
    for error in errors:
        with leaving_out("a_scores.json", said.append):
            raise error
    assert said == [
        "a_scores.json: left out of the report, expected an object",
        "a_scores.json: left out of the report, it cannot be read: too deep",
        "a_scores.json: left out of the report, it cannot be read: int too large",
        "a_scores.json: left out of the report, is damaged",
        "a_scores.json: left out of the report, it cannot be read: No such file or directory",
    ]
