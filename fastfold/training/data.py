"""Where a run's samples come from: training sets, filters, the endless order of draws, and the loader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
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
from fastfold.data.training.packed.entries import weights_of
from fastfold.data.training.packed.index import Scanned, indexed
from fastfold.data.training.sample import SampleSettings, training_sample
from fastfold.data.training.sampling import WeightedOrder
from fastfold.data.training.templates import Candidates, TrainingTemplates, read_candidates
from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext
from fastfold.training.config import DataConfig

_NOT_SCANNED = ("cache", "crop_size", "index", "max_recycles", "order", "prefetch", "workers")
"""Settings that a scan does not depend on; of all others it is taken to."""
_LOOKED_AT = 100
"""Entries that are looked at for template hits before a run."""


@dataclass(frozen=True)
class EntryReader:
    """Reads entries, through a cache where there is one.

    Attributes:
        cache: Remembers what was read, or None.
        min_plddt: Residues of predicted structures under this pLDDT are masked.
        templates: Finds what templates are drawn from, or None for no templates.
    """

    cache: FeatureCache | None
    min_plddt: float
    templates: TrainingTemplates | None = None

    def __call__(self, entry: Entry) -> EntryData | ComplexData:
        """What the entry's files hold: those of a complex if it is one."""
        if isinstance(entry, ComplexEntry):
            whole = read_complex(entry) if self.cache is None else self.cache.read_complex(entry)
            return mask_complex_plddt(whole, self.min_plddt) if entry.has_plddt else whole
        data = read_entry(entry) if self.cache is None else self.cache.read(entry)
        if not entry.has_plddt:
            return data
        return replace(data, chain=mask_low_plddt(data.chain, self.min_plddt))

    def candidates(self, entry: Entry, data: EntryData | ComplexData) -> dict[str, Candidates]:
        """By sequence what the templates of the entry's chains are drawn from.

        Raises:
            InputError: Hits cannot be used.
        """
        if self.templates is None:
            return {}
        return self.templates.candidates(entry, data.chains, data.release_date)

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
    valid: Sequence[Entry]
    unreadable: tuple[tuple[str, str], ...]

    def order(self, config: DataConfig, seed: int) -> WeightedOrder[Entry]:
        """The endless order of draws."""
        share = 0.0 if self.distillation is None else config.distillation_probability
        sets = [(self.train.entries, weights_of(self.train.entries), 1.0 - share)]
        if self.distillation is not None:
            sets.append((self.distillation.entries, weights_of(self.distillation.entries), share))
        return WeightedOrder(sets, seed)


def open_source(config: DataConfig, validate_chains: int, *, complexes: bool = False) -> SampleSource:
    """Find the chains of a run, in an index if there is a folder for it.

    Args:
        config: Group ``data``.
        validate_chains: Maximum number of chains to validate on; spread evenly over the split.
        complexes: Whether an entry is a whole structure file, as multimer networks train on them.

    Raises:
        ConfigError: A folder or split does not exist, or no chain is left after the filters.
        InputError: A table cannot be read.
    """
    if config.index is None:
        return _scan(config, validate_chains, complexes)
    settings = {name: value for name, value in vars(config).items() if name not in _NOT_SCANNED}
    found = indexed(
        config.index,
        (settings, validate_chains, complexes),
        _scanned_sources(config),
        lambda: _to_scanned(_scan(config, validate_chains, complexes)),
    )
    return _of_scanned(found)


def _scanned_sources(config: DataConfig) -> list[Path]:
    """Tables and folders that a scan reads, whether they are there or not."""
    sources = [Path(path) for path in (config.alignments, config.duplicates) if path is not None]
    if config.distillation_alignments is not None:
        sources.append(Path(config.distillation_alignments))
    names = ("index.tsv", "chain_data_cache.json", "duplicate_pdb_chains.txt", "mmcifs", "msas", "alignments")
    for root in (config.directory, config.distillation):
        if root is not None:
            splits = [Path(root) / split for split in (config.train_split, config.valid_split) if split]
            for base in (Path(root), *splits):
                sources += [base, *(base / name for name in names)]
    return sources


def _to_scanned(source: SampleSource) -> Scanned:
    kept = {"train": source.train, "distillation": source.distillation}
    filtered = {name: found for name, found in kept.items() if found is not None}
    meta = {name: {"taken": found.taken, "unreadable": found.unreadable} for name, found in filtered.items()}
    sets = {name: found.entries for name, found in filtered.items()} | {"valid": source.valid}
    return Scanned(sets, {"filtered": meta, "unreadable": source.unreadable})


def _of_scanned(found: Scanned) -> SampleSource:
    filtered = {
        name: Filtered(found.sets[name], meta["taken"], _pairs(meta["unreadable"]))
        for name, meta in found.meta["filtered"].items()
    }
    return SampleSource(
        filtered["train"],
        filtered.get("distillation"),
        found.sets["valid"],
        _pairs(found.meta["unreadable"]),
    )


def _pairs(rows: Iterable[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, reason) for name, reason in rows)


def _scan(config: DataConfig, validate_chains: int, complexes: bool) -> SampleSource:
    """As :func:`open_source`, by a look at the folders."""
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

    def found(
        directory: str, source: str, oversample: dict[str, float], alignments: str | None
    ) -> tuple[Filtered, Any]:
        everything = open_dataset(
            directory,
            layout=config.layout,
            split=config.train_split,
            source=source,
            oversample=oversample,
            depth_weights=config.depth_weights,
            alignments=alignments,
            duplicates=config.duplicates if source == EXPERIMENTAL else None,
        )
        entries = grouped(everything.entries)
        return apply_filters(entries, filters, resolved=_resolved), everything.unreadable

    train, unreadable = found(config.directory, EXPERIMENTAL, config.oversample, config.alignments)
    distillation = None
    if config.distillation is not None:
        distillation, more = found(config.distillation, DISTILLATION, {}, config.distillation_alignments)
        unreadable += more
    valid: tuple[Entry, ...] = ()
    if config.valid_split is not None:
        everything = open_dataset(
            config.directory,
            layout=config.layout,
            split=config.valid_split,
            alignments=config.alignments,
            duplicates=config.duplicates,
        )
        chains = grouped(everything.entries)
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
        InputError: The folder of template structures, or a list of them, is missing or cannot be used.
    """
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
    return EntryReader(cache, config.distillation_min_plddt, templates)


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
    number = sum(entry.has_template_hits for entry in looked)
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
