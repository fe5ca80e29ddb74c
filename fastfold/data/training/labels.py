"""Labels of a known structure for the losses (supplement, section 1.2).

:func:`structure_labels` computes all of them. Names, shapes and the values of masked entries are those of the official
training batch.
"""

from __future__ import annotations

import numpy as np
import torch

from fastfold.data.features import transforms
from fastfold.data.features.raw import check_ids, check_layout
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import atom37_to_torsion_angles, chi_angles
from fastfold.protein.rigid import Rigid, rotation_to_quaternion

Labels = dict[str, np.ndarray]

# The backbone's frame points from CA to C, but three points define the frame that points to CA.
_BACKBONE_AXES = np.array([-1.0, 1.0, -1.0], np.float32)
# An exchange of symmetric atoms rotates the last chi group about its x axis by 180 degrees.
_HALF_TURN = np.array([1.0, -1.0, -1.0], np.float32)


def structure_labels(
    aatype: np.ndarray, positions: np.ndarray, mask: np.ndarray, *, resolution: float | None = None
) -> Labels:
    """Compute all labels of one chain, or of all concatenated chains of a complex.

    Atoms outside of the mask may have any value, including NaN; they count as zeros, so that every label is finite.

    Args:
        aatype: ``[N]`` residue types 0-20.
        positions: ``[N, 37, 3]`` atom37 positions in Å.
        mask: ``[N, 37]``, 1 for observed atoms. A fraction (the confidence in a predicted structure) is passed on to
            every mask made from it.
        resolution: Resolution of the experiment in Å; None or 0 for none (NMR, predicted structures), for which the
            confidence losses are skipped.

    Returns:
        ``aatype`` ``[N]`` int32, ``seq_length`` and ``resolution`` scalars, the atom maps of
        :func:`fastfold.data.features.transforms.atom_maps` and, as float32:

        * ``all_atom_positions`` ``[N, 37, 3]``, ``all_atom_mask`` ``[N, 37]``;
        * ``pseudo_beta`` ``[N, 3]``, ``pseudo_beta_mask`` ``[N]``;
        * the labels of :func:`atom14_labels`, :func:`frame_labels` and :func:`torsion_labels`.

        Lengths are in Å.

    Raises:
        InputError: Shapes that do not match, residue types outside of 0-20, or an observed atom whose position is not
            finite.
    """
    arrays = {"aatype": np.asarray(aatype), "positions": np.asarray(positions), "mask": np.asarray(mask)}
    length = check_layout(arrays, {"aatype": ("N",), "positions": ("N", 37, 3), "mask": ("N", 37)})["N"]
    check_ids(arrays, "aatype", 21)
    types = arrays["aatype"].astype(np.int32)
    seen = arrays["mask"].astype(np.float32)
    atoms = np.where(seen[..., None] > 0, arrays["positions"], 0.0).astype(np.float32)
    if not np.isfinite(atoms).all():
        residue, atom, _ = np.argwhere(~np.isfinite(atoms))[0]
        raise InputError(
            f"atom {rc.atom_types[atom]} of residue {residue + 1} is marked as observed, but its position is "
            f"{atoms[residue, atom].tolist()}; set its mask to 0"
        )
    beta, beta_mask = transforms.pseudo_beta(types, atoms, seen)
    return {
        "aatype": types,
        "seq_length": np.array(length, np.int32),
        "resolution": np.array(resolution or 0.0, np.float32),
        "all_atom_positions": atoms,
        "all_atom_mask": seen,
        "pseudo_beta": beta,
        "pseudo_beta_mask": beta_mask,
        **transforms.atom_maps(types),
        **atom14_labels(types, atoms, seen),
        **frame_labels(types, atoms, seen),
        **torsion_labels(types, atoms, seen),
    }


def atom14_labels(aatype: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Labels:
    """Compute true atoms in the dense layout, under both namings of symmetric atoms (Table 3).

    See the supplement, section 1.8.5. The residue types are ``[N]`` from 0 to 20, the positions ``[N, 37, 3]`` in Å,
    zero where the ``mask [N, 37]`` is.

    Returns:
        ``atom14_gt_positions``, ``atom14_alt_gt_positions`` ``[N, 14, 3]``, ``atom14_gt_exists``,
        ``atom14_alt_gt_exists`` and ``atom14_atom_is_ambiguous`` ``[N, 14]``, float32.
    """
    slot = rc.restype_atom14_to_atom37[aatype]
    exists = np.take_along_axis(mask, slot, axis=1) * rc.restype_atom14_mask[aatype]
    truth = np.take_along_axis(positions, slot[..., None], axis=1) * (exists > 0)[..., None]
    other = rc.restype_atom14_renaming[aatype]
    return {
        "atom14_gt_positions": truth,
        "atom14_gt_exists": exists,
        "atom14_alt_gt_positions": np.take_along_axis(truth, other[..., None], axis=1),
        "atom14_alt_gt_exists": np.take_along_axis(exists, other, axis=1),
        "atom14_atom_is_ambiguous": rc.restype_atom14_is_ambiguous[aatype],
    }


def frame_labels(aatype: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Labels:
    """Compute true frames of the eight rigid groups and of the backbone (supplement, section 1.8.1, Table 2).

    Groups that a residue lacks are a single point: their rotation is zero and never read. A frame with a missing atom
    is finite, meaningless, and has mask 0.

    Arguments are those of :func:`atom14_labels`.

    Returns:
        float32: ``rigidgroups_gt_frames`` and ``rigidgroups_alt_gt_frames`` ``[N, 8, 12]`` (rotation row by row,
        translation in Å), ``rigidgroups_gt_exists`` (all three atoms observed), ``rigidgroups_group_exists`` (the
        residue has the group), ``rigidgroups_group_is_ambiguous`` ``[N, 8]``, ``backbone_affine_tensor`` ``[N,
        7]`` (unit quaternion of either sign, translation in Å) and ``backbone_affine_mask`` ``[N]``.
    """
    base = rc.restype_rigidgroup_base_atom37[aatype].reshape(len(aatype), 24)
    points = np.take_along_axis(positions, base[..., None], axis=1).reshape(-1, 8, 3, 3)
    group_exists = rc.restype_rigidgroup_mask[aatype]
    exists = np.take_along_axis(mask, base, axis=1).reshape(-1, 8, 3).min(axis=-1) * group_exists
    behind, origin, beside = torch.from_numpy(points).unbind(-2)
    rotation = Rigid.from_three_points(behind, origin, beside).rotation.numpy()
    rotation[:, 0] *= _BACKBONE_AXES
    ambiguous = np.zeros_like(exists)
    ambiguous[:, 4:] = rc.chi_pi_periodic[aatype]
    alternative = rotation * np.where(ambiguous[..., None] > 0, _HALF_TURN, np.float32(1.0))[..., None, :]
    translation = points[..., 1, :]
    quaternion = rotation_to_quaternion(torch.from_numpy(rotation[:, 0])).numpy()
    return {
        "rigidgroups_gt_frames": _flat(rotation, translation),
        "rigidgroups_alt_gt_frames": _flat(alternative, translation),
        "rigidgroups_gt_exists": exists,
        "rigidgroups_group_exists": group_exists,
        "rigidgroups_group_is_ambiguous": ambiguous,
        "backbone_affine_tensor": np.concatenate([quaternion, translation[:, 0]], axis=-1),
        "backbone_affine_mask": exists[:, 0],
    }


def torsion_labels(aatype: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> Labels:
    """Compute true torsion angles (supplement, section 1.2.9, Table 2).

    Arguments are those of :func:`atom14_labels`.

    Returns:
        float32: ``chi_angles`` in radians and ``chi_mask`` ``[N, 4]``, ``torsion_angles_sin_cos`` and
        ``alt_torsion_angles_sin_cos`` ``[N, 7, 2]``, ``torsion_angles_mask`` ``[N, 7]``. Residues are assumed to be
        consecutive: pre-omega and phi at the start of a further chain are meaningless, and no loss reads them.
    """
    tensors = torch.from_numpy(aatype), torch.from_numpy(positions), torch.from_numpy(mask)
    angles, chi_mask = chi_angles(*tensors)
    torsions = atom37_to_torsion_angles(*tensors, placeholder_for_undefined=False)
    return {
        "chi_angles": angles.numpy(),
        "chi_mask": chi_mask.numpy(),
        **{name: value.numpy() for name, value in torsions.items()},
    }


def _flat(rotation: np.ndarray, translation: np.ndarray) -> np.ndarray:
    """Return frames ``[*, 12]`` of rotations ``[*, 3, 3]`` and translations ``[*, 3]``."""
    return np.concatenate([rotation.reshape(*rotation.shape[:-2], 9), translation], axis=-1)
