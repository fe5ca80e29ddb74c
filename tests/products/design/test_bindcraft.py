"""BindCraft's settings: files, schedule, losses, and the rules by which its trajectories end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.confidence import predicted_tm_score
from fastfold.inference.report.groups import _STAGES
from fastfold.products.design import DesignConfig, command, hallucination
from fastfold.products.design.bindcraft import (
    DEFAULTS,
    AdvancedSettings,
    _check_value,
    read_advanced,
    read_target,
)
from fastfold.products.design.command import add_design_command
from fastfold.products.design.command_task import TaskOptions
from fastfold.products.design.optimize import DesignState, binder_problem, schedule
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.losses import task_losses
from fastfold.protein import residue_constants as rc
from fastfold.utils.command_line.from_fields import from_options
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
            "design_algorithm: expected 2stage, 3stage, 4stage, greedy, found 'mcmc'",
        ),
        (read_advanced, {"random_helicity": True}, "random_helicity: only false is supported"),
        (read_advanced, {"inter_contact_distance": -1}, "inter_contact_distance: expected"),
        (read_advanced, [], "no JSON object"),
        (read_target, {"lengths": [60, 80]}, "starting_pdb is missing"),
        (
            read_target,
            {"starting_pdb": "a.pdb", "lengths": [4]},
            "lengths: expected numbers from 5 on such as",
        ),
        (read_target, {"starting_pdb": "a.pdb", "binder_redesign": "a.fasta"}, "binder_redesign: sequences"),
        (read_target, {**DEFAULTS}, "unknown key"),
        (read_advanced, {"threshold": 1}, "has none of the keys of BindCraft's settings_advanced"),
        (
            read_advanced,
            {"intra_contact_number": 0},
            "intra_contact_number: DesignConfig.con: num: expected a whole number",
        ),
        (
            read_advanced,
            {"inter_contact_distance": 1},
            "inter_contact_distance: DesignConfig.i_con: cutoff: expected",
        ),
        (read_advanced, {"omit_AAs": "CZ"}, "omit_AAs: expected residues such as CM to forbid, found 'Z'"),
        (
            read_advanced,
            {"greedy_percentage": 200},
            "greedy_percentage: DesignConfig.tries_percent: expected a number",
        ),
        (read_advanced, {"soft_iterations": 10**12}, "soft_iterations: soft_steps must be from 0 to"),
        (
            read_advanced,
            {key: 0 for key in DEFAULTS if key.startswith("weights_")},
            "all losses have the weight 0; set one",
        ),
        (
            read_advanced,
            {"design_algorithm": "2stage", "soft_iterations": 0, "greedy_iterations": 0},
            "a design needs at least one step",
        ),
        (read_target, {"starting_pdb": "a.pdb", "lengths": [9], "chain": "A"}, "unknown key chain"),
    ],
)
def test_bad_settings_name_the_key_and_the_file(
    read: Callable[..., Any], content: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"advanced\.json") as error:
        read(write(tmp_path, content), print)
    assert message in str(error.value)


def test_unknown_keys_are_named_with_the_nearest_known_one(tmp_path: Path) -> None:
    lines: list[str] = []
    read_advanced(write(tmp_path, {"weights_rgg": 1, "soft_iterations": 60, "zip_plots": True}), lines.append)
    assert lines == [
        "advanced.json: not used: zip_plots",
        "advanced.json: unknown keys, not used: weights_rgg (did you mean weights_rg?)",
    ]


def test_structures_are_named_from_the_folder_above_the_settings(tmp_path: Path) -> None:
    """Those of BindCraft's own folder; a structure next to the settings comes first."""
    (tmp_path / "example").mkdir()
    (tmp_path / "settings_target").mkdir()
    settings = write(
        tmp_path / "settings_target", {"starting_pdb": "./example/t.pdb", "lengths": [70]}, "t.json"
    )
    near, above = settings.parent / "example" / "t.pdb", tmp_path / "example" / "t.pdb"
    assert read_target(settings, print).structure == near
    above.touch()
    assert read_target(settings, print).structure == above
    near.parent.mkdir()
    near.touch()
    assert read_target(settings, print).structure == near


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"starting_pdb": "missing.pdb"}, r"target\.json: starting_pdb: .*missing\.pdb: no such file"),
        ({"starting_pdb": "missing.pdb", "chains": "A"}, r"target\.json: starting_pdb: .*no such file"),
        ({"chains": "A,Z"}, r"target\.json: chains: .*has no chain 'Z'"),
        ({"chains": "A", "target_hotspot_residues": "B3"}, r"target\.json: target_hotspot_residues: .*"),
        ({"target_hotspot_residues": "A99"}, r"target\.json: target_hotspot_residues: .*has no residue 99"),
    ],
)
def test_a_wrong_target_names_the_key_and_the_file(
    content: dict[str, Any], message: str, backbone: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, {"starting_pdb": str(backbone), "lengths": [70], **content}, "target.json")
    with pytest.raises(InputError, match=message):
        _filled("--settings", str(path))


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


def test_binders_are_judged_at_the_limits_of_their_rules(backbone: Path) -> None:
    """Next residues of a chain may be near, and the best of the last stages counts, else of all."""
    one = binder(backbone, 10, chains=["A"])

    def problem(ca: np.ndarray, log: list[dict[str, Any]]) -> str | None:
        positions = np.zeros((24, 37, 3))
        positions[:, rc.atom_order["CA"]] = ca
        nothing: Any = None
        return binder_problem(
            one, DesignState(nothing, nothing, nothing, nothing, positions=positions, log=log)
        )

    def row(stage: str, loss: float, plddt: float) -> dict[str, Any]:
        return {"stage": stage, "loss": loss, "designed_plddt": plddt}

    # Two rows 10 Å apart; three residues of the binder come within 3.9 Å of the target.
    ca = np.array([[4.0 * i, 0, 0] for i in range(14)] + [[4.0 * i, 10.0, 0] for i in range(10)]) + 100.0
    for number in (14, 16, 18):
        ca[number, 1] = 103.9
    good = [row("hard", 1.0, 70.0)]
    assert problem(ca, good) is None
    assert problem(ca, [row("hard", 1.0, 69.9)]) == "pLDDT 69.9 below 70"
    assert problem(ca, [row("soft", 0.0, 10.0), row("hard", 2.0, 10.0), row("mutate", 1.0, 80.0)]) is None
    assert problem(ca, [row("soft", 0.0, 10.0), row("temperature", 1.0, 80.0)]) == "pLDDT 10.0 below 70"
    fewer = ca.copy()
    fewer[18, 1] = 110.0
    assert problem(fewer, good) == "2 residues at the target, fewer than 3"
    near = ca.copy()
    near[5] = near[4] + [0.5, 0, 0]  # the next one
    assert problem(near, good) is None
    near[7] = near[4] + [0.0, 0, 2.4]
    assert problem(near, good) == "2 pairs of CA atoms within 2.5 Å"
    near[7] = near[4] + [-0.1, 0, 2.5]
    near[5] = ca[5]
    assert problem(near, good) is None
    near = ca.copy()
    near[13], near[14] = [300.0, 0, 0], [301.0, 0, 0]  # neighbors in the order of residues, of two chains
    assert problem(near, good) == "1 pairs of CA atoms within 2.5 Å"


def test_a_design_without_other_chains_needs_no_neighbors() -> None:
    positions = np.zeros((10, 37, 3))
    positions[:, rc.atom_order["CA"], 0] = 4.0 * np.arange(10) + 1
    nothing: Any = None
    log = [{"stage": "hard", "loss": 1.0, "designed_plddt": 80.0}]
    state = DesignState(nothing, nothing, nothing, nothing, positions=positions, log=log)
    assert binder_problem(hallucination(10), state) is None


def test_the_page_knows_all_stages() -> None:
    config = DesignConfig(screen_steps=1, soft_steps=1, temperature_steps=1, hard_steps=1, mutation_steps=1)
    assert [step.stage for step in schedule(config)] == list(_STAGES)


@pytest.mark.parametrize(
    ("key", "value", "changed"),
    [
        ("omit_AAs", "CM", {"forbid": "CM"}),
        ("omit_AAs", False, {"forbid": ""}),
        ("soft_iterations", 60, {"soft_steps": 10}),
        ("soft_iterations", 40, {"soft_steps": 0}),
        ("temporary_iterations", 7, {"temperature_steps": 7}),
        ("hard_iterations", 7, {"hard_steps": 7}),
        ("greedy_iterations", 7, {"mutation_steps": 7}),
        ("greedy_percentage", 2.5, {"tries_percent": 2.5}),
        ("num_recycles_design", 2, {"recycles": 2}),
        ("optimise_beta_recycles_design", 4, {"strand_recycles": 4}),
        ("optimise_beta", False, {"strand_recycles": None}),
        ("intra_contact_number", 3, {"con": "num=3,cutoff=14.0,seqsep=9"}),
        ("intra_contact_distance", 8.0, {"con": "num=2,cutoff=8.0,seqsep=9"}),
        ("inter_contact_number", 3, {"i_con": "num=3,cutoff=20.0"}),
        ("inter_contact_distance", 8.0, {"i_con": "num=2,cutoff=8.0"}),
        ("weights_plddt", 7.0, {"plddt": 7.0}),
        ("weights_pae_intra", 7.0, {"pae": 7.0}),
        ("weights_pae_inter", 7.0, {"i_pae": 7.0}),
        ("weights_con_intra", 7.0, {"con": 7.0}),
        ("weights_con_inter", 7.0, {"i_con": 7.0}),
        ("weights_helicity", -7.0, {"helix": -7.0}),
        ("weights_iptm", 7.0, {"i_ptm": 7.0}),
        ("weights_rg", 7.0, {"rg": 7.0}),
        ("weights_termini_loss", 7.0, {}),
        ("use_i_ptm_loss", False, {"i_ptm": 0.0}),
        ("use_rg_loss", False, {"rg": 0.0}),
        ("use_termini_distance_loss", True, {"NC": 0.1}),
        ("num_recycles_validation", 1, {}),
        (
            "design_algorithm",
            "3stage",
            {
                "screen_steps": 0,
                "soft_steps": 75,
                "mutation_steps": 0,
                "ramp_recycles": True,
                "all_networks": True,
                "strand_recycles": None,
                "give_up_below": 0.0,
            },
        ),
        (
            "design_algorithm",
            "2stage",
            {
                "screen_steps": 0,
                "soft_steps": 75,
                "temperature_steps": 0,
                "hard_steps": 0,
                "profile_mutations": True,
                "ramp_recycles": True,
                "strand_recycles": None,
                "give_up_below": 0.0,
            },
        ),
        (
            "design_algorithm",
            "greedy",
            {
                "screen_steps": 0,
                "soft_steps": 0,
                "temperature_steps": 0,
                "hard_steps": 0,
                "ramp_recycles": True,
                "strand_recycles": None,
                "give_up_below": 0.0,
            },
        ),
    ],
)
def test_every_key_changes_its_setting_alone(
    key: str, value: Any, changed: dict[str, Any], tmp_path: Path
) -> None:
    """Keys of weights change the weight of their loss."""
    plain = AdvancedSettings().design()
    found = read_advanced(write(tmp_path, {key: value}), print)
    values = found.design()
    weights = {name: x for name, x in values.pop("weights").items() if x != plain["weights"][name]}
    different = {name: x for name, x in values.items() if x != plain[name]}
    is_weight = key.startswith(("weights_", "use_"))
    assert (weights, different) == ((changed, {}) if is_weight else ({}, changed))
    assert found.fold_recycles == (1 if key == "num_recycles_validation" else 3)


@pytest.mark.parametrize(("soft", "by_profile"), [(0, False), (1, True)])
def test_mutations_by_the_profile_need_soft_steps(soft: int, by_profile: bool) -> None:
    values = AdvancedSettings({**DEFAULTS, "design_algorithm": "2stage", "soft_iterations": soft}).design()
    assert (values["soft_steps"], values["profile_mutations"]) == (soft, by_profile)
    assert DesignConfig(**values).profile_mutations is by_profile


def test_parts_of_the_template_that_networks_do_not_see() -> None:
    for sequence, side_chains, expected in (
        (False, False, "none"),
        (False, True, "sidechains"),
        (True, False, "backbone"),
        (True, True, "backbone"),
    ):
        keys = {"rm_template_seq_design": sequence, "rm_template_sc_design": side_chains}
        assert AdvancedSettings({**DEFAULTS, **keys}).flexible == expected


@pytest.mark.parametrize(
    ("key", "value", "is_right"),
    [
        ("hard_iterations", 0, True),
        ("hard_iterations", 5.0, True),
        ("hard_iterations", True, False),
        ("hard_iterations", -1, False),
        ("greedy_percentage", 0.5, True),
        ("greedy_percentage", float("inf"), False),
        ("weights_helicity", -1.5, True),
        ("weights_helicity", "1", False),
        ("optimise_beta", 1, False),
        ("omit_AAs", None, True),
        ("omit_AAs", True, False),
        ("omit_AAs", 3, False),
        ("design_algorithm", 3, False),
        ("design_algorithm", "4stage", True),
        ("sample_models", True, True),
        ("sample_models", False, False),
    ],
)
def test_values_have_the_kind_of_the_default(key: str, value: Any, is_right: bool, tmp_path: Path) -> None:
    path = tmp_path / "advanced.json"
    if is_right:
        _check_value(key, value, path)
        return
    with pytest.raises(InputError, match=key):
        _check_value(key, value, path)


def test_a_target_file_needs_few_keys_and_right_ones(tmp_path: Path) -> None:
    least = {"starting_pdb": "t.pdb", "lengths": [90, 70, 80]}
    lines: list[str] = []
    found = read_target(write(tmp_path, least), lines.append)
    assert (found.structure, found.length) == (tmp_path / "t.pdb", "70-90")
    assert (found.chains, found.hotspots, found.until, lines) == ("", "", None, [])
    there = str(tmp_path / "absolute.pdb")
    assert read_target(write(tmp_path, least | {"starting_pdb": there}), print).structure == Path(there)
    assert read_target(write(tmp_path, least | {"number_of_final_designs": 1}), print).until == 1
    for key, value in (
        ("lengths", []),
        ("lengths", [70.0]),
        ("lengths", [70, 90.0]),
        ("lengths", 70),
        ("lengths", [0]),
        ("number_of_final_designs", 0),
        ("number_of_final_designs", True),
        ("chains", 3),
        ("starting_pdb", ["t.pdb"]),
    ):
        with pytest.raises(InputError, match=key):
            read_target(write(tmp_path, least | {key: value}), print)


def _options(*words: str, protocol: str = "binder") -> Any:
    parser = argparse.ArgumentParser()
    add_design_command(parser.add_subparsers())
    return parser.parse_args(["design", protocol, *words, "--out", "x"])


def _filled(*words: str, protocol: str = "binder") -> Any:
    options = _options(*words, protocol=protocol)
    made = from_options(command.DesignOptions, options), from_options(TaskOptions, options)
    return command._fill_by_bindcraft(*made, print)


def test_the_command_fills_in_what_files_have_and_keeps_its_own(backbone: Path, tmp_path: Path) -> None:
    target = write(
        tmp_path,
        {
            "starting_pdb": str(backbone), "chains": "A", "target_hotspot_residues": "A5", "lengths": [70, 80],
            "number_of_final_designs": 3,
        },
        "target.json",
    )  # fmt: skip
    advanced = write(tmp_path, {"rm_template_sc_design": True, "num_recycles_validation": 1})
    files = ("--settings", str(target), "--advanced", str(advanced))
    options, task, found = _filled(*files)
    assert found == read_advanced(advanced, print)
    assert (task.structure, task.chains, task.hotspots) == (backbone, "A", "A5")
    assert (task.length, options.until, task.flexible) == ("70-80", None, "sidechains")
    own = ("mine.pdb", "--chains", "B", "--hotspots", "B1", "--length", "9", "--flexible", "free")
    options, task, _ = _filled(*own, *files, "--filters", "f.yaml", "--until", "7")
    assert (task.structure, task.chains, task.hotspots) == (Path("mine.pdb"), "B", "B1")
    assert (task.length, options.until, task.flexible) == ("9", 7, "free")
    options, _, _ = _filled(*files, "--filters", "f.yaml")
    assert options.until == 3
    _, task, found = _filled("--settings", str(target))
    assert (task.length, task.flexible, found) == ("70-80", AdvancedSettings().flexible, AdvancedSettings())
    _, task, found = _filled("t.pdb", "--advanced", str(advanced))
    assert (task.structure, task.chains, task.hotspots, task.length) == (Path("t.pdb"), "", "", None)
    assert (task.flexible, found) == ("sidechains", read_advanced(advanced, print))
    assert _filled("t.pdb", "--preset", "bindcraft")[2] == AdvancedSettings()
    with pytest.raises(ConfigError, match="do not belong to fixbb"):
        _filled("t.pdb", "--preset", "bindcraft", protocol="fixbb")
    with pytest.raises(ConfigError, match="excludes --settings and --advanced"):
        _filled("--preset", "colabdesign", *files)


def test_options_of_the_command_change_bindcrafts_settings() -> None:
    """Weights are changed one by one; a number of mutations stands for a share of the residues."""
    advanced = AdvancedSettings()
    plain = command._design_config(_options("t.pdb"), advanced)
    assert plain == DesignConfig(**advanced.design())
    assert command._design_config(_options("t.pdb"), None) == DesignConfig()
    found = command._design_config(_options("t.pdb", "--loss", "rg=2", "--num-recycles", "2"), advanced)
    weights = {**advanced.design()["weights"], "rg": 2.0}
    assert found == replace(plain, weights=weights, recycles=2)
    assert plain.tries_percent == 1.0
    mutated = command._design_config(_options("t.pdb", "--mutations", "3,4"), advanced)
    assert (mutated.mutation_steps, mutated.tries_percent) == (3, 0.0)


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        ("proteinmpnn", (), (20, 0.1, True, True)),
        ("ligandmpnn", ("--mpnn-sequences", "3", "--mpnn-temperature", "0.3"), (3, 0.3, True, True)),
        ("own {pdb} {out}", (), (20, 0.1, True, False)),
    ],
)
def test_the_program_of_mpnn_has_bindcrafts_settings(
    program: str, words: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    """Options of the command come first; weights are those of packages alone."""
    namespace = _options("t.pdb", "--preset", "bindcraft", "--mpnn", program, *words)
    options = from_options(command.DesignOptions, namespace)
    filled = command._fill_program(options, AdvancedSettings(), namespace)
    names = ("mpnn_sequences", "mpnn_temperature", "mpnn_keep_interface", "mpnn_soluble")
    assert tuple(getattr(filled, name) for name in names) == expected
    assert replace(filled, **{name: getattr(options, name) for name in names}) == options


def test_settings_of_mpnn_are_read_if_there_is_a_program(tmp_path: Path) -> None:
    content = {"num_seqs": 5, "sampling_temp": 0.2, "mpnn_weights": "original", "mpnn_fix_interface": False}
    lines: list[str] = []
    path = write(tmp_path, content)
    read_advanced(path, lines.append)
    assert lines == [f"advanced.json: not used: {', '.join(content)}"]
    lines.clear()
    settings = read_advanced(path, lines.append, has_program=True)
    wanted = {
        "mpnn_sequences": 5,
        "mpnn_temperature": 0.2,
        "mpnn_keep_interface": False,
        "mpnn_soluble": False,
    }
    assert (settings.program(has_weights=True), lines) == (wanted, [])
    for key, value in (("num_seqs", 0), ("mpnn_weights", "best"), ("sampling_temp", -1), ("num_seqs", 2.5)):
        with pytest.raises(InputError, match=rf"advanced\.json: {key}: expected"):
            read_advanced(write(tmp_path, {key: value}), print, has_program=True)


def test_options_of_another_program_need_it() -> None:
    for option in ("--mpnn-keep-interface", "--mpnn-soluble"):
        with pytest.raises(ConfigError, match=f"{option} belongs to --mpnn"):
            command._redesign(_options("t.pdb", option), "C")
    with pytest.raises(ConfigError, match="--mpnn-omit belongs to --mpnn"):
        command._redesign(_options("t.pdb", "--mpnn-omit", "C"), "C")
    assert command._redesign(_options("t.pdb"), "C") is None
