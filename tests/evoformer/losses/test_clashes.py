"""The clash loss looks at near residues alone and gives what its definition over all pairs gives."""

from __future__ import annotations

import pytest
import torch

from fastfold.evoformer.losses.clashes import between_residue_clashes
from fastfold.protein import residue_constants as rc


def _definition(
    positions: torch.Tensor,
    exists: torch.Tensor,
    index: torch.Tensor,
    chain: torch.Tensor | None,
    aatype: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Atom by atom over all pairs of residues, in plain loops over residues."""
    n = len(index)
    per_atom, hits, total = torch.zeros(n, 14).double(), torch.zeros(n, 14).double(), 0.0
    overlaps = torch.zeros(()).double()
    element = torch.tensor([rc.element_radius[name[0]] for name in rc.atom_types]).double()
    radius = element[torch.from_numpy(rc.restype_atom14_to_atom37).long()[aatype]]
    for i in range(n):
        for j in range(n):
            same = chain is None or bool(chain[i] == chain[j])
            if not (index[i] < index[j] if same else chain is not None and bool(chain[i] < chain[j])):
                continue
            mask = exists[i][:, None] * exists[j][None, :]
            mask[5, 5] = 0.0
            if same and index[j] == index[i] + 1:
                mask[2, 0] = 0.0
            distance = (positions[i][:, None] - positions[j][None, :]).norm(dim=-1)
            overlap = mask * (radius[i][:, None] + radius[j][None, :] - 1.5 - distance).clamp(min=0.0)
            per_atom[i] += overlap.sum(1)
            per_atom[j] += overlap.sum(0)
            hits[i] += (overlap > 0).double().sum(1)
            hits[j] += (overlap > 0).double().sum(0)
            total += float(mask.sum())
            overlaps = overlaps + overlap.sum()
    return {
        "clashes_mean_loss": overlaps / (total + 1e-6),
        "clashes_per_atom_loss_sum": per_atom,
        "clashes_per_atom_clash_mask": (hits > 0).double(),
    }


def _case(
    seed: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residues in a box of ``scale`` Å; some atoms and one residue are missing, numbers have gaps."""
    generator = torch.Generator().manual_seed(seed)
    n = 16
    aatype = torch.randint(0, 20, (n,), generator=generator)
    exists = torch.from_numpy(rc.restype_atom14_mask).double()[aatype]
    exists = exists * (torch.rand(n, 14, generator=generator) < 0.9)
    exists[5] = 0.0
    center = scale * torch.rand(n, 1, 3, generator=generator).double()
    positions = center + 1.5 * torch.randn(n, 14, 3, generator=generator).double()
    positions[exists < 0.5] = 1e3
    chain = (torch.arange(n) >= 7).long() + 1
    index = torch.cat([torch.arange(7), torch.arange(9) + 2])
    index[12:] += 3
    return positions, exists, index, chain, aatype


@pytest.mark.parametrize("scale", [0.0, 6.0, 25.0, 200.0])
@pytest.mark.parametrize("chains", [False, True])
def test_near_residues_are_all_that_matter(scale: float, chains: bool) -> None:
    for seed in range(2):
        positions, exists, index, chain, aatype = _case(seed, scale)
        given = chain if chains else None
        expected = _definition(positions, exists, index, given, aatype)
        found = between_residue_clashes(positions, exists, index, given, aatype, 1.5)
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, msg=name, atol=1e-6, rtol=1e-6)


def test_gradient_is_that_of_the_definition() -> None:
    positions, exists, index, chain, aatype = _case(0, 8.0)
    weights = torch.rand(16, 14, generator=torch.Generator().manual_seed(1)).double()
    gradients = []
    for clashes in (
        lambda x: between_residue_clashes(x, exists, index, chain, aatype, 1.5),
        lambda x: _definition(x, exists, index, chain, aatype),
    ):
        x = positions.clone().requires_grad_()
        found = clashes(x)
        loss = found["clashes_mean_loss"] + (weights * found["clashes_per_atom_loss_sum"]).sum()
        gradients.append(torch.autograd.grad(loss, x)[0])
    assert gradients[0].any()
    torch.testing.assert_close(gradients[0], gradients[1])


def test_missing_alpha_carbons_hide_no_clash() -> None:
    """The spheres are drawn around the CA slot, wherever it lies."""
    positions, exists, index, chain, aatype = _case(0, 6.0)
    exists[:, 1] = 0.0
    positions[:, 1] = 500.0
    expected = _definition(positions, exists, index, chain, aatype)
    assert expected["clashes_per_atom_clash_mask"].any()
    found = between_residue_clashes(positions, exists, index, chain, aatype, 1.5)
    torch.testing.assert_close(found["clashes_per_atom_loss_sum"], expected["clashes_per_atom_loss_sum"])
