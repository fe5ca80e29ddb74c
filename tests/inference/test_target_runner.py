"""One target of a run: what is said of it, and its comparison with an experiment. The folds are in ``runner``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.data.targets import Chain, Target
from fastfold.errors import InputError, WeightsError
from fastfold.inference import target_runner
from fastfold.inference.config import InferConfig
from fastfold.inference.output.references import report_comparison
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.request import RunOptions
from fastfold.inference.target_runner import TargetRunner
from tests.helpers.results import helix_prediction


class _Said:
    """A progress that keeps what it is told, and whether it is important."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []

    def line(self, text: str, *, important: bool = False) -> None:
        self.lines.append((text, important))


def _runner(folder: Path, options: RunOptions, networks: list[Any]) -> tuple[TargetRunner, _Said]:
    said = _Said()
    runner = TargetRunner(
        networks,
        ResultsFolder(folder),
        torch.device("cpu"),
        InferConfig(precision="fp32"),
        options,
        said,  # type: ignore[arg-type]
    )
    return runner, said


def test_a_finished_target_is_compared_with_its_structure(tmp_path: Path) -> None:
    """A structure equal to the prediction, then none of its name, then no folder of structures at all."""
    runner, said = _runner(tmp_path / "out", RunOptions(), [])
    prediction = helix_prediction("t", 12)
    target = Target("t", (Chain("A", prediction.sequences[0]),), "", "t", ())
    results = runner.folder.target(target)
    results.add("0" * 64, "key", prediction.files(plots=False), {}, lambda scores: [0.0] * len(scores))
    truth = tmp_path / "truth"
    prediction.save(truth, plots=False)["pdb"].rename(truth / "t.pdb")
    report_comparison(runner.progress, results, target, "1/1 t", truth)
    assert said.lines == [
        (
            "1/1 t: against t.pdb: TM-score 1.000, lDDT-CA 1.000, GDT-TS 1.000, 12 of 12 residues",
            False,
        )
    ]
    assert "t_rank_001_key" in json.loads((tmp_path / "out" / "t_reference.json").read_text())
    # A structure of another protein, here of histidines alone.
    lines = (truth / "t.pdb").read_text().splitlines()
    others = [line[:17] + "HIS" + line[20:] if line.startswith("ATOM") else line for line in lines]
    (truth / "t.pdb").write_text("\n".join(others) + "\n")
    report_comparison(runner.progress, results, target, "1/1 t", truth)
    (problem, is_important) = said.lines.pop()
    assert is_important
    assert problem.startswith(
        "warning: t: not comparable with t.pdb: the prediction and the reference do not share"
    )
    found = json.loads((tmp_path / "out" / "t_reference.json").read_text())
    assert found.keys() == {"schema_version", "name", "reference", "kind", "backbone", "not_comparable"}
    (truth / "t.pdb").unlink()
    report_comparison(runner.progress, results, target, "1/1 t", truth)
    assert said.lines[1:] == [(f"warning: t: no structure of this name in {truth}", True)]
    with pytest.raises(InputError, match="no such file or folder"):
        report_comparison(runner.progress, results, target, "1/1 t", tmp_path / "nowhere")


def _network(name: str, problem: str = "") -> SimpleNamespace:
    def load(precision: str) -> None:
        assert precision == "fp32"
        if problem:
            raise WeightsError(problem)

    return SimpleNamespace(name=name, load=load)


@pytest.mark.parametrize(
    ("skip", "networks", "kept"),
    [
        (True, [_network("a", "a is damaged"), _network("b")], ["b"]),
        (False, [_network("a", "a is damaged"), _network("b")], None),
        (True, [_network("a", "a is damaged")], None),  # nothing would be left
    ],
)
def test_weights_that_cannot_be_used_end_the_run_or_are_left_out(
    tmp_path: Path, skip: bool, networks: list[Any], kept: list[str] | None
) -> None:
    runner, said = _runner(tmp_path, RunOptions(skip_bad_weights=skip), networks)
    if kept is None:
        with pytest.raises(WeightsError, match="a is damaged"):
            runner._check_networks()
        return
    runner._check_networks()
    runner.networks[0].load = None  # type: ignore[assignment,method-assign]
    runner._check_networks()  # the second time nothing is loaded and nothing said
    assert [network.name for network in runner.networks] == kept
    assert said.lines == [("warning: left out: a is damaged", True)]


class _Folder:
    """Records of a target, best first, of which the second is relaxed."""

    def __init__(self, files: tuple[str, ...] = ()) -> None:
        scores = ({}, {"relaxation": 1}, {}, {})
        self.stem, self.state = "t", Path("state")
        self.parent = SimpleNamespace(path=Path("out"), output_format="fastfold", style="fastfold")
        self._records = [
            SimpleNamespace(id=f"r{i}", scores=one, files=dict.fromkeys(files))
            for i, one in enumerate(scores)
        ]

    def records(self) -> list[Any]:
        return list(self._records)


def _sent(steps: Any, answer: Any) -> tuple[list[Any], Any]:
    """Return the work that a generator waits for, and its result when it gets an answer."""
    asked: list[Any] = []
    try:
        asked.append(next(steps))
        while True:
            asked.append(steps.send(answer))
    except StopIteration as end:
        return asked, end.value


@pytest.mark.parametrize(
    ("relax", "number", "chosen"),
    [
        ("none", 0, None),
        ("best", 0, ["r0"]),
        ("all", 0, ["r0", "r2", "r3"]),
        ("best", 3, ["r0", "r2"]),
    ],
)
def test_the_best_predictions_are_relaxed_once(
    tmp_path: Path, relax: str, number: int, chosen: list[str] | None
) -> None:
    """Threads are divided between the processes in the background."""
    runner, said = _runner(tmp_path, RunOptions(), [])
    runner.config = replace(runner.config, relax=relax, num_relax=number)  # type: ignore[arg-type]
    runner.background = SimpleNamespace(processes=2)  # type: ignore[assignment]
    notes: list[str] = []
    said.note = notes.append  # type: ignore[attr-defined]
    results: Any = _Folder()
    asked, is_relaxed = _sent(
        runner._relax(results, "1/1 t"), [("r0", "better", True), ("r2", "worse", False)]
    )
    if chosen is None:
        assert (asked, is_relaxed, notes) == ([], False, [])
        return
    (work,) = asked
    assert work.arguments[:4] == (Path("out"), "fastfold", ("t", Path("state")), chosen)
    assert work.arguments[5].threads == max(1, torch.get_num_threads() // 2)
    assert notes == ["1/1 t: relaxing"]
    assert is_relaxed
    assert said.lines == [("1/1 t r0: better", False), ("1/1 t r2: worse", True)]
    runner.background = None
    results._records = [one for one in results._records if one.scores]
    assert _sent(runner._relax(results, "t"), []) == ([], False)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("has_picture", [False, True])
@pytest.mark.parametrize("plots", [False, True])
def test_plots_are_drawn_where_they_are_missing_or_old(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    made: bool,
    overwrite: bool,
    has_picture: bool,
    plots: bool,
) -> None:
    runner, _ = _runner(tmp_path, RunOptions(overwrite=overwrite), [])
    runner.config = replace(runner.config, plots=plots)
    drawn: list[str] = []
    coverages: list[bool] = []
    monkeypatch.setattr(TargetRunner, "_draw", lambda self, results, record: drawn.append(record.id))
    monkeypatch.setattr(TargetRunner, "_finish", lambda self, results, label: iter(()))

    def draw_coverage(results: Any, name: str, *, again: bool) -> bool:
        coverages.append(again)
        return False

    monkeypatch.setattr(target_runner, "draw_missing_coverage", draw_coverage)
    results: Any = _Folder((".png",) if has_picture else ())
    target: Any = SimpleNamespace(name="t")
    _, is_changed = _sent(runner._rest(results, target, ["r1", "r3"], made=made), None)
    again = made and overwrite
    expected = ["r1", "r3"] if plots and (again or not has_picture) else []
    assert (drawn, coverages) == (expected, [again] if plots else [])
    assert bool(is_changed) is bool(expected)
