"""Torsion angles from atoms and atoms from torsion angles (supplement, section 1.8.4, Algorithms 24 and 25)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastfold.protein import residue_constants as rc
from fastfold.protein.rigid import Rigid, constant


def lookup(name: str, aatype: Tensor, like: Tensor | None = None) -> Tensor:
    """Return rows of a table of :mod:`fastfold.protein.residue_constants` for residue types ``aatype [*]``.

    Types past 20 (gaps) get the unknown residue's row. Rows of floating tables have the dtype of ``like``, rows of
    index tables are int64.
    """
    rows = constant(name, partial(getattr, rc, name), aatype.device)[
        aatype.long().clamp(max=rc.unk_restype_index)
    ]
    if rows.dtype.is_floating_point:
        return rows.to(torch.float32 if like is None else like.dtype)
    return rows.long()


def gather_atoms(atoms: Tensor, index: Tensor) -> Tensor:
    """Pick atoms per residue: ``atoms [*, N, A, ...]``, ``index [*, N, K]`` to ``[*, N, K, ...]``."""
    extra = atoms.dim() - index.dim()
    index = index.reshape(*index.shape, *(1,) * extra).expand(*index.shape, *atoms.shape[index.dim() :])
    return torch.gather(atoms, index.dim() - 1 - extra, index)


def atom14_to_atom37(atom14: Tensor, aatype: Tensor) -> Tensor:
    """Scatter ``atom14 [*, N, 14, ...]`` to atom37 slots ``[*, N, 37, ...]``; absent atoms are zero."""
    mask = lookup("restype_atom37_mask", aatype, atom14)
    atom37 = gather_atoms(atom14, lookup("restype_atom37_to_atom14", aatype))
    return atom37 * mask.reshape(*mask.shape, *(1,) * (atom37.dim() - mask.dim()))


def pseudo_beta(aatype: Tensor, positions: Tensor) -> Tensor:
    """Return positions ``[*, N, 3]`` of CB (CA for glycine) from atom37 ``[*, N, 37, 3]``, in Å."""
    glycine = (aatype == rc.restype_order["G"]).unsqueeze(-1)
    ca, cb = (positions[..., rc.atom_order[name], :] for name in ("CA", "CB"))
    return torch.where(glycine, ca, cb)


def pseudo_beta_mask(aatype: Tensor, mask: Tensor) -> Tensor:
    """Return 1 for residues ``[*, N]`` with a pseudo beta atom, from the atom37 mask ``[*, N, 37]``."""
    ca, cb = (mask[..., rc.atom_order[name]] for name in ("CA", "CB"))
    return torch.where(aatype == rc.restype_order["G"], ca, cb)


def _chi_mask(aatype: Tensor, mask: Tensor) -> Tensor:
    """Return 1 for chi angles ``[*, N, 4]`` whose four atoms all exist, from the atom37 mask ``[*, N, 37]``."""
    index = lookup("chi_atom_indices", aatype)
    present = gather_atoms(mask, index.flatten(-2)).unflatten(-1, (4, 4)).prod(-1)
    return lookup("chi_angles_mask", aatype, mask) * present


def _chi_atoms(aatype: Tensor, positions: Tensor) -> Tensor:
    index = lookup("chi_atom_indices", aatype)
    return gather_atoms(positions, index.flatten(-2)).unflatten(-2, (4, 4))


def atom37_to_torsion_angles(
    aatype: Tensor, positions: Tensor, mask: Tensor, *, placeholder_for_undefined: bool
) -> dict[str, Tensor]:
    """Compute the seven torsion angles of each residue (supplement, section 1.2.9 and Table 2).

    Args:
        aatype: ``[*, N]`` residue types.
        positions: ``[*, N, 37, 3]`` in Å.
        mask: ``[*, N, 37]``.
        placeholder_for_undefined: Set undefined angles to (sin, cos) = (1, 0), as the official program does without
            ``zero_init``; otherwise they have the value of the formula.

    Returns:
        ``torsion_angles_sin_cos`` and ``alt_torsion_angles_sin_cos`` ``[*, N, 7, 2]`` (sine first; order
        pre-omega, phi, psi, chi1-4) and ``torsion_angles_mask`` ``[*, N, 7]``.
    """
    previous = torch.zeros_like(positions)
    previous[..., 1:, :, :] = positions[..., :-1, :, :]
    previous_mask = torch.zeros_like(mask)
    previous_mask[..., 1:, :] = mask[..., :-1, :]
    n, ca, c, o = (rc.atom_order[name] for name in ("N", "CA", "C", "O"))

    def quadruple(*atoms: tuple[Tensor, int]) -> Tensor:
        return torch.stack([source[..., atom, :] for source, atom in atoms], -2)

    def present(*atoms: tuple[Tensor, int]) -> Tensor:
        return torch.stack([source[..., atom] for source, atom in atoms], -1).prod(-1)

    def defining(now: Tensor, before: Tensor) -> list[tuple[tuple[Tensor, int], ...]]:
        return [
            ((before, ca), (before, c), (now, n), (now, ca)),
            ((before, c), (now, n), (now, ca), (now, c)),
            ((now, n), (now, ca), (now, c), (now, o)),
        ]

    backbone = torch.stack([quadruple(*a) for a in defining(positions, previous)], -3)
    atoms = torch.cat([backbone, _chi_atoms(aatype, positions)], -3)
    backbone_mask = torch.stack([present(*a) for a in defining(mask, previous_mask)], -1)
    torsion_mask = torch.cat([backbone_mask, _chi_mask(aatype, mask)], -1)

    frames = Rigid.from_three_points(atoms[..., 1, :], atoms[..., 2, :], atoms[..., 0, :])
    fourth = frames.invert_apply(atoms[..., 3, :])
    sin_cos = torch.stack([fourth[..., 2], fourth[..., 1]], -1)
    sin_cos = sin_cos / torch.sqrt(sin_cos.square().sum(-1, keepdim=True) + 1e-8)
    # Psi is measured at the oxygen, which is opposite the next nitrogen.
    sin_cos = torch.cat([sin_cos[..., :2, :], -sin_cos[..., 2:3, :], sin_cos[..., 3:, :]], -2)
    periodic = lookup("chi_pi_periodic", aatype, sin_cos)
    mirror = torch.cat([torch.ones_like(periodic[..., :3]), 1.0 - 2.0 * periodic], -1)
    alternative = sin_cos * mirror[..., None]
    if placeholder_for_undefined:
        weight = torsion_mask[..., None]
        placeholder = pad(1.0 - weight, (0, 1))  # (1, 0) where the weight is 0
        sin_cos = sin_cos * weight + placeholder
        alternative = alternative * weight + placeholder
    return {
        "torsion_angles_sin_cos": sin_cos,
        "alt_torsion_angles_sin_cos": alternative,
        "torsion_angles_mask": torsion_mask,
    }


def chi_angles(aatype: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute side-chain dihedral angles in radians and their mask, both ``[*, N, 4]``.

    In the multimer network's convention; arguments as of :func:`atom37_to_torsion_angles`.
    """
    a, b, c, d = _chi_atoms(aatype, positions).unbind(-2)
    v1, v2, v3 = a - b, b - c, d - c
    c1, c2 = torch.linalg.cross(v1, v2), torch.linalg.cross(v3, v2)
    c3 = torch.linalg.cross(c2, c1)
    length = v2.square().sum(-1).clamp(min=1e-12).sqrt()
    return torch.atan2((c3 * v2).sum(-1), length * (c1 * c2).sum(-1)), _chi_mask(aatype, mask)


def torsion_angles_to_frames(aatype: Tensor, backbone: Rigid, sin_cos: Tensor) -> Rigid:
    """Compute global frames ``[*, N, 8]`` of the rigid groups of each residue (supplement Algorithm 24).

    The backbone frames are ``[*, N]`` with translations in Å, sines and cosines of the angles ``[*, N, 7, 2]``.
    """
    default = lookup("restype_rigid_group_default_frame", aatype, sin_cos)
    sin = torch.cat([torch.zeros_like(sin_cos[..., :1, 0]), sin_cos[..., 0]], -1)
    cos = torch.cat([torch.ones_like(sin_cos[..., :1, 1]), sin_cos[..., 1]], -1)
    zero, one = torch.zeros_like(sin), torch.ones_like(sin)
    about_x = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], -1).unflatten(-1, (3, 3))
    local = Rigid(default[..., :3, :3] @ about_x, default[..., :3, 3])
    # The default frames of chi2 to chi4 are relative to the previous group.
    groups = [local[..., i] for i in range(8)]
    for i in (5, 6, 7):
        groups[i] = groups[i - 1].compose(groups[i])
    to_backbone = Rigid(
        torch.stack([g.rotation for g in groups], -3), torch.stack([g.translation for g in groups], -2)
    )
    return backbone[..., None].compose(to_backbone)


def frames_to_atom14(aatype: Tensor, frames: Rigid) -> Tensor:
    """Compute atom positions ``[*, N, 14, 3]`` in Å from rigid group frames ``[*, N, 8]`` (Algorithm 24, line 11)."""
    group = lookup("restype_atom14_to_rigid_group", aatype)
    rotation = gather_atoms(frames.rotation, group)
    translation = gather_atoms(frames.translation, group)
    literature = lookup("restype_atom14_rigid_group_positions", aatype, frames.translation)
    positions = Rigid(rotation, translation).apply(literature)
    return positions * lookup("restype_atom14_mask", aatype, positions)[..., None]
