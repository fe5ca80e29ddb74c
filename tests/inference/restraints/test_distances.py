"""Distances of restraints: the closest heavy atoms, and their smooth minimum."""

from __future__ import annotations

import math

import gemmi
import numpy as np
import pytest
import torch

from fastfold.data.targets import target_from_sequence
from fastfold.inference.restraints.distances import (
    TEMPERATURE,
    RestrainedAtoms,
    atom_reach,
    restraint_distances,
    smooth_minimum,
)
from fastfold.inference.restraints.file import read_restraints
from fastfold.inference.restraints.restraint import ATOMS, Restraint, grouped, satisfied
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from tests.conftest import require_shared

SEQUENCE = "WGKA"
TYPES = torch.tensor(rc.sequence_to_aatype(SEQUENCE))

REACHED = {
    **{
        "A": 2.50,
        "D": 3.81,
        "E": 5.07,
        "F": 5.30,
        "G": 2.51,
        "H": 4.78,
        "I": 4.03,
        "K": 6.53,
        "L": 4.05,
        "M": 5.44,
    },
    **{"N": 3.86, "P": 2.54, "Q": 5.10, "R": 7.46, "S": 2.63, "T": 2.69, "V": 2.67, "W": 6.78, "Y": 6.76},
}
"""Distance of the farthest heavy atom from CA in Å, by residue type.

The 99.9% quantile in 220 chains of the PDB, by gemmi 0.7.5.
"""


def atoms(seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(len(SEQUENCE), 14, 3, dtype=torch.float64, generator=generator)


def test_the_smooth_minimum_has_its_closed_forms_and_bounds() -> None:
    same = torch.full((7,), 3.0, dtype=torch.float64)
    assert float(smooth_minimum(same, 0.2)) == pytest.approx(3.0 - 0.2 * math.log(7))
    assert float(smooth_minimum(torch.tensor([5.0, torch.inf]), 0.2)) == pytest.approx(5.0)
    two = torch.tensor([1.0, 1.3], dtype=torch.float64)
    expected = -0.2 * math.log(math.exp(-1.0 / 0.2) + math.exp(-1.3 / 0.2))
    assert float(smooth_minimum(two, 0.2)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ATOMS)
def test_the_closest_atoms_are_those_of_the_kind(kind: str) -> None:
    """Against a search by the atoms' names."""
    pairs = [(0, 1), (0, 2), (1, 3), (2, 3)]
    positions = atoms()
    names = [rc.restype_atom14_names[int(one)] for one in TYPES]

    def chosen(residue: int) -> list[int]:
        if kind == "any":
            return [i for i, name in enumerate(names[residue]) if name]
        wanted = "CA" if kind == "CA" or SEQUENCE[residue] == "G" else "CB"
        return [names[residue].index(wanted)]

    expected = [
        min(math.dist(positions[a, i], positions[b, j]) for i in chosen(a) for j in chosen(b))
        for a, b in pairs
    ]
    restraints = [Restraint(a, b, 0.0, 6.0, atoms=kind) for a, b in pairs]
    restrained = RestrainedAtoms(restraints, TYPES)
    np.testing.assert_allclose(restrained.closest(positions), expected, atol=1e-6)
    under, over = restrained.smooth_bounds(positions)
    worst = TEMPERATURE * math.log(14 * 14)
    assert worst < 0.53
    for low, exact, high in zip(under.tolist(), expected, over.tolist(), strict=True):
        assert low <= exact + 1e-6
        assert exact <= high + 1e-6
        assert high - low <= worst
    if kind != "any":
        torch.testing.assert_close(under, over)


def test_the_smooth_error_is_reached_only_by_equal_distances() -> None:
    """All atoms of a tryptophan in one point, all of another in a second one."""
    positions = torch.zeros(2, 14, 3, dtype=torch.float64)
    positions[1, :, 0] = 7.0
    types = torch.tensor(rc.sequence_to_aatype("WW"))
    under, over = RestrainedAtoms([Restraint(0, 1, 0.0, 6.0, atoms="any")], types).smooth_bounds(positions)
    assert float(under) == pytest.approx(7.0 - TEMPERATURE * math.log(196), abs=1e-6)
    assert float(over) == pytest.approx(7.0, abs=1e-6)


@pytest.mark.parametrize("side", [0, 1])
def test_gradients_of_smooth_distances_are_finite_differences(side: int) -> None:
    restraints = [
        Restraint(a, b, 0.0, 6.0, atoms=kind) for a, b, kind in ((0, 2, "any"), (1, 3, "CB"), (0, 1, "CA"))
    ]
    restrained = RestrainedAtoms(restraints, TYPES)
    positions = atoms(spread=1.0).requires_grad_()
    (gradient,) = torch.autograd.grad(restrained.smooth_bounds(positions)[side].sum(), positions)
    step = 1e-6
    for index in np.ndindex(*positions.shape):
        values = []
        for sign in (step, -step):
            moved = positions.detach().clone()
            moved[index] += sign
            values.append(float(restrained.smooth_bounds(moved)[side].sum()))
        assert float(gradient[index]) == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


def test_residues_are_found_in_the_order_of_the_features() -> None:
    order = torch.tensor([2, 0, 3, 1])  # place of each residue of the target
    positions = atoms()
    moved, types = torch.empty_like(positions), torch.empty_like(TYPES)
    moved[order], types[order] = positions, TYPES
    restraints = [Restraint(0, 2, 0.0, 6.0, atoms="any"), Restraint(1, 3, 0.0, 6.0, atoms="CB")]
    plain = RestrainedAtoms(restraints, TYPES).closest(positions)
    torch.testing.assert_close(RestrainedAtoms(restraints, types, order).closest(moved), plain)


def test_unknown_residues_are_refused() -> None:
    with pytest.raises(ValueError, match="names an unknown residue"):
        RestrainedAtoms([Restraint(0, 1, 0.0, 6.0)], torch.tensor([0, rc.unk_restype_index]))


def test_side_chains_reach_as_far_as_in_experiments() -> None:
    reach = atom_reach("CA")
    for letter, reached in REACHED.items():
        bound = float(reach[rc.restype_order[letter]])
        # Paths bend at each atom of a ring.
        assert reached - 0.05 <= bound <= reached + (1.4 if letter in "FHWY" else 0.5), letter
    assert atom_reach("CB")[rc.restype_order["G"]] == reach[rc.restype_order["G"]]
    assert (atom_reach("CB")[:20] <= reach[:20] + 1.7).all()


def test_true_contacts_of_a_dimer_meet_boltzs_constraints(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All residue pairs of 2q2k with atoms within 6 Å, by gemmi."""
    source = require_shared("data", "2q2k", "2q2k.cif")
    structure = gemmi.read_structure(str(source))
    structure.remove_hydrogens()
    structure.remove_alternative_conformations()

    def residues(name: str) -> dict[int, np.ndarray]:
        return {
            residue.label_seq: np.array([atom.pos.tolist() for atom in residue])
            for residue in structure[0][name]
            if residue.find_atom("CA", "*")
        }

    first, second = residues("A"), residues("B")
    contacts = {
        (i, j): distance
        for i, a in first.items()
        for j, b in second.items()
        if (distance := float(np.linalg.norm(a[:, None] - b[None], axis=-1).min())) <= 6.0
    }
    assert len(contacts) == 164
    pocket = sorted({i for i, _ in contacts})
    lines = [f"  - contact: {{token1: [A, {i}], token2: [B, {j}]}}" for i, j in contacts]
    lines.append(f"  - pocket: {{binder: B, contacts: {[['A', i] for i in pocket]}}}")
    path = tmp_path_factory.mktemp("dimer") / "contacts.yaml"
    path.write_text("\n".join(["constraints:", *lines]))

    chains = read_structure(source, chain_ids=["A", "B"]).chains
    target = target_from_sequence(":".join(chain.sequence for chain in chains))
    restraints = read_restraints(path, target)
    absent = 1e3 * (1.0 + np.arange(target.num_residues * 37).reshape(-1, 37, 1))  # atoms without a position
    mask = np.concatenate([chain.mask for chain in chains])[..., None] > 0
    positions = np.where(mask, np.concatenate([chain.positions for chain in chains]), absent).astype(
        np.float64
    )
    types = rc.sequence_to_aatype("".join(chain.sequence for chain in chains))
    distances = restraint_distances(restraints, positions, types)
    np.testing.assert_allclose(distances[: len(contacts)], list(contacts.values()), atol=1e-4)
    assert satisfied(restraints, distances) == len(grouped(restraints)) == 164 + len(pocket)
    as_ca = [Restraint(one.first, one.second, one.low, one.high) for one in restraints[: len(contacts)]]
    assert satisfied(as_ca, restraint_distances(as_ca, positions, types)) < 0.2 * len(contacts)
