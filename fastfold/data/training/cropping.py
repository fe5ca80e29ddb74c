"""Training crops: which residues to take, and taking them from every feature.

A crop is a sorted array of residue indices. The functions that draw one know nothing of features;
:func:`crop_features` knows nothing of how the crop was drawn.
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
_CONSTANT = ("seq_length", "num_alignments")  # one number, which raw features repeat for every residue

RESIDUE_AXIS: dict[str, int | None] = {
    **dict.fromkeys((_SEQUENCE + _LABELS).split(), 0),
    **dict.fromkeys(_PAIRS, 0),
    **dict.fromkeys((_ALIGNMENT + _TEMPLATES).split(), 1),
    **dict.fromkeys(_NO_RESIDUES.split(), None),
}
"""Feature name to the axis of residues, counted after any leading axes; None where there is none. Raw features,
merged features of a complex, features of the networks and labels are all here. Features of pairs have a second such
axis after it."""


def contiguous_crop(length: int, size: int, rng: np.random.Generator, *, clamped: bool = True) -> np.ndarray:
    """Residues of one chain without a gap (supplement, section 1.2.8).

    Args:
        length: The chain's number of residues.
        size: Residues to take; a shorter chain is taken whole.
        rng: Source of randomness.
        clamped: Whether the sample's FAPE is clamped. Then all starts are equally likely; the start of an
            unclamped sample is drawn below an upper end that is itself drawn evenly, hence lies rather near the
            chain's start.

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
    """One piece without a gap from each of the chains of a complex (AlphaFold-Multimer, Algorithm 1).

    Chains are visited in random order. Each gets as much of the room that is left as a draw decides, but so much
    at least that the chains after it can fill the rest: the crop has its full size.

    Args:
        asym_id: ``[N]`` chain of each residue; a chain's residues stand together.
        size: Residues to take; a smaller complex is taken whole.
        rng: Source of randomness.

    Returns:
        ``[min(N, size)]`` int64, sorted. Chains that the draw gave no room are left out.
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
    """The residues around one at an interface between chains (AlphaFold-Multimer, Algorithm 2).

    Args:
        asym_id: ``[N]`` chain of each residue; a chain's residues stand together.
        ca_positions: ``[N, 3]`` alpha carbons in Å; read only where the mask is not 0.
        ca_mask: ``[N]``.
        size: Residues to take; a smaller complex is taken whole.
        rng: Source of randomness: decides for the residue in the centre.
        cutoff: Alpha carbons of two chains that are closer than this, in Å, are at an interface.

    Returns:
        ``[min(N, size)]`` int64, sorted: the residues nearest to the centre, unresolved ones after all others. A
        structure without an interface is cropped by :func:`contiguous_crop_of_chains`.
    """
    _check_size(size)
    resolved = np.asarray(ca_mask) > 0
    positions = np.where(resolved[:, None], ca_positions, 0.0).astype(np.float64)
    interface = np.flatnonzero(_at_interface(np.asarray(asym_id), positions, resolved, cutoff))
    if not len(interface):
        return contiguous_crop_of_chains(asym_id, size, rng)
    distance = np.linalg.norm(positions - positions[rng.choice(interface)], axis=-1)
    # Copies of a chain can stand at exactly equal distances: a thousandth of an Å per residue decides.
    order = np.where(resolved, distance, np.inf) + 1e-3 * np.arange(len(positions))
    return np.sort(np.argsort(order, kind="stable")[:size])


def crop_features(
    features: Mapping[str, np.ndarray], indices: np.ndarray, *, leading: int = 0
) -> dict[str, np.ndarray]:
    """The features of the residues in a crop alone.

    ``residue_index`` keeps its values, so that the network knows where pieces were cut out. Cropping raw features
    before the rows of the alignment are drawn saves the time of clustering what is thrown away; the paper crops
    after it.

    Args:
        features: Features and labels by their names in :data:`RESIDUE_AXIS`.
        indices: ``[n]`` residues to keep, sorted.
        leading: Number of axes before the usual ones, for example 1 if each feature has an axis of cycles.

    Returns:
        All features; those without residues are the same arrays.

    Raises:
        InputError: A feature that the table doesn't have, two features of different numbers of residues, or an
            index that is not below that number.
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
            raise InputError(f"feature {name!r} has shape {list(value.shape)}, which has no axis of residues")
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
            f"feature {name!r} cannot be cropped: the table of features does not say which of its axes is that of "
            "the residues"
        )
    return RESIDUE_AXIS[name]


def _check_size(size: int) -> None:
    if size < 1:
        raise InputError(f"a crop needs at least one residue, got a size of {size}")


def _at_interface(
    asym_id: np.ndarray, positions: np.ndarray, resolved: np.ndarray, cutoff: float
) -> np.ndarray:
    """``[N]`` bool: resolved residues with a resolved residue of another chain closer than the cutoff."""
    found = np.zeros(len(asym_id), bool)
    for rows in row_blocks(len(asym_id)):  # all pairs at once would take gigabytes for a large complex
        apart = positions[rows, None] - positions
        near = np.einsum("ijk,ijk->ij", apart, apart) < cutoff**2
        others = (asym_id[rows, None] != asym_id) & resolved[rows, None] & resolved
        found[rows] = (near & others).any(axis=1)
    return found
