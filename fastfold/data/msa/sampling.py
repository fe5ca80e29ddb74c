"""Parts of alignments: chosen rows and columns, masked columns, clusters of rows by DBSCAN, and coverage.

The clusters are those of AF_Cluster (Wayment-Steele et al., 2024, doi:10.1038/s41586-023-06832-9).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.targets import Target
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.packages import require_package

UNKNOWN = "X"  #: Letter of masked positions


def join_alignments(msas: Sequence[Msa], *, unique: bool) -> Msa:
    """Join the alignments of one chain to one, which keeps its rows as they are.

    ``unique`` leaves out rows that repeat an earlier one, as AlphaFold's features do, except those of alignments with
    ``Msa.as_is``.
    """
    sequences: list[str] = []
    descriptions: list[str] = []
    deletions: list[np.ndarray] = []
    seen: set[str] = set()
    for number, msa in enumerate(msas):
        kept = []
        for index, row in enumerate(msa.sequences):
            is_repeated = row in seen if unique else number > 0 and index == 0
            if msa.as_is or not is_repeated:
                seen.add(row)
                kept.append(index)
        sequences += [msa.sequences[index] for index in kept]
        descriptions += [msa.descriptions[index] for index in kept]
        deletions.append(np.asarray(msa.deletions)[kept])
    return Msa(tuple(sequences), np.concatenate(deletions), tuple(descriptions), as_is=True)


def mask_columns(msa: Msa, columns: np.ndarray, query: str) -> Msa:
    """Replace all letters of some columns, from 0, by unknown residues, except in the query's row."""
    letters = row_letters(msa)
    letters[int(begins_with(msa, query)) :, columns] = ord(UNKNOWN)
    return replace(msa, sequences=tuple(row.tobytes().decode("ascii") for row in letters))


def row_letters(msa: Msa) -> np.ndarray:
    """Return the letters of an alignment as ASCII codes ``[S, N]`` uint8."""
    letters = np.frombuffer("".join(msa.sequences).encode("ascii", "replace"), np.uint8)
    return letters.reshape(len(msa.sequences), -1).copy()


def a3m_text(msa: Msa, query: str) -> str:
    """Format an alignment as A3M, with the query first.

    Inserted residues, whose letters are unknown, are written as ``x``.
    """
    lines = [] if begins_with(msa, query) else [f">query\n{query}\n"]
    for name, row, counts in zip(msa.descriptions, msa.sequences, np.asarray(msa.deletions), strict=True):
        if counts.any():
            row = "".join("x" * count + letter for count, letter in zip(counts.tolist(), row, strict=True))
        lines.append(f">{name}\n{row}\n")
    return "".join(lines)


def begins_with(msa: Msa, query: str) -> bool:
    """Return True if the first row of an alignment is a sequence, with X for any unknown residue."""
    return mask_unknown(msa.sequences[0]) == mask_unknown(query)


def cut_alignments(target: Target, alignments: Sequence[ChainMsas]) -> list[ChainMsas]:
    """Cut alignments of a target's whole chains to the parts that it has.

    Returns:
        Own and paired alignments of each chain. Rows without a residue in the parts are left out, unless rows of
        several chains belong together by their number.
    """
    cut = []
    for chain, (own, paired) in zip(target.chains, alignments, strict=True):
        if chain.regions:
            columns = np.array(chain.numbers) - 1
            own = [_columns(msa, columns, keep_all=False) for msa in own]
            paired = [_columns(msa, columns, keep_all=msa.as_is) for msa in paired]
        cut.append((own, paired))
    return cut


def chains_without_rows(target: Target, whole: Sequence[ChainMsas], cut: Sequence[ChainMsas]) -> list[str]:
    """Return the identifiers of chains whose alignments lost all rows but the query in :func:`cut_alignments`."""

    def has_rows(msas: ChainMsas) -> bool:
        return any(row.strip("-") for group in msas for msa in group for row in msa.sequences[1:])

    pairs = zip(target.chains, whole, cut, strict=True)
    return [chain.id for chain, before, after in pairs if has_rows(before) and not has_rows(after)]


def _columns(msa: Msa, columns: np.ndarray, *, keep_all: bool) -> Msa:
    """Return some columns of an alignment, and the rows that have a residue there or all."""
    rows = ["".join(row[column] for column in columns) for row in msa.sequences]
    kept = [i for i, row in enumerate(rows) if keep_all or i == 0 or row.strip("-")]
    return Msa(
        tuple(rows[i] for i in kept),
        np.asarray(msa.deletions)[kept][:, columns],
        tuple(msa.descriptions[i] for i in kept),
        msa.as_is,
    )


MAX_GAPS = 0.25  #: Rows with this share of gaps or more are left out
MIN_ROWS = 3  #: Smallest number of rows near a core row, itself included

_LETTERS = np.frombuffer(b"ACDEFGHIKLMNPQRSTVWY-", np.uint8)
_EPS = np.arange(3.0, 20.5, 0.5)
_SCANNED_SHARE = 0.25
_GIVE_UP_EPS = 10.0


class RowClusters(NamedTuple):
    """Clusters of the rows of an alignment."""

    eps: float  #: Radius of DBSCAN, the Euclidean distance of one-hot rows
    #: Rows of each cluster in increasing order, without the query; in the order of DBSCAN's labels
    rows: list[np.ndarray]
    left_out: int = 0  #: Number of rows below the query that were left out for their gaps


def cluster_rows(msa: Msa, rng: np.random.Generator | np.random.RandomState) -> RowClusters:
    """Cluster the rows below the query, with the radius that makes most clusters.

    For each radius from 3 to 20 in steps of 0.5, a random quarter of the rows is clustered. Noise counts as a cluster
    there. All rows are then clustered with the best radius, the smallest of several.

    Raises:
        ConfigError: The package scikit-learn is not installed.
    """
    require_package("scikit-learn", "`sample=clusters`")
    from sklearn.cluster import DBSCAN

    letters = row_letters(msa)
    # The query is in every sample, so it belongs to no cluster.
    candidates = 1 + np.flatnonzero((letters[1:] == ord("-")).mean(1) < MAX_GAPS)
    left_out = len(letters) - 1 - len(candidates)
    quarter = round(_SCANNED_SHARE * len(candidates))
    if quarter == 0:
        return RowClusters(float(_EPS[0]), [], left_out)
    points = (letters[candidates][:, :, None] == _LETTERS).astype(np.float32).reshape(len(candidates), -1)

    def labels(rows: np.ndarray, eps: float) -> np.ndarray:
        return DBSCAN(eps=eps, min_samples=MIN_ROWS).fit(rows).labels_

    counts: list[int] = []
    for eps in _EPS.tolist():
        chosen = rng.choice(len(points), size=quarter, replace=False)
        counts.append(len(set(labels(points[chosen], eps).tolist())))
        if eps > _GIVE_UP_EPS and counts[-1] == 1:
            break
    best = float(_EPS[int(np.argmax(counts))])
    assigned = labels(points, best)
    return RowClusters(best, [candidates[assigned == label] for label in range(assigned.max() + 1)], left_out)


IDENTITY_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Bins of sequence identity; an edge belongs to the upper bin, 1 to the last one."""

_GAP = ord("-")
_BLOCK = 1 << 24


def alignment_coverage(alignments: Sequence[ChainMsas], *, lengths: Sequence[int]) -> dict[str, Any]:
    """Count the rows that cover each residue of a target, by their identity to the query.

    All rows of a chain's alignments count, paired and unpaired, before any selection. A row in several alignments
    counts once. The query is a row too, also of a chain without alignments. Identity is the share of the query's
    residues that the row repeats, as in ColabFold's coverage plot.

    Returns:
        In JSON's types: ``schema_version``, ``chain_lengths``, ``rows`` (of each chain), ``identity_edges``,
        ``rows_by_identity`` (``[chains][bins]``), ``depth`` (``[residues]``: rows without a gap there) and
        ``depth_by_identity`` (``[bins][residues]``, whose sum is ``depth``).

    Raises:
        ValueError: The numbers of alignments and chains differ, or an alignment has another length than its chain.
    """
    bins = len(IDENTITY_EDGES) - 1
    rows: list[int] = []
    by_identity: list[list[int]] = []
    depth = np.zeros((bins, sum(lengths)), np.int64)
    start = 0
    for (unpaired, paired), length in zip(alignments, lengths, strict=True):
        query = next((msa.sequences[0] for msa in (*unpaired, *paired)), "X" * length)
        sequences = {query: None, **{row: None for msa in (*unpaired, *paired) for row in msa.sequences}}
        if any(len(row) != length for row in sequences):
            raise ValueError(f"expected alignment rows of the {length} residues of the chain")
        counts = np.zeros(bins, np.int64)
        for block in _blocks(sequences, length):
            identity = (block == np.frombuffer(query.encode("ascii"), np.uint8)).mean(1)
            place = np.searchsorted(IDENTITY_EDGES[1:-1], identity, side="right")
            counts += np.bincount(place, minlength=bins)
            for number in range(bins):
                depth[number, start : start + length] += (block[place == number] != _GAP).sum(0)
        rows.append(len(sequences))
        by_identity.append(counts.tolist())
        start += length
    return {
        "schema_version": 1,
        "chain_lengths": list(lengths),
        "rows": rows,
        "identity_edges": list(IDENTITY_EDGES),
        "rows_by_identity": by_identity,
        "depth": depth.sum(0).tolist(),
        "depth_by_identity": depth.tolist(),
    }


def _blocks(sequences: Iterable[str], length: int) -> Iterable[np.ndarray]:
    """Yield the letters of some rows at a time, ``[rows, length]`` uint8."""
    step = max(1, _BLOCK // max(1, length))
    rows = list(sequences)
    for start in range(0, len(rows), step):
        text = "".join(rows[start : start + step]).encode("ascii")
        yield np.frombuffer(text, np.uint8).reshape(-1, length)
