"""Clashes between atoms of different residues (supplement, section 1.9.11, equation 46)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import lookup
from fastfold.utils.device import reads_are_free

_N, _CA, _C = 0, 1, 2
_SULPHUR = rc.restype_atom14_names[rc.restype_order["C"]].index("SG")
"""As in the official program, this atom14 slot counts as a disulfide bridge in residues of any type."""


def between_residue_clashes(
    positions: Tensor,
    exists: Tensor,
    residue_index: Tensor,
    chain: Tensor | None,
    aatype: Tensor,
    tolerance: float,
) -> dict[str, Tensor]:
    """Compute overlaps of van der Waals spheres that exceed the tolerance.

    Atom pairs are computed only for residues near enough to overlap; the mean is over all pairs.

    Args:
        positions: atom14 ``[*, N, 14, 3]`` in Å.
        exists: ``[*, N, 14]``, 0 or 1.
        residue_index: ``[*, N]``.
        chain: ``[*, N]``, None for a single chain.
        aatype: ``[*, N]``.
        tolerance: Allowed overlap in Å.

    Returns:
        ``clashes_mean_loss [*]`` in Å, ``clashes_per_atom_loss_sum [*, N, 14]`` in Å and
        ``clashes_per_atom_clash_mask [*, N, 14]``.
    """
    counted, follows = _residue_pairs(residue_index, chain)
    radii = [rc.element_radius[name[0]] for name in rc.atom_types]
    radius = torch.tensor(radii).to(positions)[lookup("restype_atom14_to_atom37", aatype)]
    near = counted & _within_reach(positions, exists, max(radii) * 2.0 - tolerance)

    shape, length = exists.shape, exists.shape[-2]
    near = near.reshape(-1, length, length)
    sample, i, j = _places(near)
    first, second = sample * length + i, sample * length + j  # [P]
    flat, present, radius = positions.reshape(-1, 14, 3), exists.reshape(-1, 14), radius.reshape(-1, 14)
    mask = present[first][:, :, None] * present[second][:, None, :]  # [P, 14, 14]
    if not reads_are_free(near.device):
        mask = mask * near.flatten()[:, None, None]
    mask[:, _C, _N] *= ~follows.reshape(-1, length, length)[sample, i, j]
    mask[:, _SULPHUR, _SULPHUR] = 0.0
    delta = flat[first][:, :, None, :] - flat[second][:, None, :, :]
    distance = (delta.square().sum(-1) + 1e-10).sqrt()
    bound = radius[first][:, :, None] + radius[second][:, None, :] - tolerance
    loss = mask * F.relu(bound - distance)
    clash = mask * (distance < bound)

    zero = torch.zeros_like(present)
    per_atom = zero.index_add(0, first, loss.sum(-1)).index_add(0, second, loss.sum(-2)).reshape(shape)
    hits = zero.index_add(0, first, clash.sum(-1)).index_add(0, second, clash.sum(-2)).reshape(shape)
    total = _number_of_pairs(exists, counted, follows)
    return {
        # per_atom counts every overlap at both of its atoms.
        "clashes_mean_loss": 0.5 * per_atom.sum((-2, -1)) / (1e-6 + total),
        "clashes_per_atom_loss_sum": per_atom,
        "clashes_per_atom_clash_mask": (hits > 0).to(positions.dtype),
    }


def _places(near: Tensor) -> tuple[Tensor, ...]:
    """Return sample, first and second residue of the near pairs of ``[B, N, N]``.

    On a GPU all pairs are returned, because the host would have to wait for the number of near ones. This takes about
    eight tensors ``[B, N, N, 14, 14]``.
    """
    if reads_are_free(near.device):
        return near.nonzero().unbind(-1)
    sizes = [torch.arange(size, device=near.device) for size in near.shape]
    return torch.cartesian_prod(*sizes).unbind(-1)


def _residue_pairs(residue_index: Tensor, chain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the counted pairs of residues ``[*, N, N]`` (each once), and the pairs of chain neighbours."""
    offset = residue_index[..., None, :] - residue_index[..., :, None]
    if chain is None:
        return offset > 0, offset == 1
    # Ordering by residue number alone, as in the official program, misses equal numbers of two chains.
    step = chain[..., None, :] - chain[..., :, None]
    return torch.where(step == 0, offset > 0, step > 0), (offset == 1) & (step == 0)


def _within_reach(positions: Tensor, exists: Tensor, margin: float) -> Tensor:
    """Return pairs of residues ``[*, N, N]`` that may have atoms nearer than ``margin`` Å.

    Each residue is bounded by a sphere around its CA.
    """
    with torch.no_grad():
        center = positions[..., _CA, :]
        reach = ((positions - center[..., None, :]).square().sum(-1) * exists).amax(-1).sqrt()
        apart = torch.cdist(center, center, compute_mode="donot_use_mm_for_euclid_dist")
        # 1e-3 Å allows for rounding.
        near = apart < reach[..., :, None] + reach[..., None, :] + margin + 1e-3
        some = exists.amax(-1) > 0
        return near & some[..., :, None] & some[..., None, :]


def _number_of_pairs(exists: Tensor, counted: Tensor, follows: Tensor) -> Tensor:
    """Return the number of atom pairs ``[*]`` that could clash: all but peptide bonds and sulphur bridges."""

    def pairs(first: Tensor, second: Tensor, of: Tensor) -> Tensor:
        return ((first[..., None, :] @ of.to(first.dtype)).squeeze(-2) * second).sum(-1)

    atoms, sulphur = exists.sum(-1), exists[..., _SULPHUR]
    bonds = pairs(exists[..., _C], exists[..., _N], counted & follows)
    return pairs(atoms, atoms, counted) - bonds - pairs(sulphur, sulphur, counted)
