"""What training draws per sample in addition to the crop: rows of the alignment to leave out, the FAPE's clamping."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fastfold.data.features.checks import check_layout
from fastfold.data.features.raw import MSA_LAYOUT
from fastfold.errors import ConfigError

_BY_ROW = (*MSA_LAYOUT, "msa_species_identifiers")


def rows_left(
    rows: int,
    rng: np.random.Generator,
    *,
    fraction: float = 0.3,
    num_blocks: int = 5,
    randomize_num_blocks: bool = False,
) -> np.ndarray:
    """Rows of an alignment that stay when blocks are deleted (supplement, section 1.2.6, Algorithm 1).

    Similar sequences stand together in an alignment: to delete blocks removes whole branches of the family, and
    the network learns to do with less. Blocks may overlap and hang over the end.

    Args:
        rows: Number of rows ``S``.
        rng: Source of randomness.
        fraction: Size of a block in rows, as a part of all; in [0, 1].
        num_blocks: Number of blocks.
        randomize_num_blocks: Draw the number of blocks from 1 to ``num_blocks`` instead.

    Returns:
        Sorted int64 indices; row 0, the query, always stays.

    Raises:
        ConfigError: A fraction outside of [0, 1], or no sensible number of blocks.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"the fraction of the alignment in a deleted block must be 0 to 1, got {fraction}")
    if num_blocks < int(randomize_num_blocks):
        raise ConfigError(f"the number of deleted blocks must not be {num_blocks}")
    number = int(rng.integers(1, num_blocks + 1)) if randomize_num_blocks else num_blocks
    stays = np.ones(rows, bool)
    for start in rng.integers(rows, size=number):
        stays[start : start + int(rows * fraction)] = False
    stays[0] = True
    return np.flatnonzero(stays)


def delete_blocks(
    raw: Mapping[str, np.ndarray],
    rng: np.random.Generator,
    *,
    fraction: float = 0.3,
    num_blocks: int = 5,
    randomize_num_blocks: bool = False,
) -> dict[str, np.ndarray]:
    """A chain's raw features after blocks of its alignment were deleted.

    The copies of a chain in a complex must go on sharing one alignment: delete once and give all of them the result.

    Args:
        raw: What :mod:`fastfold.data.features.raw` makes; ``msa`` and ``deletion_matrix_int`` are ``[S, N]``.
        rng: Source of randomness.
        fraction: See :func:`rows_left`.
        num_blocks: See :func:`rows_left`.
        randomize_num_blocks: See :func:`rows_left`.

    Returns:
        All raw features; those by row have the rows that stay, and ``num_alignments`` says how many.

    Raises:
        InputError: There is no alignment, or it is malformed.
        ConfigError: As :func:`rows_left`.
    """
    rows = check_layout(raw, MSA_LAYOUT)["S"]
    kept = rows_left(
        rows, rng, fraction=fraction, num_blocks=num_blocks, randomize_num_blocks=randomize_num_blocks
    )
    return _take_rows(raw, kept)


def subsample_rows(
    raw: Mapping[str, np.ndarray], most: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """A chain's raw features with a random part of its alignment, drawn evenly without replacement.

    The paper takes 1,000 rows so of the alignments of predicted structures (supplement, section 1.3).

    Args:
        raw: See :func:`delete_blocks`.
        most: Rows to keep, the query, which always stays, included; a shallower alignment is kept whole.
        rng: Source of randomness.

    Returns:
        All raw features; the rows that stay keep their order.

    Raises:
        InputError: There is no alignment, or it is malformed.
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
    """Whether a sample's backbone FAPE is clamped: the feature ``use_clamped_fape`` (supplement, section 1.11.5).

    Args:
        rng: Source of randomness. The paper throws one coin per batch; give each sample of a batch a generator in
            the same state for that.
        unclamped: Probability of no clamping.

    Returns:
        A float32 scalar, 1 for clamped and 0 for not.

    Raises:
        ConfigError: A probability outside of [0, 1].
    """
    if not 0.0 <= unclamped <= 1.0:
        raise ConfigError(f"the probability of an unclamped FAPE must be 0 to 1, got {unclamped}")
    return np.array(rng.random() >= unclamped, np.float32)
