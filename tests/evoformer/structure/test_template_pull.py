"""Pulls towards forced templates: free within the threshold, forces are gradients, and copies are apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure.distogram_embedding import start_at_templates
from fastfold.evoformer.structure.restraint_springs import POINTS, RESTRAINT_FEATURES, RestraintSprings
from fastfold.evoformer.structure.template_pull import TEMPLATE_FEATURES, template_pulls
from tests.evoformer.structure.test_distogram_descent import helix

LENGTH = 12


def features(
    residues: list[int], positions: Tensor, thresholds: list[float], numbers: list[int]
) -> dict[str, Tensor]:
    """Return features of forced templates without restraints."""
    arrays = (torch.tensor(residues), positions, torch.tensor(thresholds), torch.tensor(numbers))
    none = (torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    return {
        **dict(zip(TEMPLATE_FEATURES, arrays, strict=True)),
        **dict(zip(RESTRAINT_FEATURES, none, strict=True)),
        "aatype": torch.zeros(LENGTH),
    }


def springs(*arguments: list[int] | Tensor | list[float]) -> RestraintSprings:
    found = RestraintSprings.from_features(features(*arguments))  # type: ignore[arg-type]
    assert found is not None
    return found


def turned_and_moved(points: Tensor) -> Tensor:
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    return points @ (turn * torch.det(turn)).to(points).T + 5.0


def test_atoms_within_the_threshold_are_free() -> None:
    """One of many atoms leaves its place, so that the superposition hardly follows."""
    torch.manual_seed(0)
    template = 30 * torch.randn(LENGTH, 3)
    one = springs([*range(LENGTH)], template, [2.0] * LENGTH, [0] * LENGTH)
    points = torch.zeros(POINTS * LENGTH, 3)
    for moved, excess in ((0.0, 0.0), (1.4, 0.0), (4.0, 2.5), (9.0, 7.5)):
        atoms = turned_and_moved(template)
        atoms[3, 0] += moved
        points[1::POINTS] = atoms
        expected = 2000 * (excess**2 / 2 if excess < 4 else 8 + 4 * (excess - 4))
        assert float(one.total(points)) == pytest.approx(expected, rel=0.35)
        assert torch.count_nonzero(one.forces(points)[1::POINTS].norm(dim=-1) > 1) == (excess > 0)


def test_forces_are_the_gradient_for_a_fixed_place() -> None:
    """Of two templates of parts of a structure, by finite differences, and of structures side by side."""
    torch.manual_seed(1)
    template = 10 * torch.randn(9, 3, dtype=torch.float64)
    one = springs([0, 1, 2, 3, 4, 7, 8, 9, 10], template, [0.5] * 5 + [3.0] * 4, [0] * 5 + [1] * 4)
    points = 10 * torch.randn(POINTS * LENGTH, 3, dtype=torch.float64)
    forces = one.forces(points)
    fixed = [(pull, pull.placed(points[pull.points])) for pull in one.templates]

    def energy(points: Tensor) -> Tensor:
        """Return the written form, with the templates where they are."""
        excess = torch.cat([((points[p.points] - place).norm(dim=-1) - p.free).relu() for p, place in fixed])
        bounded = excess.clamp(max=4.0)
        return 2000 * (bounded * (excess - bounded / 2)).sum()

    torch.testing.assert_close(one.total(points), energy(points))
    leaf = points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(leaf), leaf)
    torch.testing.assert_close(forces, gradient)
    two, both = one.repeated(2), torch.cat([points, 1.5 * points])
    torch.testing.assert_close(two.forces(both), torch.cat([forces, one.forces(1.5 * points)]))
    torch.testing.assert_close(two.total(both), one.total(points) + one.total(1.5 * points))


def test_a_start_has_the_shape_of_the_template() -> None:
    """Residues without one stay, and a helix that is moved as a whole keeps its frames."""
    torch.manual_seed(2)
    affines = helix(LENGTH)
    template = turned_and_moved(affines[:8, 4:])
    one = springs([*range(8)], template, [1.0] * 8, [0] * 8)
    found = start_at_templates(affines, one)
    torch.testing.assert_close(found[:, 4:], affines[:, 4:], atol=1e-3, rtol=0)
    stretched = replace(one.templates[0], positions=2 * template)
    found = start_at_templates(affines, replace(one, templates=(stretched,)))
    torch.testing.assert_close(
        torch.pdist(found[:8, 4:]), 2 * torch.pdist(affines[:8, 4:]), atol=1e-3, rtol=0
    )
    torch.testing.assert_close(found[8:, 4:], affines[8:, 4:])


def test_targets_without_forced_templates_have_no_pull() -> None:
    assert template_pulls({}, (), per_residue=POINTS, ca=1) == ()
