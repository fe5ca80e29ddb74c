"""Merge the raw features of each chain to those of the complex (AlphaFold-Multimer, Evans et al. 2021).

Chains with equal sequences are copies of an entity and share its alignment. Copies that lack other residues have
alignments of their own. Different entities are paired by species as far as possible, because chains in contact have
co-evolved within each species. Within a species, rows are paired by their rank of similarity to their own chain's
query. Unpaired rows are block-diagonal below: each entity's rows with gaps in all other entities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastfold.data.features import raw as raw_features
from fastfold.data.features import transforms
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc

MAX_TEMPLATES = 4
MAX_ROWS_PER_CHAIN = 2048
MIN_ROWS = 512
"""Smallest depth of the alignment, as in the official pipeline, so that the extra MSA is never empty."""


@dataclass(frozen=True)
class _MergedRows:
    """Alignment rows ``[S, N]``: HHblits ids (uint8) and deletion counts (float32)."""

    msa: np.ndarray
    deletions: np.ndarray

    def __getitem__(self, rows: slice | np.ndarray) -> _MergedRows:
        return _MergedRows(self.msa[rows], self.deletions[rows])

    def __len__(self) -> int:
        return len(self.msa)


@dataclass(frozen=True)
class _Chain:
    """Chain before merging; ``paired`` contains the lines that it shares with other chains."""

    sequence: str
    features: dict[str, np.ndarray]
    templates: dict[str, np.ndarray]
    num_templates: int
    unpaired: _MergedRows
    paired: _MergedRows


def chain_order(entities: Sequence[str]) -> tuple[int, ...]:
    """Return the order of the chains in the merged features, from the entity of each.

    Copies of one entity are adjacent, and entities are in the order of their first occurrence.
    """
    first = {entity: i for i, entity in reversed(list(enumerate(entities)))}
    return tuple(sorted(range(len(entities)), key=lambda i: (first[entities[i]], i)))


def merge_chains(
    raw: Sequence[Mapping[str, np.ndarray]],
    raw_paired: Sequence[Mapping[str, np.ndarray]],
    sequences: Sequence[str],
    *,
    entities: Sequence[str] | None = None,
    in_lines: bool = False,
    min_rows: int = MIN_ROWS,
) -> dict[str, np.ndarray]:
    """Merge the features of a complex of ``N`` residues, with chains in the order of :func:`chain_order`.

    Chains of equal ``entities`` are copies; by default these are the ``sequences``. Chains of one sequence must have
    alignments of one depth in ``raw``. ``raw_paired`` has ``msa``, ``deletion_matrix_int`` and
    ``msa_species_identifiers`` of each chain's UniProt alignment, and is used if there are at least two different
    sequences. ``in_lines`` pairs row i of all chains, regardless of species, and keeps unpaired rows that equal a
    paired one, as in ColabFold. Padding adds rows up to ``min_rows``.

    Returns:
        ``aatype``, ``residue_index`` (from zero in each chain), ``asym_id``, ``entity_id``, ``sym_id``
        (from one), ``entity_mask`` ``[N]`` int32; ``seq_mask``, ``deletion_mean`` ``[N]`` float32; ``msa``
        ``[S, N]`` int32 residue types; ``deletion_matrix``, ``msa_mask`` (0 in padded rows), ``bert_mask``
        (0 also outside of a block's diagonal) ``[S, N]``, ``cluster_bias_mask`` ``[S]`` float32;
        ``template_aatype`` ``[4, N]`` int32, ``template_all_atom_positions`` ``[4, N, 37, 3]`` in Å,
        ``template_all_atom_mask`` ``[4, N, 37]`` float32, and ``template_frame`` ``[4, N]`` int32 if a chain has it;
        ``all_atom_mask`` ``[N, 37]`` and zeros ``all_atom_positions`` ``[N, 37, 3]`` instead of labels; and the scalars
        ``seq_length``, ``num_alignments`` (before padding), ``assembly_num_chains``, ``num_templates``.
    """
    entities = sequences if entities is None else entities
    order = chain_order(entities)
    numbers = {entity: i for i, entity in enumerate(dict.fromkeys(entities), start=1)}
    seen = dict.fromkeys(numbers, 0)
    chains: list[_Chain] = []
    for index in order:
        entity = entities[index]
        seen[entity] += 1
        ids = {"asym_id": len(chains) + 1, "entity_id": numbers[entity], "sym_id": seen[entity]}
        chains.append(_chain(raw[index], sequences[index], ids))
    if len(set(sequences)) > 1:
        chains = _pair(chains, [raw_paired[index] for index in order], in_lines)
    chains = [_crop(chain) for chain in chains]
    merged = {name: np.concatenate([chain.features[name] for chain in chains]) for name in chains[0].features}
    for name in chains[0].templates:
        merged[name] = np.concatenate([chain.templates[name] for chain in chains], axis=1)
    if any("template_frame" in raw[index] for index in order):
        frames = [_frames(raw[index], asym) for asym, index in enumerate(order, start=1)]
        merged["template_frame"] = np.concatenate(frames, axis=1)
    merged |= _merge_alignments(chains, min_rows)
    merged |= {
        "seq_length": np.array(len(merged["aatype"]), np.int32),
        "assembly_num_chains": np.array(len(chains), np.int32),
        "num_templates": np.array(chains[0].num_templates, np.int32),
    }
    return merged


def _chain(raw: Mapping[str, np.ndarray], sequence: str, ids: Mapping[str, int]) -> _Chain:
    """Return a chain's features under the multimer network's names, with its ids."""
    aatype = np.argmax(raw["aatype"], axis=-1).astype(np.int32)
    length = len(aatype)
    deletions = np.asarray(raw["deletion_matrix_int"], np.float32)
    all_atom_mask = rc.restype_atom37_mask[aatype].astype(np.int32)
    features = {
        "aatype": aatype,
        "residue_index": np.asarray(raw["residue_index"], np.int32),
        **{name: np.full(length, number, np.int32) for name, number in ids.items()},
        "entity_mask": np.ones(length, np.int32),
        "seq_mask": np.ones(length, np.float32),
        "deletion_mean": deletions.mean(axis=0),
        "all_atom_mask": all_atom_mask,
        "all_atom_positions": np.zeros((*all_atom_mask.shape, 3), np.float32),
    }
    template = raw_features.template_features(raw, length)
    templates = {
        "template_aatype": transforms.template_aatype(template["template_aatype"]),
        "template_all_atom_positions": template["template_all_atom_positions"],
        "template_all_atom_mask": template["template_all_atom_masks"],
    }
    # A chain without templates counts as one with an empty template, as in the official pipeline.
    number = min(max(len(template["template_aatype"]), 1), MAX_TEMPLATES)
    templates = {name: transforms.pad_templates(value, MAX_TEMPLATES) for name, value in templates.items()}
    unpaired = _MergedRows(np.asarray(raw["msa"], np.uint8), deletions)
    return _Chain(sequence, features, templates, number, unpaired, unpaired[:0])


def _frames(raw: Mapping[str, np.ndarray], asym: int) -> np.ndarray:
    """Return the frame of each template's residues ``[4, N]``: the chain, or a negative number shared by chains."""
    frame = transforms.pad_templates(np.asarray(raw.get("template_frame", ()), np.int32), MAX_TEMPLATES)
    return np.repeat(np.where(frame > 0, -frame, asym)[:, None], len(raw["aatype"]), axis=1)


def paired_lines(raw_paired: Sequence[Mapping[str, np.ndarray]], in_lines: bool) -> np.ndarray:
    """Return the row of each chain's paired alignment in each line, ``[P, chains]`` int64, -1 for a gap.

    Raises:
        InputError: Rows are paired line by line, and the chains have different numbers of them.
    """
    if not in_lines:
        species = "msa_species_identifiers"
        return pair_rows([rows_by_species(raw["msa"], raw[species]) for raw in raw_paired])
    rows = [len(raw["msa"]) for raw in raw_paired]
    if len(set(rows)) > 1:
        raise InputError(f"expected equal numbers of paired rows in all chains, found {rows}")
    return np.repeat(np.arange(rows[0])[:, None], len(rows), axis=1)


def _pair(
    chains: Sequence[_Chain], raw_paired: Sequence[Mapping[str, np.ndarray]], in_lines: bool
) -> list[_Chain]:
    """Give each chain its paired lines and remove them from its unpaired rows, unless they came as lines."""
    paired = [
        _MergedRows(np.asarray(raw["msa"], np.uint8), np.asarray(raw["deletion_matrix_int"], np.float32))
        for raw in raw_paired
    ]
    lines = paired_lines(raw_paired, in_lines)
    result = []
    for number, (chain, rows) in enumerate(zip(chains, paired, strict=True)):
        shared = _MergedRows(
            take_rows(rows.msa, lines[:, number], rc.gap_index),
            take_rows(rows.deletions, lines[:, number], 0),
        )
        unpaired = chain.unpaired
        if not in_lines:
            unpaired = unpaired[rows_without_copy(unpaired.msa, shared.msa)]
        result.append(replace(chain, paired=shared, unpaired=unpaired))
    return result


def _crop(chain: _Chain) -> _Chain:
    """Limit a chain to ``MAX_ROWS_PER_CHAIN`` rows.

    Half of them are paired lines. The number of unpaired rows is reduced by the paired lines with residues of the
    chain.
    """
    paired = chain.paired[: MAX_ROWS_PER_CHAIN // 2]
    filled = int((paired.msa != rc.gap_index).any(axis=1).sum())
    return replace(chain, paired=paired, unpaired=chain.unpaired[: MAX_ROWS_PER_CHAIN - filled])


def _merge_alignments(chains: Sequence[_Chain], min_rows: int) -> dict[str, np.ndarray]:
    """Build the alignment of the complex: paired lines first, then blocks of each different chain's own rows."""
    lengths = [chain.unpaired.msa.shape[1] for chain in chains]
    starts = np.cumsum([0, *lengths])
    top = len(chains[0].paired)
    depth: dict[str, int] = {}
    for chain in chains:
        if depth.setdefault(chain.sequence, len(chain.unpaired)) != len(chain.unpaired):
            raise InputError(
                f"two chains with the same sequence have alignments of {depth[chain.sequence]} and "
                f"{len(chain.unpaired)} different rows; give all copies of a chain the same alignments"
            )
    first_row = dict(zip(depth, np.cumsum([top, *depth.values()]).tolist(), strict=False))
    rows = top + sum(depth.values())
    shape = (max(rows, min_rows), int(starts[-1]))
    ids = np.full(shape, rc.gap_index, np.uint8)
    deletions = np.zeros(shape, np.float32)
    bert_mask = np.zeros(shape, np.float32)
    for chain, start, length in zip(chains, starts, lengths, strict=False):
        for row, block in ((first_row[chain.sequence], chain.unpaired), (0, chain.paired)):
            place = slice(row, row + len(block)), slice(start, start + length)
            ids[place], deletions[place], bert_mask[place] = block.msa, block.deletions, 1.0
    msa = rc.hhblits_id_to_restype[ids]
    msa[rows:] = 0
    msa_mask = np.zeros(shape, np.float32)
    msa_mask[:rows] = 1.0
    # Row 0 is the query of the whole complex, also for a single entity.
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
    lines = feature[rows]
    lines[rows < 0] = gap
    return lines


def rows_without_copy(msa: np.ndarray, paired: np.ndarray) -> np.ndarray:
    """Return the numbers (int64) of rows of ``msa`` ``[S, N]`` that do not occur in ``paired`` ``[P, N]``."""
    present = {row.tobytes() for row in np.ascontiguousarray(paired)}
    rows = np.ascontiguousarray(msa, paired.dtype)
    return np.array([i for i, row in enumerate(rows) if row.tobytes() not in present], np.int64)
