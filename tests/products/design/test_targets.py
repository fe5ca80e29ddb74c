"""Binders of several targets: templates that are flexible, joint losses, and off-targets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.losses.design import Outputs, avoid_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.config import InferConfig
from fastfold.inference.models import requested_networks
from fastfold.inference.request import InferRequest
from fastfold.inference.runner import Summary
from fastfold.products.design.config import DesignConfig
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.joint import JointEvaluator, planned_evaluator
from fastfold.products.design.optimize import DesignState
from fastfold.products.design.results.design import Design
from fastfold.products.design.results.refold import fold_designs
from fastfold.products.design.saved import design_identity, load_state, save_state
from fastfold.products.design.tasks.binders import binder
from fastfold.products.design.tasks.given import TargetStructure, check_flexible, template_features
from fastfold.products.design.tasks.layout import draw_numbers
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.protein import residue_constants as rc


def test_targets_are_named_with_chains_and_residues(tmp_path: Path) -> None:
    assert TargetStructure.parse("t.pdb") == TargetStructure(Path("t.pdb"))
    assert TargetStructure.parse("t.pdb:A,B:A54,B2") == TargetStructure(Path("t.pdb"), ("A", "B"), "A54,B2")
    odd = tmp_path / "a:b.pdb"
    odd.write_text("")
    assert TargetStructure.parse(str(odd)) == TargetStructure(odd)
    with pytest.raises(ConfigError, match="expected FILE:CHAINS:RESIDUES"):
        TargetStructure.parse("t.pdb:A:B:C")
    with pytest.raises(ConfigError, match="expected none, sidechains, backbone, free"):
        check_flexible("yes")


def test_flexible_templates_leave_parts_out(backbone: Path) -> None:
    task = binder(backbone, 7, chains=["A"])
    whole, nothing = template_features(task.templates or (), "given", ["none"] * 2) or (None, None)
    assert nothing is None
    assert whole is not None
    side_atoms = np.ones(37, bool)
    side_atoms[[rc.atom_order[name] for name in ("N", "CA", "C", "CB", "O")]] = False
    whole = {**whole, "template_all_atom_masks": np.ones_like(whole["template_all_atom_masks"])}
    from fastfold.products.design.tasks import given

    for flexible in ("sidechains", "backbone"):
        found = given._flexible(whole, flexible)
        masks = found["template_all_atom_masks"]
        assert masks[..., side_atoms].sum() == 0
        assert masks[..., ~side_atoms].min() == 1
        types = found["template_aatype"].argmax(-1)
        assert (types == 21).all() == (flexible == "backbone")
    assert binder(backbone, 7, flexible="free").template_features is None


def test_flexible_targets_change_what_the_network_sees(multimer: AlphaFold, backbone: Path) -> None:
    x = torch.randn(6, 20, generator=torch.manual_seed(0))
    losses = [
        Evaluator(
            binder(backbone, 6, chains=["A"], flexible=flexible), [multimer], {"plddt": 1.0, "exp_res": 1.0}
        )(x, Relaxation(), gradient=False).loss
        for flexible in ("none", "backbone", "free")
    ]
    assert len(set(losses)) == 3


def test_avoided_contacts_have_a_loss_with_a_lower_bound() -> None:
    edges = torch.linspace(2.3125, 21.6875, 63)
    logits = torch.zeros(3, 3, 64)
    logits[0, 1, 5] = 50.0  # a contact
    logits[0, 2, 63] = logits[2, 1, 63] = 50.0  # none
    nothing = torch.zeros(3, 14, 3)
    made = Outputs(logits, torch.cat([torch.zeros(1), edges]), nothing, nothing, nothing, nothing)
    pairs = torch.tensor([[0.0, 1, 1], [0, 0, 0], [0, 1, 0]])
    far = avoid_loss(made, 14.0, torch.tensor([0.0, 0, 1]), pairs)
    near = avoid_loss(made, 14.0, torch.tensor([1.0, 0, 0]), pairs)
    assert float(far) == pytest.approx(0, abs=1e-5)
    assert float(near) == pytest.approx(-np.log(1e-6), rel=1e-2)
    assert float(avoid_loss(made, 14.0, torch.tensor([1.0, 0, 0]), pairs * torch.tensor([1.0, 0, 1]))) < 1e-5


@pytest.mark.long
def test_joint_losses_are_means_over_targets_plus_off_targets(multimer: AlphaFold, backbone: Path) -> None:
    first, second, off = (TargetStructure(backbone, (chain,)) for chain in "ABA")
    task = binder(backbone, 6, chains=["A"], others=[second], avoided=[off])
    weights = {"plddt": 1.0, "avoid": 0.5}
    made = planned_evaluator(task, DesignConfig(weights=weights), [None] * 3, [multimer])
    assert isinstance(made, JointEvaluator)
    x = torch.randn(6, 20, generator=torch.manual_seed(0))
    found = made(x, Relaxation(soft=0.5))
    parts = [
        Evaluator(one, [multimer], weights)(x, Relaxation(soft=0.5))
        for one, weights in (
            (binder(backbone, 6, chains=["A"]), {"i_con": 1.0, "plddt": 1.0}),
            (task.others[0], {"i_con": 1.0, "plddt": 1.0}),
            (task.avoided[0], {"avoid": 0.5}),
        )
    ]
    assert found.loss == pytest.approx((parts[0].loss + parts[1].loss) / 2 + parts[2].loss, rel=1e-6)
    assert parts[0].losses["plddt"] != parts[1].losses["plddt"]
    assert found.losses["plddt"] == pytest.approx((parts[0].losses["plddt"] + parts[1].losses["plddt"]) / 2)
    assert found.losses["avoid"] == pytest.approx(parts[2].losses["avoid"])
    gradients = [part.gradient for part in parts]
    assert all(one is not None for one in gradients)
    wanted = (gradients[0] + gradients[1]) / 2 + gradients[2]  # type: ignore[operator]
    torch.testing.assert_close(found.gradient, wanted, rtol=1e-4, atol=1e-6)
    assert len(found.plddt) == 20
    nothing = planned_evaluator(task, DesignConfig(weights={"avoid": 0.0}), [None] * 3, [multimer])
    assert "avoid" not in nothing(x, Relaxation(soft=0.5), gradient=False).losses
    with pytest.raises(ConfigError, match="the loss avoid needs off-targets"):
        planned_evaluator(binder(backbone, 6), DesignConfig(weights={"avoid": 0.5}), [None], [multimer])
    assert first == off


def test_every_complex_is_folded_with_its_templates(
    tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = binder(
        backbone,
        6,
        chains=["A"],
        others=[TargetStructure(backbone, ("B",))],
        avoided=[TargetStructure(backbone)],
        cyclic=True,
    )
    design = Design("d", task, "ACDEFG", None)  # type: ignore[arg-type]
    assert [len(one) for one in design.sequences] == [14, 6]
    (tmp_path / "d.fasta").write_text(design.records)
    read: dict[str, list[bool]] = {}

    rings = []

    def run(request: InferRequest) -> Summary:
        rings.append(request.config.ring_names)
        targets, errors = request.read_targets()
        assert not errors
        for one in targets:
            read[one.name] = [chain is not None for chain in one.templates or ()]
            assert one.chains[-1].sequence == "ACDEFG"
        return Summary((), (), ())

    monkeypatch.setattr(
        "fastfold.products.design.results.refold.takes_templates", lambda *settings, are_whole: are_whole
    )
    fold_designs(
        [design],
        tmp_path / "d.fasta",
        requested_networks([]),
        InferConfig(),
        output=tmp_path,
        overwrite=False,
        run=run,
    )
    assert rings == ["B", True, "A", "C"]  # a binder of chain B is chain A
    assert read == {
        "d": [True, True],  # of the binder, for a monomer network, a template without atoms
        "d_alone": [],
        "d_target_2": [True, True],
        "d_off_1": [True, True, True],
    }


def test_lengths_follow_the_seed() -> None:
    drawn = [draw_numbers([(60, 62)], seed)[0] for seed in range(40)]
    assert set(drawn) == {60, 61, 62}
    assert drawn == [draw_numbers([(60, 62)], seed)[0] for seed in range(40)]


def test_a_state_is_read_for_its_own_design_alone(tmp_path: Path, backbone: Path) -> None:
    task = hallucination(10)
    state = DesignState(
        parameters=torch.rand(10, 20),
        step=2,
        moments=torch.rand(2, 10, 20),
        best=torch.rand(10, 20),
        best_loss=1.0,
        best_violation=3.0,
        plddt=np.arange(10.0),
        positions=np.ones((10, 37, 3), np.float32),
        log=[{"loss": 1.0}],
        trace=[np.ones((10, 3), np.float32)],
    )
    path = tmp_path / "x.safetensors"
    save_state(path, state, "one")
    found = load_state(path, "one", overwrite=False)
    assert found is not None
    assert torch.equal(found.best, state.best)
    np.testing.assert_array_equal(found.positions, state.positions)
    assert (found.step, found.best_loss, found.best_violation, found.log) == (2, 1.0, 3.0, state.log)
    assert load_state(path, "other", overwrite=True) is None
    with pytest.raises(ConfigError, match="belongs to a design with other settings"):
        load_state(path, "other", overwrite=False)
    config = DesignConfig()
    bound = binder(backbone, 6)
    tasks = [task, replace(task, own_losses={"mine": lambda o, a: o.lddt.sum()}), bound]
    tasks += [replace(bound, flexible="free"), replace(bound, avoided=[bound])]
    assert len({design_identity(one, config, ["a"]) for one in tasks}) == 5
    assert design_identity(task, config, ["a"]) != design_identity(task, config, ["b"])


def test_an_own_loss_takes_part(monomer: AlphaFold) -> None:
    task = replace(hallucination(10), own_losses={"mine": lambda o, _: o.positions[:, 1].square().mean()})
    found = Evaluator(task, [monomer], {"mine": 2.0})(torch.rand(10, 20), Relaxation(soft=1.0))
    assert found.loss == pytest.approx(2 * found.losses["mine"])
    assert found.gradient is not None
    assert float(found.gradient.abs().sum()) > 0
