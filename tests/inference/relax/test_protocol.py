"""Rounds until nothing is violated, each bounded; what stays bad is reported with its residues."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fastfold.errors import ConfigError
from fastfold.inference.relax import RelaxConfig, minimize, protocol, relax
from fastfold.inference.relax.stereo import violating_residues
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.machine import available_cores
from tests.conftest import require_shared
from tests.helpers.peptides import helix

CPU = RelaxConfig(platform="CPU", threads=1)
QUICK = RelaxConfig(platform="CPU", max_iterations=5, max_rounds=1)


def broken(protein: Protein, after: int, shift: tuple[float, float, float]) -> Protein:
    """The chain's rest moved away."""
    xyz = protein.atom_positions.copy()
    xyz[after:] += np.float32(shift)
    return replace(protein, atom_positions=xyz)


def test_a_sound_peptide_is_relaxed_in_one_round() -> None:
    protein = helix("AKLEW", "GSAV")
    found = relax(protein, CPU)
    assert found.relaxed, found.reason
    assert found.minimized
    assert (found.rounds, found.residues_freed, found.atoms_added) == (1, 0, 2)
    assert found.energy_before is not None
    assert found.energy_after is not None
    assert found.energy_after < 0 < found.energy_before
    assert 0.05 < (found.heavy_atom_rmsd or 0) < 0.6
    assert found.platform == "CPU (1 thread)"
    for field in ("aatype", "residue_index", "chain_index"):
        np.testing.assert_array_equal(getattr(found.protein, field), getattr(protein, field))
    was = protein.atom_mask > 0.5
    np.testing.assert_array_equal(found.protein.b_factors[was], protein.b_factors[was])
    moved = np.linalg.norm(found.protein.atom_positions - protein.atom_positions, axis=-1)[was]
    assert found.heavy_atom_rmsd == pytest.approx(np.sqrt(np.square(moved).mean()), rel=1e-5)


def test_residues_with_violations_are_freed_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[list[int]] = []
    inner = minimize.minimize

    def spied(*args: Any, free_residues: set[int], **kwargs: Any) -> Any:
        freed.append(sorted(free_residues))
        return inner(*args, free_residues=free_residues, **kwargs)

    monkeypatch.setattr(minimize, "minimize", spied)
    found = relax(broken(helix("AKLEWAKL"), 4, (20.0, 0.0, 0.0)), CPU, continuous=True)
    assert len(found.violations_before) >= 2
    assert freed[0] == []
    assert len(freed) == found.rounds > 1
    assert {3, 4} & set(freed[1])
    assert all(set(a) <= set(b) for a, b in itertools.pairwise(freed))
    assert found.residues_freed == len(freed[-1])


def test_a_further_round_goes_on_from_all_atoms_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[np.ndarray] = []
    ends: list[np.ndarray] = []
    inner = minimize.minimize

    def spied(prepared: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(prepared, *args, **kwargs)
        starts.append(prepared.positions)
        ends.append(found.positions)
        return found

    monkeypatch.setattr(minimize, "minimize", spied)
    relax(broken(helix("AKLEW"), 3, (20.0, 0.0, 0.0)), replace(QUICK, max_rounds=2), continuous=True)
    assert len(starts) == 2
    np.testing.assert_array_equal(starts[1], ends[0])


def test_all_cores_are_used_unless_threads_are_given() -> None:
    cores = available_cores()
    assert relax(helix("AAA"), QUICK).platform == f"CPU ({cores} thread{'s' if cores > 1 else ''})"
    assert relax(helix("AAA"), replace(QUICK, threads=3)).platform == "CPU (3 threads)"


def test_progress_has_the_round_the_iterations_and_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(protocol, "_USUAL_ITERATIONS", 20)
    lines: list[str] = []
    config = replace(CPU, max_rounds=2, max_iterations=30)
    relax(broken(helix("AKLEW"), 3, (20.0, 0.0, 0.0)), config, continuous=True, on_progress=lines.append)
    said = [re.sub(r"\d:\d\d", "T", line) for line in lines]
    assert "round 1 of at most 2, 10 iterations, elapsed T, about T left" in said
    assert "round 1 of at most 2, 25 iterations, elapsed T, longer than usual" in said
    assert "round 2 of at most 2, 10 iterations, elapsed T, about T left in this round" in said


def test_progress_is_rare() -> None:
    lines: list[str] = []
    relax(helix("AKLEW"), CPU, on_progress=lines.append)
    assert lines == []


def test_rounds_have_a_limit_and_what_remains_is_named() -> None:
    names = AuthorNames(("H",), tuple(str(100 + i) for i in range(8)))
    found = relax(
        broken(helix("AKLEWAKL"), 4, (60.0, 0.0, 0.0)),
        RelaxConfig(platform="CPU", max_rounds=2, max_iterations=30),
        names=names,
        continuous=True,
    )
    assert not found.relaxed
    assert found.rounds == 2
    assert found.iterations <= 2 * (10 * 30 + 10)
    assert "violations remain at" in found.reason
    assert "GLU 103 of chain H (" in found.reason
    assert "bond" in next(v for v in found.violations if v.index == 3).kinds
    assert found.violations == violating_residues(found.protein, names)


def test_a_chain_is_not_tied_over_a_gap_that_its_numbers_hide() -> None:
    numbers = np.arange(21, 30)
    protein = replace(broken(helix("AKLEWGSAV"), 5, (9.0, 0.0, 0.0)), residue_index=numbers)
    found = relax(protein, CPU)
    assert found.relaxed, found.reason
    assert found.chain_breaks == ("TRP 25 of chain A and GLY 26 of chain A (C-N 8.0 Å)",)
    assert found.to_dict()["chain_breaks"] == list(found.chain_breaks)
    assert "chain broken between TRP 25" in str(found)
    np.testing.assert_array_equal(found.protein.residue_index, numbers)
    c, n = rc.atom_order["C"], rc.atom_order["N"]
    assert np.linalg.norm(found.protein.atom_positions[5, n] - found.protein.atom_positions[4, c]) > 6.0


def test_a_gap_of_a_prediction_is_a_violation() -> None:
    found = relax(broken(helix("AKLEWAKL"), 4, (30.0, 0.0, 0.0)), QUICK, continuous=True)
    assert found.chain_breaks == ()
    assert "bond" in next(v for v in found.violations_before if v.index == 4).kinds


def test_an_energy_that_stays_positive_is_no_relaxation() -> None:
    """Eight lysines push each other away in vacuum."""
    found = relax(helix("K" * 8), CPU)
    assert not found.relaxed
    assert found.violations == ()
    assert found.rounds == CPU.max_rounds
    assert "the energy stays positive at" in found.reason


def test_a_second_round_lowers_an_energy_that_springs_hold_above_zero() -> None:
    protein = helix("VIVIVIVK")
    once, found = (relax(protein, replace(CPU, max_rounds=rounds)) for rounds in (1, 3))
    assert not once.relaxed
    assert once.violations == ()
    assert found.relaxed, found.reason
    assert (found.rounds, found.residues_freed) == (2, 0)
    assert found.energy_after < 0.0 < once.energy_after


def test_a_minimiser_that_fails_is_reported_with_the_residues_that_clash() -> None:
    protein = helix("AAAAAA")
    xyz = protein.atom_positions.copy()
    xyz[4] = xyz[1]
    found = relax(replace(protein, atom_positions=xyz), CPU, continuous=True)
    assert not found.relaxed
    assert not found.minimized
    assert found.protein.atom_positions is not None
    assert found.energy_after is None
    assert "round 1 failed" in found.reason
    assert "ALA 2 of chain A (clash" in found.reason
    assert "ALA 5 of chain A (clash" in found.reason
    assert str(found).startswith("not relaxed on CPU")


def test_a_collapsed_structure_is_reported_at_once() -> None:
    found = relax(replace(helix("AAAA"), atom_positions=np.zeros((4, 37, 3))), CPU)
    assert not found.minimized
    assert "ALA 1 of chain A have the same position" in found.reason


def test_the_result_says_when_its_iterations_ran_out() -> None:
    found = relax(helix("AAA"), RelaxConfig(platform="Reference", max_iterations=3))
    assert found.iteration_limit_reached
    assert found.platform == "Reference"


def test_a_chain_of_one_residue_relaxes_with_caps_that_are_not_written() -> None:
    protein = helix("AKEAW", "K", apart=14.0)
    found = relax(protein, CPU)
    assert found.violations == ()
    assert found.capped == ("LYS 1 of chain B",)
    assert found.to_dict()["capped"] == list(found.capped)
    assert "capped, as not bonded to another residue: LYS 1 of chain B" in str(found)
    added = found.protein.atom_mask - protein.atom_mask
    assert [rc.atom_types[slot] for slot in np.flatnonzero(added.any(0))] == ["OXT"]
    assert found.hydrogens is not None
    assert sorted(
        n for r, n in zip(found.hydrogens.residues, found.hydrogens.names, strict=True) if r == 5
    ) == [
        "H",
        "HA",
        *("HB2", "HB3", "HD2", "HD3", "HE2", "HE3", "HG2", "HG3", "HZ1", "HZ2", "HZ3"),
    ]


@pytest.mark.parametrize("sequences", ["K", "KG", ("K", "W")])
def test_structures_without_a_planar_peptide_bond_are_relaxed(sequences: str | tuple[str, ...]) -> None:
    protein = helix(*([sequences] if isinstance(sequences, str) else sequences), apart=14.0)
    if len(protein) == 2 and len(protein.chains) == 1:
        xyz = protein.atom_positions.copy()
        xyz[1] = _turned(xyz[1], about=(xyz[0, rc.atom_order["C"]], xyz[1, rc.atom_order["N"]]), degrees=90.0)
        protein = replace(protein, atom_positions=xyz)
    result = relax(protein, RelaxConfig(platform="CPU", threads=1, max_rounds=1, max_iterations=200))
    assert result.minimized, result.reason
    assert result.energy_after is not None


def _turned(points: np.ndarray, *, about: tuple[np.ndarray, np.ndarray], degrees: float) -> np.ndarray:
    """Points turned about an axis from one position to another (Rodrigues)."""
    axis = (about[1] - about[0]) / np.linalg.norm(about[1] - about[0])
    arm, angle = points - about[1], np.deg2rad(degrees)
    turned = arm * np.cos(angle) + np.cross(axis, arm) * np.sin(angle)
    turned += axis * (arm @ axis)[:, None] * (1 - np.cos(angle))
    return np.asarray(turned + about[1], np.float32)


def test_a_residue_alone_after_a_break_is_capped_and_named() -> None:
    found = relax(broken(helix("AKLE"), 3, (9.0, 0.0, 0.0)), QUICK)
    assert found.capped == ("GLU 4 of chain A",)
    assert relax(helix("AKLE"), QUICK).capped == ()


def test_without_openmm_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install openmm"):
        relax(helix("AAA"), CPU)


def chain(name: str) -> Protein:
    return structure_to_protein(read_structure(require_shared("data", "structures", "train", name)))


def first(protein: Protein, count: int) -> Protein:
    fields = ("atom_positions", "atom_mask", "aatype", "residue_index", "chain_index", "b_factors")
    return Protein(**{field: getattr(protein, field)[:count] for field in fields})


def check_1igd(cut: Callable[[Protein], Protein], at_most: float) -> None:
    found = relax(cut(chain("1igd_A_c04301.pdb.gz")), CPU)
    assert found.relaxed, found.reason
    assert found.violations_before == ()
    assert (found.energy_before or 0) > 0
    assert (found.energy_after or 0) < at_most
    assert (found.heavy_atom_rmsd or 9) < 0.5


def test_a_piece_of_a_crystal_structure_stays_within_half_an_angstrom() -> None:
    check_1igd(lambda protein: first(protein, 14), -300)


@pytest.mark.slow
def test_a_crystal_structure_stays_within_half_an_angstrom() -> None:
    check_1igd(lambda protein: protein, -4000)
