"""Where a run's samples come from: training sets, filters, the endless order of draws, and the loader."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.features.coevolution import Coevolution, analyse_subset
from fastfold.data.features.raw import msa_features
from fastfold.data.loading.loader import SampleLoader, draw_rng
from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.complex_entry import (
    ComplexData,
    ComplexEntry,
    group_complexes,
    mask_complex_plddt,
    read_complex,
)
from fastfold.data.training.complex_sample import complex_sample
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import (
    DISTILLATION,
    EXPERIMENTAL,
    Entry,
    EntryData,
    mask_low_plddt,
    read_entry,
    resolved_share,
)
from fastfold.data.training.filters import Filtered, Filters, apply_filters
from fastfold.data.training.sample import SampleSettings, training_sample
from fastfold.data.training.sampling import WeightedOrder, sampling_weights
from fastfold.parallel import DistributedContext
from fastfold.training.config import DataConfig


@dataclass(frozen=True)
class EntryReader:
    """Reads entries, through a cache where there is one.

    Attributes:
        cache: Remembers what was read, or None.
        min_plddt: Residues of predicted structures under this pLDDT are masked.
    """

    cache: FeatureCache | None
    min_plddt: float

    def __call__(self, entry: Entry) -> EntryData | ComplexData:
        """What the entry's files hold: those of a complex if it is one."""
        if isinstance(entry, ComplexEntry):
            whole = read_complex(entry) if self.cache is None else self.cache.read_complex(entry)
            return mask_complex_plddt(whole, self.min_plddt) if entry.has_plddt else whole
        data = read_entry(entry) if self.cache is None else self.cache.read(entry)
        if not entry.has_plddt:
            return data
        return EntryData(mask_low_plddt(data.chain, self.min_plddt), data.alignments, data.resolution)

    def coevolution(self, entry: Entry, data: EntryData, subset: int) -> Coevolution:
        """See :func:`fastfold.data.features.coevolution.analyse_subset`."""

        def analyse() -> Coevolution:
            return analyse_subset(msa_features(data.alignments, data.chain.sequence)["msa"], subset)

        return analyse() if self.cache is None else self.cache.coevolution(entry, subset, analyse)


@dataclass(frozen=True)
class MakeSample:
    """Makes the sample of a draw; sent to the loader's workers.

    Attributes:
        reader: Reads entries.
        tree: Config tree of the network.
        settings: How samples are made.
        seed: The run's.
    """

    reader: EntryReader
    tree: Any
    settings: SampleSettings
    seed: int

    def __call__(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        """The sample of draw ``number``, which is ``entry``."""
        data = self.reader(entry)
        rng = draw_rng(self.seed, number)
        if isinstance(data, ComplexData):
            return complex_sample(
                data.chains, data.alignments, self.tree, self.settings, rng, resolution=data.resolution
            )
        return training_sample(
            data.chain,
            data.alignments,
            self.tree,
            self.settings,
            rng,
            resolution=data.resolution,
            analyse=partial(self.reader.coevolution, entry, data),
        )


@dataclass(frozen=True)
class SampleSource:
    """The chains of a run, or complexes for a multimer network.

    Attributes:
        train: What is trained on, after filters.
        distillation: Predicted structures that are mixed in, or None.
        valid: What to validate on; may be empty.
        unreadable: Names and reasons of structures that were found but cannot be used.
    """

    train: Filtered
    distillation: Filtered | None
    valid: tuple[Entry, ...]
    unreadable: tuple[tuple[str, str], ...]

    def order(self, config: DataConfig, seed: int) -> WeightedOrder[Entry]:
        """The endless order of draws."""
        share = 0.0 if self.distillation is None else config.distillation_probability
        sets = [(self.train.entries, sampling_weights(self.train.entries), 1.0 - share)]
        if self.distillation is not None:
            sets.append((self.distillation.entries, sampling_weights(self.distillation.entries), share))
        return WeightedOrder(sets, seed)


def open_source(config: DataConfig, validate_chains: int, *, complexes: bool = False) -> SampleSource:
    """Find the chains of a run.

    Args:
        config: Group ``data``.
        validate_chains: Maximum number of chains to validate on; spread evenly over the split.
        complexes: Whether an entry is a whole structure file, as multimer networks train on them.

    Raises:
        ConfigError: A folder or split does not exist, or no chain is left after the filters.
        InputError: A table cannot be read.
    """
    filters = Filters(
        max_resolution=config.max_resolution,
        max_single_residue=config.max_single_residue,
        min_length=config.min_length,
        max_length=config.max_length,
        min_resolved=config.min_resolved,
        max_release_date=config.max_release_date,
    )

    def grouped(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return group_complexes(entries) if complexes else entries

    def found(directory: str, source: str, oversample: dict[str, float] | None) -> tuple[Filtered, Any]:
        everything = open_dataset(
            directory,
            layout=config.layout,
            split=config.train_split,
            source=source,
            oversample=oversample,
            depth_weights=config.depth_weights,
        )
        entries = grouped(everything.entries)
        return apply_filters(entries, filters, resolved=_resolved), everything.unreadable

    train, unreadable = found(config.directory, EXPERIMENTAL, config.oversample)
    distillation = None
    if config.distillation is not None:
        distillation, more = found(config.distillation, DISTILLATION, {})
        unreadable += more
    valid: tuple[Entry, ...] = ()
    if config.valid_split is not None:
        chains = grouped(
            open_dataset(config.directory, layout=config.layout, split=config.valid_split).entries
        )
        longest = config.max_length or max(len(entry) for entry in chains)
        chains = tuple(entry for entry in chains if len(entry) <= longest)
        valid = tuple(
            chains[i * len(chains) // validate_chains] for i in range(min(validate_chains, len(chains)))
        )
        if len(chains) <= validate_chains:
            valid = chains
    return SampleSource(train, distillation, valid, unreadable)


def _resolved(entry: Entry) -> float:
    """Share of an entry's residues whose CA has a position; reads its files."""
    chains = read_complex(entry).chains if isinstance(entry, ComplexEntry) else (read_entry(entry).chain,)
    shares = [resolved_share(chain) for chain in chains]
    return float(np.average(shares, weights=[len(chain) for chain in chains]))


def entry_reader(config: DataConfig) -> EntryReader:
    """Reads entries as group ``data`` says.

    Raises:
        OutputError: The cache's folder cannot be made.
    """
    cache = None if config.cache is None else FeatureCache(config.cache)
    return EntryReader(cache, config.distillation_min_plddt)


def sample_settings(config: DataConfig) -> SampleSettings:
    """How samples are made under group ``data``."""
    return SampleSettings(
        crop_size=config.crop_size,
        cycles=config.max_recycles + 1,
        single_sequence_probability=config.single_sequence_probability,
        block_deletion=config.block_deletion,
        unclamped_probability=config.unclamped_probability,
        unknown_resolution=config.unknown_resolution,
        spatial_crop_probability=config.spatial_crop_probability,
        coevolution_dropout=config.coevolution_dropout,
        coevolution_subsets=config.coevolution_subsets,
        max_chains=config.max_chains,
    )


def make_loader(
    source: SampleSource,
    config: DataConfig,
    tree: Any,
    seed: int,
    context: DistributedContext,
    replay: Iterable[int],
) -> SampleLoader:
    """The loader of this process's share of the samples.

    Args:
        source: The chains.
        config: Group ``data``.
        tree: Config tree of the network.
        seed: The run's.
        context: The run's processes.
        replay: Draws of a recorded order, to be repeated first.
    """
    make = MakeSample(entry_reader(config), tree, sample_settings(config), seed)
    return SampleLoader(
        make,
        source.order(config, seed),
        workers=config.workers,
        prefetch=config.prefetch,
        # Processes that work on one sample together have to draw the same.
        deterministic=config.order == "draw" or context.dp_size < context.size,
        rank=context.dp_rank,
        ranks=context.dp_size,
        replay=replay,
    )
