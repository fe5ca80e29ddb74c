"""Transforms shared by monomer and multimer networks, from integer arrays to network inputs.

All functions are pure; only :func:`corrupt_msa` is random, with the generator passed in. Residue types follow
:mod:`fastfold.protein.residue_constants`: 0-19, 20 unknown, 21 gap, 22 masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from ml_collections import ConfigDict

from fastfold.errors import ConfigError
from fastfold.protein import residue_constants as rc

NUM_MSA_CLASSES = 23
_MASK_CLASS = 22
_NO_CENTER, _NO_ROW = 254, 255
_ROUNDING = 1e-6  #: Excess of a sum of probabilities over one that is rounding, as of 0.7 + 0.2 + 0.1
_ROW_BLOCK = 256
_ROWS_AT_ONCE = 8192  # compared by one operator, which takes long rows of bytes in the least time
_COUNTS = 2**19  # bytes that fit into a core's cache


@dataclass(frozen=True)
class Alignment:
    """Whole alignment of a target, from which each recycling iteration draws rows."""

    msa: np.ndarray  #: ``[S, N]`` uint8 residue types 0-21; row 0 is the query
    deletions: np.ndarray  #: ``[S, N]`` float32, residues deleted before each column
    mask: np.ndarray  #: ``[S, N]`` float32, 0 where a row is padding
    bert_mask: np.ndarray  #: ``[S, N]`` float32, 0 where a masked position must not be a training target
    cluster_bias: np.ndarray  #: ``[S]`` float32, 1 for rows that are always drawn as cluster centres
    profile: np.ndarray  #: ``[N, 22]`` float32 residue frequencies of all rows, padding left out


@dataclass(frozen=True)
class RandomDraw:
    """Random choices of one iteration, which with the :class:`Alignment` determine its features."""

    clusters: np.ndarray  #: ``[C]`` rows of the alignment that are cluster centres, the query first
    extra: np.ndarray  #: ``[E]`` all other rows, which are assigned to clusters
    num_extra: int  #: Number of rows of the extra MSA, from the first
    masked: np.ndarray  #: ``[C, N]`` bool, positions of masked-residue prediction
    msa: np.ndarray  #: ``[C, N]`` uint8, the centres with the masked positions replaced (22: masked)


def one_hot(ids: np.ndarray, classes: int) -> np.ndarray:
    """Return one-hot float32 ``[*, classes]`` of integers ``[*]``."""
    return (np.asarray(ids)[..., None] == np.arange(classes)).astype(np.float32)


def to_restype_order(ids: np.ndarray) -> np.ndarray:
    """Convert HHblits ids 0-21 (any integer array) to residue types uint8 of the same shape."""
    return rc.hhblits_id_to_restype.astype(np.uint8)[ids]


def has_deletion(deletions: np.ndarray) -> np.ndarray:
    """Return 1 where residues were deleted, from deletion counts ``[*]``, float32."""
    return np.clip(deletions, 0.0, 1.0).astype(np.float32)


def deletion_value(deletions: np.ndarray) -> np.ndarray:
    """Squeeze deletion counts ``[*]`` into [0, 1): ``2/π · arctan(d/3)``, float32 (supplement, Table 1)."""
    scaled = np.asarray(deletions, np.float32) / np.float32(3.0)
    return np.arctan(scaled) * np.float32(2.0 / np.pi)


def count_residues(msa: np.ndarray, classes: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Count each class in each column of ``msa [S, N]``, as ``[N, classes]`` float64.

    The ``weights [S]`` of the rows are ones by default.
    """
    length = msa.shape[1]
    columns = np.arange(length) * classes
    counts = np.zeros(length * classes)
    for rows in row_blocks(len(msa), 1024):
        index = (msa[rows] + columns).ravel()
        weight = None if weights is None else np.repeat(weights[rows], length)
        counts += np.bincount(index, weight, minlength=counts.size)
    return counts.reshape(length, classes)


def msa_profile(msa: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Compute residue frequencies ``[N, 22]`` float32 of ``msa [S, N]`` where ``mask [S, N]`` is not 0."""
    counts = count_residues(np.where(mask > 0, msa, _MASK_CLASS), NUM_MSA_CLASSES)[:, :_MASK_CLASS]
    return (counts / np.maximum(mask.sum(axis=0), 1e-10)[:, None]).astype(np.float32)


def row_blocks(rows: int, size: int = _ROW_BLOCK) -> Iterator[slice]:
    """Yield slices of ``size`` that cover ``range(rows)``, to limit the memory of row-wise work."""
    return (slice(start, start + size) for start in range(0, rows, size))


def agreement(
    centers: np.ndarray, center_mask: np.ndarray, rows: np.ndarray, row_mask: np.ndarray
) -> np.ndarray:
    """Count the columns in which rows and cluster centres have the same residue, ``[E, C]`` unsigned integers.

    Centres ``[C, N]`` and rows ``[E, N]`` are residue types 0-22, their masks 0 or 1. Gaps and masked positions never
    agree (supplement, section 1.2.7).
    """
    # Positions that never agree get different codes on both sides.
    center_codes = np.where((center_mask > 0) & (centers < rc.gap_index), centers, _NO_CENTER)
    row_codes = np.where((row_mask > 0) & (rows < rc.gap_index), rows, _NO_ROW)
    return np.ascontiguousarray(equal_columns(center_codes, row_codes).T)


def equal_columns(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Count the columns in which ``rows [R, N]`` and ``others [S, N]`` are equal, bytes, as unsigned ``[R, S]``."""
    # Counting equal bytes by column is faster than a product of one-hot codes.
    columns, other_columns = np.ascontiguousarray(rows.T, np.uint8), np.ascontiguousarray(others.T, np.uint8)
    result = np.zeros((len(rows), len(others)), np.min_scalar_type(rows.shape[1]))
    number = _COUNTS // max(1, min(len(others), _ROWS_AT_ONCE))
    for own, block in itertools.product(
        row_blocks(len(rows), number), row_blocks(len(others), _ROWS_AT_ONCE)
    ):
        total = result[own, block]
        equal = np.empty(total.shape, np.bool_)
        count = np.empty(total.shape, np.uint8)
        for start in range(0, rows.shape[1], 255):  # a byte counts at most 255 columns
            some = slice(start, start + 255)
            count[...] = 0
            for one, other in zip(columns[some, own], other_columns[some, block], strict=True):
                np.equal(one[:, None], other, out=equal)
                np.add(count, equal.view(np.uint8), out=count)
            total += count
    return result


def corrupt_msa(
    rng: np.random.Generator,
    msa: np.ndarray,
    masked: np.ndarray,
    profile: np.ndarray,
    config: ConfigDict,
    *,
    epsilon: float,
) -> np.ndarray:
    """Replace the ``masked [C, N]`` positions of ``msa [C, N]`` as BERT does (supplement, section 1.2.7).

    A masked position becomes a residue drawn uniformly, one drawn from its column's ``profile [N, 22]``, itself, or,
    with the remaining probability, the mask class 22. The config has ``uniform_prob``, ``profile_prob`` and
    ``same_prob``; ``epsilon`` is added to each class's probability, as in the official networks.

    Returns:
        ``[C, N]`` uint8 residue types 0-22.

    Raises:
        ConfigError: The three probabilities sum to more than one.
    """
    mask_prob = 1.0 - config.uniform_prob - config.profile_prob - config.same_prob
    if mask_prob < -_ROUNDING:
        raise ConfigError("masked_msa: uniform_prob, profile_prob and same_prob sum to more than 1")
    row, column = np.nonzero(masked)
    probabilities = np.full((len(row), NUM_MSA_CLASSES), epsilon)
    probabilities[:, : rc.restype_num] += config.uniform_prob / rc.restype_num
    probabilities[:, :_MASK_CLASS] += config.profile_prob * profile[column]
    probabilities[np.arange(len(row)), msa[row, column]] += config.same_prob
    probabilities[:, _MASK_CLASS] += max(mask_prob, 0.0)
    cumulative = probabilities.cumsum(axis=1)
    point = rng.random(len(row)) * cumulative[:, -1]
    result = msa.copy()
    result[row, column] = np.minimum((point[:, None] >= cumulative).sum(axis=1), _MASK_CLASS)
    return result


def cluster_features(
    alignment: Alignment, draw: RandomDraw, profile: np.ndarray, deletion_mean: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute the network's alignment features of one iteration (supplement, Table 1).

    Clusters have residue frequencies ``profile [C, N, 23]`` and mean deletion counts ``deletion_mean [C, N]``.

    Returns:
        ``msa_feat`` ``[C, N, 49]`` (residue one-hot 23, has deletion, deletion value, cluster profile 23,
        mean deletion value), ``msa_mask``, ``bert_mask`` ``[C, N]`` float32, ``true_msa`` ``[C, N]`` int32,
        ``extra_msa`` ``[E, N]`` int32, ``extra_msa_mask``, ``extra_has_deletion``, ``extra_deletion_value``
        ``[E, N]`` float32. ``E`` is at least one: without extra rows, one row of zeros with mask 0 is used, because the
        outer product of a wholly masked extra MSA is not zero (its bias remains).
    """
    deletions = alignment.deletions[draw.clusters]
    kept = draw.extra[: draw.num_extra]
    extra = {
        "extra_msa": alignment.msa[kept].astype(np.int32),
        "extra_msa_mask": alignment.mask[kept],
        "extra_has_deletion": has_deletion(alignment.deletions[kept]),
        "extra_deletion_value": deletion_value(alignment.deletions[kept]),
    }
    if not len(kept):
        extra = {name: np.zeros((1, *value.shape[1:]), value.dtype) for name, value in extra.items()}
    msa_feat = np.empty((*draw.msa.shape, 2 * NUM_MSA_CLASSES + 3), np.float32)  # large, so filled in place
    msa_feat[..., :23] = draw.msa[..., None] == np.arange(NUM_MSA_CLASSES, dtype=np.uint8)
    msa_feat[..., 23] = has_deletion(deletions)
    msa_feat[..., 24] = deletion_value(deletions)
    msa_feat[..., 25:48] = profile
    msa_feat[..., 48] = deletion_value(deletion_mean)
    return {
        "msa_feat": msa_feat,
        "msa_mask": alignment.mask[draw.clusters],
        "true_msa": alignment.msa[draw.clusters].astype(np.int32),
        "bert_mask": alignment.bert_mask[draw.clusters] * draw.masked,
        **extra,
    }


def atom_maps(aatype: np.ndarray) -> dict[str, np.ndarray]:
    """Return the atoms of residues of types 0-20 ``[N]``, and the maps between the two atom layouts.

    Returns:
        ``atom14_atom_exists`` ``[N, 14]`` and ``atom37_atom_exists`` ``[N, 37]`` float32,
        ``residx_atom14_to_atom37`` ``[N, 14]`` and ``residx_atom37_to_atom14`` ``[N, 37]`` int32.
    """
    return {
        "atom14_atom_exists": rc.restype_atom14_mask[aatype],
        "atom37_atom_exists": rc.restype_atom37_mask[aatype],
        "residx_atom14_to_atom37": rc.restype_atom14_to_atom37[aatype],
        "residx_atom37_to_atom14": rc.restype_atom37_to_atom14[aatype],
    }


def pseudo_beta(aatype: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Cβ of each residue, Cα for glycine: ``[*, N, 3]`` in Å, and a mask ``[*, N]``, float32.

    The residue types are ``[*, N]``, the positions ``[*, N, 37, 3]`` in Å and their mask ``[*, N, 37]``.
    """
    is_glycine = aatype == rc.restype_order["G"]
    ca, cb = rc.atom_order["CA"], rc.atom_order["CB"]
    atoms = np.where(is_glycine[..., None], positions[..., ca, :], positions[..., cb, :])
    return atoms.astype(np.float32), np.where(is_glycine, mask[..., ca], mask[..., cb]).astype(np.float32)


def template_aatype(one_hot_hhblits: np.ndarray) -> np.ndarray:
    """Convert raw template sequences ``[T, N, 22]`` (one-hot over HHblits ids) to residue types ``[T, N]`` int32."""
    return rc.hhblits_id_to_restype[np.argmax(one_hot_hhblits, axis=-1)]


def pad_templates(value: np.ndarray, number: int) -> np.ndarray:
    """Return the first ``number`` templates of ``[T, ...]``, padded with zeros to ``[number, ...]``."""
    missing = max(0, number - len(value))
    return np.pad(value[:number], [(0, missing)] + [(0, 0)] * (value.ndim - 1))
