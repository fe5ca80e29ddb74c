"""Join several chains to one, for networks trained on single chains.

The chains form one sequence, and the residue index has a gap between two chains, larger than any relative position that
the network distinguishes. The alignment follows ColabFold: the whole query, the paired lines, and below them each
chain's own rows with gaps in all other chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fastfold.data.features.merging import chain_order, paired_lines
from fastfold.data.features.pairing import rows_without_copy, take_rows
from fastfold.data.features.raw import alignment_ids
from fastfold.protein import residue_constants as rc

CHAIN_GAP = 200  #: Gap of the residue index between two chains; relative positions end at 32


def join_chains(
    raw: Sequence[Mapping[str, np.ndarray]],
    raw_paired: Sequence[Mapping[str, np.ndarray]],
    sequences: Sequence[str],
    *,
    in_lines: bool = False,
) -> dict[str, np.ndarray]:
    """Compute raw features of one chain of ``N`` residues that joins several.

    The chains are in the order of :func:`merging.chain_order`.

    Args:
        raw: Per chain, its raw features with the unpaired alignments; without ``msa`` it has none.
        raw_paired: Per chain, raw features of the alignment to pair; empty if there is nothing to pair.
        sequences: Per chain, its sequence; equal ones are adjacent.
        in_lines: See :func:`fastfold.data.features.merging.merge_chains`.

    Returns:
        Features as of one chain (:mod:`fastfold.data.features.raw`), without templates: ``aatype`` ``[N, 21]``,
        ``between_segment_residues``, ``residue_index``, ``seq_length``, ``num_alignments`` ``[N]``, ``msa`` and
        ``deletion_matrix_int`` ``[S, N]``, int32, ``sequence`` ``[N]`` uint8; and ``asym_id`` ``[N]`` int32, the chain
        of each residue from one.

    Raises:
        InputError: Rows are paired line by line, and the chains have different numbers of them.
    """
    order = chain_order(sequences)
    chains = [raw[index] for index in order]
    lengths = [len(chain["aatype"]) for chain in chains]
    starts = np.cumsum([0, *lengths])
    length = int(starts[-1])
    joined = {
        name: np.concatenate([chain[name] for chain in chains])
        for name in ("aatype", "between_segment_residues", "sequence")
    }
    number = np.repeat(np.arange(len(chains)), lengths)
    rows = [alignment_ids([joined["sequence"].tobytes().decode("ascii")])]
    deletions = [np.zeros((1, length), np.int32)]
    paired = [raw_paired[index] for index in order] if raw_paired else []
    lines: list[np.ndarray] = []
    if paired:
        chosen = paired_lines(paired, in_lines).T
        lines = [take_rows(one["msa"], at, rc.gap_index) for one, at in zip(paired, chosen, strict=True)]
        counts = [
            take_rows(one["deletion_matrix_int"], at, 0) for one, at in zip(paired, chosen, strict=True)
        ]
        rows.append(np.concatenate(lines, axis=1))
        deletions.append(np.concatenate(counts, axis=1))
    for k, chain in enumerate(chains):
        if "msa" not in chain:
            continue
        msa, deleted = chain["msa"], chain["deletion_matrix_int"]
        if lines and not in_lines:
            left = rows_without_copy(msa, lines[k])
            msa, deleted = msa[left], deleted[left]
        around = ((0, 0), (int(starts[k]), length - int(starts[k + 1])))
        rows.append(np.pad(msa, around, constant_values=rc.gap_index))
        deletions.append(np.pad(deleted, around))
    alignment = np.concatenate(rows).astype(np.int32)
    return joined | {
        "residue_index": (np.arange(length) + CHAIN_GAP * number).astype(np.int32),
        "seq_length": np.full(length, length, np.int32),
        "asym_id": (number + 1).astype(np.int32),
        "msa": alignment,
        "deletion_matrix_int": np.concatenate(deletions).astype(np.int32),
        "num_alignments": np.full(length, len(alignment), np.int32),
    }
