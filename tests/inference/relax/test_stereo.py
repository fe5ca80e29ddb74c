"""Handedness and peptide bonds: violations are found, and the minimiser makes none; mirror images are refused."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import MagicMock

import numpy as np
import openmm
import pytest
from openmm import unit
from scipy.spatial.transform import Rotation

from fastfold.errors import InputError
from fastfold.inference.relax import RelaxConfig, minimize, relax
from fastfold.inference.relax.minimize import Minimized
from fastfold.inference.relax.platforms import choose_platform
from fastfold.inference.relax.prepare import PreparedStructure, prepare, to_protein
from fastfold.inference.relax.stereo import check_not_mirrored, violating_residues, wrong_hands
from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import dihedrals
from fastfold.protein.labels import AuthorNames
from fastfold.protein.protein import Protein
from tests.helpers.peptides import helix, twisted

CB = rc.atom_order["CB"]


def exchanged(protein: Protein, residue: int, first: str, second: str) -> Protein:
    """Exchange the directions of two bonds of a beta carbon."""
    xyz = protein.atom_positions.copy()
    slots = [rc.atom_order[first], rc.atom_order[second]]
    xyz[residue, slots] = xyz[residue, slots[::-1]]
    return replace(protein, atom_positions=xyz)


def with_d_alanine(sequence: str, residue: int) -> Protein:
    """A helix with one beta carbon where the hydrogen should be."""
    protein = helix(sequence)
    xyz = protein.atom_positions.copy()
    n, ca, c, cb = (xyz[residue, rc.atom_order[name]] for name in ("N", "CA", "C", "CB"))
    normal = np.cross(n - ca, c - ca)
    normal /= np.linalg.norm(normal)
    xyz[residue, CB] = cb - 2 * np.dot(cb - ca, normal) * normal
    return replace(protein, atom_positions=xyz)


def mirrored(protein: Protein) -> Protein:
    return replace(protein, atom_positions=protein.atom_positions * np.float32([-1, 1, 1]))


def test_hands_of_alpha_and_beta_carbons_are_told() -> None:
    protein = helix("AGTIKWC")
    assert not wrong_hands(protein).any()
    assert np.flatnonzero(wrong_hands(exchanged(protein, 2, "OG1", "CG2"))).tolist() == [2]
    assert np.flatnonzero(wrong_hands(exchanged(protein, 3, "CG1", "CG2"))).tolist() == [3]
    assert np.flatnonzero(wrong_hands(mirrored(protein))).tolist() == [0, 2, 3, 4, 5, 6]
    (found,) = violating_residues(exchanged(protein, 3, "CG1", "CG2"))
    assert (found.index, "chirality" in found.kinds) == (3, True)


def test_a_d_amino_acid_of_the_input_is_named_and_costs_no_further_round() -> None:
    protein = with_d_alanine("AKAEW", 2)
    found = relax(protein, RelaxConfig(platform="CPU"))
    assert [v.residue for v in found.violations_before if "chirality" in v.kinds] == ["ALA 3 of chain A"]
    assert not found.relaxed
    assert "violations remain at ALA 3 of chain A (chirality)" in found.reason
    assert found.rounds == 1
    assert np.flatnonzero(wrong_hands(found.protein)).tolist() == [2]


@pytest.mark.long
def test_clashes_do_not_turn_a_hand() -> None:
    """Without its pull a beta carbon gives way in some of these clashes."""
    clashes = [clashing(distance) for distance in (0.05, 0.1, 0.4)]
    prepared = [(protein, prepare(protein)) for protein in clashes]
    assert not any(hands_after(*pair).any() for pair in prepared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimize, "_HAND_STIFFNESS", 0.0)
        assert any(hands_after(*pair).any() for pair in prepared)


def clashing(distance: float) -> Protein:
    """Two helices, an atom of the second at a distance in Å behind a beta carbon of the first."""
    protein = helix("TVTVT", "AAA")
    xyz = protein.atom_positions.copy()
    bond = xyz[2, CB] - xyz[2, rc.atom_order["CA"]]
    xyz[5:] += xyz[2, CB] + distance * bond / np.linalg.norm(bond) - xyz[6, CB]
    return replace(protein, atom_positions=xyz)


def test_a_twisted_peptide_is_turned_to_trans(monkeypatch: pytest.MonkeyPatch) -> None:
    protein = twisted(helix("AGSAV"), 3, 120.0)
    assert "omega" in {kind for v in violating_residues(protein) for kind in v.kinds}
    found = relax(protein, RelaxConfig(platform="CPU", threads=1))
    assert found.relaxed, found.reason
    assert abs(omega(found.protein, 3)) > 135.0
    monkeypatch.setattr(minimize, "_PLANE_STIFFNESS", 0.0)
    left = relax(protein, RelaxConfig(platform="CPU", threads=1))
    assert abs(omega(left.protein, 3)) < 135.0


def pushed(overlap: float) -> Protein:
    """Return two helices, of which one has a CB next to an oxygen of the other, ``overlap`` Å beyond it."""
    protein = helix("AAAAAAA", "AAA")
    xyz = protein.atom_positions.copy()
    bond = xyz[3, rc.atom_order["O"]] - xyz[3, rc.atom_order["C"]]
    xyz[7:] += xyz[3, rc.atom_order["O"]] + overlap * bond / np.linalg.norm(bond) - xyz[8, CB]
    return replace(protein, atom_positions=xyz)


def minimized(protein: Protein) -> tuple[float, float]:
    """Return the largest twist of a peptide bond after one minimisation, and the energy with that of restraints."""
    prepared = prepare(protein)
    found = minimize.minimize(prepared, RelaxConfig(tolerance=0.5), choose_platform("CPU"))
    after = to_protein(prepared, found.positions, protein)[0]
    tied = (*range(1, 7), 8, 9)
    return max(180.0 - abs(omega(after, i)) for i in tied), found.energy_after + found.restraint_energy


def test_a_clash_does_not_twist_a_planar_peptide(monkeypatch: pytest.MonkeyPatch) -> None:
    protein = pushed(0.5)
    assert minimized(protein)[0] < 30.0
    monkeypatch.setattr(minimize, "_region", lambda angles: ())  # phi and psi do not hold it
    assert minimized(protein)[0] < 30.0
    monkeypatch.setattr(minimize, "_TWIST_OF_PLANAR", 90.0)
    assert minimized(protein)[0] > 40.0


def test_springs_on_planar_peptides_are_removed_where_they_stay_planar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    protein = pushed(2.2)
    monkeypatch.setattr(minimize, "_TWIST_OF_PLANAR", 90.0)
    twist, energy = minimized(protein)
    assert 4.0 < twist < 30.0
    monkeypatch.setattr(minimize, "_TWIST_OF_PLANAR", 2.0)
    assert minimized(protein) == pytest.approx((twist, energy), rel=0.01)
    monkeypatch.setattr(minimize, "_release_planes", lambda *settings: None)
    held_twist, held_energy = minimized(protein)
    assert held_twist < twist - 1.0
    assert held_energy > energy + 1.0


def test_planes_are_held_again_until_none_twists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spring that comes back can twist the next bond, and one that gives way is not held twice."""
    prepared = prepare(helix("AAAAA"))
    guard, beyond, held = minimize.OmegaGuard(prepared, ()), [[0], [1], [1, 2], [1]], list[list[int]]()
    monkeypatch.setattr(guard, "bonds_beyond", lambda degrees, positions: beyond.pop(0))
    monkeypatch.setattr(guard, "release", lambda context: None)
    monkeypatch.setattr(guard, "hold", lambda context, numbers: held.append(sorted(numbers)))
    monkeypatch.setattr(minimize, "_descend", lambda *arguments: None)
    context, counter = MagicMock(), minimize._Counter(10, lambda iterations: None)
    minimize._release_planes(context, guard, RelaxConfig(), counter)
    assert held == [[1], [2]]
    assert beyond == []
    context.setPositions.assert_not_called()
    counter.iterations, beyond[:] = 10, [[0]]
    minimize._release_planes(context, guard, RelaxConfig(), counter)
    context.setPositions.assert_called_once()


def test_residues_stay_in_their_region_but_for_glycine_and_phi_above_zero() -> None:
    """Half a turn of the residues after a bond N-CA moves its phi from -60 to 120 degrees, after CA-C psi from -40."""
    prepared = prepare(helix("AAGAA"))

    def turned(residue: int, *, axis: tuple[str, str], moved: tuple[str, ...], degrees: float) -> np.ndarray:
        atoms = {a.name: a.index for a in list(prepared.topology.residues())[residue].atoms()}
        first, second = (prepared.positions[atoms[name]] for name in axis)
        is_moved = prepared.residue_of > residue
        is_moved[[atoms[name] for name in moved]] = True
        turn = Rotation.from_rotvec(np.radians(degrees) * (second - first) / np.linalg.norm(second - first))
        xyz = prepared.positions.copy()
        xyz[is_moved] = second + turn.apply(xyz[is_moved] - second)
        return xyz

    def phi(residue: int, degrees: float = 180.0) -> np.ndarray:
        return turned(residue, axis=("N", "CA"), moved=("C", "O"), degrees=degrees)

    def psi(residue: int, degrees: float) -> np.ndarray:
        return turned(residue, axis=("CA", "C"), moved=("O",), degrees=degrees)

    of_alanine = torsion_energy(prepared, phi(1))
    start = torsion(prepared, 1)
    assert torsion_energy(prepared, prepared.positions) == 0.0
    # Both ways round are 180 degrees from the start, and 38 about -70 and -40 are free.
    assert of_alanine == pytest.approx(1000 * np.radians(180 - abs(start[0] + 70) - 38) ** 2, rel=0.02)
    beyond = 60 - 38 + (start[1] + 40)
    assert torsion_energy(prepared, psi(1, 60.0)) == pytest.approx(1000 * np.radians(beyond) ** 2, rel=0.02)
    assert torsion_energy(prepared, psi(1, 20.0)) == 0.0
    assert torsion_energy(prepared, phi(2)) == torsion_energy(prepared, psi(2, 60.0)) == 0.0  # of glycine
    assert torsion_energy(replace(prepared, positions=phi(1)), phi(1)) == 0.0
    # From a psi between helix and strand, phi alone is kept, below 0.
    between = psi(1, 90.0)
    assert torsion_energy(replace(prepared, positions=between), psi(1, 150.0)) == 0.0
    assert torsion_energy(replace(prepared, positions=between), phi(1)) > 100.0


def torsion(prepared: PreparedStructure, residue: int) -> tuple[float, float]:
    """Return phi and psi of a residue in degrees."""
    before, own, after = (
        {a.name: prepared.positions[a.index] for a in each.atoms()}
        for each in list(prepared.topology.residues())[residue - 1 : residue + 2]
    )
    angles = (before["C"], own["N"], own["CA"], own["C"]), (own["N"], own["CA"], own["C"], after["N"])
    return tuple(float(dihedrals(*atoms)) for atoms in angles)  # type: ignore[return-value]


def torsion_energy(prepared: PreparedStructure, positions: np.ndarray) -> float:
    system = openmm.System()
    for _ in positions:
        system.addParticle(1.0)
    system.addForce(minimize._torsion_guard(prepared))
    platform = openmm.Platform.getPlatformByName("Reference")
    context = openmm.Context(system, openmm.VerletIntegrator(0.001), platform)
    context.setPositions(positions / 10.0)
    return float(context.getState(energy=True).getPotentialEnergy().value_in_unit(unit.kilojoules_per_mole))


def omega(protein: Protein, residue: int) -> float:
    """Return the torsion angle of the peptide bond before a residue, in degrees."""
    ca, c, n = (rc.atom_order[name] for name in ("CA", "C", "N"))
    xyz = protein.atom_positions.astype(np.float64)
    return float(dihedrals(xyz[residue - 1, ca], xyz[residue - 1, c], xyz[residue, n], xyz[residue, ca]))


def hands_after(protein: Protein, prepared: PreparedStructure) -> np.ndarray:
    free = range(len(protein))
    found: Minimized = minimize.minimize(prepared, RelaxConfig(), choose_platform("CPU"), free_residues=free)
    return wrong_hands(to_protein(prepared, found.positions, protein)[0])


def test_a_mirror_image_is_refused_by_its_chain() -> None:
    sound, other = helix("AKLEWAKLEW", "GSAVT"), mirrored(helix("AKLEWAKLEW", "GSAVT"))
    xyz = sound.atom_positions.copy()
    xyz[10:] = other.atom_positions[10:]
    names = AuthorNames(("H", "L"), tuple(map(str, range(15))))
    with pytest.raises(InputError, match="chain L is the mirror image of a protein: 4 of 4 alpha carbons"):
        relax(replace(sound, atom_positions=xyz), names=names)


def test_a_mirrored_backbone_is_refused_by_its_phi_angles() -> None:
    protein = mirrored(helix("AKLEWAKLEWA"))
    mask = protein.atom_mask.copy()
    mask[:, [slot for name, slot in rc.atom_order.items() if name not in ("N", "CA", "C", "O")]] = 0
    with pytest.raises(InputError, match="chain A is the mirror image of a protein: 10 of 10 phi angles"):
        relax(replace(protein, atom_mask=mask))


@pytest.mark.parametrize(
    ("length", "wrong", "is_refused"),
    [(20, 10, False), (20, 11, True), (4, 2, False), (3, 3, True), (2, 2, False)],
)
def test_a_mirror_image_has_more_wrong_hands_than_right_ones(
    length: int, wrong: int, is_refused: bool
) -> None:
    """Three or more of them."""
    protein = helix("A" * length)
    xyz = protein.atom_positions.copy()
    xyz[:wrong, :, 2] *= -1
    changed = replace(protein, atom_positions=xyz)
    names = AuthorNames(("A",), tuple(map(str, range(length))))
    if not is_refused:
        check_not_mirrored(changed, names)
        return
    with pytest.raises(InputError, match=f"mirror image of a protein: {wrong} of {length} alpha carbons"):
        check_not_mirrored(changed, names)
