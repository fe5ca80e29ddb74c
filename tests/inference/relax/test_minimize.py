"""One minimisation: energies, restraints, constraints and the limit of iterations."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.inference.relax import minimize as minimizing
from fastfold.inference.relax.config import RelaxConfig
from fastfold.inference.relax.minimize import Minimized, minimize
from fastfold.inference.relax.platforms import choose_platform
from fastfold.inference.relax.prepare import PreparedStructure, prepare
from tests.helpers.peptides import helix


@pytest.fixture(scope="module")
def prepared() -> PreparedStructure:
    return prepare(helix("AKLEW"))


def run(prepared: PreparedStructure, free: tuple[int, ...] = (), **settings: float) -> Minimized:
    platform = choose_platform("CPU")
    return minimize(prepared, RelaxConfig(**settings), platform, free_residues=free)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def held(prepared: PreparedStructure) -> Minimized:
    """Result with the usual settings, for the tests that only compare it."""
    return run(prepared)


def moved(prepared: PreparedStructure, found: Minimized) -> np.ndarray:
    """How far each heavy atom went, in Å."""
    distance = np.linalg.norm(found.positions - prepared.positions, axis=-1)
    return distance[~prepared.is_hydrogen]


def test_the_energy_falls_and_springs_hold_heavy_atoms(prepared: PreparedStructure, held: Minimized) -> None:
    loose = run(prepared, stiffness=0.0)
    assert held.energy_before == pytest.approx(loose.energy_before)
    assert loose.energy_after < held.energy_after < 0 < held.energy_before
    assert loose.restraint_energy == 0.0
    assert moved(prepared, held).max() < moved(prepared, loose).max()
    # k/2 d², k = 10 kcal/mol/Å²
    expected = 0.5 * 10 * 4.184 * np.square(moved(prepared, held)).sum()
    assert held.restraint_energy == pytest.approx(expected, rel=1e-3)
    assert 10 < held.iterations < 5000
    assert not held.limit_reached


def test_residues_that_are_freed_have_no_springs(prepared: PreparedStructure, held: Minimized) -> None:
    one_free = run(prepared, free=(4,))
    assert one_free.energy_after < held.energy_after
    has_spring = prepared.residue_of[~prepared.is_hydrogen] != 4
    expected = 0.5 * 10 * 4.184 * np.square(moved(prepared, one_free)[has_spring]).sum()
    assert one_free.restraint_energy == pytest.approx(expected, rel=1e-3)


def test_caps_have_no_springs() -> None:
    capped = prepare(helix("AAA", "W"))
    found = run(capped)
    squares = np.square(found.positions - capped.positions).sum(-1)[~capped.is_hydrogen]
    is_held = capped.residue_of[~capped.is_hydrogen] >= 0
    assert found.restraint_energy == pytest.approx(0.5 * 10 * 4.184 * squares[is_held].sum(), rel=1e-3)
    assert squares[~is_held].max() > squares[is_held].max()


def test_few_iterations_come_to_a_minimum(prepared: PreparedStructure, held: Minimized) -> None:
    """Minimising with constraints from the start takes three times as many."""
    exact = run(prepared, tolerance=0.05)
    assert held.iterations < 250
    total, least = (one.energy_after + one.restraint_energy for one in (held, exact))
    assert total == pytest.approx(least, rel=0.01)


def test_bonds_to_hydrogens_keep_their_length(prepared: PreparedStructure, held: Minimized) -> None:
    lengths = [
        np.linalg.norm(held.positions[a.index] - held.positions[b.index])
        for a, b in prepared.topology.bonds()
        if {a.name, b.name} == {"N", "H"}
    ]
    assert len(lengths) == 5
    np.testing.assert_allclose(lengths, 1.01, atol=1e-3)


def test_iterations_have_a_limit_and_are_not_in_vain(prepared: PreparedStructure) -> None:
    """Each attempt at tighter constraints has the same number of them."""
    few, more, all_ = (run(prepared, max_iterations=n) for n in (5, 20, 5000))
    assert few.limit_reached
    assert not all_.limit_reached
    assert few.iterations <= 10 * 5 + 10
    assert all_.energy_after < more.energy_after < few.energy_after < few.energy_before


def test_attempts_have_a_limit(prepared: PreparedStructure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimizing, "_MOST_ATTEMPTS", 1)
    assert run(prepared, max_iterations=20).iterations < 20 + 10


def test_one_thread_gives_the_same_each_time(prepared: PreparedStructure, held: Minimized) -> None:
    again = run(prepared)
    np.testing.assert_array_equal(held.positions, again.positions)
    assert (held.energy_after, held.iterations) == (again.energy_after, again.iterations)
