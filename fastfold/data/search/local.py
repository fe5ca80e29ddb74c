"""Search FASTA files on this machine: check requests and make engines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fastfold.data.search.database import parse_databases
from fastfold.data.search.engine import SearchEngine, SearchPlan
from fastfold.data.search.hhblits import HhblitsEngine, is_cluster_database
from fastfold.data.search.hmmer import HmmerEngine
from fastfold.data.search.settings import HmmerSettings, SearchSources
from fastfold.data.search.shard_pool import smallest_memory
from fastfold.data.targets import target_from_sequence, unique_stems
from fastfold.errors import ConfigError
from fastfold.utils.machine import available_cores, host_available_bytes
from fastfold.utils.text_files import PathLike
from fastfold.utils.units import parse_bytes


def local_engines(sources: SearchSources) -> list[SearchEngine]:
    """Return an engine per FASTA file, and one for all databases of HH-suite.

    Raises:
        ConfigError: No database is given, two have the same name, the memory is not an amount of memory, or hhblits is
            missing.
        InputError: A database is invalid.
    """
    if not sources.databases:
        raise ConfigError("no database given; name one FASTA file or more")
    settings = replace(sources.hmmer, engine=sources.engine)  # type: ignore[arg-type]
    every = parse_databases(sources.databases)
    clusters = tuple(database for database in every if is_cluster_database(database.path))
    databases = [database for database in every if database not in clusters]
    if not databases and settings != HmmerSettings():
        raise ConfigError(
            "HMMER's settings are for FASTA files, and hhblits searches with AlphaFold's flags; leave them out"
        )
    for database in databases:
        database.check()
    memory = host_available_bytes() // 2 if sources.memory is None else parse_bytes(sources.memory)
    workers = sources.num_workers or max(1, min(available_cores(), memory // smallest_memory()))
    engines: list[SearchEngine] = [
        HmmerEngine(settings, database, num_workers=workers, memory_bytes=memory) for database in databases
    ]
    return [*engines, HhblitsEngine(clusters, workers)] if clusters else engines


def search(
    sequences: str | Mapping[str, str] | Sequence[str],
    databases: PathLike | Sequence[PathLike],
    out: PathLike,
    *,
    num_workers: int = 1,
    memory: str | int | None = None,
    **settings: Any,
) -> Path:
    r"""Search sequence databases for the alignments of sequences.

    Args:
        sequences: A sequence, which is then named ``query``; sequences by name; or a list of them, named ``query_1``,
            ``query_2`` and so on. ``:`` joins the chains of a complex.
        databases: FASTA files, plain or gzipped: ``NAME=FILE``, or a file whose name identifies it
            (``uniref90.fasta``); or the common prefix of an HH-suite database's files.
        out: Folder for the alignments, for ``fastfold.predict(msa=...)`` and ``--msa-dir``. Existing results are not
            searched again.
        num_workers: Number of processes. With more than one, the code of a script must be inside
            ``if __name__ == "__main__":``, because each process reads the script.
        memory: Memory limit for all processes together, for example ``16GiB``; None for half of the free memory.
        settings: Further fields of :class:`~fastfold.data.search.settings.HmmerSettings`: ``engine``, ``iterations``,
            ``e_value`` and so on.

    Raises:
        InputError: A sequence or a database is invalid.
        ConfigError: A setting is invalid.
        OutputError: The folder cannot be written, or has alignments of the same name that are not from a search.

    Example:
        >>> from pathlib import Path
        >>> import fastfold
        >>> sequence = "MTYKLILNGKTLKGETTTEAVDAATAEKVFKQYANDNGVDGEWTYDDATKTFTVTE"
        >>> _ = Path("uniref90.fasta").write_text(f">near\n{sequence.replace('VDAAT', 'VEAAS')}\n")
        >>> folder = fastfold.search({"protein_g": sequence}, "uniref90.fasta", "alignments")
        >>> fastfold.data.read_msa(folder / "protein_g" / "uniref90_hits.sto").descriptions
        ('query', 'near/1-56 ...')
    """
    unknown = sorted(settings.keys() - {one.name for one in fields(HmmerSettings)})
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}")
    listed = (databases,) if isinstance(databases, (str, os.PathLike)) else tuple(databases)
    hmmer = HmmerSettings(**settings)
    sources = SearchSources(
        tuple(os.fspath(database) for database in listed),
        engine=hmmer.engine,
        num_workers=num_workers,
        memory=memory,
        hmmer=hmmer,
    )
    if isinstance(sequences, str):
        named = {"query": sequences}
    elif isinstance(sequences, Mapping):
        named = dict(sequences)
    else:
        named = {f"query_{number}": sequence for number, sequence in enumerate(sequences, 1)}
    stems = unique_stems(list(named))
    targets = [
        target_from_sequence(sequence, stem) for stem, sequence in zip(stems, named.values(), strict=True)
    ]
    SearchPlan(targets, local_engines(sources), Path(out)).run(
        say=lambda line: None, on_step=lambda work, status, cost: None, interval_s=60.0
    )
    return Path(out)
