"""Folds under restraints: distances come nearer to them, and the report says what holds."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError
from fastfold.evoformer.losses.design import Outputs
from fastfold.inference.config import InferConfig
from fastfold.inference.restraints.file import Restraint
from fastfold.inference.restraints.fit import (
    RestraintReport,
    _Loss,
    ca_distances,
    fit_restraints,
    grouped,
    satisfied,
)
from tests.helpers.command_line import CommandLine

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
PAIRS = [Restraint(2, 26, 0.0, 8.0), Restraint(6, 22, 0.0, 8.0), Restraint(4, 24, 0.0, 9.0)]


def outputs(ca: torch.Tensor, logits: torch.Tensor | None = None) -> Outputs:
    n = len(ca)
    positions = torch.zeros(n, 37, 3, dtype=ca.dtype)
    positions[:, 1] = ca
    edges = torch.linspace(2.3125, 21.6875, 63, dtype=ca.dtype)
    return Outputs(
        distogram=torch.zeros(n, n, 64, dtype=ca.dtype) if logits is None else logits,
        lower_edges=torch.cat([edges.new_zeros(1), edges]),
        lddt=torch.zeros(n, 50, dtype=ca.dtype),
        resolved=torch.zeros(n, 37, dtype=ca.dtype),
        positions=positions,
        atom14=positions[:, :14],
    )


def line(step: float) -> torch.Tensor:
    ca = torch.zeros(6, 3, dtype=torch.float64)
    ca[:, 0] = step * torch.arange(6)
    return ca


def test_the_loss_falls_with_the_violation_and_one_of_a_group_suffices() -> None:
    far, near = Restraint(0, 5, 0.0, 8.0), Restraint(0, 1, 0.0, 8.0)

    def loss(*restraints: Restraint, step: float = 4.0) -> float:
        return float(_Loss(restraints, torch.arange(6), line(1.0))(outputs(line(step))))

    assert loss(far, step=5.0) > loss(far, step=3.0) > loss(far, step=1.0)
    grouped_far = (Restraint(0, 5, 0.0, 8.0, 1.0, "x"), Restraint(0, 1, 0.0, 8.0, 1.0, "x"))
    assert loss(*grouped_far) == pytest.approx(loss(near))
    assert loss(far, near) == pytest.approx((loss(far) + loss(near)) / 2)
    assert loss(Restraint(0, 5, 30.0, np.inf), step=1.0) > loss(Restraint(0, 5, 30.0, np.inf), step=7.0)


def test_groups_and_satisfied_restraints() -> None:
    given = [Restraint(0, 1, 0, 8), Restraint(0, 2, 0, 8, 1, "x"), Restraint(0, 3, 0, 8, 1, "x")]
    assert grouped(given) == [[0], [1, 2]]
    assert satisfied(given, np.array([9.0, 9.0, 7.0])) == 1
    assert satisfied(given, np.array([8.0, 9.0, 7.0])) == 2


def test_the_report_is_plain() -> None:
    given = (Restraint(0, 1, 0.0, 8.0, line="line 2"), Restraint(0, 2, 5.0, np.inf, line="line 3"))
    found = RestraintReport(given, np.array([9.0, 4.0]), np.array([7.0, 4.0]), 50.0, 60.0, 12).to_json()
    assert (found["satisfied_before"], found["satisfied"], found["total"]) == (0, 1, 2)
    assert [row["holds"] for row in found["restraints"]] == [True, False]
    assert found["restraints"][1]["max"] is None
    assert found["restraints"][0]["residues"] == [1, 2]


@pytest.mark.slow
def test_mini_obeys_restraints() -> None:
    """Helices that are far apart come together; the network is left as it was."""
    model = fastfold.load_model("mini")
    before = copy.deepcopy(model.state_dict())
    target = target_from_sequence(SEQUENCE)
    sampler = featurize(target.chains, [([], [])], model.config)
    found = fit_restraints(model, sampler, PAIRS, steps=25)
    plain = fastfold.predict(SEQUENCE, model, num_recycles=1)
    assert satisfied(PAIRS, ca_distances(PAIRS, plain.atom_positions)) < 3
    with torch.no_grad():
        result = model(
            lambda cycle, member: {
                k: torch.as_tensor(v) for k, v in found.sampler.sample(cycle, member).items()
            },
            1,
        )
    after = ca_distances(PAIRS, result["structure_module"]["final_atom_positions"].numpy())
    assert np.maximum(after - 8.0, 0).sum() < 0.5 * np.maximum(found.before - 8.0, 0).sum()
    assert model.structure_module.stop_rotation_gradient
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_command_writes_the_report(cli: CommandLine) -> None:
    path = cli.folder / "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,3,A,9,5\nA,1,A,10,6\n")
    done = cli.infer(cli.fasta({"T1": "MKTAYIAKQR"}), "--restraints", path, "--restraint-steps", "2")
    assert done.code == 0, done.err
    assert "of 2 restraints hold" in done.err
    report = cli.scores("T1")["restraints"]
    assert report["total"] == 2
    assert [row["line"] for row in report["restraints"]] == ["line 2", "line 3"]
    assert cli.config("T1")["settings"]["restraints"] == "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,3,A,99,5\n")
    failed = cli.infer(cli.fasta({"T2": "MKTAYIAKQR"}), "--restraints", path)
    assert failed.code == 1
    assert "line 2: chain A has residues 1 to 10, found 99" in failed.err + failed.out


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    for wrong in ({"precision": "int8"}, {"parallel": "dap=2"}, {"cuda_graphs": True}):
        with pytest.raises(ConfigError, match="restraints"):
            InferConfig(restraints=tmp_path, **wrong)
    with pytest.raises(ConfigError, match="restraint_steps"):
        InferConfig(restraint_steps=0)
