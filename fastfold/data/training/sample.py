"""Training samples of chains and complexes: features of every recycling iteration and labels, cropped.

Chains of a complex are in the order of the multimer features: copies of a sequence are adjacent. The assignment of
experimental copies to predicted ones is known only after the network has run, so a sample contains the labels of all
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features import coevolution
from fastfold.data.features.merging import chain_order, merge_chains
from fastfold.data.features.pipeline import sampler_from_merged, sampler_from_raw
from fastfold.data.features.raw import msa_features, sequence_features, template_features
from fastfold.data.features.transforms import row_blocks
from fastfold.data.msa.msa import Msa
from fastfold.data.training import augmentation
from fastfold.data.training.entry import ComplexMsas
from fastfold.data.training.labels import structure_labels
from fastfold.data.training.templates import TemplateCandidates
from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.structure import ChainStructure

FEATURES, LABELS = "features/", "labels/"
"""Prefixes of a sample's keys: inputs of the network, and labels of the losses."""

_BACKBONE = [rc.atom_order[name] for name in ("N", "CA", "C")]


@dataclass(frozen=True)
class SampleSettings:
    """Settings of samples."""

    crop_size: int  #: Largest number of residues
    cycles: int  #: Recycling iterations to make features for
    single_sequence_probability: float = 0.0  #: Share of samples without their alignment
    block_deletion: bool = True  #: Delete blocks of alignment rows (supplement, section 1.2.6)
    max_rows: int | None = None  #: Number of rows drawn uniformly from a deeper alignment, or None for all
    #: Share of samples whose backbone FAPE is not clamped (section 1.11.5)
    unclamped_probability: float = 0.1
    #: Resolution in Å of structures without one, or None: the confidence heads do not learn from them then
    unknown_resolution: float | None = None
    #: Share of complexes that are cropped around a residue at an interface; others are cropped chain by chain
    spatial_crop_probability: float = 0.5
    #: Share of samples without couplings, for a network that uses coevolution
    coevolution_dropout: float = 0.0
    coevolution_subsets: int = 0  #: Number of random subsets of alignment rows for couplings; 0 for all rows
    #: Largest number of chains of a complex; of larger ones, neighbours are chosen, see
    #: :func:`fastfold.data.training.sample.neighboring_chains`
    max_chains: int = 20


def training_sample(
    chain: ChainStructure,
    alignments: Sequence[Msa],
    config: ConfigDict,
    settings: SampleSettings,
    rng: np.random.Generator,
    *,
    resolution: float | None = None,
    analyze: Callable[[int], coevolution.Coevolution] | None = None,
    templates: TemplateCandidates | None = None,
) -> dict[str, np.ndarray]:
    """Compute features and labels of one chain of ``N`` residues for a monomer network.

    ``analyze`` returns the coevolution of a numbered subset of the first alignment's rows, by default
    :func:`fastfold.data.features.coevolution.analyze_subset`.

    Returns:
        ``features/*`` with a leading axis of ``settings.cycles``, and ``labels/*`` without, both cropped to
        ``min(N, crop_size)`` residues: float32 and int32, names as in AlphaFold.

    Raises:
        InputError: An alignment belongs to another chain, or the chain has no backbone.
    """
    _require_backbone(chain)
    alone = rng.random() < settings.single_sequence_probability
    clamped = augmentation.sample_fape_clamp(rng, unclamped=settings.unclamped_probability)
    crop = augmentation.contiguous_crop(len(chain), settings.crop_size, rng, clamped=bool(clamped))
    msa = msa_features([] if alone else alignments, chain.sequence)
    msa = _augment_alignment(msa, settings, rng)
    drawn = {} if templates is None else templates.draw(rng)
    raw = sequence_features(chain.sequence) | msa | template_features(drawn, len(chain))
    raw["residue_index"] = chain.residue_index
    if coevolution.is_input(config):
        couplings = None
        if alignments and not alone:
            couplings = _coevolution(chain, alignments, settings, rng, analyze)
        raw |= coevolution.features(couplings, len(chain))
    sampler = sampler_from_raw(raw, config, seed=int(rng.integers(2**31)))
    features = augmentation.crop_features(sampler.stack(settings.cycles), crop, leading=1)
    labels = structure_labels(
        rc.sequence_to_aatype(chain.sequence),
        chain.positions,
        chain.mask,
        resolution=settings.unknown_resolution if resolution is None else resolution,
    )
    labels = augmentation.crop_features(labels, crop)
    labels["use_clamped_fape"] = clamped
    parts = {FEATURES: features, LABELS: labels}
    return {f"{prefix}{key}": x for prefix, part in parts.items() for key, x in part.items()}


def _augment_alignment(
    msa: dict[str, np.ndarray], settings: SampleSettings, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw rows of a chain's alignment, and delete blocks, as the settings say."""
    if settings.max_rows is not None:
        msa = augmentation.subsample_rows(msa, settings.max_rows, rng)
    return augmentation.delete_blocks(msa, rng) if settings.block_deletion else msa


def _coevolution(
    chain: ChainStructure,
    alignments: Sequence[Msa],
    settings: SampleSettings,
    rng: np.random.Generator,
    analyze: Callable[[int], coevolution.Coevolution] | None,
) -> coevolution.Coevolution:
    """Compute the coevolution of random alignment rows, at times without couplings."""
    if analyze is None:
        analyze = partial(coevolution.analyze_subset, msa_features(alignments, chain.sequence)["msa"])
    analyzed = analyze(int(rng.integers(settings.coevolution_subsets + 1)))
    return replace(analyzed, scores=None) if rng.random() < settings.coevolution_dropout else analyzed


def _require_backbone(chain: ChainStructure) -> None:
    """Refuse a chain with only CA atoms, which has no frames to learn from."""
    if not (chain.mask[:, _BACKBONE] > 0).all(axis=1).any():
        raise InputError(
            f"chain {chain.chain_id!r} has no residue with all of N, CA and C (is it a trace of CA atoms?); remove the "
            "structure from the training set, or replace it by one with all atoms"
        )


COPIES = "copies/"  #: Prefix of the data for the exchange of equal chains: see :func:`complex_sample`

_CA = rc.atom_order["CA"]
_ROWS = ("msa", "deletion_matrix", "msa_mask", "bert_mask", "cluster_bias_mask")


def complex_sample(
    chains: Sequence[ChainStructure],
    alignments: Sequence[ComplexMsas],
    config: ConfigDict,
    settings: SampleSettings,
    rng: np.random.Generator,
    *,
    resolution: float | None = None,
    templates: Mapping[str, TemplateCandidates] | None = None,
) -> dict[str, np.ndarray]:
    """Compute features and labels of a complex for a multimer network (Evans et al. 2021).

    The alignment is cropped before its rows are drawn, unlike in the paper (doi:10.1101/2021.10.04.463034), because
    clustering a complex of thousands of residues for a small crop is slow. Rows without any residue in the crop are
    left out. Alignments of equal chains must be equal, and their templates are drawn once for all copies.

    Returns:
        ``features/*`` with a leading axis of ``settings.cycles``, and ``labels/*`` without, both cropped to the same
        ``n = min(N, crop_size)`` residues: float32 and int32, names as in AlphaFold. If a sequence in the crop has
        copies, also ``copies/*``: ``residue [n]``, each cropped residue's place in its chain from 0. And, for the ``M``
        residues whose labels these could get, in the crop or not: ``all_atom_positions [M, 37, 3]`` (Å),
        ``all_atom_mask [M, 37]``, ``asym_id``, ``entity_id`` and ``residue_index [M]``, the place of the residue in its
        chain.

    Raises:
        InputError: An alignment belongs to another chain, or a chain has no backbone.
    """
    chosen = neighboring_chains(chains, settings.max_chains, rng)
    chains, alignments = in_feature_order([chains[i] for i in chosen], [alignments[i] for i in chosen])
    for chain in chains:
        _require_backbone(chain)
    if rng.random() < settings.single_sequence_probability:
        alignments = [ComplexMsas()] * len(chains)
    wanted = dict.fromkeys(chain.sequence for chain in chains if chain.sequence in (templates or {}))
    drawn = {sequence: (templates or {})[sequence].draw(rng) for sequence in wanted}
    augment = partial(_augment_alignment, settings=settings, rng=rng)
    merged = merged_features(chains, alignments, augment, templates=drawn)
    positions = np.concatenate([chain.positions for chain in chains])
    mask = np.concatenate([chain.mask for chain in chains])
    crop = _draw_crop(merged["asym_id"], positions[:, _CA], mask[:, _CA], settings, rng)
    sampler = sampler_from_merged(_cropped_rows(merged, crop), config, seed=int(rng.integers(2**31)))
    labels = structure_labels(
        merged["aatype"],
        positions,
        mask,
        resolution=settings.unknown_resolution if resolution is None else resolution,
    )
    parts = {
        FEATURES: sampler.stack(settings.cycles),
        LABELS: augmentation.crop_features(labels, crop),
        COPIES: copies_of_residues(merged, positions, mask, crop),
    }
    return {f"{prefix}{key}": x for prefix, part in parts.items() for key, x in part.items()}


def in_feature_order(
    chains: Sequence[ChainStructure], alignments: Sequence[ComplexMsas]
) -> tuple[list[ChainStructure], list[ComplexMsas]]:
    """Reorder chains and alignments to the multimer features' order, with adjacent copies."""
    order = chain_order([chain.sequence for chain in chains])
    return [chains[i] for i in order], [alignments[i] for i in order]


def merged_features(
    chains: Sequence[ChainStructure],
    alignments: Sequence[ComplexMsas],
    augment: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None,
    *,
    templates: Mapping[str, Mapping[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """Merge the features of a complex (:func:`fastfold.data.features.merging.merge_chains`).

    Chains are in the order of the features, and residues have the numbers of the structure. Chains of equal sequence
    use the alignments of the first, and the raw template features by sequence. ``augment`` removes rows of an alignment
    once for all copies.

    Raises:
        InputError: An alignment belongs to another chain.
    """
    sequences = [chain.sequence for chain in chains]
    own: dict[str, ComplexMsas] = {}
    for sequence, msas in zip(sequences, alignments, strict=True):
        own.setdefault(sequence, msas)
    unpaired = {sequence: msa_features(msas.unpaired, sequence) for sequence, msas in own.items()}
    if augment is not None:
        unpaired = {sequence: augment(msa) for sequence, msa in unpaired.items()}
    raw = [
        sequence_features(chain.sequence)
        | unpaired[chain.sequence]
        | template_features((templates or {}).get(chain.sequence, {}), len(chain))
        | {"residue_index": chain.residue_index}
        for chain in chains
    ]
    raw_paired = []
    if len(own) > 1:
        paired = {sequence: msa_features(msas.paired, sequence) for sequence, msas in own.items()}
        raw_paired = [paired[sequence] for sequence in sequences]
    return merge_chains(raw, raw_paired, sequences)


def neighboring_chains(
    chains: Sequence[ChainStructure], most: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """Choose some chains of a large assembly: one at random, and its nearest neighbours.

    Returns:
        Sorted indices. The distance of two chains is that of their nearest alpha carbons; chains without any come last.
    """
    if len(chains) <= most:
        return tuple(range(len(chains)))
    points = [chain.positions[chain.mask[:, _CA] > 0, _CA].astype(np.float64) for chain in chains]
    center = int(rng.integers(len(chains)))
    distances = np.array([_nearest(points[center], other) for other in points])
    distances[center] = -1.0
    return tuple(int(i) for i in np.sort(np.argsort(distances, kind="stable")[:most]))


def _nearest(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the smallest squared distance between points ``[A, 3]`` and ``[B, 3]``; infinite if empty."""
    least = np.inf
    for rows in row_blocks(len(one)) if len(other) else ():
        apart = one[rows, None] - other
        least = min(least, float(np.einsum("ijk,ijk->ij", apart, apart).min()))
    return least


def copies_of_residues(
    merged: dict[str, np.ndarray], positions: np.ndarray, mask: np.ndarray, crop: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the data of :func:`complex_sample` on cropped residues in all copies; empty without copies.

    Residues of copies correspond by their place in the sequence, because copies may be numbered differently without
    SEQRES. The ``crop [n]`` is of the whole complex with ``positions [N, 37, 3]`` in Å and ``mask [N, 37]``.
    """
    asym, entity = merged["asym_id"], merged["entity_id"]
    if (merged["sym_id"][np.isin(entity, entity[crop])] == 1).all():
        return {}
    place = (np.arange(len(asym)) - np.searchsorted(asym, asym)).astype(np.int32)
    residue = entity.astype(np.int64) * len(asym) + place  # equal in all copies
    rows = np.flatnonzero(np.isin(residue, residue[crop]))
    return {
        "residue": place[crop],
        "all_atom_positions": positions[rows],
        "all_atom_mask": mask[rows],
        "asym_id": asym[rows],
        "entity_id": entity[rows],
        "residue_index": place[rows],
    }


def _draw_crop(
    asym_id: np.ndarray,
    ca: np.ndarray,
    ca_mask: np.ndarray,
    settings: SampleSettings,
    rng: np.random.Generator,
) -> np.ndarray:
    if rng.random() < settings.spatial_crop_probability:
        return augmentation.spatial_crop(asym_id, ca, ca_mask, settings.crop_size, rng)
    return augmentation.contiguous_crop_of_chains(asym_id, settings.crop_size, rng)


def _cropped_rows(merged: dict[str, np.ndarray], crop: np.ndarray) -> dict[str, np.ndarray]:
    """Return merged features of a crop's residues, with the rows that belong to its chains."""
    cropped = augmentation.crop_features(merged, crop)
    rows = cropped["bert_mask"].any(axis=1)
    return cropped | {name: cropped[name][rows] for name in _ROWS}
