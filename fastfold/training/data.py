"""Where a run's samples come from: training sets, filters, the endless order of draws, and the loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from fastfold.data.features.coevolution import Coevolution, analyse_subset
from fastfold.data.features.raw import msa_features
from fastfold.data.loading.loader import SampleLoader, draw_rng
from fastfold.data.loading.retry import retry_io
from fastfold.data.msa.find import TEMPLATE_HITS
from fastfold.data.templates.database import MmcifFolder, parse_date
from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.complex_entry import (
    ComplexData,
    ComplexEntry,
    mask_complex_plddt,
    read_complex,
)
from fastfold.data.training.complex_sample import complex_sample
from fastfold.data.training.entry import (
    Entry,
    EntryData,
    mask_low_plddt,
    read_entry,
)
from fastfold.data.training.packed.records import RecordFile, is_packed
from fastfold.data.training.packed.samples import SAMPLES, of_record
from fastfold.data.training.sample import SampleSettings, training_sample
from fastfold.data.training.templates import Candidates, TrainingTemplates, read_candidates
from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext
from fastfold.training.config import DataConfig
from fastfold.training.sets.source import SampleSource

_LOOKED_AT = 100
"""Entries that are looked at for template hits before a run."""


@dataclass(frozen=True)
class EntryReader:
    """Reads entries, through a cache where there is one.

    Attributes:
        cache: Remembers what was read, or None.
        min_plddt: Residues of predicted structures under this pLDDT are masked.
        templates: Finds what templates are drawn from, or None for no templates.
        packed: The packed set whose records entries have, or None.
    """

    cache: FeatureCache | None
    min_plddt: float
    templates: TrainingTemplates | None = None
    packed: RecordFile | None = None

    def __call__(self, entry: Entry) -> EntryData | ComplexData:
        """What the entry's files hold: those of a complex if it is one."""
        data = self._read(entry) if entry.record is None else self._packed(entry.record)
        if not entry.has_plddt:
            return data
        if isinstance(data, ComplexData):
            return mask_complex_plddt(data, self.min_plddt)
        return replace(data, chain=mask_low_plddt(data.chain, self.min_plddt))

    def _read(self, entry: Entry) -> EntryData | ComplexData:
        """The entry's data from its files or the cache."""
        if isinstance(entry, ComplexEntry):
            return read_complex(entry) if self.cache is None else self.cache.read_complex(entry)
        return read_entry(entry) if self.cache is None else self.cache.read(entry)

    def candidates(self, entry: Entry, data: EntryData | ComplexData) -> dict[str, Candidates]:
        """By sequence what the templates of the entry's chains are drawn from.

        Raises:
            InputError: Hits cannot be used.
        """
        if self.templates is None:
            return {}
        return self.templates.candidates(entry, data)

    def has_template_hits(self, entry: Entry) -> bool:
        """Whether a chain of an entry has template hits."""
        if entry.record is None:
            return entry.has_template_hits
        return bool(self._packed(entry.record).hits)

    def _packed(self, number: int) -> EntryData | ComplexData:
        assert self.packed is not None, "an entry of a packed set without the set"
        return of_record(self.packed.record(SAMPLES, number))

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
        distillation_rows: ``max_rows`` of the settings for predicted structures.
    """

    reader: EntryReader
    tree: Any
    settings: SampleSettings
    seed: int
    distillation_rows: int | None = None

    def __call__(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        """The sample of draw ``number``, which is ``entry``; files that a disk or a network fails to give are read
        again."""
        return retry_io(partial(self._make, number, entry))

    def _make(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        data = self.reader(entry)
        rng = draw_rng(self.seed, number)
        candidates = self.reader.candidates(entry, data)
        settings = self.settings
        if entry.has_plddt:
            settings = replace(settings, max_rows=self.distillation_rows)
        if isinstance(data, ComplexData):
            return complex_sample(
                data.chains,
                data.alignments,
                self.tree,
                settings,
                rng,
                resolution=data.resolution,
                templates=candidates,
            )
        return training_sample(
            data.chain,
            data.alignments,
            self.tree,
            settings,
            rng,
            resolution=data.resolution,
            analyse=partial(self.reader.coevolution, entry, data),
            templates=candidates.get(data.chain.sequence),
        )


def entry_reader(config: DataConfig) -> EntryReader:
    """Reads entries as group ``data`` says.

    Raises:
        OutputError: The cache's folder cannot be made.
        InputError: The folder of template structures, or a list of them, is missing or cannot be used; or the packed
            set cannot.
    """
    packed = RecordFile(config.directory) if is_packed(config.directory) else None
    cache = None if config.cache is None else FeatureCache(config.cache)
    templates = None
    if config.template_mmcif_dir is not None:
        entries = MmcifFolder(
            config.template_mmcif_dir,
            obsolete=config.obsolete_pdbs,
            release_dates=config.template_release_dates,
            kept=1,  # large ones take hundreds of megabytes, in every worker
        )
        templates = TrainingTemplates(
            entries,
            None if config.max_template_date is None else parse_date(config.max_template_date),
            read_candidates if cache is None else cache.template_hits,
        )
    return EntryReader(cache, config.distillation_min_plddt, templates, packed)


def check_templates(config: DataConfig, tree: Any) -> None:
    """Refuse templates for a network that takes none.

    Raises:
        ConfigError: Templates are given, and the network has no use for them.
    """
    if config.template_mmcif_dir is not None and not takes_templates(tree):
        raise ConfigError(
            "data.template_mmcif_dir is given, but the network takes no templates; of AlphaFold's networks model_1 and "
            "model_2 (with or without _ptm) and all multimer networks do. Choose one of them with model=, or leave "
            "the templates out"
        )


def takes_templates(tree: Any) -> bool:
    """Whether the network of a configuration tree takes templates."""
    return bool(tree.model.embeddings_and_evoformer.template.enabled)


def describe_templates(reader: EntryReader, entries: Sequence[Entry]) -> str:
    """One line on where templates come from, by a look beside the alignments of some entries.

    Args:
        reader: Reads the entries.
        entries: All that are trained on, at least one.
    """
    masks = "the template stack trains on masks"
    if reader.templates is None:
        return f"without templates: {masks}; data.template_mmcif_dir=DIR, a folder of mmCIF files, makes hits templates"
    looked = [entries[i * len(entries) // _LOOKED_AT] for i in range(_LOOKED_AT)]
    looked = list(dict.fromkeys(looked))
    number = sum(reader.has_template_hits(entry) for entry in looked)
    if not number:
        names = ", ".join(f"{stem}{end}" for stem, end in TEMPLATE_HITS)
        return f"without templates: {masks}; none of {len(looked)} entries looked at has hits ({names}) of its own"
    return f"templates from {reader.templates.entries.folder}: {number} of {len(looked)} entries looked at have hits"


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
    rows = config.distillation_max_rows
    make = MakeSample(entry_reader(config), tree, sample_settings(config), seed, rows)
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
