"""Pairing of alignment rows across the chains of a complex (AlphaFold-Multimer, Evans et al. 2021).

Two chains that touch have co-evolved within each species, so rows of the same species are put on one line.
Within a species, rows are paired by their rank of similarity to their own chain's query.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_ROWS_PER_SPECIES = 600
"""Species with more rows than this in some chain are not paired: their ranks say nothing about who meets
whom."""


def rows_by_species(msa: np.ndarray, species: np.ndarray) -> dict[bytes, np.ndarray]:
    """Rows of each species, most similar to the query first, ties in the order of the alignment.

    Args:
        msa: ``[S, N]`` integers, the query in row 0.
        species: ``[S]`` bytes, empty where unknown (such rows belong to no species).
    """
    similarity = (msa == msa[0]).mean(axis=1)
    names, inverse = np.unique(species, return_inverse=True)
    order = np.lexsort((-similarity, inverse.reshape(-1)))
    ends = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(names)))
    return {
        bytes(name): rows for name, rows in zip(names, np.split(order, ends[:-1]), strict=True) if bytes(name)
    }


def pair_rows(species_rows: Sequence[dict[bytes, np.ndarray]]) -> np.ndarray:
    """Which row of each chain stands in each line of the paired alignment.

    A species is used if it occurs in two chains or more. It gives as many lines as its rarest chain has rows;
    chains without it have a gap there. Lines with more chains come first, and among these the ones whose row
    numbers (and so e-values) have the smaller product.

    Args:
        species_rows: Per chain, the result of :func:`rows_by_species`.

    Returns:
        ``[P, chains]`` int64 row numbers, -1 for a gap; line 0 is all zeros (the queries).
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
        # The product is int64 as in AlphaFold and may wrap for many deep chains; only the order depends on
        # it.
        ordered.append(group[np.argsort(np.abs(group.prod(axis=1)), kind="stable")])
    return np.concatenate(ordered)


def take_rows(feature: np.ndarray, rows: np.ndarray, gap: int) -> np.ndarray:
    """Lines ``[P, N]`` of a feature ``[S, N]`` by row number, filled with ``gap`` where the number is -1."""
    taken = feature[rows]
    taken[rows < 0] = gap
    return taken


def rows_without_copy(msa: np.ndarray, paired: np.ndarray) -> np.ndarray:
    """Numbers of the rows of ``msa`` ``[S, N]`` that are none of the rows of ``paired`` ``[P, N]``, int64."""
    present = {row.tobytes() for row in np.ascontiguousarray(paired)}
    rows = np.ascontiguousarray(msa, paired.dtype)
    return np.array([i for i, row in enumerate(rows) if row.tobytes() not in present], np.int64)
