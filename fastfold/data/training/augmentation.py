"""Random augmentation of samples in addition to the crop: deleted alignment rows, and FAPE clamping."""

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

    The copies of a chain in a complex must share one alignment: delete once and use the result for all. The result has
    all raw features; those by row contain the remaining rows, and ``num_alignments`` is their number.

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
