"""Training sample of a chain: features of every recycling iteration and labels, cropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.features import coevolution
from fastfold.data.features.pipeline import sampler_from_raw
from fastfold.data.features.raw import msa_features, sequence_features, template_features
from fastfold.data.msa.msa import Msa
from fastfold.data.training.augmentation import delete_blocks, sample_fape_clamp, subsample_rows
from fastfold.data.training.cropping import contiguous_crop, crop_features
from fastfold.data.training.labels import structure_labels
from fastfold.data.training.templates import Candidates
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
    #: :func:`fastfold.data.training.complex_sample.neighbouring_chains`
    max_chains: int = 20


def training_sample(
    chain: ChainStructure,
    alignments: Sequence[Msa],
    config: Any,
    settings: SampleSettings,
    rng: np.random.Generator,
    *,
    resolution: float | None = None,
    analyse: Callable[[int], coevolution.Coevolution] | None = None,
    templates: Candidates | None = None,
) -> dict[str, np.ndarray]:
    """Compute features and labels of one chain of ``N`` residues for a monomer network.

    ``analyse`` returns the coevolution of a numbered subset of the first alignment's rows, by default
    :func:`fastfold.data.features.coevolution.analyse_subset`.

    Returns:
        ``features/*`` with a leading axis of ``settings.cycles``, and ``labels/*`` without, both cropped to
        ``min(N, crop_size)`` residues: float32 and int32, names as in AlphaFold.

    Raises:
        InputError: An alignment belongs to another chain, or the chain has no backbone.
    """
    require_backbone(chain)
    alone = rng.random() < settings.single_sequence_probability
    clamped = sample_fape_clamp(rng, unclamped=settings.unclamped_probability)
    crop = contiguous_crop(len(chain), settings.crop_size, rng, clamped=bool(clamped))
    msa = msa_features([] if alone else alignments, chain.sequence)
    msa = augment_alignment(msa, settings, rng)
    drawn = {} if templates is None else templates.draw(rng)
    raw = sequence_features(chain.sequence) | msa | template_features(drawn, len(chain))
    raw["residue_index"] = chain.residue_index
    if coevolution.is_input(config):
        found = None
        if alignments and not alone:
            found = _coevolution(chain, alignments, settings, rng, analyse)
        raw |= coevolution.features(found, len(chain))
    sampler = sampler_from_raw(raw, config, seed=int(rng.integers(2**31)))
    features = crop_features(sampler.stack(settings.cycles), crop, leading=1)
    labels = structure_labels(
        rc.sequence_to_aatype(chain.sequence),
        chain.positions,
        chain.mask,
        resolution=settings.unknown_resolution if resolution is None else resolution,
    )
    labels = crop_features(labels, crop)
    labels["use_clamped_fape"] = clamped
    parts = {FEATURES: features, LABELS: labels}
    return {f"{prefix}{key}": x for prefix, part in parts.items() for key, x in part.items()}


def augment_alignment(
    msa: dict[str, np.ndarray], settings: SampleSettings, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw rows of a chain's alignment, and delete blocks, as the settings say."""
    if settings.max_rows is not None:
        msa = subsample_rows(msa, settings.max_rows, rng)
    return delete_blocks(msa, rng) if settings.block_deletion else msa


def _coevolution(
    chain: ChainStructure,
    alignments: Sequence[Msa],
    settings: SampleSettings,
    rng: np.random.Generator,
    analyse: Callable[[int], coevolution.Coevolution] | None,
) -> coevolution.Coevolution:
    """Compute the coevolution of random alignment rows, at times without couplings."""
    if analyse is None:
        analyse = partial(coevolution.analyse_subset, msa_features(alignments, chain.sequence)["msa"])
    found = analyse(int(rng.integers(settings.coevolution_subsets + 1)))
    return replace(found, scores=None) if rng.random() < settings.coevolution_dropout else found


def require_backbone(chain: ChainStructure) -> None:
    """Refuse a chain with only CA atoms, which has no frames to learn from.

    Raises:
        InputError: The chain has no backbone to learn from.
    """
    if not (chain.mask[:, _BACKBONE] > 0).all(axis=1).any():
        raise InputError(
            f"chain {chain.chain_id!r} has no residue with all of N, CA and C (is it a trace of CA atoms?); remove the "
            "structure from the training set, or replace it by one with all atoms"
        )
