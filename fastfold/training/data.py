"""Samples of a run: readers of entries, the function that makes samples, templates, the loader, and packed sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from fastfold.data.features.coevolution import Coevolution, analyze_subset
from fastfold.data.features.raw import msa_features
from fastfold.data.loading.loader import SampleLoader, draw_rng, retry_io
from fastfold.data.msa.find import TEMPLATE_HITS
from fastfold.data.templates.database import MmcifFolder, parse_date
from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.entry import Entry, EntryData, mask_low_plddt, read_entry
from fastfold.data.training.packed.records import RecordFile, is_packed, open_packed
from fastfold.data.training.packed.samples import SAMPLES, MakeRecord, build, of_record
from fastfold.data.training.sample import SampleSettings, complex_sample, training_sample
from fastfold.data.training.templates import TemplateCandidates, TrainingTemplates, read_candidates
from fastfold.errors import ConfigError
from fastfold.evoformer.config import is_multimer
from fastfold.parallel import DistributedContext
from fastfold.training.config import DataConfig
from fastfold.training.sets.source import SampleSource, fixed_settings, open_source, to_scanned
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.text_files import PathLike

_LOOKED_AT = 100  #: Maximum number of entries that are checked for template hits before a run


@dataclass(frozen=True)
class EntryReader:
    """Reader of entries, with an optional cache."""

    cache: FeatureCache | None  #: Cache of entries, or None
    min_plddt: float  #: Residues of predicted structures under this pLDDT are masked
    templates: TrainingTemplates | None = None  #: Source of template candidates, or None for no templates
    packed: RecordFile | None = None  #: The packed set of the entries, or None

    def __call__(self, entry: Entry) -> EntryData:
        if entry.record is not None:
            data = self._packed(entry.record)
        else:
            data = read_entry(entry) if self.cache is None else self.cache.read(entry)
        if not entry.has_plddt:
            return data
        return replace(data, chains=tuple(mask_low_plddt(chain, self.min_plddt) for chain in data.chains))

    def candidates(self, entry: Entry, data: EntryData) -> dict[str, TemplateCandidates]:
        """Return the template candidates of the entry's chains by sequence.

        Raises:
            InputError: A file of hits is invalid.
        """
        return {} if self.templates is None else self.templates.candidates(entry, data)

    def has_template_hits(self, entry: Entry) -> bool:
        """Return True if a chain of the entry has template hits."""
        if entry.record is None:
            return entry.has_template_hits
        return bool(self._packed(entry.record).hits)

    def _packed(self, number: int) -> EntryData:
        assert self.packed is not None, "an entry of a packed set without the set"
        return of_record(self.packed.record(SAMPLES, number))

    def coevolution(self, entry: Entry, data: EntryData, subset: int) -> Coevolution:
        """Return :func:`fastfold.data.features.coevolution.analyze_subset` of the entry's alignment, cached."""

        def analyze() -> Coevolution:
            return analyze_subset(msa_features(data.alignments, data.chain.sequence)["msa"], subset)

        return analyze() if self.cache is None else self.cache.coevolution(entry, subset, analyze)


@dataclass(frozen=True)
class MakeSample:
    """Function that makes the sample of a draw; sent to the loader's workers.

    ``distillation_rows`` is ``max_rows`` of the settings for predicted structures.
    """

    reader: EntryReader
    tree: ConfigDict
    settings: SampleSettings
    seed: int
    distillation_rows: int | None = None

    def __call__(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        """Make the sample of draw ``number`` of ``entry``; retry reads after errors of a disk or a network."""
        return retry_io(partial(self._make, number, entry))

    def _make(self, number: int, entry: Entry) -> dict[str, np.ndarray]:
        data = self.reader(entry)
        rng = draw_rng(self.seed, number)
        candidates = self.reader.candidates(entry, data)
        settings = self.settings
        if entry.has_plddt:
            settings = replace(settings, max_rows=self.distillation_rows)
        if is_multimer(self.tree):
            return complex_sample(
                data.chains,
                data.msas,
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
            analyze=partial(self.reader.coevolution, entry, data),
            templates=candidates.get(data.chain.sequence),
        )


def entry_reader(config: DataConfig) -> EntryReader:
    """Return the reader of entries that group ``data`` configures.

    Raises:
        OutputError: The cache's folder cannot be created.
        InputError: The folder of template structures, a list of them, or the packed set is missing or invalid.
    """
    packed = open_packed(config.directory)
    cache = None if config.cache is None else FeatureCache(config.cache)
    templates = None
    if config.template_mmcif_dir is not None:
        entries = MmcifFolder(
            config.template_mmcif_dir,
            obsolete=config.obsolete_pdbs,
            release_dates=config.template_release_dates,
            kept=1,  # large entries take hundreds of megabytes, in every worker
        )
        newest = None if config.max_template_date is None else parse_date(config.max_template_date)
        templates = TrainingTemplates(
            entries, newest, read_candidates if cache is None else cache.template_hits
        )
    return EntryReader(cache, config.distillation_min_plddt, templates, packed)


def check_templates(config: DataConfig, tree: ConfigDict) -> None:
    """Refuse templates for a network without template embedders.

    Raises:
        ConfigError: Templates are configured, but the network does not read them.
    """
    if config.template_mmcif_dir is not None and not takes_templates(tree):
        raise ConfigError(
            "data.template_mmcif_dir is set, but the network does not read templates; AlphaFold's model_1 and "
            "model_2 (with or without _ptm) and all multimer networks do. Choose one of them with model=, or leave "
            "the templates out"
        )


def takes_templates(tree: ConfigDict) -> bool:
    """Return True if the network of a configuration tree reads templates."""
    return bool(tree.model.embeddings_and_evoformer.template.enabled)


def describe_templates(reader: EntryReader, entries: Sequence[Entry]) -> str:
    """Describe the source of templates in one line, after checking some entries for hits."""
    masks = "the template stack trains on masks"
    if reader.templates is None:
        return f"without templates: {masks}; to use hits, set data.template_mmcif_dir=DIR, a folder of mmCIF files"
    looked = list(dict.fromkeys(entries[i * len(entries) // _LOOKED_AT] for i in range(_LOOKED_AT)))
    number = sum(reader.has_template_hits(entry) for entry in looked)
    if not number:
        names = ", ".join(f"{stem}{end}" for stem, end in TEMPLATE_HITS)
        return f"without templates: {masks}; found hits ({names}) for 0 of {len(looked)} checked entries"
    return f"templates from {reader.templates.entries.folder}: {number} of {len(looked)} checked entries have hits"


def sample_settings(config: DataConfig) -> SampleSettings:
    """Return the settings of samples that group ``data`` configures."""
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
    reader: EntryReader,
    config: DataConfig,
    tree: ConfigDict,
    seed: int,
    context: DistributedContext,
    replay: Iterable[int],
) -> SampleLoader:
    """Return the loader of this process's share of the samples; ``reader`` reads the entries of ``source``."""
    make = MakeSample(reader, tree, sample_settings(config), seed, config.distillation_max_rows)
    return SampleLoader(
        make,
        source.order(config, seed),
        workers=config.workers,
        prefetch=config.prefetch,
        # Processes that share a sample must draw the same one.
        deterministic=config.order == "draw" or context.dp_size < context.size,
        rank=context.dp_rank,
        ranks=context.dp_size,
        replay=replay,
    )


def build_packed(
    config: DataConfig,
    out: PathLike,
    *,
    validate_chains: int,
    complexes: bool,
    say: Callable[[str], None] = print,
) -> None:
    """Pack the chains or complexes of a run, with all inputs of their samples, into one file.

    The filters, splits and weights of ``config`` are fixed in the file. ``complexes`` says that an entry is a whole
    structure file, as for multimer networks. ``say`` is called with progress and the entries that are left out.

    Raises:
        ConfigError: A folder or split does not exist, no chain passes the filters, or none can be used.
        InputError: A table cannot be read.
        WriteError: The file cannot be written.
    """
    if is_packed(config.directory):
        raise ConfigError(f"expected a folder in data.directory, found the packed set {config.directory!r}")
    prepare_output_directory(Path(out).parent)
    source = open_source(config, validate_chains, complexes=complexes)
    cache = None if config.cache is None else FeatureCache(config.cache)
    # Without masking: residues are masked when a run reads them, so that its settings choose the limit.
    reader = EntryReader(cache, min_plddt=-math.inf)
    say(source.train.summary())
    scanned = to_scanned(source)
    failed = build(
        out,
        scanned.sets,
        MakeRecord(reader),
        meta={"more": scanned.meta, "settings": fixed_settings(config, validate_chains, complexes)},
        workers=config.workers,
        say=say,
    )
    for name, reason in failed[:3]:
        say(f"left out: {name}: {reason}")
    if len(failed) > 3:
        say(f"left out: {len(failed) - 3:,} more; runs with this set list them in quarantine.tsv")
