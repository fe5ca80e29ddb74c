"""Training crops: choose residues, and take them from every feature.

A crop is a sorted array of residue indices. Functions that draw a crop do not depend on features, and
:func:`crop_features` does not depend on the way a crop is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastfold.data.features.transforms import row_blocks
from fastfold.errors import InputError

_SEQUENCE = """
    aatype between_segment_residues residue_index sequence seq_mask target_feat coevolution_single
    asym_id entity_id sym_id entity_mask deletion_mean
    atom14_atom_exists atom37_atom_exists residx_atom14_to_atom37 residx_atom37_to_atom14
"""
_LABELS = """
    all_atom_positions all_atom_mask pseudo_beta pseudo_beta_mask
    atom14_gt_positions atom14_gt_exists atom14_alt_gt_positions atom14_alt_gt_exists atom14_atom_is_ambiguous
    rigidgroups_gt_frames rigidgroups_alt_gt_frames rigidgroups_gt_exists rigidgroups_group_exists
    rigidgroups_group_is_ambiguous backbone_affine_tensor backbone_affine_mask
    chi_angles chi_mask torsion_angles_sin_cos alt_torsion_angles_sin_cos torsion_angles_mask
"""
_ALIGNMENT = """
    msa deletion_matrix_int deletion_matrix msa_mask bert_mask
    msa_feat true_msa extra_msa extra_msa_mask extra_has_deletion extra_deletion_value
"""
_TEMPLATES = """
    template_aatype template_all_atom_positions template_all_atom_masks template_all_atom_mask
    template_pseudo_beta template_pseudo_beta_mask
"""
_NO_RESIDUES = """
    msa_row_mask extra_msa_row_mask msa_species_identifiers cluster_bias_mask
    template_mask template_sum_probs num_templates assembly_num_chains
    resolution use_clamped_fape random_crop_to_size_seed
"""
_PAIRS = ("coevolution_pair",)
_CONSTANT = ("seq_length", "num_alignments")  # one number, repeated for every residue in raw features

RESIDUE_AXIS: dict[str, int | None] = {
    **dict.fromkeys((_SEQUENCE + _LABELS).split(), 0),
    **dict.fromkeys(_PAIRS, 0),
    **dict.fromkeys((_ALIGNMENT + _TEMPLATES).split(), 1),
    **dict.fromkeys(_NO_RESIDUES.split(), None),
}
"""Axis of residues by feature name, counted after any leading axes; None for no such axis.

The table contains raw features, merged features of a complex, features of the networks, and labels. Features of pairs
have a second such axis after it.
"""


def contiguous_crop(length: int, size: int, rng: np.random.Generator, *, clamped: bool = True) -> np.ndarray:
    """Draw contiguous residues of one chain (supplement, section 1.2.8).

    Args:
        length: Number of residues of the chain.
        size: Number of residues to take; a shorter chain is taken whole.
        rng: Random generator.
        clamped: True if the sample's FAPE is clamped. Then the start is uniform. Otherwise the start is drawn below an
            upper end that is itself drawn uniformly, and is therefore nearer to the chain's start.

    Returns:
        ``[min(length, size)]`` int64, sorted.
    """
    _check_size(size)
    last = max(length - size, 0)
    if not clamped:
        last -= int(rng.integers(last + 1))
    start = int(rng.integers(last + 1))
    return np.arange(start, start + min(length, size))


def contiguous_crop_of_chains(asym_id: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one contiguous piece of each chain of a complex (AlphaFold-Multimer, Algorithm 1).

    Chains are visited in random order. Each gets a random part of the remaining size, at least as much as the later
    chains cannot fill, so that the crop has its full size.

    Args:
        asym_id: ``[N]`` chain of each residue; a chain's residues are adjacent.
        size: Number of residues to take; a smaller complex is taken whole.
        rng: Random generator.

    Returns:
        ``[min(N, size)]`` int64, sorted. Chains whose draw is zero are left out.
    """
    _check_size(size)
    room, behind = min(size, len(asym_id)), len(asym_id)
    taken = []
    for chain in rng.permutation(np.unique(asym_id)):
        residues = np.flatnonzero(asym_id == chain)
        behind -= len(residues)
        number = int(rng.integers(max(0, room - behind), min(room, len(residues)) + 1))
        start = int(rng.integers(len(residues) - number + 1))
        taken.append(residues[start : start + number])
        room -= number
    return np.sort(np.concatenate(taken))


def spatial_crop(
    asym_id: np.ndarray,
    ca_positions: np.ndarray,
    ca_mask: np.ndarray,
    size: int,
    rng: np.random.Generator,
    *,
    cutoff: float = 10.0,
) -> np.ndarray:
    """Draw the residues around one at an interface between chains (AlphaFold-Multimer, Algorithm 2).

    Args:
        asym_id: ``[N]`` chain of each residue; a chain's residues are adjacent.
        ca_positions: ``[N, 3]`` alpha carbons in Å; read only where the mask is not 0.
        ca_mask: ``[N]``.
        size: Number of residues to take; a smaller complex is taken whole.
        rng: Random generator, for the central residue.
        cutoff: Distance in Å below which alpha carbons of two chains form an interface.

    Returns:
        ``[min(N, size)]`` int64, sorted: the residues nearest to the centre, unresolved ones last. A structure without
        an interface is cropped by :func:`contiguous_crop_of_chains`.
    """
    _check_size(size)
    resolved = np.asarray(ca_mask) > 0
    positions = np.where(resolved[:, None], ca_positions, 0.0).astype(np.float64)
    interface = np.flatnonzero(_at_interface(np.asarray(asym_id), positions, resolved, cutoff))
    if not len(interface):
        return contiguous_crop_of_chains(asym_id, size, rng)
    distance = np.linalg.norm(positions - positions[rng.choice(interface)], axis=-1)
    # Copies of a chain can be at equal distances: a thousandth of an Å per residue breaks ties.
    order = np.where(resolved, distance, np.inf) + 1e-3 * np.arange(len(positions))
    return np.sort(np.argsort(order, kind="stable")[:size])


def crop_features(
    features: Mapping[str, np.ndarray], indices: np.ndarray, *, leading: int = 0
) -> dict[str, np.ndarray]:
    """Return the features of the residues in a crop.

    ``residue_index`` keeps its values, so that the network sees the gaps between pieces. Cropping raw features before
    drawing alignment rows saves the time of clustering discarded columns; the paper crops afterwards.

    Args:
        features: Features and labels by their names in :data:`RESIDUE_AXIS`.
        indices: ``[n]`` residues to keep, sorted.
        leading: Number of additional leading axes, for example 1 for an axis of cycles.

    Returns:
        All features; those without an axis of residues are the same arrays.

    Raises:
        InputError: A feature is not in the table, two features have different numbers of residues, or an index is out
            of range.
    """
    indices = np.asarray(indices)
    cropped: dict[str, np.ndarray] = {}
    sizes: dict[int, str] = {}
    for name, value in features.items():
        value = np.asarray(value)
        if name == "seq_length":
            value = np.full_like(value, len(indices))
        axis = _residue_axis(name, value.ndim - leading)
        if axis is None:
            cropped[name] = value
            continue
        axis += leading
        if axis >= value.ndim:
            raise InputError(
                f"expected an axis of residues in feature {name!r}, found shape {list(value.shape)}"
            )
        sizes.setdefault(value.shape[axis], name)
        if len(sizes) > 1:
            (one, first), (other, second) = sizes.items()
            raise InputError(f"feature {first!r} has {one} residues, but {second!r} has {other}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < value.shape[axis]:
            raise InputError(
                f"a crop with residues {indices.min()} to {indices.max()} of {value.shape[axis]}, "
                "counted from 0"
            )
        cropped[name] = value.take(indices, axis=axis)
        if name in _PAIRS:
            cropped[name] = cropped[name].take(indices, axis=axis + 1)
    return cropped


def _residue_axis(name: str, ndim: int) -> int | None:
    if name in _CONSTANT:
        return 0 if ndim else None
    if name not in RESIDUE_AXIS:
        raise InputError(
            f"feature {name!r} cannot be cropped: its axis of residues is not in the table of features"
        )
    return RESIDUE_AXIS[name]


def _check_size(size: int) -> None:
    if size < 1:
        raise InputError(f"a crop needs at least one residue, found a size of {size}")


def _at_interface(
    asym_id: np.ndarray, positions: np.ndarray, resolved: np.ndarray, cutoff: float
) -> np.ndarray:
    """Return ``[N]`` bool: residues closer than the cutoff to a residue of another chain, if resolved."""
    found = np.zeros(len(asym_id), bool)
    for rows in row_blocks(len(asym_id)):  # in blocks, because all pairs of a large complex take gigabytes
        apart = positions[rows, None] - positions
        near = np.einsum("ijk,ijk->ij", apart, apart) < cutoff**2
        others = (asym_id[rows, None] != asym_id) & resolved[rows, None] & resolved
        found[rows] = (near & others).any(axis=1)
    return found
