"""Backbones are measured by their definitions: chains built from known torsions, bonds and angles give them back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom37_to_torsion_angles
from fastfold.protein.metrics.backbone import (
    backbone_figures,
    bond_angle,
    in_helix_or_strand,
    measure_backbone,
    off_planar,
    torsion,
)

N_CA, CA_C, C_N = 1.46, 1.52, 1.33
TAU, CA_C_N, C_N_CA = 111.0, 117.0, 121.0


def place(a: Tensor, b: Tensor, c: Tensor, bond: float, angle: float, turn: float) -> Tensor:
    """Return the atom ``d`` at a bond from ``c``, with the angle b-c-d and the torsion a-b-c-d in degrees."""
    axis = (c - b) / (c - b).norm()
    normal = torch.linalg.cross(b - a, axis)
    normal = normal / normal.norm()
    side = torch.linalg.cross(normal, axis)
    polar, around = math.radians(angle), math.radians(turn)
    return c + bond * (
        -math.cos(polar) * axis + math.sin(polar) * (math.cos(around) * side + math.sin(around) * normal)
    )


def chain(phi: list[float], psi: list[float], omega: list[float]) -> Tensor:
    """Return N, CA and C ``[N, 3, 3]`` of a chain; torsions at its ends do not count."""
    atoms = [torch.tensor([0.0, 1.0, 0.0]), torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])]
    atoms = [x.double() for x in atoms]
    for i in range(len(phi)):
        atoms.append(place(*atoms[-3:], C_N, CA_C_N, psi[i - 1]))
        atoms.append(place(*atoms[-3:], N_CA, C_N_CA, omega[i]))
        atoms.append(place(*atoms[-3:], CA_C, TAU, phi[i]))
    return torch.stack(atoms[3:]).view(-1, 3, 3)


def atom37(backbone: Tensor) -> tuple[Tensor, Tensor]:
    positions, mask = torch.zeros(len(backbone), 37, 3).double(), torch.zeros(len(backbone), 37)
    slots = [rc.atom_order[name] for name in ("N", "CA", "C")]
    positions[:, slots], mask[:, slots] = backbone, 1.0
    return positions, mask


PHI, PSI, OMEGA = (
    [0.0, -63.0, 57.0, -120.0, -179.0],
    [-43.0, 40.0, 130.0, 175.0, 0.0],
    [0.0, 180.0, -170.0, 5.0, 150.0],
)


def test_a_chain_of_known_torsions_bonds_and_angles_gives_them_back() -> None:
    positions, mask = atom37(chain(PHI, PSI, OMEGA))
    found = measure_backbone(positions, mask, torch.arange(5), torch.zeros(5))
    for measured, built, ends in (
        (found.phi, PHI, (1, 5)),
        (found.psi, PSI, (0, 4)),
        (found.omega, OMEGA, (1, 5)),
    ):
        inside = slice(*ends)
        wrapped = (measured[inside] - torch.tensor(built[inside]) + 180) % 360 - 180
        torch.testing.assert_close(wrapped, torch.zeros(4).double(), rtol=0, atol=1e-6)
    assert found.phi[0].isnan()
    assert found.psi[4].isnan()
    for measured, built in (
        (found.n_ca, N_CA),
        (found.ca_c, CA_C),
        (found.n_ca_c, TAU),
        (found.c_n[1:], C_N),
        (found.ca_c_n[1:], CA_C_N),
        (found.c_n_ca[1:], C_N_CA),
    ):
        torch.testing.assert_close(measured, torch.full_like(measured, built), rtol=0, atol=1e-6)
    # Of planar peptides, by the law of cosines: CA atoms are on both sides of C-N, or on the same side.
    along = C_N - CA_C * math.cos(math.radians(CA_C_N)) - N_CA * math.cos(math.radians(C_N_CA))
    up, down = CA_C * math.sin(math.radians(CA_C_N)), N_CA * math.sin(math.radians(C_N_CA))
    assert float(found.ca_ca[1]) == pytest.approx(math.hypot(along, up + down), abs=1e-6)
    assert float(found.ca_ca[3]) == pytest.approx(math.hypot(along, up - down), abs=0.01)  # omega is 5


def test_torsions_agree_with_the_networks_own() -> None:
    positions, mask = atom37(chain(PHI, PSI, OMEGA))
    angles = atom37_to_torsion_angles(
        torch.zeros(5).long(), positions, mask.double(), placeholder_for_undefined=False
    )["torsion_angles_sin_cos"]
    found = measure_backbone(positions, mask, torch.arange(5), torch.zeros(5))
    for number, measured in ((0, found.omega), (1, found.phi)):
        radians = torch.deg2rad(measured[1:])
        expected = torch.stack([radians.sin(), radians.cos()], -1)
        torch.testing.assert_close(angles[1:, number], expected, rtol=0, atol=1e-6)


def test_chain_breaks_and_missing_atoms_have_no_figures() -> None:
    positions, mask = atom37(chain(PHI, PSI, OMEGA))
    index, chains = torch.tensor([1, 2, 9, 10, 11]), torch.tensor([0, 0, 0, 0, 1])
    found = measure_backbone(positions, mask, index, chains)
    assert found.c_n.isnan().tolist() == [True, False, True, False, True]
    assert found.phi.isnan().tolist() == [True, False, True, False, True]
    assert found.psi.isnan().tolist() == [False, True, False, True, True]
    mask[1, rc.atom_order["CA"]] = 0.0
    found = measure_backbone(positions, mask, index, chains)
    assert found.ca_ca.isnan().tolist() == [True, True, True, False, True]
    assert found.n_ca_c.isnan().tolist() == [False, True, False, False, False]


def test_angles_of_simple_points() -> None:
    x, y, z = torch.eye(3).double()
    assert float(torsion(x, 0 * x, y, y + z)) == pytest.approx(-90.0)
    assert float(torsion(z, 0 * x, y, y + x)) == pytest.approx(90.0)
    assert abs(float(torsion(x, 0 * x, y, y - x))) == pytest.approx(180.0)
    assert float(bond_angle(x, 0 * x, x + y)) == pytest.approx(45.0)
    assert off_planar(torch.tensor([0.0, -10.0, 100.0, -175.0])).tolist() == [0.0, 10.0, 80.0, 5.0]


def test_the_regions_of_the_ramachandran_plot() -> None:
    torsions = {
        (-60.0, -45.0): True,
        (-135.0, 135.0): True,
        (-75.0, 150.0): True,
        (-150.0, -170.0): True,
        (57.0, 40.0): False,
        (-100.0, 20.0): False,
        (-20.0, 120.0): False,
        (-60.0, -100.0): False,
    }
    phi, psi = torch.tensor(list(torsions)).T
    assert in_helix_or_strand(phi, psi).tolist() == list(torsions.values())


def test_the_figures_count_residues_and_bonds() -> None:
    positions, mask = atom37(chain(PHI, PSI, OMEGA))
    positions[3:] += torch.tensor([0.0, 0.0, 0.1])  # stretches one peptide bond
    geometry = measure_backbone(positions, mask, torch.arange(5), torch.zeros(5))
    aatype = torch.as_tensor(rc.sequence_to_aatype("AAAGA"))
    figures = backbone_figures(geometry, aatype)
    assert figures["phi_positive"] == pytest.approx(1 / 2)  # residues 1 and 2; 3 is glycine
    assert figures["omega_off_planar"] == pytest.approx(
        float(np.mean(off_planar(geometry.omega[1:]).numpy() > 30))
    )
    assert figures["c_n_min"] == pytest.approx(C_N, abs=1e-6)
    assert figures["c_n_max"] == pytest.approx(float(geometry.c_n[3]))
    assert figures["ca_ca"] == pytest.approx(float(geometry.ca_ca[1:].mean()))
    glycines = backbone_figures(geometry, torch.as_tensor(rc.sequence_to_aatype("GGGGG")))
    assert "phi_positive" not in glycines
    assert not backbone_figures(
        measure_backbone(positions[:1], mask[:1], torch.arange(1), torch.zeros(1)), aatype[:1]
    )
