"""Lines about targets say what was folded, by which networks, and how sure the best prediction is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastfold.data.targets import target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.target_lines import announce, conclusion, count_of, report_geometry
from fastfold.inference.output.results_folder import PredictionRecord


def _record(model: str = "model_1", **scores: Any) -> PredictionRecord:
    return PredictionRecord("0" * 64, f"{model}_seed_0", {}, {"model": model, **scores})


class _Lines:
    """Stands for the progress of a run."""

    def __init__(self) -> None:
        self.said: list[tuple[str, bool]] = []

    def line(self, text: str, *, important: bool = False) -> None:
        self.said.append((text, important))


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"plddt": 71.84, "ptm": 0.456}, "pLDDT 71.8, pTM 0.46 by model_1_seed_0, best of 1 prediction"),
        ({"plddt": 50.0, "iptm": 0.5}, "pLDDT 50.0, ipTM 0.50 by model_1_seed_0, best of 1 prediction"),
        (
            {"plddt": 50.0, "has_clash": True},
            "pLDDT 50.0, its chains overlap by model_1_seed_0, best of 1 prediction",
        ),
    ],
)
def test_a_conclusion_has_the_scores_that_there_are(scores: dict[str, Any], expected: str) -> None:
    assert conclusion([_record(**scores)]) == expected


def test_a_conclusion_is_about_the_first_of_all_predictions() -> None:
    line = conclusion([_record(plddt=80.0), _record("model_2", plddt=90.0)])
    assert line == "pLDDT 80.0 by model_1_seed_0, best of 2 predictions"


def test_networks_are_counted_once_and_further_embeddings_named() -> None:
    assert count_of([_record(), _record("model_2")]) == "model_1, model_2"
    assert count_of([_record(), _record(), _record("model_2")]) == "model_1, model_2 (3 embeddings)"


def test_only_a_best_structure_that_is_not_physical_gives_a_warning() -> None:
    progress: Any = _Lines()
    report_geometry(progress, "one", [_record(geometry="ok"), _record("model_2", geometry="2 pairs overlap")])
    report_geometry(progress, "old", [_record()])
    assert progress.said == []
    report_geometry(progress, "one", [_record(geometry="2 pairs of atoms overlap")])
    warning = "warning: one: the structure of model_1_seed_0 is not physical: 2 pairs of atoms overlap"
    assert progress.said == [(warning, True)]


@pytest.mark.parametrize(
    ("residues", "is_said", "seeds", "shown"),
    [(4, False, (1, 2), ", 2 seeds"), (9000, True, (1, 2), ", 2 seeds"), (4, False, (3,), "")],
)
def test_a_target_is_announced_with_its_evidence_networks_and_seeds(
    residues: int, is_said: bool, seeds: tuple[int, ...], shown: str
) -> None:
    """Aligned errors that are left out by default are named, and more than one seed."""
    progress: Any = _Lines()
    target, network = (
        target_from_sequence("A" * residues, "one"),
        SimpleNamespace(name="model_1", info=SimpleNamespace(multimer=False)),
    )
    networks: Any = [network]
    announce(progress, target, "1/1 one", [([], [])], networks, InferConfig(seeds=seeds), msa_dir=None)
    *before, last = progress.said
    evidence = f"{residues:,} residues, no alignment, from the sequence alone"
    assert last == (f"1/1 one: {evidence}, by model_1{shown}", False)
    assert any("aligned errors of all pairs are left out" in line for line, _ in before) == is_said
