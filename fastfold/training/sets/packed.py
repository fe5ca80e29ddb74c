"""Packed sets: built once with the settings that select entries, then used with the same settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.packed.records import is_packed
from fastfold.data.training.packed.samples import MakeRecord, build
from fastfold.errors import ConfigError
from fastfold.training.config import DataConfig
from fastfold.training.data import EntryReader
from fastfold.training.sets.source import fixed_settings, open_source, to_scanned
from fastfold.utils.atomic_files import prepare_output_directory
from fastfold.utils.text_files import PathLike


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
