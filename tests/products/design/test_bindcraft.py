"""BindCraft's settings: files, schedule, losses, and the rules by which its trajectories end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import InputError
from fastfold.evoformer.confidence import predicted_tm_score
from fastfold.inference.report.groups import _STAGES
from fastfold.products.design import DesignConfig
from fastfold.products.design.bindcraft import DEFAULTS, AdvancedSettings, read_advanced, read_target
from fastfold.products.design.optimise import DesignState, binder_problem, schedule
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.losses import task_losses
from tests.helpers.results import helix_prediction
from tests.products.design.test_losses import outputs, task

UNUSED = {
    "force_reject_AA": False, "use_multimer_design": True, "rm_template_seq_predict": False, "enable_mpnn": True,
    "num_seqs": 20, "max_mpnn_sequences": 2, "mpnn_weights": "soluble", "zip_plots": True, "max_trajectories": False,
    "acceptance_rate": 0.01, "af_params_dir": "",
}  # fmt: skip
"""Keys of BindCraft's advanced files that belong to other parts of it."""


def write(folder: Path, content: Any, name: str = "advanced.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_the_four_stages_are_bindcrafts() -> None:
    """75 steps on logits, 50 of them before the first exit; 45 of softmax, 5 on residues, 15 rounds of mutations."""
    config = DesignConfig(**AdvancedSettings().design())
    steps = schedule(config)
    stages = [step.stage for step in steps]
    counts = {stage: stages.count(stage) for stage in dict.fromkeys(stages)}
    assert counts == {"screen": 50, "soft": 25, "temperature": 45, "hard": 5, "mutate": 15}
    assert [steps[i].relaxation.soft for i in (0, 49, 50, 74)] == pytest.approx([0.9 / 50, 0.9, 1 / 25, 1.0])
    assert {step.recycles for step in steps} == {1}
    assert not any(step.all_networks for step in steps)
    assert [step.recycles for step in schedule(config, has_strands=True)] == [1] * 50 + [3] * 90
    assert steps[75 + 44].relaxation.temperature == pytest.approx(0.01)
    assert (config.tries_percent, config.give_up_below, config.forbid) == (1.0, 65.0, "C")
    wanted = {
        "plddt": 0.1,
        "pae": 0.4,
        "i_pae": 0.1,
        "con": 1.0,
        "i_con": 1.0,
        "helix": -0.3,
        "i_ptm": 0.05,
        "rg": 0.3,
    }
    assert {name: weight for name, weight in config.weights.items() if weight} == wanted
    assert (config.con, config.i_con) == ("num=2,cutoff=14.0,seqsep=9", "num=2,cutoff=20.0")


def test_files_are_read_unchanged(tmp_path: Path) -> None:
    lines: list[str] = []
    settings = read_advanced(write(tmp_path, {**DEFAULTS, **UNUSED}), lines.append)
    assert settings == AdvancedSettings()
    assert lines == [f"advanced.json: not used: {', '.join(UNUSED)}"]
    other = {"soft_iterations": 100, "use_rg_loss": False, "omit_AAs": None, "rm_template_seq_design": True}
    changed = read_advanced(write(tmp_path, other), lines.append)
    values = changed.design()
    assert (values["screen_steps"], values["soft_steps"], values["weights"]["rg"]) == (50, 50, 0.0)
    assert (values["forbid"], changed.flexible, changed.fold_recycles) == ("", "backbone", 3)
    three = read_advanced(write(tmp_path, {"design_algorithm": "3stage"}), lines.append).design()
    assert (three["screen_steps"], three["soft_steps"], three["mutation_steps"]) == (0, 75, 0)
    given = {
        "design_path": "/out", "binder_name": "PDL1", "starting_pdb": "PDL1.pdb", "chains": "A, B",
        "target_hotspot_residues": "A56", "lengths": [65, 150], "number_of_final_designs": 100,
    }  # fmt: skip
    target = read_target(write(tmp_path, given, "PDL1.json"), lines.append)
    assert (target.structure, target.chains) == (tmp_path / "PDL1.pdb", "A,B")
    assert (target.hotspots, target.length, target.until) == ("A56", "65-150", 100)
    with pytest.raises(InputError, match="number_of_final_designs: expected a number such as 100"):
        read_target(write(tmp_path, {**given, "number_of_final_designs": "many"}, "PDL1.json"), lines.append)
    assert lines[-1] == "PDL1.json: not used: design_path, binder_name"


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (
            read_advanced,
            {"soft_iterations": "many"},
            "advanced.json: soft_iterations: expected a value such as 75",
        ),
        (read_advanced, {"hard_iterations": 2.5}, "hard_iterations: expected"),
        (
            read_advanced,
            {"design_algorithm": "mcmc"},
            "design_algorithm: expected 3stage or 4stage, found 'mcmc'",
        ),
        (read_advanced, {"random_helicity": True}, "random_helicity: only false is supported"),
        (read_advanced, {"inter_contact_distance": -1}, "inter_contact_distance: expected"),
        (read_advanced, [], "no JSON object"),
        (read_target, {"lengths": [60, 80]}, "starting_pdb is missing"),
        (read_target, {"starting_pdb": "a.pdb", "lengths": [0]}, "lengths: expected numbers such as"),
        (read_target, {"starting_pdb": "a.pdb", "lengths": [9], "chain": "A"}, "unknown key chain"),
    ],
)
def test_bad_settings_name_the_key_and_the_file(
    read: Callable[..., Any], content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"advanced\.json") as error:
        read(write(tmp_path, content), print)
    assert message in str(error.value)


def test_the_interface_ptm_is_that_of_the_score() -> None:
    given, one = outputs(), task("binder")
    loss = task_losses(one, torch.device("cpu"), torch.float64)["i_ptm"](
        given, torch.zeros(24, dtype=torch.long)
    )
    assert given.errors is not None
    assert given.error_breaks is not None
    assert isinstance(given.errors, torch.Tensor)
    score = predicted_tm_score(given.errors, given.error_breaks, asym_id=torch.from_numpy(one.chain))
    assert float(loss) == pytest.approx(1 - float(score), rel=1e-6)


def test_hotspots_may_be_whole_chains(tmp_path: Path) -> None:
    path = helix_prediction("two", 14, 10).save(tmp_path / "two", plots=False)["pdb"]
    assert binder(path, 10, hotspots="A3,B").hotspots.tolist() == [2, *range(14, 24)]


def test_clashing_floating_and_unsure_binders_end(backbone: Path) -> None:
    made = helix_prediction("x", 14, 10)
    one = binder(backbone, 10, chains=["A"])

    def state(positions: np.ndarray, plddt: float = 80.0) -> DesignState:
        rows = [
            {"stage": "screen", "loss": 0.0, "designed_plddt": 10.0},
            {"stage": "hard", "loss": 1.0, "designed_plddt": plddt},
            {"stage": "mutate", "loss": 2.0, "designed_plddt": 20.0},
        ]
        nothing: Any = None
        return DesignState(nothing, nothing, nothing, nothing, positions=positions, log=rows)

    positions = made.atom_positions * made.atom_mask[..., None]
    positions[14:][made.atom_mask[14:] > 0] -= [1.5, 0.0, 0.0]
    assert binder_problem(one, state(positions)) is None
    assert binder_problem(one, state(positions, 69.0)) == "pLDDT 69.0 below 70"
    far = positions.copy()
    far[14:][made.atom_mask[14:] > 0] += 30.0
    assert binder_problem(one, state(far)) == "0 residues at the target, fewer than 3"
    near = positions.copy()
    near[3] = near[20]
    assert binder_problem(one, state(near)) == "1 pairs of CA atoms within 2.5 Å"


def test_the_page_knows_all_stages() -> None:
    config = DesignConfig(screen_steps=1, soft_steps=1, temperature_steps=1, hard_steps=1, mutation_steps=1)
    assert [step.stage for step in schedule(config)] == list(_STAGES)
