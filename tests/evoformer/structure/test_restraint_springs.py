"""Springs of restraints in the descent: forces are gradients, one of a group pulls, and folds obey them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.evoformer.structure.restraint_springs import RESTRAINT_FEATURES, RestraintSprings
from tests.evoformer.structure.test_distogram_descent import LENGTH, assert_same_frames, helix, run

CONFIG = model_config("mini").model.heads.structure_module.distogram_descent


def springs(
    ends: list[tuple[int, int]], limits: list[tuple[float, float]], groups: list[int], residues: int = LENGTH
) -> RestraintSprings:
    """Return springs of weight 1 between numbered points."""
    arrays = (torch.tensor(ends), torch.tensor(limits), torch.ones(len(ends)), torch.tensor(groups))
    features = dict(zip(RESTRAINT_FEATURES, arrays, strict=True))
    found = RestraintSprings.from_features(features | {"aatype": torch.zeros(residues)})
    assert found is not None
    return found


def test_the_energy_is_bounded_and_flat_within_limits() -> None:
    """Against the written form: half the stiffness times the squared excess, and a line from 4 Å on."""
    for low, high, distance, excess in (
        (0.0, 8.0, 7.4, 0.0),
        (0.0, 8.0, 9.5, 2.0),
        (0.0, 8.0, 20.0, 12.5),
        (6.0, float("inf"), 3.5, 3.0),
        (6.0, float("inf"), 7.0, 0.0),
        (0.0, 8.0, 0.1, 0.0),
        (5.0, 5.2, 5.1, 0.0),  # a range narrower than the margins
    ):
        points = torch.zeros(8, 3)
        points[5, 0] = distance
        found = springs([(1, 5)], [(low, high)], [0], residues=2).total(points)
        expected = 500 * (excess**2 / 2 if excess < 4 else 8 + 4 * (excess - 4))
        assert float(found) == pytest.approx(expected, abs=0.3), (low, high, distance)


def test_forces_are_the_gradient() -> None:
    """Also of groups and of structures side by side."""
    torch.manual_seed(0)
    points = (12 * torch.rand(24, 3, dtype=torch.float64)).requires_grad_()
    one = springs([(1, 9), (5, 21), (3, 13), (1, 17)], [(0, 4), (20, 99), (0, 3), (0, 5)], [0, 1, 2, 2], 6)
    one = replace(one, low=one.low.double(), high=one.high.double(), weight=one.weight.double())
    two = one.repeated(2)
    both = torch.cat([points, 1.5 * points])
    (gradient,) = torch.autograd.grad(two.total(both), points)
    forces = two.forces(both.detach()).chunk(2)
    torch.testing.assert_close(forces[0] + 1.5 * forces[1], gradient)
    apart = one.total(points.detach()) + one.total(1.5 * points.detach())
    torch.testing.assert_close(two.total(both.detach()), apart)


def test_the_nearest_of_a_group_pulls_alone() -> None:
    points = torch.zeros(12, 3)
    points[5, 0], points[9, 0] = 10.0, 14.0
    forces = springs([(1, 5), (1, 9)], [(0.0, 8.0), (0.0, 8.0)], [0, 0], residues=3).forces(points)
    assert float(forces[5, 0]) == pytest.approx(500 * 2.5, rel=1e-3)
    assert not forces[9].any()


def test_known_distances_are_shortened_to_the_limits() -> None:
    """Alternatives and lower limits leave them as they are."""
    distance = torch.full((4, 4), 30.0, dtype=torch.float64)
    distance[0, 2] = 5.0
    given = [(1, 13), (1, 9), (5, 9), (5, 13), (0, 13)]
    limits = [(0.0, 8.0), (0.0, 8.0), (0.0, 8.0), (0.0, 8.0), (0.0, 6.0)]
    springs(given, limits, [0, 1, 2, 2, 3], residues=4).shorten(distance)
    expected = torch.full((4, 4), 30.0, dtype=torch.float64)
    expected[0, 2], expected[2, 0], expected[0, 3], expected[3, 0] = 5.0, 8.0, 6.0, 6.0
    assert torch.equal(distance, expected)


def closer(affines: Tensor) -> float:
    """Return the distance in Å of the CA atoms of residues 5 and 50."""
    return float(torch.linalg.vector_norm(affines[5, 4:] - affines[50, 4:]))


def test_a_descent_obeys_restraints_and_keeps_the_backbone() -> None:
    """Ends of a helix of 60 residues come together where the distogram knows nothing."""
    flat = torch.zeros(LENGTH, LENGTH, 64)
    start, config = helix(LENGTH), CONFIG
    near = springs([(4 * 5 + 1, 4 * 50 + 1)], [(0.0, 12.0)], [0])
    assert closer(run(start, flat)) > 20.0
    moved = run(start, flat, restraints=near, config=config)
    assert closer(moved) <= 12.0
    steps = torch.linalg.vector_norm(moved[1:, 4:] - moved[:-1, 4:], dim=-1)
    assert float((steps - 3.8).abs().max()) < 0.15
    far = springs([(4 * 5 + 1, 4 * 50 + 1)], [(40.0, float("inf"))], [0])
    assert closer(run(start, flat, restraints=far)) >= 40.0


def test_restraints_that_hold_change_nothing() -> None:
    torch.manual_seed(0)
    start, logits = helix(LENGTH), torch.randn(LENGTH, LENGTH, 64)
    config = CONFIG.copy_and_resolve_references()
    config.steps, config.last_steps, config.backbone_steps = 6, 6, 6
    slack = springs([(5, 205)], [(0.0, 500.0)], [0])
    assert_same_frames(run(start, logits, restraints=slack, config=config), run(start, logits, config=config))
