"""From the raw features of each chain to those of the whole complex (AlphaFold-Multimer's data pipeline).

Chains with one sequence are copies of an entity and share its alignment side by side. Different entities
are paired by species as far as possible; what is left stands block-diagonally below, each entity's rows
over gaps in all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfold.data.features import pairing, transforms
from fastfold.data.features import raw as raw_features
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc

MAX_TEMPLATES = 4
MAX_ROWS_PER_CHAIN = 2048
MIN_ROWS = 512
"""The official pipeline pads the alignment to this depth, so that the extra MSA is never empty."""


@dataclass(frozen=True)
class _Rows:
    """Alignment rows ``[S, N]``: HHblits ids (uint8) and deletion counts (float32)."""

    msa: np.ndarray
    deletions: np.ndarray

    def __getitem__(self, rows: slice | np.ndarray) -> _Rows:
        return _Rows(self.msa[rows], self.deletions[rows])

    def __len__(self) -> int:
        return len(self.msa)


@dataclass(frozen=True)
class _Chain:
    """One chain on its way into the complex; ``paired`` has the lines it shares with the other chains."""

    entity: int
    sym: int
    features: dict[str, np.ndarray]
    templates: dict[str, np.ndarray]
    num_templates: int
    unpaired: _Rows
    paired: _Rows | None = None


def chain_order(sequences: Sequence[str]) -> tuple[int, ...]:
    """Order of the chains in the merged features: copies of one entity stand together, entities in the
    order in which they first occur."""
    first = {sequence: i for i, sequence in reversed(list(enumerate(sequences)))}
    return tuple(sorted(range(len(sequences)), key=lambda i: (first[sequences[i]], i)))


def merge_chains(
    raw: Sequence[Mapping[str, np.ndarray]],
    raw_paired: Sequence[Mapping[str, np.ndarray]],
    sequences: Sequence[str],
    *,
    in_lines: bool = False,
    min_rows: int = MIN_ROWS,
) -> dict[str, np.ndarray]:
    """Merged features of a complex of ``N`` residues, chains in the order of :func:`chain_order`.

    Args:
        raw: Per chain, its raw features with the alignments that are not paired; these must have the same
            depth in all copies of an entity.
        raw_paired: Per chain, ``msa``, ``deletion_matrix_int`` and ``msa_species_identifiers`` of the UniProt
            alignment; used if there are two different sequences or more.
        sequences: Per chain, its sequence: equal sequences make copies of one entity.
        in_lines: Row i of ``raw_paired`` of one chain belongs to row i of all others, whatever the species, and
            unpaired rows that equal a paired one stay, as ColabFold has it.
        min_rows: Rows to pad the alignment to.

    Returns:
        ``aatype``, ``residue_index`` (from zero in each chain), ``asym_id``, ``entity_id``, ``sym_id``
        (from one), ``entity_mask`` ``[N]`` int32; ``seq_mask``, ``deletion_mean`` ``[N]`` float32; ``msa``
        ``[S, N]`` int32 residue types; ``deletion_matrix``, ``msa_mask`` (0 in padded rows), ``bert_mask``
        (0 also outside of a block's diagonal) ``[S, N]``, ``cluster_bias_mask`` ``[S]`` float32;
        ``template_aatype`` ``[4, N]`` int32, ``template_all_atom_positions`` ``[4, N, 37, 3]`` in Å,
        ``template_all_atom_mask`` ``[4, N, 37]`` float32; ``all_atom_mask`` ``[N, 37]`` and zeros
        ``all_atom_positions`` ``[N, 37, 3]`` in the place of labels; and the scalars ``seq_length``,
        ``num_alignments`` (before padding), ``assembly_num_chains``, ``num_templates``.
    """
    order = chain_order(sequences)
    entities = {sequence: i for i, sequence in enumerate(dict.fromkeys(sequences), start=1)}
    seen = dict.fromkeys(entities, 0)
    chains: list[_Chain] = []
    for index in order:
        seen[sequences[index]] += 1
        entity, sym = entities[sequences[index]], seen[sequences[index]]
        chains.append(_chain(raw[index], asym=len(chains) + 1, entity=entity, sym=sym))
    if len(entities) > 1:
        chains = _pair(chains, [raw_paired[index] for index in order], in_lines)
    chains = [_crop(chain) for chain in chains]
    merged = {name: np.concatenate([chain.features[name] for chain in chains]) for name in chains[0].features}
    for name in chains[0].templates:
        merged[name] = np.concatenate([chain.templates[name] for chain in chains], axis=1)
    merged |= _merge_alignments(chains, min_rows)
    merged |= {
        "seq_length": np.array(len(merged["aatype"]), np.int32),
        "assembly_num_chains": np.array(len(chains), np.int32),
        "num_templates": np.array(chains[0].num_templates, np.int32),
    }
    return merged


def _chain(raw: Mapping[str, np.ndarray], *, asym: int, entity: int, sym: int) -> _Chain:
    """A chain's features as the multimer network names them, with its ids."""
    aatype = np.argmax(raw["aatype"], axis=-1).astype(np.int32)
    length = len(aatype)
    deletions = np.asarray(raw["deletion_matrix_int"], np.float32)
    all_atom_mask = rc.restype_atom37_mask[aatype].astype(np.int32)
    features = {
        "aatype": aatype,
        "residue_index": np.asarray(raw["residue_index"], np.int32),
        "asym_id": np.full(length, asym, np.int32),
        "entity_id": np.full(length, entity, np.int32),
        "sym_id": np.full(length, sym, np.int32),
        "entity_mask": np.ones(length, np.int32),
        "seq_mask": np.ones(length, np.float32),
        "deletion_mean": deletions.mean(axis=0),
        "all_atom_mask": all_atom_mask,
        "all_atom_positions": np.zeros((*all_atom_mask.shape, 3), np.float32),
    }
    given = raw_features.template_features(raw, length)
    templates = {
        "template_aatype": transforms.template_aatype(given["template_aatype"]),
        "template_all_atom_positions": given["template_all_atom_positions"],
        "template_all_atom_mask": given["template_all_atom_masks"],
    }
    # A chain without templates counts as having one that is empty, as in the official pipeline.
    number = min(max(len(given["template_aatype"]), 1), MAX_TEMPLATES)
    templates = {name: transforms.pad_templates(value, MAX_TEMPLATES) for name, value in templates.items()}
    unpaired = _Rows(np.asarray(raw["msa"], np.uint8), deletions)
    return _Chain(entity, sym, features, templates, number, unpaired)


def paired_lines(raw_paired: Sequence[Mapping[str, np.ndarray]], in_lines: bool) -> np.ndarray:
    """Which row of each chain's paired alignment stands in each line of the complex.

    Args:
        raw_paired: See :func:`merge_chains`.
        in_lines: See :func:`merge_chains`.

    Returns:
        ``[P, chains]`` int64 row numbers, -1 for a gap.

    Raises:
        InputError: The rows stand in lines, but not all chains have the same number of them.
    """
    if not in_lines:
        species = "msa_species_identifiers"
        return pairing.pair_rows([pairing.rows_by_species(raw["msa"], raw[species]) for raw in raw_paired])
    rows = [len(raw["msa"]) for raw in raw_paired]
    if len(set(rows)) > 1:
        raise InputError(f"the chains have {rows} paired rows, which should be as many in each")
    return np.repeat(np.arange(rows[0])[:, None], len(rows), axis=1)


def _pair(
    chains: Sequence[_Chain], raw_paired: Sequence[Mapping[str, np.ndarray]], in_lines: bool
) -> list[_Chain]:
    """Gives each chain its paired lines and, unless they came as lines, takes them out of its unpaired rows."""
    paired = [
        _Rows(np.asarray(raw["msa"], np.uint8), np.asarray(raw["deletion_matrix_int"], np.float32))
        for raw in raw_paired
    ]
    lines = paired_lines(raw_paired, in_lines)
    result = []
    for number, (chain, rows) in enumerate(zip(chains, paired, strict=True)):
        shared = _Rows(
            pairing.take_rows(rows.msa, lines[:, number], rc.gap_index),
            pairing.take_rows(rows.deletions, lines[:, number], 0),
        )
        unpaired = chain.unpaired
        if not in_lines:
            unpaired = unpaired[pairing.rows_without_copy(unpaired.msa, shared.msa)]
        result.append(replace(chain, paired=shared, unpaired=unpaired))
    return result


def _crop(chain: _Chain) -> _Chain:
    """At most ``MAX_ROWS_PER_CHAIN`` rows: half of them paired lines, and as many unpaired rows fewer as
    the chain has residues in paired lines."""
    if chain.paired is None:
        return replace(chain, unpaired=chain.unpaired[:MAX_ROWS_PER_CHAIN])
    paired = chain.paired[: MAX_ROWS_PER_CHAIN // 2]
    filled = int((paired.msa != rc.gap_index).any(axis=1).sum())
    return replace(chain, paired=paired, unpaired=chain.unpaired[: MAX_ROWS_PER_CHAIN - filled])


def _merge_alignments(chains: Sequence[_Chain], min_rows: int) -> dict[str, np.ndarray]:
    """The alignment of the complex: paired lines on top, each entity's own rows in blocks below."""
    lengths = [chain.unpaired.msa.shape[1] for chain in chains]
    starts = np.cumsum([0, *lengths])
    top = 0 if chains[0].paired is None else len(chains[0].paired)
    depth: dict[int, int] = {}
    for chain in chains:
        if depth.setdefault(chain.entity, len(chain.unpaired)) != len(chain.unpaired):
            raise InputError(
                f"two chains with the same sequence have alignments of {depth[chain.entity]} and "
                f"{len(chain.unpaired)} different rows; give all copies of a chain the same alignments"
            )
    first_row = dict(zip(depth, np.cumsum([top, *depth.values()]).tolist(), strict=False))
    rows = top + sum(depth.values())
    shape = (max(rows, min_rows), int(starts[-1]))
    ids = np.full(shape, rc.gap_index, np.uint8)
    deletions = np.zeros(shape, np.float32)
    bert_mask = np.zeros(shape, np.float32)
    for chain, start, length in zip(chains, starts, lengths, strict=False):
        blocks = [(first_row[chain.entity], chain.unpaired)]
        if chain.paired is not None:
            blocks.append((0, chain.paired))
        for row, block in blocks:
            place = slice(row, row + len(block)), slice(start, start + length)
            ids[place], deletions[place], bert_mask[place] = block.msa, block.deletions, 1.0
    msa = rc.hhblits_id_to_restype[ids]
    msa[rows:] = 0
    msa_mask = np.zeros(shape, np.float32)
    msa_mask[:rows] = 1.0
    # The query of the whole complex is row 0, in one line over all chains, paired or of a single entity.
    cluster_bias_mask = np.zeros(shape[0], np.float32)
    cluster_bias_mask[0] = 1.0
    return {
        "msa": msa,
        "deletion_matrix": deletions,
        "msa_mask": msa_mask,
        "bert_mask": bert_mask,
        "cluster_bias_mask": cluster_bias_mask,
        "num_alignments": np.array(rows, np.int32),
    }
