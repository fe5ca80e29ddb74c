"""Chains or complexes of a run, from a scan of the folders, an index or a packed set."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.training.cache import parser_version
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import (
    DISTILLATION,
    EXPERIMENTAL,
    Entry,
    group_complexes,
    read_entry,
    resolved_share,
)
from fastfold.data.training.packed.records import RecordFile, Scanned, open_packed, scanned_of, weights_of
from fastfold.data.training.packed.samples import indexed
from fastfold.data.training.sampling import Filtered, Filters, WeightedOrder, apply_filters
from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext
from fastfold.training.config import DataConfig
from fastfold.utils.foreign_text import parse_json

_log = logging.getLogger(__name__)

_LONG_SCAN_S = 20.0  #: Duration of a scan in seconds from which a run suggests an index

_FILTERS = (
    "max_length",
    "max_release_date",
    "max_resolution",
    "max_single_residue",
    "min_length",
    "min_resolved",
    "min_rows",
)
_OF_DISTILLATION = ("max_length", "min_length", "min_rows")
"""Filters with values of their own for predicted structures."""
_FIXED = (
    *("train_split", "valid_split", "oversample", "depth_weights", *_FILTERS),
    *(f"distillation_{name}" for name in _OF_DISTILLATION),
)
"""Settings that select the entries of a packed set."""
_USELESS = ("alignments", "cache", "distillation", "distillation_alignments", "duplicates", "index")
_NOT_SCANNED = ("cache", "crop_size", "index", "max_recycles", "order", "prefetch", "workers")
"""Settings that do not change the result of a scan; all others invalidate an index."""


@dataclass(frozen=True)
class SampleSource:
    """Chains of a run, or complexes for a multimer network."""

    train: Filtered  #: Training entries after filters
    distillation: Filtered | None  #: Predicted structures to mix in, or None
    valid: Sequence[Entry]  #: Validation entries; may be empty
    unreadable: tuple[tuple[str, str], ...]  #: Names of structures that cannot be used, and reasons

    def order(self, config: DataConfig, seed: int) -> WeightedOrder[Entry]:
        """Return the endless order of draws."""
        share = 0.0 if self.distillation is None else config.distillation_probability
        sets = [(self.train.entries, weights_of(self.train.entries), 1.0 - share)]
        if self.distillation is not None:
            sets.append((self.distillation.entries, weights_of(self.distillation.entries), share))
        return WeightedOrder(sets, seed)


def open_run_source(
    config: DataConfig, validate_chains: int, context: DistributedContext, *, complexes: bool
) -> SampleSource:
    """Open the sets of a run as :func:`open_source`, and suggest an index after a long scan.

    Raises:
        ConfigError: As of :func:`open_source`.
        InputError: A table cannot be read.
    """
    started = time.perf_counter()
    source = open_source(config, validate_chains, complexes=complexes)
    seconds = time.perf_counter() - started
    if seconds > _LONG_SCAN_S and config.index is None and context.is_rank_zero:
        remedy = "data.index=FOLDER keeps the result"
        print(f"scanning the training set took {seconds:.0f} s; {remedy}", flush=True)
    return source


def open_source(config: DataConfig, validate_chains: int, *, complexes: bool = False) -> SampleSource:
    """Open the training and validation set of a run from a packed set, an index or a scan.

    The chains to validate on are spread evenly over the split. For ``complexes`` see
    :func:`fastfold.training.data.build_packed`.

    Raises:
        ConfigError: A folder or split does not exist, or no chain is left after the filters.
        InputError: A table cannot be read.
    """
    packed = open_packed(config.directory)
    if packed is not None:
        return _of_packed(packed, config, validate_chains, complexes)
    if config.index is None:
        return _scan(config, validate_chains, complexes)
    settings = {name: value for name, value in vars(config).items() if name not in _NOT_SCANNED}
    scanned = indexed(
        config.index,
        (settings, validate_chains, complexes),
        _scanned_sources(config),
        lambda: to_scanned(_scan(config, validate_chains, complexes)),
    )
    return _of_scanned(scanned)


def fixed_settings(config: DataConfig, validate_chains: int, complexes: bool) -> dict[str, Any]:
    """Return the settings that a packed set fixes, by their option names, in JSON types."""
    settings = {f"data.{name}": getattr(config, name) for name in _FIXED}
    network = "a multimer network" if complexes else "a monomer network"
    settings |= {"trainer.validate_chains": validate_chains, "model": network}
    return dict(parse_json(json.dumps(settings), "settings"))


def _of_packed(file: RecordFile, config: DataConfig, validate_chains: int, complexes: bool) -> SampleSource:
    """Return the source of a packed set, which has to be built with the settings of this run."""
    for name in _USELESS:
        if getattr(config, name) is not None:
            raise ConfigError(
                f"data.{name} has no effect on the packed set in data.directory; remove the setting"
            )
    wanted = fixed_settings(config, validate_chains, complexes)
    if config.valid_split is None:  # a run may do without validation
        wanted |= {
            name: file.meta["settings"].get(name) for name in ("data.valid_split", "trainer.validate_chains")
        }
    differing = [
        f"{name}: {built}, now {wanted.get(name)}"
        for name, built in file.meta["settings"].items()
        if wanted.get(name) != built
    ]
    if differing:
        raise ConfigError(
            f"the packed set {config.directory!r} was built with other settings ({'; '.join(differing)}); build it "
            "again, or use these settings"
        )
    if file.meta["version"] != parser_version():
        _log.warning("the packed set %s was built by other versions of the parsers", config.directory)
    source = _of_scanned(scanned_of(file))
    return replace(
        source,
        valid=() if config.valid_split is None else source.valid,
        unreadable=(*source.unreadable, *_pairs(file.meta["failed"])),
    )


def _scanned_sources(config: DataConfig) -> list[Path]:
    """Return the tables and folders that a scan reads, existing or not."""
    single = (config.alignments, config.duplicates, config.distillation_alignments)
    sources = [Path(path) for path in single if path is not None]
    names = ("index.tsv", "chain_data_cache.json", "duplicate_pdb_chains.txt", "mmcifs", "msas", "alignments")
    for root in (config.directory, config.distillation):
        if root is not None:
            splits = [Path(root) / split for split in (config.train_split, config.valid_split) if split]
            for base in (Path(root), *splits):
                sources += [base, *(base / name for name in names)]
    return sources


def to_scanned(source: SampleSource) -> Scanned:
    """Convert a source to sets of entries, and the rest to JSON types."""
    filtered = {"train": source.train}
    if source.distillation is not None:
        filtered["distillation"] = source.distillation
    meta = {
        name: {"taken": entries.removed, "unreadable": entries.unreadable}
        for name, entries in filtered.items()
    }
    sets = {name: entries.entries for name, entries in filtered.items()} | {"valid": source.valid}
    return Scanned(sets, {"filtered": meta, "unreadable": source.unreadable})


def _of_scanned(scanned: Scanned) -> SampleSource:
    filtered = {
        name: Filtered(scanned.sets[name], meta["taken"], _pairs(meta["unreadable"]))
        for name, meta in scanned.meta["filtered"].items()
    }
    return SampleSource(
        filtered["train"],
        filtered.get("distillation"),
        scanned.sets["valid"],
        _pairs(scanned.meta["unreadable"]),
    )


def _pairs(rows: Iterable[Sequence[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, reason) for name, reason in rows)


def _scan(config: DataConfig, validate_chains: int, complexes: bool) -> SampleSource:
    filters = Filters(**{name: getattr(config, name) for name in _FILTERS})
    of_predicted = {name: getattr(config, f"distillation_{name}") for name in _OF_DISTILLATION}

    def grouped(entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        return group_complexes(entries) if complexes else entries

    def scan(
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
        bounds = replace(filters, **of_predicted) if source == DISTILLATION else filters
        return apply_filters(entries, bounds, resolved=_resolved), everything.unreadable

    train, unreadable = scan(config.directory, EXPERIMENTAL, config.oversample, config.alignments)
    distillation = None
    if config.distillation is not None:
        try:
            distillation, more = scan(config.distillation, DISTILLATION, {}, config.distillation_alignments)
        except ConfigError as error:
            raise ConfigError(
                f"data.distillation: {error}. Its own filters are data.distillation_min_length, "
                "data.distillation_max_length and data.distillation_min_rows"
            ) from error
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
        number = min(validate_chains, len(chains))
        valid = tuple(chains[i * len(chains) // number] for i in range(number))
    return SampleSource(train, distillation, valid, unreadable)


def _resolved(entry: Entry) -> float:
    """Return the share of an entry's residues with a resolved CA; reads its files."""
    chains = read_entry(entry).chains
    shares = [resolved_share(chain) for chain in chains]
    return float(np.average(shares, weights=[len(chain) for chain in chains]))
