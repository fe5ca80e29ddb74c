"""How much of a target its alignments cover: depth at each residue, and how alike the rows are to the query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fastfold.data.msa.find import ChainMsas

IDENTITY_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Bins of sequence identity; an edge belongs to the bin above it, 1 to the last one."""

_GAP = ord("-")
_BLOCK = 1 << 24


def alignment_coverage(alignments: Sequence[ChainMsas], *, lengths: Sequence[int]) -> dict[str, Any]:
    """Count the rows that cover each residue of a target, by how alike they are to the query.

    Counted is what was given: all alignments of a chain, paired and unpaired, before anything is left out or drawn; a
    row that stands in several is counted once. The query itself is a row, also of a chain without alignments. Identity
    is the share of the query's residues that the row repeats, as in ColabFold's coverage plot.

    Args:
        alignments: Per chain.
        lengths: Residues of each chain.

    Returns:
        In JSON's types: ``schema_version``, ``chain_lengths``, ``rows`` (of each chain), ``identity_edges``,
        ``rows_by_identity`` (``[chains][bins]``), ``depth`` (``[residues]``: rows without a gap there) and
        ``depth_by_identity`` (``[bins][residues]``, whose sum is ``depth``).

    Raises:
        ValueError: There are not as many alignments as chains, or an alignment has another length than its chain.
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
            raise ValueError(f"an alignment has rows that are not of the {length} residues of its chain")
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
    """The letters of some rows at a time, ``[rows, length]`` uint8."""
    step = max(1, _BLOCK // max(1, length))
    rows = list(sequences)
    for start in range(0, len(rows), step):
        text = "".join(rows[start : start + step]).encode("ascii")
        yield np.frombuffer(text, np.uint8).reshape(-1, length)
