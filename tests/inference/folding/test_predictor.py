"""Targets that a predictor refuses before it folds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.msa.msa import parse_a3m
from fastfold.data.targets import Target, target_from_sequence
from fastfold.data.templates.features import ForcedTemplate
from fastfold.data.templates.whole.given import GivenStructure
from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.folding import predictor as predictor_module
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.target_templates import TargetTemplates
from tests.helpers.command_line import small_model
from tests.helpers.results import helix_prediction

SEQUENCE = "MKTAYIAK"
FORCED = ForcedTemplate("known_A", 1.0, np.arange(24.0).reshape(8, 3), np.ones(8, bool))


def _predictor(target: Target, templates: int | None, model: fastfold.AlphaFold) -> TargetPredictor:
    raw = None if templates is None else {"template_aatype": np.zeros((templates, 8, 22), np.float32)}
    return TargetPredictor(
        target,
        [model],
        [([], [])] * len(target.chains),
        InferConfig(),
        device=torch.device("cpu"),
        templates=None if raw is None else TargetTemplates((raw,) * len(target.chains)),
        say=lambda line: None,
    )


@pytest.fixture(scope="module")
def networks() -> dict[bool, fastfold.AlphaFold]:
    """A network by whether it uses templates."""
    return {True: small_model(), False: fastfold.load_model("mini")}


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("templates", [None, 0, 1, 2])
@pytest.mark.parametrize("takes", [False, True])
def test_templates_need_a_network_that_uses_them_or_are_forced(
    networks: dict[bool, fastfold.AlphaFold], is_forced: bool, templates: int | None, takes: bool
) -> None:
    target = target_from_sequence(SEQUENCE)
    if is_forced:
        target = replace(target, forced_templates=((FORCED,),))
    model = networks[takes]
    if not templates or takes or is_forced:
        assert _predictor(target, templates, model).target is target
        return
    with pytest.raises(ConfigError, match=r"templates are given, but mini does not use any; leave them out"):
        _predictor(target, templates, model)


def test_templates_of_a_complex_are_refused_by_their_own_words(
    networks: dict[bool, fastfold.AlphaFold],
) -> None:
    pair = target_from_sequence(f"{SEQUENCE}:{SEQUENCE}")
    with pytest.raises(ConfigError, match="mini does not use any for a complex; leave them out"):
        _predictor(pair, 1, networks[False])


@pytest.mark.parametrize(("rings", "expected"), [("B", "Y"), ("A,B", "X,Y"), (None, False)])
def test_rings_are_named_as_in_the_input_and_folded_as_in_the_guess(
    tmp_path: Path, networks: dict[bool, fastfold.AlphaFold], rings: str | None, expected: object
) -> None:
    prediction = helix_prediction("g", 9, 8)
    path = prediction.save(tmp_path, plots=False)["pdb"]
    names = {"A": "X", "B": "Y"}
    lines = path.read_text().splitlines()
    path.write_text("\n".join(f"{x[:21]}{names[x[21]]}{x[22:]}" if x[:4] == "ATOM" else x for x in lines))
    target = target_from_sequence(":".join(prediction.sequences))
    config = InferConfig(initial_guess=path, rings=rings)
    made = TargetPredictor(
        target, [networks[False]], [([], [])] * 2, config, device=torch.device("cpu"), say=lambda line: None
    )
    assert [chain.id for chain in made.target.chains] == ["X", "Y"]
    assert made._rings == expected
    np.testing.assert_allclose(made._guess[:, 1], prediction.atom_positions[:, 1], atol=1e-3)  # type: ignore[index]


@pytest.mark.parametrize(("use", "seed"), [(None, 1), ("template", 1), ("initial_guess", 0)])
def test_a_scored_structure_is_the_guess_if_it_is_used_as_one(
    tmp_path: Path, use: str | None, seed: int
) -> None:
    predictions = [helix_prediction("g", 9, seed=0), helix_prediction("g", 9, seed=0)]
    predictions[1].atom_positions[:] += 5.0
    scored, guess = (
        one.save(tmp_path / str(number), plots=False)["pdb"] for number, one in enumerate(predictions)
    )
    target = target_from_sequence(predictions[0].sequences[0])
    if use is not None:
        target = replace(target, scored_structure=GivenStructure(scored, use))
    _, positions, _ = predictor_module._with_guess(target, InferConfig(initial_guess=guess))
    assert positions is not None
    np.testing.assert_allclose(positions[:, 1], predictions[seed].atom_positions[:, 1], atol=1e-3)
    named, nothing, _ = predictor_module._with_guess(replace(target, scored_structure=None), InferConfig())
    assert (named.name, nothing) == (target.name, None)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("ranks", [None, 3])
def test_folds_are_planned_with_the_sizes_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
    networks: dict[bool, fastfold.AlphaFold],
    cuda_graphs: bool,
    ranks: int | None,
) -> None:
    """A replayed graph has no memory of the host; several processes share the memory that all of them have."""
    planned: list[dict[str, Any]] = []

    def fit(model: Any, device: Any, residues: int, budget: Any, **more: Any) -> SimpleNamespace:
        planned.append({"residues": residues, "budget": budget, **more})
        return SimpleNamespace()

    monkeypatch.setattr(predictor_module, "fit_target", fit)
    monkeypatch.setattr(predictor_module, "check_cuda_graphs", lambda *_: None)
    monkeypatch.setattr(predictor_module.FoldMemory, "here", lambda device, **sizes: ("here", sizes))
    group = SimpleNamespace(ranks=ranks, run=print, memory=lambda **sizes: ("all", sizes))
    host = None if cuda_graphs else "1GiB"
    config = InferConfig(cuda_graphs=cuda_graphs, memory_budget="2GiB", host_memory=host)
    sizes = {"host_memory": 0 if cuda_graphs else 1 << 30, "offload_dir": None}
    TargetPredictor(
        target_from_sequence(SEQUENCE),
        [networks[False]],
        [([parse_a3m(f">q\n{SEQUENCE}\n>h\n{SEQUENCE}\n"), parse_a3m(f">q\n{SEQUENCE}\n")], [])],
        config,
        device=torch.device("cpu"),
        say=lambda line: None,
        distributed=None if ranks is None else group,  # type: ignore[arg-type]
    )
    (found,) = planned
    found.pop("config")
    assert found == {
        "residues": 8,
        "budget": 2 << 30,
        "name": "query",
        "rows": 3,
        "templates": 0,
        "memory": ("here" if ranks is None else "all", sizes),
        "offload_dir": None,
        "ranks": ranks or 1,
        "cuda_graph": cuda_graphs,
    }
