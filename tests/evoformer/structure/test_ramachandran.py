"""The Ramachandran potential is the negative log density of its table, and the table is that of proteins."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from fastfold.evoformer.structure import ramachandran
from fastfold.evoformer.structure.ramachandran import GRID, RamachandranPotential
from fastfold.protein import residue_constants as rc


def potential(sequence: str) -> RamachandranPotential:
    aatype = torch.as_tensor(rc.sequence_to_aatype(sequence))
    return RamachandranPotential(aatype, torch.ones(len(sequence) - 1).bool(), torch.zeros(()).double())


def at(found: RamachandranPotential, phi: float, psi: float, residues: int) -> Tensor:
    return found.energies(torch.deg2rad(torch.tensor([[phi, psi]]).double()).expand(residues, 2))


def grid_of(found, rows):
    """Energies ``[n, GRID, GRID]`` at phi and psi from -180 degrees on."""
    phi, psi = torch.arange(GRID)[:, None], torch.arange(GRID)
    shape = (rows.stop - rows.start, GRID, GRID)
    return found.at_grid(rows, phi.expand(shape), psi.expand(shape))


def test_slopes_are_derivatives_and_the_grid_has_the_energies():
    torch.manual_seed(0)
    sequence = "AGPXVPWLG"
    found = potential(sequence)
    torsions = (2 * math.pi * torch.rand(len(sequence), 2).double() - math.pi).requires_grad_()
    (expected,) = torch.autograd.grad(found.energies(torsions).sum(), torsions)
    torch.testing.assert_close(found.slopes(torsions.detach()), expected)
    grid = grid_of(found, slice(2, 6))
    assert grid.shape == (4, GRID, GRID)
    step = 360 / GRID
    for phi, psi in ((0, 0), (20, 61), (70, 3)):
        expected = at(found, step * phi - 180, step * psi - 180, len(sequence))[2:6]
        torch.testing.assert_close(grid[:, phi, psi], expected)


def test_the_grid_is_periodic():
    found = potential("AGPX")
    number = torch.arange(GRID).expand(4, 1, GRID)
    rows, end, start = slice(0, 4), torch.full_like(number, GRID), torch.zeros_like(number)
    assert torch.equal(found.at_grid(rows, end, number), found.at_grid(rows, start, number))
    assert torch.equal(found.at_grid(rows, number, end), found.at_grid(rows, number, start))


def test_densities_lack_parts_of_their_components():
    """Uniform components weigh less, and so do those with phi above 0 of residues other than glycine."""
    grid = grid_of(potential("GAPV"), slice(0, 4))
    totals = (-grid).exp().mean((1, 2))
    uniform = json.loads(Path(ramachandran.__file__).with_suffix(".json").read_text())["glycine"]["weights"][
        "*"
    ][-1]
    assert abs(float(totals[0]) - (1 - (1 - 0.001) * uniform)) < 1e-3
    assert bool(((totals[1:] > 0.8) & (totals[1:] < 1.001)).all())


def test_residues_far_from_all_others_are_pulled():
    """Nothing but the uniform component is near these angles, and its slope is 0."""
    found = potential("AVG")
    for phi, psi in ((20.0, -90.0), (-10.0, 70.0)):
        assert bool((at(found, phi, psi, 3)[:2] > 6).all())
        slopes = found.slopes(torch.deg2rad(torch.tensor([[phi, psi]]).double()).expand(3, 2))
        assert bool((slopes[:2].norm(dim=-1) > 0.4).all())


def test_the_basins_are_those_of_proteins():
    found = potential("GANPVPX")
    helix, left, strand = (at(found, *angles, residues=7) for angles in ((-63, -42), (57, 40), (-120, 130)))
    assert bool((helix < 0).all())  # denser than a uniform density
    assert float(left[0]) < 0
    assert bool((left[1:] > 2).all())
    alanine, valine, before_proline = 1, 4, 2
    assert float(strand[valine]) < float(strand[alanine])
    assert float(helix[alanine]) < float(helix[before_proline])  # N of the next proline is in the way
    proline = found.energies(torch.deg2rad(torch.tensor([[-65.0, 140.0]]).double()).expand(7, 2))[3]
    assert float(proline) < float(at(found, -120, 140, 7)[3]) - 2
    lowest = grid_of(found, slice(1, 2))[0].flatten().argmin()
    phi, psi = (360 / GRID * float(x) - 180 for x in (lowest // GRID, lowest % GRID))
    assert abs(phi + 63) <= 10
    assert abs(psi + 42) <= 10


def test_a_break_before_proline_does_not_count():
    aatype = torch.as_tensor(rc.sequence_to_aatype("APA"))
    bonded = torch.tensor([False, True])
    apart = RamachandranPotential(aatype, bonded, torch.zeros(()).double())
    assert torch.equal(grid_of(apart, slice(0, 1))[0], grid_of(potential("AA"), slice(0, 1))[0])
    assert not torch.equal(grid_of(potential("APA"), slice(0, 1)), grid_of(apart, slice(0, 1)))
