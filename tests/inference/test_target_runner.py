"""One target of a run: what is said of it, and its comparison with an experiment. The folds are in ``runner``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.data.targets import Chain, Target
from fastfold.errors import InputError, WeightsError
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.target_lines import report_comparison
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
