"""Peptide planes: known backbones come back from their CA atoms, and the path found is the best of all."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure import peptide_planes as module
from fastfold.evoformer.structure.backbone_descent import backbone_points
from fastfold.evoformer.structure.peptide_planes import PlaneWeights, peptide_planes
from fastfold.evoformer.structure.ramachandran import RamachandranPotential
from fastfold.evoformer.structure.rigid_points import placed
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.backbone import BackboneGeometry, measure_backbone
from tests.protein.metrics.test_backbone import chain

LENGTH = 14


def build(
    backbone: Tensor, sequence: str, bonded: Tensor, predicted: Tensor, weights: PlaneWeights
) -> tuple[Tensor, Tensor]:
    """Return the frames before and after, of CA atoms without orientations."""
    aatype = torch.as_tensor(rc.sequence_to_aatype(sequence)).long()
    affines = torch.zeros(len(sequence), 7).double()
    affines[:, 0], affines[:, 4:] = 1.0, backbone[:, 1]
    potential = RamachandranPotential(aatype, bonded, affines)
    is_glycine = aatype == rc.restype_order["G"]
    return affines, peptide_planes(affines, bonded, potential, predicted, is_glycine, weights)


def geometry(affines: Tensor, index: Tensor) -> BackboneGeometry:
    """Measure frames of alanines."""
    points = placed(affines, backbone_points(torch.zeros(len(affines)).long(), affines))
    positions, mask = torch.zeros(len(affines), 37, 3).double(), torch.zeros(len(affines), 37)
    slots = [rc.atom_order[name] for name in ("N", "CA", "C")]
    positions[:, slots], mask[:, slots] = points[:, :3], 1.0
    return measure_backbone(positions, mask, index, torch.zeros_like(index))


@pytest.mark.parametrize(("phi", "psi"), [(-63.0, -42.0), (-120.0, 130.0)])
def test_helices_and_strands_come_back_from_their_ca_atoms(phi: float, psi: float) -> None:
    backbone = chain([phi] * LENGTH, [psi] * LENGTH, [180.0] * LENGTH)
    predicted = torch.deg2rad(torch.tensor([phi, psi]).double()).expand(LENGTH, 2)
    bonded = torch.ones(LENGTH - 1).bool()
    before, after = build(backbone, "A" * LENGTH, bonded, predicted, PlaneWeights(beta=0.0, predicted=1.0))
    assert torch.equal(after[:, 4:], before[:, 4:])
    found = geometry(after, torch.arange(LENGTH))
    inside = slice(1, LENGTH - 1)
    assert float((found.phi[inside] - phi).abs().max()) < 12.0  # the turns of planes are 10 degrees apart
    assert float((found.psi[inside] - psi).abs().max()) < 12.0
    assert float((found.omega[1:].abs() - 180).abs().max()) < 12.0
    assert float((found.c_n[1:] - 1.33).abs().max()) < 0.12


def test_the_path_is_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four turns of four planes: all 256 combinations are tried."""
    monkeypatch.setattr(module, "_TURNS", 4)
    length, turns = 5, 4
    torch.manual_seed(1)
    costs = torch.randn(length - 2, turns, turns)
    bonded = torch.tensor([True, True, False, True])
    monkeypatch.setattr(module, "_costs", lambda *x: costs[x[-1].start - 1 : x[-1].stop - 1])
    monkeypatch.setattr(module, "_ROWS", 2)
    ca = torch.zeros(length, 3)
    weights = PlaneWeights(0.0, 0.0)
    found = module._cheapest(module._Planes(ca, ca, ca, ca), bonded, None, ca, weights)  # type: ignore[arg-type]

    def total(path: tuple[int, ...]) -> float:
        return float(costs[0, path[0], path[1]])  # residues 2 and 3 have a break on one side

    best = min(total(path) for path in itertools.product(range(turns), repeat=length - 1))
    assert total(tuple(found.tolist())) == pytest.approx(best)
    bonded[2] = True
    found = module._cheapest(module._Planes(ca, ca, ca, ca), bonded, None, ca, weights)  # type: ignore[arg-type]

    def whole(path: tuple[int, ...]) -> float:
        return sum(float(costs[i, path[i], path[i + 1]]) for i in range(length - 2))

    best = min(whole(path) for path in itertools.product(range(turns), repeat=length - 1))
    assert whole(tuple(found.tolist())) == pytest.approx(best)


def test_costs_are_those_of_the_atoms() -> None:
    """The cost of two planes equals that of the torsions and the angle which their atoms have."""
    torch.manual_seed(2)
    backbone = chain([-70.0, -100.0, -65.0], [140.0, 10.0, 130.0], [180.0] * 3)
    ca = backbone[:, 1]
    c, n = module._turned_planes(ca)
    aatype = torch.as_tensor(rc.sequence_to_aatype("AVA")).long()
    potential = RamachandranPotential(aatype, torch.ones(2).bool(), ca)
    predicted = torch.full((3, 2), 0.5).double()
    weights = PlaneWeights(beta=0.0, predicted=3.0)
    costs = module._costs(module._Planes(ca, c, n, 0 * ca), potential, predicted, weights, slice(1, 2))[0]
    for a, b in ((0, 0), (7, 30), (20, 11)):
        positions, mask = torch.zeros(3, 37, 3).double(), torch.ones(3, 37)
        place = {name: rc.atom_order[name] for name in ("N", "CA", "C")}
        positions[:, place["CA"]] = ca
        positions[0, place["C"]], positions[1, place["N"]] = c[0, a], n[0, a]
        positions[1, place["C"]], positions[2, place["N"]] = c[1, b], n[1, b]
        found = measure_backbone(positions, mask, torch.arange(3), torch.zeros(3))
        torsions = torch.deg2rad(torch.stack([found.phi, found.psi], -1))
        step = 2 * math.pi / 72
        rounded = ((torsions + math.pi) / step).round() * step - math.pi
        expected = (found.n_ca_c[1] - 111.0) ** 2 / 72 + potential.energies(rounded)[1]
        expected += 3.0 * (2 - (rounded[1] - 0.5).cos().sum())
        assert float(costs[a, b]) == pytest.approx(float(expected), rel=1e-6)
        # Both planes have the bonds of a trans peptide.
        assert float(found.omega[1].abs()) == pytest.approx(180.0, abs=1e-3)
        assert float(found.c_n[1]) == pytest.approx(1.329, abs=0.01)
        assert float(found.ca_c_n[2]) == pytest.approx(116.6, abs=1.0)
        assert float(found.c_n_ca[2]) == pytest.approx(121.4, abs=1.0)


def test_the_direction_of_cb_decides_between_planes() -> None:
    """A strand and its image turned half around its axis have the same CA atoms nearly, but CB on other sides."""
    backbone = chain([-120.0] * LENGTH, [130.0] * LENGTH, [180.0] * LENGTH)
    bonded = torch.ones(LENGTH - 1).bool()
    predicted = torch.zeros(LENGTH, 2).double()
    affines, built = build(backbone, "A" * LENGTH, bonded, predicted, PlaneWeights(beta=0.0, predicted=0.0))
    aatype = torch.zeros(LENGTH).long()
    potential = RamachandranPotential(aatype, bonded, affines)
    again = peptide_planes(
        built, bonded, potential, predicted, aatype > 0, PlaneWeights(beta=50.0, predicted=0.0)
    )
    local = backbone_points(aatype, affines)
    beta = [(placed(x, local)[:, 3] - x[:, 4:])[1:-1] for x in (built, again)]
    assert float(torch.nn.functional.cosine_similarity(*beta, dim=-1).min()) > 0.95


def test_chains_end_at_breaks_and_lonely_residues_stay() -> None:
    backbone = chain([-63.0] * LENGTH, [-42.0] * LENGTH, [180.0] * LENGTH)
    bonded = torch.ones(LENGTH - 1).bool()
    bonded[5] = bonded[6] = False  # residue 6 is alone
    predicted = torch.deg2rad(torch.tensor([-63.0, -42.0]).double()).expand(LENGTH, 2)
    weights = PlaneWeights(beta=0.0, predicted=1.0)
    before, after = build(backbone, "A" * LENGTH, bonded, predicted, weights)
    assert torch.equal(after[6], before[6])
    moved = backbone.clone()
    moved[7:] += 3.0
    other = build(moved, "A" * LENGTH, bonded, predicted, weights)[1]
    assert torch.equal(other[:7], after[:7])
    torch.testing.assert_close(other[7:, 4:] - 3.0, after[7:, 4:])
    found = geometry(after, torch.arange(LENGTH))
    assert bool(found.n_ca_c.isfinite().all())
    assert torch.equal(build(backbone[:1], "A", bonded[:0], predicted[:1], weights)[1], before[:1])
