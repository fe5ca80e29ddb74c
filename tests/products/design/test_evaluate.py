"""Losses of designs under small networks, and their gradients with respect to the sequence."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.execution import current_call
from fastfold.evoformer.inputs import Relaxation, relax_sequence
from fastfold.evoformer.losses.design import seq_ent_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding.gradients import differentiable
from fastfold.products.design.evaluate import Evaluator, RecycleMode, uniform_bias
from fastfold.products.design.passes import PassState
from fastfold.products.design.tasks.binders import BinderParts, binder
from fastfold.products.design.tasks.losses import task_losses
from fastfold.products.design.tasks.protocols import fixed_backbone, hallucination
from fastfold.products.design.tasks.task import DesignTask

SOFT = Relaxation(soft=0.6)


def start(task: DesignTask, seed: int = 0) -> torch.Tensor:
    return torch.randn(task.num_parameters, 20, generator=torch.manual_seed(seed)).double()


def check_gradient(evaluator: Evaluator, recycles: int = 0, tolerance: float = 1e-4, **settings: Any) -> None:
    """Along a random direction, against a central difference."""
    x, direction = start(evaluator.task), start(evaluator.task, 1)
    gradient = evaluator(x, SOFT, recycles=recycles, **settings).gradient
    assert gradient is not None
    step = 1e-6

    def value(sign: float) -> float:
        at = x + sign * step * direction
        return evaluator(at, SOFT, recycles=recycles, gradient=False, **settings).loss

    assert float((gradient * direction).sum()) == pytest.approx(
        (value(1) - value(-1)) / (2 * step), rel=tolerance
    )


@pytest.mark.parametrize("loss", ["plddt", "con", "rg", "pae"])
def test_the_gradient_is_a_finite_difference(monomer: AlphaFold, loss: str) -> None:
    model = copy.deepcopy(monomer).double()
    check_gradient(Evaluator(hallucination(12), [model], {loss: 1.0, "seq_ent": 0.1}))


@pytest.mark.parametrize("recycles", [1, 2, 3])
def test_backprop_is_a_finite_difference_through_all_passes(monomer: AlphaFold, recycles: int) -> None:
    model = copy.deepcopy(monomer).double()
    weights = {"plddt": 1.0, "con": 1.0, "pae": 1.0}
    through = Evaluator(hallucination(10), [model], weights, recycle_mode="backprop")
    check_gradient(through, recycles, tolerance=1e-5)
    x = start(through.task)
    found = through(x, SOFT, recycles=recycles)
    last = Evaluator(hallucination(10), [model], weights)(x, SOFT, recycles=recycles)
    assert found.loss == pytest.approx(last.loss, rel=1e-9)
    assert found.gradient is not None
    assert last.gradient is not None
    assert float((found.gradient - last.gradient).norm() / last.gradient.norm()) > 1e-2


@pytest.mark.parametrize("recycles", [1, 2])
def test_add_prev_is_the_loss_of_the_mean_output(monomer: AlphaFold, recycles: int) -> None:
    """All passes recorded at once, with constant states between them, give the same loss and gradient."""
    model = copy.deepcopy(monomer).double()
    weights = {"plddt": 1.0, "con": 0.5, "pae": 0.3}
    evaluator = Evaluator(hallucination(10), [model], weights, recycle_mode="add_prev")
    x = start(evaluator.task)
    found = evaluator(x, SOFT, recycles=recycles)
    leaf, state, logits = x.double().requires_grad_(), None, []
    with contextlib.ExitStack() as stack:
        for number in range(recycles + 1):
            one = stack.enter_context(evaluator._pass(0, leaf, SOFT, number, number, False, state))
            state = PassState.after(number, one.result)
            logits.append((one.outputs.distogram, one.outputs.errors, one.outputs.lddt))
        means = [torch.stack(group).mean(0) for group in zip(*logits, strict=True)]
        mean = replace(one.outputs, distogram=means[0], errors=means[1], lddt=means[2])
        losses = task_losses(evaluator.task, torch.device("cpu"), torch.float64)
        loss = torch.stack(
            [weight * losses[name](mean, one.aatype) for name, weight in weights.items()]
        ).sum()
        loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert found.gradient is not None
    assert leaf.grad is not None
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-9, atol=1e-12)
    last = Evaluator(hallucination(10), [model], weights)(x, SOFT, recycles=recycles)
    assert found.loss != pytest.approx(last.loss, rel=1e-6)
    assert evaluator(x, SOFT, recycles=recycles, gradient=False).loss == pytest.approx(found.loss, rel=1e-12)


def test_first_and_sample_take_the_gradient_of_one_pass(monomer: AlphaFold) -> None:
    model = copy.deepcopy(monomer).double()
    evaluators = {
        mode: Evaluator(hallucination(10), [model], {"con": 1.0}, recycle_mode=mode)
        for mode in ("last", "first", "sample")
    }
    x = start(evaluators["last"].task)
    single = [evaluators["last"](x, SOFT, recycles=n).gradient for n in (0, 1)]
    first = evaluators["first"](x, SOFT, recycles=1)
    assert first.loss == pytest.approx(evaluators["last"](x, SOFT, recycles=1).loss, rel=1e-9)
    torch.testing.assert_close(first.gradient, single[0], rtol=1e-9, atol=1e-12)
    drawn = [evaluators["sample"](x, SOFT, recycles=1, seed=seed).gradient for seed in range(6)]
    chosen = [[bool(torch.allclose(one, other, rtol=1e-9)) for other in single] for one in drawn]
    assert all(sum(one) == 1 for one in chosen)
    assert len({tuple(one) for one in chosen}) == 2


@pytest.mark.parametrize("mode", get_args(RecycleMode))
def test_a_loss_of_the_sequence_has_its_gradient_in_every_mode(monomer: AlphaFold, mode: RecycleMode) -> None:
    """The entropy does not depend on the network, nor on its passes."""
    evaluator = Evaluator(hallucination(10), [monomer], {"seq_ent": 1.0}, recycle_mode=mode)
    x = start(evaluator.task).float().requires_grad_()
    seq_ent_loss(relax_sequence(x, SOFT).logits, torch.ones(10), SOFT.temperature).backward()
    found = evaluator(x, SOFT, recycles=1).gradient
    assert found is not None
    torch.testing.assert_close(found, x.grad)


def test_a_monomer_network_sees_chains_with_a_gap(monomer: AlphaFold) -> None:
    """The gap is larger than any relative position that the network tells apart, as with an offset of 50."""
    model = copy.deepcopy(monomer).double()
    evaluator = Evaluator(hallucination(10, copies=2), [model], {"i_con": 1.0, "con": 1.0})
    features, _ = evaluator._features[0]
    index = features["residue_index"]
    assert (index[1:] - index[:-1]).tolist() == [1] * 9 + [201] + [1] * 9
    assert int(index[10] - index[9]) > 2 * 32
    check_gradient(evaluator)


def test_a_monomer_network_sees_copies_in_rows_of_their_own(monomer: AlphaFold, multimer: AlphaFold) -> None:
    """Row 0 has all copies; each further one has a copy and gaps (class 21), as in ColabDesign."""
    task = hallucination(10, copies=3)
    model = copy.deepcopy(monomer).double()
    evaluator = Evaluator(task, [model], {"con": 1.0, "i_con": 1.0})
    relaxed = relax_sequence(start(task).double(), SOFT)
    features, _, _ = evaluator._features_of(0, relaxed)
    rows = features["msa_feat"]
    assert rows.shape == (4, 30, 49)
    assert torch.equal(features["msa_mask"], torch.ones(4, 30))
    for number in range(3):
        own = slice(10 * number, 10 * number + 10)
        assert torch.equal(rows[1 + number, own], rows[0, own])
        others = torch.cat([rows[1 + number, : own.start], rows[1 + number, own.stop :]])
        gap = torch.zeros(49, dtype=torch.float64)
        gap[[21, 46]] = 1.0
        assert torch.equal(others, gap.expand_as(others))
    check_gradient(evaluator)
    several = Evaluator(task, [multimer], {"con": 1.0})._features_of(0, relax_sequence(start(task), SOFT))[0]
    assert several["msa_feat"].shape[0] == 1


def test_a_monomer_network_sees_the_target_of_a_binder(monomer: AlphaFold, backbone: Path) -> None:
    """Its two chains in one frame, and nothing of the binder."""
    model = copy.deepcopy(monomer).double()
    task = binder(backbone, 8)
    assert task.templates is not None
    features, _ = Evaluator(task, [model], {"i_con": 1.0})._features[0]
    mask, positions = features["template_all_atom_masks"][0], features["template_all_atom_positions"][0]
    given = np.concatenate([one.positions for one in task.templates if one is not None])
    assert mask[:24].sum() > 0
    assert mask[24:].sum() == 0
    np.testing.assert_allclose(positions[:24].numpy(), given, atol=1e-4)

    def loss(one: DesignTask) -> float:
        return Evaluator(one, [model], {"i_con": 1.0})(start(task), SOFT, gradient=False).loss

    first, second, nothing = task.templates
    assert second is not None
    apart = replace(task, templates=[first, replace(second, positions=second.positions + 6.0), nothing])
    assert abs(loss(apart) / loss(task) - 1) > 1e-5
    assert abs(loss(task.without_templates) / loss(task) - 1) > 1e-5


def test_the_gradient_of_a_binder_is_a_finite_difference(multimer: AlphaFold, backbone: Path) -> None:
    model = copy.deepcopy(multimer).double()
    task = binder(backbone, 6, chains=["A"], hotspots="A3")
    check_gradient(Evaluator(task, [model], {"plddt": 1.0, "exp_res": 1.0}, hard_profile=False))


@pytest.mark.parametrize("kind", ["monomer", "multimer"])
def test_passes_that_are_computed_again_have_the_dropout_of_the_first_time(
    kind: str, backbone: Path, request: pytest.FixtureRequest
) -> None:
    """Templates that are not there take no random numbers, with and without gradients."""
    model = copy.deepcopy(request.getfixturevalue(kind)).double()
    task = binder(backbone, 6, chains=["A"])
    evaluator = Evaluator(task, [model], {"rg": 1.0}, recycle_mode="backprop", hard_profile=False)
    check_gradient(evaluator, recycles=1, dropout=True, seed=5)


def test_more_frames_than_templates_are_refused(monomer: AlphaFold, backbone: Path) -> None:
    parts = BinderParts(framework=backbone, loops="A:3-5,B:2-4")
    task = binder(backbone, chains=["A"], parts=parts, copies=4)
    with pytest.raises(ConfigError, match=r"takes 4 templates, and the chains need 5, one for each copy"):
        Evaluator(task, [monomer], {"plddt": 1.0})


@pytest.mark.parametrize("fails", [False, True])
def test_settings_of_gradients_are_undone(monomer: AlphaFold, fails: bool) -> None:
    model = copy.deepcopy(monomer)
    state = torch.random.get_rng_state()
    with contextlib.suppress(ZeroDivisionError), differentiable(model, 200, 3, True):
        call = current_call()
        assert call is not None
        assert call.training
        assert call.checkpointing
        assert not call.stop_rotation_gradient
        assert call.generator is not None
        assert not any(p.requires_grad for p in model.parameters())
        with differentiable(model, 200, 3, True):
            pass
        assert not any(p.requires_grad for p in model.parameters()), "another call still runs"
        _ = 1 / (0 if fails else 1)
    assert current_call() is None
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_network_is_left_as_it_was(monomer: AlphaFold) -> None:
    model = copy.deepcopy(monomer)
    evaluator = Evaluator(hallucination(12), [model], {"con": 1.0})
    evaluator(start(evaluator.task), SOFT, dropout=True)
    assert model.structure_module.stop_rotation_gradient
    assert not model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_dropout_follows_its_seed(monomer: AlphaFold) -> None:
    evaluator = Evaluator(hallucination(12), [monomer], {"con": 1.0})
    x = start(evaluator.task)
    found = [evaluator(x, SOFT, dropout=True, seed=seed, gradient=False).loss for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("mode", ["last", "average"])
def test_passes_add_up(monomer: AlphaFold, mode: RecycleMode) -> None:
    """The losses are those of the last pass, the averaged gradient is the mean of the passes' gradients."""
    model = copy.deepcopy(monomer).double()
    evaluator = Evaluator(hallucination(12), [model], {"con": 1.0}, recycle_mode=mode)
    x = start(evaluator.task)
    found = evaluator(x, SOFT, recycles=1)
    last = Evaluator(hallucination(12), [model], {"con": 1.0})
    single = [last(x, SOFT, recycles=n) for n in (0, 1)]
    assert found.loss == pytest.approx(single[1].loss, rel=1e-12)
    first, second = (one.gradient for one in single)
    assert first is not None
    assert second is not None
    wanted = second if mode == "last" else (first + second) / 2
    torch.testing.assert_close(found.gradient, wanted, rtol=1e-9, atol=1e-12)


def test_networks_are_averaged(monomer: AlphaFold) -> None:
    other = copy.deepcopy(monomer)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    task = hallucination(12)
    both = Evaluator(task, [monomer, other], {"con": 1.0})
    x = start(task)
    found = [both(x, SOFT, networks=n) for n in (None, [0], [1])]
    assert found[0].loss == pytest.approx((found[1].loss + found[2].loss) / 2)
    gradients = [one.gradient for one in found]
    assert all(g is not None for g in gradients)
    torch.testing.assert_close(gradients[0], (gradients[1] + gradients[2]) / 2, rtol=1e-4, atol=1e-6)


def test_losses_and_networks_that_do_not_fit_are_refused(monomer: AlphaFold, backbone: Path) -> None:
    with pytest.raises(ConfigError, match="hallucinate has no loss 'rmsd'; it has NC, clashes, con"):
        Evaluator(hallucination(12), [monomer], {"rmsd": 1.0})
    with pytest.raises(ConfigError, match="holds rings up to 200 residues, and chain A has 201"):
        Evaluator(hallucination(201, copies=2, cyclic=True), [monomer], {"con": 1.0})
    unseeing = copy.copy(monomer)
    unseeing.config = copy.deepcopy(monomer.config)
    with unseeing.config.unlocked():
        unseeing.config.model.embeddings_and_evoformer.template.enabled = False
    with pytest.raises(ConfigError, match="takes no templates, which hold the given chains"):
        Evaluator(binder(backbone, 8), [unseeing], {"i_con": 1.0})
    for weights in ({"con": 0.0}, {"con": float("nan")}):
        with pytest.raises(ConfigError, match="expected losses with finite weights, not all 0"):
            Evaluator(hallucination(12), [monomer], weights)
    without = copy.deepcopy(monomer)
    del without.heads["predicted_aligned_error"]
    with pytest.raises(ConfigError, match="predicts no aligned error"):
        Evaluator(fixed_backbone(backbone, chain="A"), [without], {"dgram_cce": 1.0, "pae": 0.1})


def test_forbidden_residues() -> None:
    bias = uniform_bias("cM")
    assert bias is not None
    assert torch.nonzero(bias < -1e5).flatten().tolist() == [4, 12]
    assert uniform_bias("") is None
    with pytest.raises(ConfigError, match="found 'J'"):
        uniform_bias("CJ")
    with pytest.raises(ConfigError, match="all residues are forbidden"):
        uniform_bias("ACDEFGHIKLMNPQRSTVWY")


@pytest.mark.parametrize("is_hard", [False, True])
def test_limits_and_the_entropy_count_if_they_have_weights(
    monkeypatch: pytest.MonkeyPatch, is_hard: bool
) -> None:
    """Limits see the residues of a hard sequence, else their shares, of the designed chain alone."""
    seen: list[torch.Tensor] = []

    def of_limits(residues: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(residues)
        return {"composition": residues.sum(), "charge": residues.mean()}

    evaluator = Evaluator.__new__(Evaluator)
    evaluator.weights = {"con": 1.0, "charge": 2.0, "seq_ent": 3.0}
    evaluator._losses = {"con": lambda outputs, aatype: torch.tensor(5.0), "rg": lambda *_: torch.tensor(6.0)}  # type: ignore[dict-item]
    evaluator.limits = SimpleNamespace(losses=of_limits)  # type: ignore[assignment]
    evaluator.task = SimpleNamespace(sequence=lambda form: form * 2, designed_chain=np.array([0, 2]))  # type: ignore[assignment]
    soft, hard, logits = (torch.arange(3.0)[:, None] + number for number in (0, 10, 20))
    relaxed: Any = SimpleNamespace(soft=soft, hard=hard, logits=logits)
    nothing: Any = None
    relaxation = Relaxation(hard=float(is_hard), temperature=0.5)
    found = evaluator._named_losses(nothing, relaxed, relaxation, nothing)
    assert found.keys() == {"con", "charge", "seq_ent"}
    assert float(found["con"]) == 5.0
    expected = (hard if is_hard else soft)[[0, 2]] * 2
    assert torch.equal(seen[0], expected)
    assert float(found["charge"]) == float(expected.mean())
    assert float(found["seq_ent"]) == float(seq_ent_loss(logits, torch.ones(3), 0.5))
    evaluator.weights = {"composition": 1.0}
    assert evaluator._named_losses(nothing, relaxed, relaxation, nothing).keys() == {"composition"}
