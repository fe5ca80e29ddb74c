"""Folds of `mini` under restraints: its descent obeys them and the report tells what changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.config import descent_settings, model_config
from fastfold.evoformer.structure.distogram_descent import descend
from fastfold.evoformer.structure.restraint_springs import RESTRAINT_FEATURES
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.network import RunNetwork
from fastfold.inference.network_settings import apply_settings, numeric_settings
from fastfold.inference.restraints.distances import atom_reach
from fastfold.inference.restraints.restraint import Restraint
from fastfold.inference.restraints.springs import add_springs, fold_with_springs
from fastfold.protein.residue_constants import restype_order
from fastfold.protein.validation import check_structure
from tests.helpers.command_line import small_model

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"


def features(sequence: str, restraints: list[Restraint]) -> list[np.ndarray]:
    config = fastfold.load_model("mini").config
    sampler = featurize(target_from_sequence(sequence).chains, [([], [])], config)
    add_springs(sampler, restraints)
    return [sampler.sample(0)[name] for name in RESTRAINT_FEATURES]


def test_features_name_points_and_limits_of_the_descent() -> None:
    """Of closest atoms the limits are those of CB, farther by a part of the reach of the side chains."""
    given = [
        Restraint(0, 7, 0.0, 8.0, 0.5),
        Restraint(1, 6, 5.0, 8.0, group="x", atoms="CB"),
        Restraint(2, 5, 3.0, 6.0, group="x", atoms="any"),
    ]
    points, limits, weights, groups = features("MKTAYIAK", given)
    assert points.tolist() == [[1, 29], [7, 27], [11, 23]]
    nearer = 0.2 * sum(float(atom_reach("CB")[restype_order[letter]]) for letter in "TI")
    np.testing.assert_allclose(limits, [[0, 8], [5, 8], [3 + nearer, 6 + nearer]], rtol=1e-6)
    assert weights.tolist() == [0.5, 1.0, 1.0]
    assert groups.tolist() == [0, 1, 1]


def test_unknown_residues_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown residue"):
        features("MKXAYIAK", [Restraint(2, 7, 0.0, 8.0)])


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_distances_before_are_those_of_the_last_layer_and_groups_are_left_out(leave_one_out: bool) -> None:
    """A network of chosen structures: CA atoms on a line, 1 and 2 Å apart by layer, and 4 Å when folded.

    The second group holds only in folds without the first one, where atoms are 9 Å apart.
    """
    config, sequence = fastfold.load_model("mini").config, "MKTAYIAK"
    target = target_from_sequence(sequence)
    sampler = featurize(target.chains, [([], [])], config)
    given = [
        Restraint(0, 2, 0.0, 8.0, group="near"),
        Restraint(1, 3, 9.0, 30.0),
        Restraint(0, 1, 0.0, 3.0, group="near"),
    ]
    line = np.arange(8.0)[:, None] * np.array([1.0, 0, 0])
    layers = torch.zeros(2, 8, 14, 3)
    layers[:, :, 1] = torch.tensor(np.stack([line, 2 * line]))
    probabilities = torch.tensor([[0.5, 0.25], [0.75, 0.125], [0.25, 0.25]], dtype=torch.bfloat16)
    runs: list[int] = []

    def run(*_: object) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        sides = {"atom_pos": layers.to(torch.bfloat16)}
        return {"structure_module": {"sidechains": sides, "restraint_probabilities": probabilities}}, {}

    def fold(one: SimpleNamespace, run: RunNetwork) -> SimpleNamespace:
        run(*[None] * 4)  # type: ignore[arg-type]
        number = len(one.sampler.static[RESTRAINT_FEATURES[2]])
        runs.append(number)
        assert (one.on_cycle, one.recycles) == ((None, []) if number < 3 else (print, [1]))
        positions = np.zeros((8, 37, 3), np.float32)
        positions[:, 1] = line * (4 if number != 1 else 9)
        aatype = np.array([restype_order[letter] for letter in sequence])
        return SimpleNamespace(atom_positions=positions, aatype=aatype, mean_plddt=61.0)

    one = SimpleNamespace(sampler=sampler, target=target, on_cycle=print, recycles=[1])
    _, report = fold_with_springs(one, given, fold, run, leave_one_out=leave_one_out)  # type: ignore[arg-type]
    np.testing.assert_allclose(report.before, [4, 4, 2], atol=1e-5)
    np.testing.assert_allclose(report.after, [8, 8, 4], atol=1e-5)
    assert report.probabilities.tolist() == [[0.5, 0.25], [0.75, 0.125], [0.25, 0.25]]
    assert (report.probabilities.dtype, report.plddt) == (np.float32, 61.0)
    assert report.restraints == tuple(given)
    if not leave_one_out:
        assert (runs, report.left_out) == ([3], None)
        return
    assert runs == [3, 1, 2]
    assert report.left_out is not None
    first, second = report.left_out
    assert (first.group, first.contradicts, first.plddt) == ((0, 2), (1,), 0.0)
    np.testing.assert_allclose(first.distances, [18, 18, 9], atol=1e-5)
    assert (second.group, second.contradicts, second.plddt) == ((1,), (), 0.0)
    np.testing.assert_allclose(second.distances, [8, 8, 4], atol=1e-5)


@pytest.mark.parametrize(
    ("limits", "folds"),
    [
        ([(0, 2, 8.0), (0, 1, 4.0)], [2]),  # all hold
        ([(0, 2, 3.0)], [1]),  # without it there is nothing to compare with
        ([(0, 2, 3.0), (0, 1, 4.0)], [2, 1, 1]),
    ],
)
def test_groups_are_left_out_if_one_of_several_does_not_hold(
    limits: list[tuple[int, int, float]], folds: list[int]
) -> None:
    """CA atoms are 4 Å apart."""
    target = target_from_sequence("MKTA")
    sampler = featurize(target.chains, [([], [])], fastfold.load_model("mini").config)
    line = np.arange(4.0)[:, None] * np.array([4.0, 0, 0])
    sides = torch.zeros(1, 4, 14, 3)
    sides[0, :, 1] = torch.tensor(line)
    runs: list[int] = []

    def fold(one: SimpleNamespace, run: RunNetwork) -> SimpleNamespace:
        run(*[None] * 4)  # type: ignore[arg-type]
        runs.append(len(one.sampler.static[RESTRAINT_FEATURES[2]]))
        positions = np.zeros((4, 37, 3), np.float32)
        positions[:, 1] = line
        aatype = np.array([restype_order[letter] for letter in "MKTA"])
        return SimpleNamespace(atom_positions=positions, aatype=aatype, mean_plddt=61.0)

    one: Any = SimpleNamespace(sampler=sampler, target=target, on_cycle=None, recycles=[])
    fold_with_springs(
        one,
        [Restraint(first, second, 0.0, high) for first, second, high in limits],
        fold,  # type: ignore[arg-type]
        lambda *_: ({"structure_module": {"sidechains": {"atom_pos": sides}}}, {}),
        leave_one_out=True,
    )
    assert runs == folds


def test_a_restrained_fold_obeys_and_stays_a_protein(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    rows = ("A,3,A,27,8,CA,", "A,7,A,23,8,CB,", "A,5,A,25,7.5,any,g", "A,5,A,24,7.5,any,g")
    header = "chain1,residue1,chain2,residue2,max,atoms,group"
    path.write_text("\n".join([header, *rows, ""]))
    model = fastfold.load_model("mini")
    found = fastfold.predict(SEQUENCE, model, restraints=path)
    report = found.restraints
    assert report is not None
    assert (report["satisfied_before"], report["satisfied"], report["total"]) == (0, 3, 3)
    ca = torch.from_numpy(found.atom_positions[:, 1])
    assert float(torch.linalg.vector_norm(ca[2] - ca[26])) == pytest.approx(
        report["restraints"][0]["distance"], abs=0.01
    )
    assert report["steps"] == 0
    assert not check_structure(found.protein).problems
    again = fastfold.predict(SEQUENCE, model)
    assert again.restraints is None
    assert float(np.linalg.norm(again.atom_positions[2, 1] - again.atom_positions[26, 1])) > 8.0


def test_any_network_ends_in_the_descent_on_request(tmp_path: Path) -> None:
    """A network without a descent of its own gets the settings of `mini`'s, in place of gradient steps."""
    path = tmp_path / "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,2,A,12,8\n")
    plain = fastfold.load_model("mini")
    plain.config.model.heads.structure_module.distogram_descent = None
    sequence = SEQUENCE[:14]
    own = fastfold.predict(sequence, "mini", restraints=path, num_recycles=0)
    found = fastfold.predict(sequence, plain, restraints=path, restraint_springs=True, num_recycles=0)
    assert np.array_equal(found.atom_positions, own.atom_positions)
    assert found.restraints == own.restraints
    assert found.restraints is not None
    assert (found.restraints["satisfied"], found.restraints["steps"]) == (1, 0)
    free = fastfold.predict(sequence, plain, num_recycles=0)
    assert not np.array_equal(free.atom_positions, own.atom_positions)
    assert "distogram_descent" not in {
        key for key, value in plain.config.model.heads.structure_module.items() if value is not None
    }


def test_chains_of_a_multimer_network_are_apart_in_the_descent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residues of different chains are no neighbours, and restraints between chains hold."""
    path = tmp_path / "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,3,B,2,8\n")
    numbers: list[list[int]] = []

    def watched(*arguments: Any, residue_index: torch.Tensor, **named: Any) -> torch.Tensor:
        numbers.append(residue_index.tolist())
        return descend(*arguments, residue_index=residue_index, **named)

    monkeypatch.setattr("fastfold.evoformer.model.descend", watched)
    model = small_model("model_1_multimer_v3")
    with torch.no_grad():  # the distances of a network with random weights hardly count
        for parameter in model.heads["distogram"].parameters():
            parameter.mul_(0.02)
    found = fastfold.predict(
        "MKTAYIAKQR:GSGSGS", model, restraints=path, restraint_springs=True, num_recycles=0
    ).restraints
    assert found is not None
    assert (found["satisfied_before"], found["satisfied"]) == (0, 1)
    (index,) = numbers
    assert np.diff(index).tolist() == [1] * 9 + [191] + [1] * 5


def test_springs_are_planned_with_the_descent(tmp_path: Path) -> None:
    network = model_config("model_1_ptm")
    assert descent_settings(apply_settings(InferConfig(), network)) is None
    config = InferConfig(restraints=tmp_path, restraint_springs=True)
    mini = descent_settings(model_config("mini"))
    assert descent_settings(apply_settings(config, network)) == mini
    assert numeric_settings(config, network)["restraint_springs"] is True
    assert "restraint_springs" not in numeric_settings(InferConfig(restraints=tmp_path), network)


def test_contradictions_are_told(tmp_path: Path) -> None:
    """A pair cannot be near and far: one of both holds, and the other one without it."""
    path = tmp_path / "links.csv"
    path.write_text(
        "chain1,residue1,chain2,residue2,min,max,weight\nA,3,A,15,,5,1\nA,4,A,15,8.6,,1\nA,1,A,9,,30,1\n"
    )
    found = fastfold.predict(SEQUENCE, "mini", restraints=path, restraint_leave_one_out=True).restraints
    assert found is not None
    assert found["satisfied"] < 3
    contradicts = [row["contradicts"] for row in found["restraints"]]
    assert ["line 3"] in contradicts or ["line 2"] in contradicts
    assert contradicts[2] == []
    assert found["satisfied_left_out"] is not None
