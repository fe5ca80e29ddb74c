"""Assemble the chains of a target and their alignments to features before sampling, and to lines of one alignment.

A single chain has AlphaFold's features for monomers, a complex those of AlphaFold-Multimer. A complex for a monomer
network is joined to one chain, whose residue index has a gap between two chains that is larger than any relative
position that the network distinguishes. Its alignment follows ColabFold: the whole query, the paired lines, and below
them each chain's own rows with gaps in all other chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fastfold.data.features import merging
from fastfold.data.features.raw import (
    TEMPLATE_LAYOUT,
    alignment_ids,
    msa_features,
    sequence_features,
    template_features,
)
from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.msa.sampling import begins_with, join_alignments
from fastfold.data.targets import Chain
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc

Features = dict[str, np.ndarray]


def monomer_features(
    chain: Chain, msas: Sequence[Msa], templates: Mapping[str, Any] | None = None
) -> Features:
    """Compute raw features of one chain (:mod:`fastfold.data.features.raw`), with all alignment rows.

    Raises:
        InputError: An alignment or the templates do not belong to the chain.
    """
    letters = chain.letters or chain.sequence
    return (
        sequence_features(letters)
        | msa_features(msas, letters)
        | template_features(templates or {}, len(letters))
    )


def multimer_features(
    chains: Sequence[Chain],
    alignments: Sequence[ChainMsas],
    templates: Sequence[Mapping[str, Any] | None] | None = None,
) -> Features:
    """Compute merged features of a complex, or of one chain for a multimer network.

    See :func:`fastfold.data.features.pipeline.featurize` and :func:`fastfold.data.features.merging.merge_chains`.

    Raises:
        InputError: Alignments or templates do not belong to the chains, or cannot be paired.
    """
    own, in_lines = _alignments_by_sequence(chains, alignments)
    sequences = [chain.sequence for chain in chains]
    unpaired = {sequence: monomer_features(chain, msas[0]) for sequence, (chain, msas) in own.items()}
    templates = templates or [None] * len(chains)
    raw = [
        unpaired[sequence] | template_features(template or {}, len(sequence))
        for sequence, template in zip(sequences, templates, strict=True)
    ]
    raw_paired: list[Features] = []
    if len(own) > 1:  # only different chains are paired, copies are aligned row by row
        paired = {sequence: monomer_features(chain, msas[1]) for sequence, (chain, msas) in own.items()}
        raw_paired = [paired[sequence] for sequence in sequences]
    entities = [chain.entity for chain in chains]
    return merging.merge_chains(raw, raw_paired, sequences, entities=entities, in_lines=in_lines)


def joined_features(
    chains: Sequence[Chain],
    alignments: Sequence[ChainMsas],
    templates: Sequence[Mapping[str, Any] | None] | None = None,
) -> Features:
    """Compute raw features of a complex for a monomer network, with all chains joined.

    See :func:`fastfold.data.features.assembly.join_chains`. Atoms of templates are in one frame (:func:`share_frames`).

    Raises:
        InputError: Alignments or templates do not belong to the chains, or cannot be paired.
    """
    own, in_lines = _alignments_by_sequence(chains, alignments)
    has_pairs = any(msas[1] for _, msas in own.values())
    raw, paired = {}, {}
    for sequence, (chain, msas) in own.items():
        raw[sequence] = sequence_features(chain.letters or chain.sequence)
        if msas[0] or not has_pairs:
            raw[sequence] = monomer_features(chain, msas[0])
        paired[sequence] = monomer_features(chain, msas[1])
    sequences = [chain.sequence for chain in chains]
    raw_paired = [paired[sequence] for sequence in sequences] if has_pairs else []
    entities = [chain.entity for chain in chains]
    joined = join_chains([raw[s] for s in sequences], raw_paired, entities, in_lines=in_lines)
    if templates is not None and any(templates):
        order = merging.chain_order(entities)
        parts = [template_features(templates[i] or {}, len(sequences[i])) for i in order]
        axes = {name: shape.index("N") for name, shape in TEMPLATE_LAYOUT.items() if "N" in shape}
        joined |= {name: np.concatenate([part[name] for part in parts], axis) for name, axis in axes.items()}
        joined["template_sum_probs"] = parts[0]["template_sum_probs"]
    return joined


def share_frames(templates: Sequence[Mapping[str, Any] | None]) -> bool:
    """Return True if each template has its atoms of all chains in one frame."""
    frames = [() if one is None else tuple(one.get("template_frame", ())) for one in templates]
    return len(set(frames)) == 1 and len(frames[0]) > 0 and all(frame > 0 for frame in frames[0])


def chain_alignments(chains: Sequence[Chain], alignments: Sequence[ChainMsas]) -> list[np.ndarray]:
    """Return each chain's own alignment, else its paired one, in the order of the features.

    Alignments are ``[S, N]`` int32 HHblits ids.
    """
    own, _ = _alignments_by_sequence(chains, alignments)
    ids = {key: monomer_features(chain, msas[0] or msas[1])["msa"] for key, (chain, msas) in own.items()}
    order = merging.chain_order([chain.entity for chain in chains])
    return [ids[chains[index].sequence] for index in order]


def _alignments_by_sequence(
    chains: Sequence[Chain], alignments: Sequence[ChainMsas]
) -> tuple[dict[str, tuple[Chain, ChainMsas]], bool]:
    """Return each sequence's first chain with its alignments, and True for rows paired line by line.

    The alignments to pair decide, and without any the others. Without any alignment the result is True, because the
    queries form the only line.
    """
    own: dict[str, tuple[Chain, ChainMsas]] = {}
    for chain, msas in zip(chains, alignments, strict=True):
        own.setdefault(chain.sequence, (chain, msas))
    alone, paired = ([msa for _, msas in own.values() for msa in msas[kind]] for kind in (0, 1))
    in_lines = all(msa.as_is for msa in paired or alone)
    if not in_lines and any(msa.as_is for msa in paired):
        raise InputError(
            "expected one kind of alignments for all chains, found both rows that are paired already and others"
        )
    return own, in_lines


CHAIN_GAP = 200  #: Gap of the residue index between two chains; relative positions end at 32


def join_chains(
    raw: Sequence[Mapping[str, np.ndarray]],
    raw_paired: Sequence[Mapping[str, np.ndarray]],
    entities: Sequence[str],
    *,
    in_lines: bool = False,
) -> dict[str, np.ndarray]:
    """Compute raw features of one chain of ``N`` residues that joins several.

    The chains are in the order of :func:`~fastfold.data.features.merging.chain_order`; equal entities are adjacent.
    ``raw`` has features of each chain with the unpaired alignments; without ``msa`` it has none. ``raw_paired`` has
    those of the alignments to pair, and is empty if there is nothing to pair. For ``in_lines`` see
    :func:`fastfold.data.features.merging.merge_chains`.

    Returns:
        Features as of one chain (:mod:`fastfold.data.features.raw`), without templates: ``aatype`` ``[N, 21]``,
        ``between_segment_residues``, ``residue_index``, ``seq_length``, ``num_alignments`` ``[N]``, ``msa`` and
        ``deletion_matrix_int`` ``[S, N]``, int32, ``sequence`` ``[N]`` uint8; and ``asym_id`` ``[N]`` int32, the chain
        of each residue from one.

    Raises:
        InputError: Rows are paired line by line, and the chains have different numbers of them.
    """
    order = merging.chain_order(entities)
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
        chosen = list(zip(paired, merging.paired_lines(paired, in_lines).T, strict=True))
        lines = [merging.take_rows(one["msa"], at, rc.gap_index) for one, at in chosen]
        counts = [merging.take_rows(one["deletion_matrix_int"], at, 0) for one, at in chosen]
        rows.append(np.concatenate(lines, axis=1))
        deletions.append(np.concatenate(counts, axis=1))
    for k, chain in enumerate(chains):
        if "msa" not in chain:
            continue
        msa, deleted = chain["msa"], chain["deletion_matrix_int"]
        if lines and not in_lines:
            left = merging.rows_without_copy(msa, lines[k])
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


@dataclass(frozen=True)
class ComplexLines:
    """Lines of a complex's alignment besides the queries: paired lines first, then rows of each different chain."""

    sequences: tuple[str, ...]  #: Sequence of each chain; equal ones share their rows
    queries: dict[str, Msa]  #: The query of each different chain, an alignment of one row
    paired: dict[str, Msa]  #: Rows of each different chain in the paired lines, ``P`` each
    own: dict[str, Msa]  #: Rows of each different chain alone

    @property
    def number_paired(self) -> int:
        """Number of paired lines ``P``."""
        return len(self.paired[self.sequences[0]].sequences)

    @property
    def number(self) -> int:
        """Number of all lines."""
        return self.number_paired + sum(len(msa.sequences) for msa in self.own.values())

    def take(self, lines: np.ndarray) -> list[ChainMsas]:
        """Return alignments of the queries and some lines, paired line by line, with ``Msa.as_is``.

        The ``lines [K]`` are integers from 0 in increasing order.
        """
        start = self.number_paired
        shared = lines[lines < start]
        by_sequence: dict[str, ChainMsas] = {}
        for sequence, own in self.own.items():
            end = start + len(own.sequences)
            alone = own.take(lines[(lines >= start) & (lines < end)] - start)
            start = end
            if len(self.own) == 1:
                by_sequence[sequence] = ([_stack(self.queries[sequence], alone)], [])
            else:
                lines_here = _stack(self.queries[sequence], self.paired[sequence].take(shared))
                by_sequence[sequence] = ([alone] if alone.sequences else [], [lines_here])
        return [by_sequence[sequence] for sequence in self.sequences]


def complex_lines(chains: Sequence[Chain], alignments: Sequence[ChainMsas]) -> ComplexLines:
    """Pair the rows of a complex as its features do, and return all lines.

    Copies of one chain have only their own rows, as for multimer networks.

    Raises:
        InputError: Alignments do not belong to the chains, or cannot be paired.
    """
    by_sequence, in_lines = _alignments_by_sequence(chains, alignments)
    sequences = tuple(chain.sequence for chain in chains)
    queries, own, pairable = {}, {}, {}
    for sequence, (chain, (unpaired, paired)) in by_sequence.items():
        letters = chain.letters or sequence
        queries[sequence] = Msa((letters,), np.zeros((1, len(letters)), np.int32), ("query",), as_is=True)
        own[sequence] = _below_query(unpaired, queries[sequence])
        pairable[sequence] = _with_query(paired, queries[sequence])
    none = np.zeros(0, np.int64)
    if len(by_sequence) == 1:
        return ComplexLines(sequences, queries, {key: msa.take(none) for key, msa in own.items()}, own)
    order = merging.chain_order([chain.entity for chain in chains])
    raw = {key: msa_features([msa], key) for key, msa in pairable.items()}
    rows = merging.paired_lines([raw[sequences[index]] for index in order], in_lines)[1:]
    column = {sequences[index]: rows[:, number] for number, index in enumerate(order)}
    lines = {key: _with_gaps(msa, column[key]) for key, msa in pairable.items()}
    if not in_lines:
        for key, msa in own.items():
            if msa.sequences:
                ids = [msa_features([one], key)["msa"] for one in (msa, _stack(queries[key], lines[key]))]
                own[key] = msa.take(merging.rows_without_copy(*ids))
    return ComplexLines(sequences, queries, lines, own)


def _below_query(msas: Sequence[Msa], query: Msa) -> Msa:
    """Join alignments to their rows without the query."""
    joined = _with_query(msas, query)
    return joined.take(np.arange(1, len(joined.sequences)))


def _with_query(msas: Sequence[Msa], query: Msa) -> Msa:
    """Join alignments, with the query above if it is not the first row."""
    if not msas:
        return query
    joined = join_alignments(msas, unique=True)
    return joined if begins_with(joined, query.sequences[0]) else _stack(query, joined)


def _stack(first: Msa, second: Msa) -> Msa:
    return Msa(
        first.sequences + second.sequences,
        np.concatenate([first.deletions, second.deletions]),
        first.descriptions + second.descriptions,
        as_is=True,
    )


def _with_gaps(msa: Msa, rows: np.ndarray) -> Msa:
    """Return rows by number, with a row of gaps for -1."""
    picked = msa.take(rows)
    gaps = "-" * len(msa.sequences[0])
    letters = tuple(row if number >= 0 else gaps for row, number in zip(picked.sequences, rows, strict=True))
    names = tuple(
        name if number >= 0 else "none" for name, number in zip(picked.descriptions, rows, strict=True)
    )
    deletions = np.where(rows[:, None] < 0, 0, picked.deletions)
    return replace(picked, sequences=letters, deletions=deletions, descriptions=names)
