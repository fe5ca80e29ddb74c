"""Coverage of a target by its alignments: depth per residue by sequence identity."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fastfold.data.msa.find import ChainMsas

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
