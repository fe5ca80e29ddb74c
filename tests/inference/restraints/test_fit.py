"""Folds under restraints: distances come nearer to them, and the report says what holds."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastfold
from fastfold.data.features.pipeline import featurize
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError
from fastfold.evoformer.losses.design import Outputs
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.gradients import GradientPolicy, GradientRun
from fastfold.inference.restraints import fit as fit_module
from fastfold.inference.restraints.distances import atom_reach, restraint_distances
from fastfold.inference.restraints.fit import PATIENCE, RECYCLES, Figures, _Fit, _Loss, fit_restraints
from fastfold.inference.restraints.restraint import Restraint, grouped, satisfied
from fastfold.protein.residue_constants import sequence_to_aatype
from tests.helpers.command_line import CommandLine

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
PAIRS = [Restraint(2, 26, 0.0, 8.0), Restraint(6, 22, 0.0, 8.0), Restraint(4, 24, 0.0, 9.0)]

ALANINES = torch.zeros(6, dtype=torch.int64)


def test_neighbours_keep_their_distance_within_eight_residues_of_a_chain() -> None:
    """Chains are apart in the numbers of residues; gaps of numbering count."""
    index = torch.tensor([0, 1, 2, 12, 13, 0, 1])
    chain = torch.tensor([1, 1, 1, 1, 1, 2, 2])
    features = {"residue_index": index, "asym_id": chain, "msa_feat": torch.zeros(1, dtype=torch.float64)}
    assert fit_module._numbered(features).tolist() == (index + 200 * chain).tolist()
    assert fit_module._numbered({"residue_index": index}).tolist() == index.tolist()
    columns, near = fit_module._near_residues(features)
    pairs = {
        (i, int(j)) for i, row in enumerate(columns) for j, kept in zip(row, near[i], strict=True) if kept
    }
    expected = {(0, 1), (0, 2), (1, 2), (3, 4), (5, 6)}
    assert pairs == expected | {(j, i) for i, j in expected}
    assert near.sum() == len(pairs)
    long = {"residue_index": torch.arange(12), "msa_feat": features["msa_feat"]}
    columns, near = fit_module._near_residues(long)
    assert sorted(columns[0][near[0] > 0].tolist()) == list(range(1, 9))
    assert sorted(columns[11][near[11] > 0].tolist()) == list(range(3, 11))


def test_the_loss_of_a_step_has_terms_of_confidence_of_neighbours_and_of_the_size() -> None:
    """Of zeros, pLDDT is 50 and neighbours have not changed; the size is that of all biases together."""
    fit = _Fit.__new__(_Fit)
    made = outputs(line(4.0))
    fit._neighbors, fit._near = torch.zeros(6, 16, dtype=torch.int64), torch.ones(6, 16, dtype=torch.float64)
    fit._start = torch.zeros(6, 16, 64, dtype=torch.float64).log_softmax(-1)
    fit._everyone, fit.residues = torch.ones(6, dtype=torch.float64), 6
    fit.bias = {"one": torch.full((2, 3), 2.0).double(), "other": torch.full((4,), 3.0).double()}
    loss: Any = lambda _: torch.tensor(7.0, dtype=torch.float64)  # noqa: E731
    assert float(fit._total(loss, made)) == pytest.approx(7.0 + 0.3 * 0.5 + 0.1 * (6 * 4 + 4 * 9) / 6)
    fit._start = (
        torch.cat([torch.zeros(6, 16, 32), torch.full((6, 16, 32), -99.0)], -1).double().log_softmax(-1)
    )
    changed = math.log(2)  # from half of the bins to all
    assert float(fit._total(loss, made)) == pytest.approx(7.0 + 0.15 + 2.0 * changed + 1.0)


@pytest.mark.parametrize(
    ("with_all", "without", "expected"),
    [
        (
            (9.0, 5.0, 9.0),
            {0: (9.0, 9.0, 5.0), 1: (9.0, 5.0, 9.0), 2: (9.0, 5.0, 9.0)},
            [((0,), (2,)), ((1,), ()), ((2,), ())],
        ),
        (
            (9.0, 9.0, 9.0),
            {0: (9.0, 5.0, 5.0), 1: (5.0, 9.0, 9.0), 2: (9.0, 9.0, 5.0)},
            [((0,), (1, 2)), ((1,), (0,)), ((2,), ())],
        ),
        ((5.0, 5.0, 5.0), {}, []),  # all hold
    ],
)
def test_a_group_contradicts_those_that_hold_without_it_alone(
    with_all: tuple[float, ...], without: dict[int, tuple[float, ...]], expected: list[Any]
) -> None:
    """Distances of three restraints of at most 8 Å, after steps with all and without each one."""
    fit = _Fit.__new__(_Fit)
    fit._restraints = [Restraint(0, number, 0.0, 8.0) for number in (1, 2, 3)]
    fit.bias = {"one": torch.zeros(1)}
    calls: list[tuple[int, ...]] = []

    def descend(steps: int, left_out: Sequence[int] = ()) -> tuple[int, Figures]:
        assert (steps, float(fit.bias["one"])) == (4, 0.0)
        calls.append(tuple(left_out))
        fit.bias["one"] += 1.0  # restored after each trial
        found = without[left_out[0]] if len(left_out) else with_all
        return steps, Figures(np.array(found), 60.0 + len(left_out))

    fit.descend = descend  # type: ignore[method-assign]
    found = fit.contradictions(4)
    assert [(one.group, one.contradicts) for one in found] == expected
    assert calls == [(), *(one for one, _ in expected)]
    assert all(one.plddt == 1.0 for one in found)
    assert float(fit.bias["one"]) == 0.0
    fit._restraints = fit._restraints[:1]
    without[0] = with_all = (9.0,)
    assert fit.contradictions(4) == []  # nothing is left to contradict


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
        return float(_Loss(restraints, torch.arange(6), ALANINES, line(1.0))(outputs(line(step))))

    assert loss(far, step=5.0) > loss(far, step=3.0) > loss(far, step=1.0)
    grouped_far = (Restraint(0, 5, 0.0, 8.0, 1.0, "x"), Restraint(0, 1, 0.0, 8.0, 1.0, "x"))
    assert loss(*grouped_far) == pytest.approx(loss(near))
    assert loss(far, near) == pytest.approx((loss(far) + loss(near)) / 2)
    assert loss(Restraint(0, 5, 30.0, np.inf), step=1.0) > loss(Restraint(0, 5, 30.0, np.inf), step=7.0)


def test_a_restraint_of_any_atoms_without_a_loss_holds() -> None:
    """Two tryptophans whose CA are 12 Å apart, and whose side chains meet: 6 Å is violated by CA alone."""
    types = torch.tensor(sequence_to_aatype("WWAAAA"))
    positions = torch.zeros(6, 14, 3, dtype=torch.float64)
    positions[1, :, 0] = 12.0
    restraints = {kind: Restraint(0, 1, 0.0, 6.0, atoms=kind) for kind in ("any", "CA", "CB")}

    def loss(kind: str, nearest: float) -> float:
        moved = positions.clone()
        moved[1, 13, 0] = nearest  # CH2
        made = replace(outputs(line(1.0)), atom14=moved)
        losses = _Loss([restraints[kind]], torch.arange(6), types, line(1.0))
        assert float(losses.distances(made)) == pytest.approx(nearest if kind == "any" else 12.0)
        return float(losses(made))

    # Nearest atoms, 14 pairs of 196, count as if they were log(196 / 14) / 10 Å farther apart.
    assert loss("any", 5.7) == loss("any", 4.0) < loss("any", 5.8) < loss("any", 9.0)
    assert loss("CA", 4.0) == loss("CA", 9.0) > loss("any", 9.0)


def test_distances_of_cb_may_differ_by_the_reach_of_side_chains() -> None:
    """Probability of the bins that a restraint permits: all are equal, so it is their number."""
    edges = outputs(line(1.0)).lower_edges
    types = torch.tensor(sequence_to_aatype("WGAAAA"))
    reach = sum(float(atom_reach("CB")[int(one)]) for one in types[:2])

    def permitted(kind: str) -> float:
        atom14 = torch.zeros(6, 14, 3, dtype=torch.float64)
        atom14[0, :, 0] = 5.0
        made = replace(outputs(line(1.0)), atom14=atom14)
        loss = _Loss([Restraint(0, 1, 4.0, 6.0, atoms=kind)], torch.arange(6), types, line(1.0))
        return 64 * (np.exp(-float(loss(made))) - 1e-6)

    upper = torch.cat([edges[1:], torch.tensor([torch.inf])])
    for kind, below, above in (("CA", 3.0, 3.0), ("CB", 0.0, 0.0), ("any", 0.0, reach)):
        count = int(((edges < 6.0 + above) & (upper > 4.0 - below)).sum())
        assert permitted(kind) == pytest.approx(count, rel=1e-3), kind


def test_the_distogram_of_each_pair_counts() -> None:
    """All pairs are said to be far apart but two, in the rows of their first residues."""
    logits = torch.full((6, 6, 64), -20.0, dtype=torch.float64)
    logits[..., -1] = 20.0
    for first, second in ((0, 1), (0, 3)):
        logits[first, second, 10] = 60.0

    def loss(first: int, second: int) -> float:
        restraints = [Restraint(0, 2, 0.0, 8.0), Restraint(first, second, 0.0, 8.0)]
        return 2.0 * float(
            _Loss(restraints, torch.arange(6), ALANINES, line(1.0))(outputs(line(1.0), logits))
        )

    denied = -np.log(1e-6)
    for pair, expected in (((0, 1), denied), ((0, 3), denied), ((0, 4), 2 * denied), ((3, 0), 2 * denied)):
        assert loss(*pair) == pytest.approx(expected, abs=1e-3), pair


def test_the_nearest_of_a_group_decides_smoothly() -> None:
    """Against the loss of each restraint alone."""
    members = [Restraint(0, i, 0.0, 4.0, group="x") for i in (1, 3, 5)]

    def loss(*restraints: Restraint) -> float:
        return float(_Loss(restraints, torch.arange(6), ALANINES, line(1.0))(outputs(line(2.0))))

    alone = np.array([loss(one) for one in members])
    assert loss(*members) == pytest.approx(-0.05 * np.log(np.exp(-alone / 0.05).sum()))
    assert alone.min() - 0.05 * np.log(3) <= loss(*members) <= alone.min()


def test_weights_are_shares_of_the_loss() -> None:
    def loss(*restraints: Restraint) -> float:
        return float(_Loss(restraints, torch.arange(6), ALANINES, line(1.0))(outputs(line(4.0))))

    near, far = Restraint(0, 1, 0.0, 8.0, 0.95), Restraint(0, 5, 0.0, 8.0, 0.2)
    assert loss(near, far) == pytest.approx((0.95 * loss(near) + 0.2 * loss(far)) / 1.15)


def test_groups_and_satisfied_restraints() -> None:
    given = [Restraint(0, 1, 0, 8), Restraint(0, 2, 0, 8, 1, "x"), Restraint(0, 3, 0, 8, 1, "x")]
    assert grouped(given) == [[0], [1, 2]]
    assert satisfied(given, np.array([9.0, 9.0, 7.0])) == 1
    assert satisfied(given, np.array([8.0, 9.0, 7.0])) == 2


class Trials(_Fit):
    """Fits in which restraints 0 and 1 exclude each other: 0 holds with both, 1 without 0."""

    def __init__(self) -> None:
        group = {"weight": 1.0, "group": "x"}
        self._restraints = [
            Restraint(0, 1, 0, 8),
            Restraint(0, 2, 0, 8),
            *(Restraint(0, i, 0, 8, **group) for i in (3, 4)),
        ]
        self.bias = {"msa_feat": torch.zeros(2, requires_grad=True)}
        self.seen: list[tuple[int, ...]] = []

    def descend(self, steps: int, left_out: Sequence[int] = ()) -> tuple[int, Figures]:
        assert steps == 5
        assert not self.bias["msa_feat"].any()
        self.seen.append(tuple(left_out))
        with torch.no_grad():
            self.bias["msa_feat"] += 1
        holds = 0 not in left_out
        distances = np.array([7.0 if holds else 9.0, 9.0 if holds else 7.0, 9.0, 7.0])
        return steps, Figures(distances, 50.0 + 2 * (not holds))


def test_restraints_that_exclude_each_other_are_found() -> None:
    """Each trial starts from the fit, and is compared with one of the same length."""
    fit = Trials()
    trials = fit.contradictions(5)
    assert [(one.group, one.contradicts, one.plddt) for one in trials] == [
        ((0,), (1,), 2.0),
        ((1,), (), 0.0),
        ((2, 3), (), 0.0),
    ]
    assert [float(one.distances[0]) for one in trials] == [9.0, 7.0, 7.0]
    assert fit.seen == [(), (0,), (1,), (2, 3)]
    assert not fit.bias["msa_feat"].any()


class Course(_Fit):
    """Fit whose restraint has a given distance after each step."""

    def __init__(self, distances: Sequence[float]) -> None:
        self._course, self.passes = list(distances), 0
        self._restraints, self._of_templates = [Restraint(0, 1, 0.0, 8.0)], ()
        self.bias = {"msa_feat": torch.zeros(1, requires_grad=True)}
        self.residues, self.first = 1, Figures(np.array([distances[0]]), 50.0)
        self._recording = GradientRun(GradientPolicy.of_length(1))
        self._loss = lambda restraints: self  # type: ignore[assignment]

    def _run(self) -> float:  # type: ignore[override]
        self.passes += 1
        return self._course[self.passes - 1]

    def _recorded(self) -> object:  # type: ignore[override]
        return nullcontext()

    def distances(self, distance: float) -> torch.Tensor:
        return torch.tensor([distance])

    def _agreed(self, distances: torch.Tensor) -> np.ndarray:
        return distances.detach().numpy()

    def _figures(self, distance: float) -> Figures:  # type: ignore[override]
        return Figures(np.array([distance]), 50.0)

    def _total(self, loss: object, distance: float) -> torch.Tensor:  # type: ignore[override]
        return distance - self.bias["msa_feat"].sum() + self.bias["msa_feat"].detach().sum()


@pytest.mark.parametrize(
    ("distances", "steps", "taken", "best"),
    [
        ([7.0], 5, 0, 0),  # holds already
        ([12.0, 10.0, 7.9, 6.0], 5, 2, 2),  # holds after two steps
        ([12.0, 9.0, 10.0, 11.0], 3, 3, 1),  # the best step is not the last
        ([12.0, 9.0, *[10.0] * PATIENCE, 7.0], 9, 1 + PATIENCE, 1),  # no step was better for long
    ],
)
def test_a_fit_ends_early_and_keeps_the_best_step(
    distances: list[float], steps: int, taken: int, best: int
) -> None:
    fit = Course(distances)
    done, figures = fit.descend(steps)
    assert (done, fit.passes) == (taken, taken + 1)
    # Each step of Adam adds its rate to the bias, because the gradient is always -1.
    assert fit.bias["msa_feat"].tolist() == pytest.approx([0.03 * best], rel=1e-3)
    assert figures.distances[0] == distances[best]


def test_near_residues_are_eight_on_each_side_of_the_same_chain() -> None:
    index = torch.tensor([*range(12), 30, 31])
    features = {"residue_index": index, "asym_id": (index >= 11).long(), "msa_feat": torch.zeros(1)}
    columns, near = fit_module._near_residues(features)
    assert columns.shape == near.shape == (14, 2 * 8)
    for i, (others, marks) in enumerate(zip(columns.tolist(), near.tolist(), strict=True)):
        expected = [
            j
            for j in range(14)
            if j != i and abs(j - i) <= 8 and (i >= 11) == (j >= 11) and abs(int(index[i] - index[j])) <= 8
        ]
        assert [j for j, mark in zip(others, marks, strict=True) if mark] == expected


def test_the_loss_of_a_fit_is_the_sum_of_its_terms() -> None:
    """The local term is the divergence of the distogram from that before the fit, of near residues alone."""
    fit = object.__new__(_Fit)
    generator = torch.Generator().manual_seed(0)
    before, after = (torch.randn(6, 6, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    fit._everyone, fit.residues = torch.ones(6, dtype=torch.float64), 6
    fit.bias = {"msa_feat": torch.full((2, 3), 0.5)}
    fit._neighbors = torch.tensor([[1], [0], [1], [2], [3], [4]])
    fit._near = torch.tensor([[1.0], [1.0], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    fit._start = torch.stack([before[i, j] for i, j in enumerate(fit._neighbors[:, 0])])[:, None].log_softmax(
        -1
    )
    divergences = [
        torch.distributions.kl_divergence(
            torch.distributions.Categorical(logits=before[i, j]),
            torch.distributions.Categorical(logits=after[i, j]),
        )
        for i, j in ((0, 1), (1, 0))
    ]
    # The mean pLDDT of equal probabilities is 0.5; the bias has six numbers of 0.5.
    expected = 7.0 + 0.3 * 0.5 + 2.0 * sum(divergences) / 2 + 0.1 * 6 * 0.25 / 6
    total = fit._total(lambda _: torch.tensor(7.0), outputs(line(4.0), after))  # type: ignore[arg-type]
    assert float(total) == pytest.approx(float(expected), rel=1e-6)


def ends_in_the_structure_module() -> fastfold.AlphaFold:
    """Return ``mini`` without its descent, as AlphaFold's networks are."""
    model = fastfold.load_model("mini")
    model.config.model.heads.structure_module.distogram_descent = None
    return model


def test_a_network_that_obeys_restraints_itself_is_refused() -> None:
    model = fastfold.load_model("mini")
    sampler = featurize(target_from_sequence("MKTAYIAKQR").chains, [([], [])], model.config)
    with pytest.raises(ConfigError, match="its descent obeys restraints"):
        fit_restraints(model, sampler, [Restraint(0, 5, 0.0, 8.0)], steps=1)


def test_figures_of_a_fit_are_those_of_the_network_and_its_bias() -> None:
    """One step of Adam changes each feature by the rate; templates are not reported."""
    model = ends_in_the_structure_module()
    sequence = "MKTAYIAK"
    sampler = featurize(target_from_sequence(sequence).chains, [([], [])], model.config)
    pairs = [
        Restraint(0, 7, 20.0, 99.0),
        Restraint(1, 5, 0.0, 40.0, 0.01, group="x"),
        Restraint(2, 5, 0.0, 0.1, 0.01, group="x"),
    ]
    found = fit_restraints(
        model,
        sampler,
        pairs,
        steps=1,
        of_templates=[Restraint(0, 3, 0.0, 30.0, 0.01)],
        leave_one_out=True,
    )

    def fold(features: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        tensors = {key: torch.as_tensor(value) for key, value in features.items()}
        with torch.no_grad():
            result = model(lambda cycle, member: dict(tensors), RECYCLES)
        shares = result["predicted_lddt"]["logits"].softmax(-1)
        scores = 100 * (shares * (torch.arange(50) + 0.5) / 50).sum(-1)
        atoms = result["structure_module"]["final_atom_positions"].numpy()
        return atoms, float(scores.mean())

    plain, plddt = fold(sampler.sample(0))
    aatype = sequence_to_aatype(sequence)
    assert found.fit.steps == 1
    np.testing.assert_allclose(
        found.fit.before.distances[:3], restraint_distances(pairs, plain, aatype), atol=1e-3
    )
    assert found.fit.before.plddt == pytest.approx(plddt, abs=1e-3)
    assert float(found.fit.probabilities[1, 0]) == pytest.approx(1.0, abs=1e-3)  # 40 Å are beyond all bins
    biased = found.sampler.sample(0)
    for name in ("msa_feat", "target_feat"):
        change = biased[name] - sampler.sample(0)[name]
        np.testing.assert_allclose(np.abs(change), 0.03, atol=1e-3)
    after, plddt = fold(biased)
    assert found.fit.fitted.plddt == pytest.approx(plddt, abs=0.01)
    np.testing.assert_allclose(
        found.fit.fitted.distances[:3], restraint_distances(pairs, after, aatype), atol=1e-2
    )
    report = found.report(after, 55.0)
    assert report.confidence is not None
    assert (report.confidence.before, report.confidence.fitted) == (
        found.fit.before.plddt,
        found.fit.fitted.plddt,
    )
    assert (len(report.before), len(report.after), report.probabilities.shape) == (3, 3, (3, 2))
    assert found.fit.left_out is not None
    assert [(trial.group, trial.contradicts) for trial in found.fit.left_out] == [((0,), ()), ((1, 2), ())]


@pytest.mark.slow
def test_a_network_obeys_restraints() -> None:
    """Helices that are far apart come together; the network is left as it was."""
    model = ends_in_the_structure_module()
    before = copy.deepcopy(model.state_dict())
    target = target_from_sequence(SEQUENCE)
    sampler = featurize(target.chains, [([], [])], model.config)
    found = fit_restraints(model, sampler, PAIRS, steps=25)
    first = found.fit.before.distances
    assert satisfied(PAIRS, first) < 3
    with torch.no_grad():
        result = model(
            lambda cycle, member: {
                k: torch.as_tensor(v) for k, v in found.sampler.sample(cycle, member).items()
            },
            RECYCLES,
        )
    positions = result["structure_module"]["final_atom_positions"].numpy()
    after = restraint_distances(PAIRS, positions, sequence_to_aatype(SEQUENCE))
    assert np.maximum(after - 8.0, 0).sum() < 0.5 * np.maximum(first - 8.0, 0).sum()
    assert found.fit.left_out is None
    np.testing.assert_allclose(found.fit.fitted.distances, after, atol=1e-2)
    assert ((found.fit.probabilities >= 0) & (found.fit.probabilities <= 1)).all()
    assert model.structure_module.stop_rotation_gradient
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_contradictions_are_told() -> None:
    """A pair of residues cannot be near and far; which one of both holds is up to the network."""
    model = ends_in_the_structure_module()
    target = target_from_sequence(SEQUENCE)
    sampler = featurize(target.chains, [([], [])], model.config)
    near, far, other = Restraint(2, 26, 0.0, 8.0), Restraint(2, 26, 20.0, np.inf), Restraint(4, 10, 0.0, 30.0)
    found = fit_restraints(model, sampler, [near, far, other], steps=12, leave_one_out=True)
    assert found.fit.left_out is not None
    by_group = {trial.group: trial.contradicts for trial in found.fit.left_out}
    assert by_group[(0,)] == (1,) or by_group[(1,)] == (0,)
    assert by_group[(2,)] == ()
    done = fit_restraints(model, sampler, [other], steps=4, leave_one_out=True).fit
    assert (done.left_out, done.steps) == ((), 0)


@pytest.mark.long
def test_the_command_writes_the_report(cli: CommandLine) -> None:
    path = cli.folder / "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,3,A,9,5\nA,1,A,10,6\n")
    done = cli.infer(
        cli.fasta({"T1": "MKTAYIAKQR"}),
        "--restraints",
        path,
        "--restraint-steps",
        "1",
        "--restraint-leave-one-out",
    )
    assert done.code == 0, done.err
    assert "of 2 restraints hold" in done.err
    report = cli.scores("T1")["restraints"]
    assert report["total"] == 2
    assert report["leave_one_out"]
    assert all(row["holds"] or "contradicts" in row for row in report["restraints"])
    assert report["steps"] == 1  # one restraint does not hold before
    assert -1 < report["evidence"] < 1
    assert [row["line"] for row in report["restraints"]] == ["line 2", "line 3"]
    assert cli.config("T1")["settings"]["restraints"] == "links.csv"
    path.write_text("chain1,residue1,chain2,residue2,max\nA,3,A,99,5\n")
    failed = cli.infer(cli.fasta({"T2": "MKTAYIAKQR"}), "--restraints", path)
    assert failed.code == 1
    assert "line 2: chain A has residues 1 to 10, found 99" in failed.err + failed.out


def test_contradicting_settings_are_refused(tmp_path: Path) -> None:
    for wrong in ({"precision": "int8"}, {"cuda_graphs": True}):
        with pytest.raises(ConfigError, match="restraints"):
            InferConfig(restraints=tmp_path, **wrong)
    for name in ("restraint_leave_one_out", "restraint_springs"):
        with pytest.raises(ConfigError, match=f"{name} needs restraints"):
            InferConfig(**{name: True})
    with pytest.raises(ConfigError, match="restraint_steps"):
        InferConfig(restraint_steps=0)
