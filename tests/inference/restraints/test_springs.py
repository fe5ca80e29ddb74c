"""Folds of `mini` under restraints: its descent obeys them and the report tells what changed."""

from __future__ import annotations

from pathlib import Path
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
from fastfold.inference.network_settings import apply_settings, numeric_settings
from fastfold.inference.restraints.distances import atom_reach
from fastfold.inference.restraints.restraint import Restraint
from fastfold.inference.restraints.springs import add_springs
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
