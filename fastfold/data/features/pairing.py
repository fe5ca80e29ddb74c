"""Pair alignment rows across the chains of a complex (AlphaFold-Multimer, Evans et al. 2021).

Chains in contact have co-evolved within each species, so rows of one species form a line. Within a species, rows are
paired by their rank of similarity to their own chain's query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_ROWS_PER_SPECIES = 600
"""Largest number of rows of a species in a chain; with more, ranks are meaningless and rows are not paired."""


def rows_by_species(msa: np.ndarray, species: np.ndarray) -> dict[bytes, np.ndarray]:
    """Return the rows of each species, most similar to the query first, ties in alignment order.

    The query is row 0 of ``msa [S, N]``. Rows of an unknown ``species [S]``, empty bytes, belong to none.
    """
    similarity = (msa == msa[0]).mean(axis=1)
    names, inverse = np.unique(species, return_inverse=True)
    order = np.lexsort((-similarity, inverse.reshape(-1)))
    ends = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(names)))
    return {
        bytes(name): rows for name, rows in zip(names, np.split(order, ends[:-1]), strict=True) if bytes(name)
    }


def pair_rows(species_rows: Sequence[dict[bytes, np.ndarray]]) -> np.ndarray:
    """Return the row of each chain in each line of the paired alignment, ``[P, chains]`` int64, -1 for a gap.

    The rows of each chain are from :func:`rows_by_species`; line 0 is all zeros (the queries). A species is used if it
    occurs in at least two chains. Its number of lines is that of its rows in the chain with the fewest; chains without
    the species have a gap. Lines with more chains come first, and among these the ones with the smaller product of row
    numbers (and therefore e-values).
    """
    number = len(species_rows)
    lines: dict[int, list[np.ndarray]] = {number: [np.zeros((1, number), np.int64)]}
    for species in sorted(set().union(*species_rows)):
        rows = [chain.get(species) for chain in species_rows]
        sizes = [len(r) for r in rows if r is not None]
        if len(sizes) < 2 or max(sizes) > MAX_ROWS_PER_SPECIES:
            continue
        take = min(sizes)
        columns = [np.full(take, -1) if r is None else r[:take] for r in rows]
        lines.setdefault(len(sizes), []).append(np.stack(columns, axis=1))
    ordered = []
    for present in sorted(lines, reverse=True):
        group = np.concatenate(lines[present])
        # The product is int64 as in AlphaFold and may overflow for many deep chains, which affects only the order.
        ordered.append(group[np.argsort(np.abs(group.prod(axis=1)), kind="stable")])
    return np.concatenate(ordered)


def take_rows(feature: np.ndarray, rows: np.ndarray, gap: int) -> np.ndarray:
    """Return lines ``[P, N]`` of a feature ``[S, N]`` by row number, with ``gap`` for -1."""
    taken = feature[rows]
    taken[rows < 0] = gap
    return taken


def rows_without_copy(msa: np.ndarray, paired: np.ndarray) -> np.ndarray:
    """Return the numbers (int64) of rows of ``msa`` ``[S, N]`` that do not occur in ``paired`` ``[P, N]``."""
    present = {row.tobytes() for row in np.ascontiguousarray(paired)}
    rows = np.ascontiguousarray(msa, paired.dtype)
    return np.array([i for i, row in enumerate(rows) if row.tobytes() not in present], np.int64)
