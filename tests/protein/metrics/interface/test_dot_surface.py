"""Dots of surfaces against closed forms for one, two and three spheres."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.protein.metrics.interface.dot_surface import (
    DotSurface,
    dot_surface,
    nearest,
    sphere_points,
    touches,
)

RADIUS, PROBE = 1.9, 1.7


def surface(*centers: tuple[float, float, float]) -> DotSurface:
    atoms = np.array(centers)
    return dot_surface(
        atoms, np.full(len(atoms), RADIUS), np.ones(len(atoms), bool), probe=PROBE, density=40.0
    )


def test_the_area_of_a_sphere() -> None:
    dots = surface((1.0, 2.0, 3.0))
    assert dots.areas.sum() == pytest.approx(4 * np.pi * RADIUS**2)
    assert np.allclose(dots.points, [1.0, 2.0, 3.0] + RADIUS * dots.normals)
    assert np.allclose(dots.probes - dots.points, PROBE * dots.normals)


def test_the_area_of_two_spheres() -> None:
    """Two caps, and a torus between them."""
    apart = 3.2
    half = apart / 2 / (RADIUS + PROBE)
    ring = (RADIUS + PROBE) * np.sqrt(1 - half**2)
    caps = 4 * np.pi * RADIUS**2 * (1 + half)
    torus = 2 * np.pi * PROBE * (ring * 2 * np.arcsin(half) - 2 * PROBE * half)
    dots = surface((0, 0, 0), (0, 0, apart))
    assert dots.areas.sum() == pytest.approx(caps + torus, rel=5e-3)
    between = np.abs(dots.points[:, 2] - apart / 2) < 0.3
    assert np.linalg.norm(dots.points[between, :2], axis=-1).min() == pytest.approx(ring - PROBE, abs=0.05)


def test_a_probe_rests_on_three_spheres_and_enters_none() -> None:
    centers = np.array([(0, 0, 0), (3.4, 0, 0), (1.7, 2.9, 0)])
    dots = surface(*centers)
    apart = np.linalg.norm(dots.probes[:, None] - centers, axis=-1)
    assert apart.min() > RADIUS + PROBE - 1e-3
    rests = (np.abs(apart - RADIUS - PROBE) < 1e-3).sum(-1)
    assert set(rests.tolist()) == {1, 2, 3}
    assert np.allclose(dots.probes - dots.points, PROBE * dots.normals)
    # The two hollows are mirror images, and no dot lies in the plane between the three.
    assert dots.areas[dots.points[:, 2] > 0].sum() == pytest.approx(dots.areas.sum() / 2, rel=2e-2)
    middle = np.linalg.norm(dots.points[:, :2] - [1.7, 0.97], axis=-1) < 0.5
    assert np.abs(dots.points[middle, 2]).min() > 0.5


def test_probes_on_both_sides_of_a_hole_cut_each_other() -> None:
    """Probes that rest on a wide triangle from above and below overlap; neither has dots within the other."""
    side = 5.6
    dots = surface((0, 0, 0), (side, 0, 0), (side / 2, side * np.sqrt(3) / 2, 0))
    height = np.sqrt((RADIUS + PROBE) ** 2 - side**2 / 3)
    assert height < PROBE
    middle = np.array([side / 2, side / np.sqrt(12), 0])
    resting = middle + np.array([(0, 0, height), (0, 0, -height)])
    own = np.linalg.norm(dots.probes[:, None] - resting, axis=-1) < 1e-6
    assert own.any(0).all()
    apart = np.linalg.norm(dots.points[:, None] - resting, axis=-1)
    assert apart[own.any(-1)].min() > PROBE - 1e-3


def test_neighbours_are_those_of_all_pairs() -> None:
    rng = np.random.default_rng(0)
    points, centers = rng.normal(size=(700, 3)) * 5, rng.normal(size=(90, 3)) * 5
    reach = rng.uniform(0.5, 2.0, 90)
    apart = np.linalg.norm(points[:, None] - centers, axis=-1)
    assert (touches(points, centers, reach) == (apart < reach).any(-1)).all()
    index, squared = nearest(points, centers)
    assert (index == apart.argmin(-1)).all()
    assert np.allclose(squared, apart.min(-1) ** 2)
    assert not touches(points, centers[:0], reach[:0]).any()
    assert np.allclose(np.linalg.norm(sphere_points(50), axis=-1), 1)
