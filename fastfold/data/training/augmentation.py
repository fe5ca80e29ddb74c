"""Random augmentation of samples: crops, deleted alignment rows, and FAPE clamping.

A crop is a sorted array of residue indices. Functions that draw a crop do not depend on features, and
:func:`crop_features` does not depend on the way a crop is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastfold.data.features.raw import MSA_LAYOUT, check_layout
from fastfold.data.features.transforms import row_blocks
from fastfold.errors import ConfigError, InputError

_BY_ROW = (*MSA_LAYOUT, "msa_species_identifiers")


def rows_left(
    rows: int,
    rng: np.random.Generator,
    *,
    fraction: float = 0.3,
    num_blocks: int = 5,
    randomize_num_blocks: bool = False,
) -> np.ndarray:
    """Return the rows of an alignment that remain after block deletion (supplement, Algorithm 1).

    Similar sequences are adjacent in an alignment. Deleting blocks removes whole branches of the family, so that the
    network learns from less data. Blocks may overlap and extend over the end. The result is sorted int64 indices; row
    0, the query, always remains. ``fraction`` is the size of a block relative to all rows; with
    ``randomize_num_blocks`` the number is drawn from 1 to ``num_blocks``.

    Raises:
        ConfigError: A fraction outside of [0, 1], or an invalid number of blocks.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(
            f"the fraction of the alignment in a deleted block must be 0 to 1, found {fraction}"
        )
    if num_blocks < (least := int(randomize_num_blocks)):
        raise ConfigError(f"expected at least {least} deleted blocks, found {num_blocks}")
    number = int(rng.integers(1, num_blocks + 1)) if randomize_num_blocks else num_blocks
    stays = np.ones(rows, bool)
    for start in rng.integers(rows, size=number):
        stays[start : start + int(rows * fraction)] = False
    stays[0] = True
    return np.flatnonzero(stays)


def delete_blocks(
    raw: Mapping[str, np.ndarray], rng: np.random.Generator, *, num_blocks: int = 5
) -> dict[str, np.ndarray]:
    """Delete blocks of a chain's alignment in its raw features, see :func:`rows_left`.

    The copies of a chain in a complex must share one alignment: delete once and use the result for all. Features by row
    contain the remaining rows, and ``num_alignments`` is their number.

    Raises:
        InputError: The alignment is missing or malformed.
    """
    rows = check_layout(raw, MSA_LAYOUT)["S"]
    return _take_rows(raw, rows_left(rows, rng, num_blocks=num_blocks))


def subsample_rows(
    raw: Mapping[str, np.ndarray], most: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw at most ``most`` rows of a chain's alignment in its raw features, always the query, in order.

    Rows are drawn uniformly without replacement. The paper draws 1,000 rows of the alignments of predicted structures
    in this way (supplement, section 1.3).

    Raises:
        InputError: The alignment is missing or malformed.
    """
    rows = check_layout(raw, MSA_LAYOUT)["S"]
    if rows <= most:
        return dict(raw)
    others = rng.choice(rows - 1, size=most - 1, replace=False)
    return _take_rows(raw, np.concatenate([[0], 1 + np.sort(others)]))


def _take_rows(raw: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, np.ndarray]:
    result = {name: np.asarray(value) for name, value in raw.items()}
    result |= {name: result[name][kept] for name in _BY_ROW if name in result}
    if "num_alignments" in result:
        result["num_alignments"] = np.full_like(result["num_alignments"], len(kept))
    return result


def sample_fape_clamp(rng: np.random.Generator, *, unclamped: float = 0.1) -> np.ndarray:
    """Draw the feature ``use_clamped_fape``: 1 if backbone FAPE is clamped (supplement, section 1.11.5).

    The paper draws once per batch; for that, give each sample of a batch a generator in the same state.

    Raises:
        ConfigError: A probability outside of [0, 1].
    """
    if not 0.0 <= unclamped <= 1.0:
        raise ConfigError(f"the probability of an unclamped FAPE must be 0 to 1, found {unclamped}")
    return np.array(rng.random() >= unclamped, np.float32)


_FIRST_AXIS = """
    aatype between_segment_residues residue_index sequence seq_mask target_feat coevolution_single
    asym_id entity_id sym_id entity_mask deletion_mean
    atom14_atom_exists atom37_atom_exists residx_atom14_to_atom37 residx_atom37_to_atom14
    all_atom_positions all_atom_mask pseudo_beta pseudo_beta_mask
    atom14_gt_positions atom14_gt_exists atom14_alt_gt_positions atom14_alt_gt_exists atom14_atom_is_ambiguous
    rigidgroups_gt_frames rigidgroups_alt_gt_frames rigidgroups_gt_exists rigidgroups_group_exists
    rigidgroups_group_is_ambiguous backbone_affine_tensor backbone_affine_mask
    chi_angles chi_mask torsion_angles_sin_cos alt_torsion_angles_sin_cos torsion_angles_mask
    coevolution_pair
"""
_SECOND_AXIS = """
    msa deletion_matrix_int deletion_matrix msa_mask bert_mask
    msa_feat true_msa extra_msa extra_msa_mask extra_has_deletion extra_deletion_value
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
    **dict.fromkeys(_FIRST_AXIS.split(), 0),
    **dict.fromkeys(_SECOND_AXIS.split(), 1),
    **dict.fromkeys(_NO_RESIDUES.split(), None),
}
"""Axis of residues by feature name, counted after any leading axes; None for no such axis.

The table contains raw features, merged features of a complex, features of the networks, and labels. Features of pairs
have a second such axis after it.
"""


def contiguous_crop(length: int, size: int, rng: np.random.Generator, *, clamped: bool = True) -> np.ndarray:
    """Draw contiguous residues of one chain, ``[min(length, size)]`` int64 (supplement, section 1.2.8).

    For a sample whose FAPE is ``clamped``, the start is uniform. Otherwise it is drawn below an upper end that is
    itself drawn uniformly, and is therefore nearer to the chain's start.
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
    chains cannot fill, so that the crop has its full size. The ``asym_id [N]`` is the chain of each residue, whose
    residues are adjacent. The result ``[min(N, size)]`` is sorted int64; chains whose draw is zero are left out.
    """
    _check_size(size)
    room, behind = min(size, len(asym_id)), len(asym_id)
    parts = []
    for chain in rng.permutation(np.unique(asym_id)):
        residues = np.flatnonzero(asym_id == chain)
        behind -= len(residues)
        number = int(rng.integers(max(0, room - behind), min(room, len(residues)) + 1))
        start = int(rng.integers(len(residues) - number + 1))
        parts.append(residues[start : start + number])
        room -= number
    return np.sort(np.concatenate(parts))


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

    Alpha carbons of two chains form an interface below the ``cutoff`` in Å. A structure without one is cropped by
    :func:`contiguous_crop_of_chains`, from which ``asym_id [N]`` and ``size`` are. The ``ca_positions [N, 3]`` in Å are
    read only where ``ca_mask [N]`` is not 0.

    Returns:
        ``[min(N, size)]`` int64, sorted: the residues nearest to the centre, unresolved ones last.
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
    """Return the features of the residues in a crop, sorted ``indices [n]``.

    Features and labels have their names in :data:`RESIDUE_AXIS`, and ``leading`` additional leading axes, for example 1
    for an axis of cycles. Those without an axis of residues are returned as the same arrays. ``residue_index`` keeps
    its values, so that the network sees the gaps between pieces. Cropping raw features before drawing alignment rows
    saves the time of clustering discarded columns; the paper crops afterwards.

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
    is_near = np.zeros(len(asym_id), bool)
    for rows in row_blocks(len(asym_id)):  # in blocks, because all pairs of a large complex take gigabytes
        apart = positions[rows, None] - positions
        near = np.einsum("ijk,ijk->ij", apart, apart) < cutoff**2
        others = (asym_id[rows, None] != asym_id) & resolved[rows, None] & resolved
        is_near[rows] = (near & others).any(axis=1)
    return is_near
