"""Logged steps of every protocol equal those of ColabDesign with the same parameters.

``colabdesign.json`` has 20 steps of ColabDesign (e31a56fe of its main branch, JAX 0.4.34, float32, without dropout),
one recycle, every loss with a weight, and losses and gradients of single passes (JAX 0.4.38) and of three passes in
each recycle mode (JAX 0.4.34). The backbone has glycines, whose CB the losses of designs need.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.evoformer.embedders.templates import TemplateTorsionEmbedder
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.products.design import (
    BinderParts,
    DesignConfig,
    DesignTask,
    binder,
    fixed_backbone,
    hallucination,
    partial,
)
from fastfold.products.design.config import RecycleMode
from fastfold.products.design.evaluate import Evaluation, Evaluator
from fastfold.products.design.optimize import first_state, optimize
from fastfold.protein import residue_constants as rc
from tests.helpers.networks import ORACLES
from tests.helpers.results import helix_prediction

RECORDED = json.loads((ORACLES / "synthetic_designs" / "colabdesign.json").read_text())
_HEADS = {"distogram": 0.05, "predicted_aligned_error": 0.1}


@pytest.fixture(scope="module")
def model() -> AlphaFold:
    """The recorded network, with logits of pairs that are not saturated."""
    made = fastfold.load_model(ORACLES / "synthetic_monomer" / "params.npz")
    # Undefined angles are quotients of rounding errors in a program that XLA compiled.
    assert isinstance(made.template_torsion_embedder, TemplateTorsionEmbedder)
    made.template_torsion_embedder.placeholder_for_undefined = True
    with torch.no_grad():
        for head, scale in _HEADS.items():
            for parameter in made.heads[head].parameters():
                parameter.mul_(scale)
    return made


def task(protocol: str, folder: Path) -> DesignTask:
    if protocol == "hallucination":
        return hallucination(14)
    given = helix_prediction("backbone", 14, 10, seed=6).save(folder, plots=False)["pdb"]
    if protocol == "fixbb":
        return fixed_backbone(given, chain="A")
    return partial(given, "A3-7", chain="A") if protocol == "partial" else binder(given, 10, chains=["A"])


@pytest.mark.long
@pytest.mark.parametrize("case", RECORDED["steps"])
def test_twenty_steps_are_colabdesigns(case: str, model: AlphaFold, tmp_path: Path) -> None:
    protocol, optimizer = case.split("/")
    config = DesignConfig(
        soft_steps=10,
        temperature_steps=6,
        hard_steps=4,
        optimizer=optimizer,  # type: ignore[arg-type]
        recycles=1,
        dropout=False,
    )
    evaluator = Evaluator(task(protocol, tmp_path), [model], RECORDED["weights"][protocol])
    state = first_state(evaluator, config, 0)
    start = np.random.default_rng(0).normal(size=state.parameters.shape) * 0.3
    state.parameters = torch.from_numpy(start).float()
    optimize(evaluator, config, 0, state)
    for name, wanted in RECORDED["steps"][case].items():
        found = [row[name] for row in state.log]
        # The entropy of nearly certain residues is small and steep.
        tolerance = {"seq_ent": 1e-3, "rmsd": 1e-4}.get(name, 2e-5)
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", RECORDED["single"])
def test_one_evaluation_is_colabdesigns(case: str, model: AlphaFold, tmp_path: Path) -> None:
    """Equal chains in MSA rows of their own, tied repeats, and a chain that is designed again with its template.

    Losses of the structure module are left out. Templates have no residue types of the binder.
    """
    given = helix_prediction("backbone", 14, 10, seed=6).save(tmp_path, plots=False)["pdb"]
    task = {
        "oligomer": lambda: hallucination(10, copies=2),
        "repeats": lambda: hallucination(7, repeats=2),
        "redesign_template": lambda: binder(given, parts=BinderParts(redesign=("B",), flexible="backbone")),
    }[case]()
    recorded = RECORDED["single"][case]
    start = np.random.default_rng(0).normal(size=(task.num_parameters, 20)) * 0.3
    evaluator = Evaluator(task, [model], recorded["weights"])
    check(evaluator(torch.from_numpy(start).float(), Relaxation(soft=0.6)), recorded)


@pytest.mark.parametrize("mode", RECORDED["recycle_modes"])
def test_recycle_modes_are_colabdesigns(mode: RecycleMode, model: AlphaFold) -> None:
    """Three passes; gradients of two modes differ by at least a tenth, and losses of ``add_prev`` are its own."""
    weights = RECORDED["weights"]["hallucination"]
    evaluator = Evaluator(hallucination(10), [model], weights, recycles=2, recycle_mode=mode)
    start = np.random.default_rng(0).normal(size=(10, 20)) * 0.3
    recorded = RECORDED["recycle_modes"]
    check(evaluator(torch.from_numpy(start).float(), Relaxation(soft=0.6)), recorded[mode])
    gradient = np.array(recorded[mode]["gradient"])
    for other in recorded.keys() - {mode}:
        apart = np.linalg.norm(gradient - np.array(recorded[other]["gradient"]))
        assert apart > 0.1 * np.linalg.norm(gradient), other


def check(found: Evaluation, recorded: Mapping[str, Any]) -> None:
    """Check losses and gradient of an evaluation against recorded ones."""
    for name, wanted in recorded["losses"].items():
        assert found.losses[name] == pytest.approx(wanted, rel=2e-5), name
    assert found.gradient is not None
    gradient = np.array(recorded["gradient"])
    cosine = (found.gradient.numpy() * gradient).sum() / np.linalg.norm(gradient)
    assert cosine == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    np.testing.assert_allclose(found.gradient.numpy(), gradient, atol=1e-5 * np.abs(gradient).max())


def test_glycines_of_a_given_structure_have_a_cb(tmp_path: Path) -> None:
    made = task("fixbb", tmp_path)
    assert made.reference is not None
    glycine = made.reference.aatype == rc.restype_order["G"]
    assert bool(glycine.any())
    ca, cb = (made.reference.positions[glycine, rc.atom_order[name]] for name in ("CA", "CB"))
    np.testing.assert_allclose((cb - ca).norm(dim=-1), 1.522, atol=1e-3)
    assert bool((made.reference.mask[glycine, rc.atom_order["CB"]] == 1).all())
