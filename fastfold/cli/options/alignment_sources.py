"""Options for the sources of alignments: databases on this machine, or an MSA server."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastfold.data.search.settings import HmmerSettings
from fastfold.errors import ConfigError
from fastfold.utils.packages import require_package

if TYPE_CHECKING:
    from fastfold.data.search.colabfold.source import ColabFoldSource
    from fastfold.inference.alignment_search import Engines

MMSEQS = "mmseqs"
"""Engine that searches ColabFold's databases."""

_FLAGS = {
    "iterations": "--iterations",
    "e_value": "--e-value",
    "include_e_value": "--include-e-value",
    "msv_filter": "--F1",
    "viterbi_filter": "--F2",
    "forward_filter": "--F3",
    "file_format": "--format",
    "memory": "--memory",
}
"""Options of HMMER's programs only, by the names of their settings."""


def add_source_options(parser: Any) -> None:
    """Add ``--db``, ``--engine`` and ``--msa-server`` to a parser or a group."""
    parser.add_argument(
        "--db",
        nargs="+",
        action="extend",
        metavar="[NAME=]FASTA",
        default=[],
        help="databases to search, FASTA (.gz too)",
    )
    parser.add_argument(
        "--engine",
        choices=("jackhmmer", "phmmer", MMSEQS),
        default=HmmerSettings.engine,
        help="phmmer: one pass that aligns more distant domains too; mmseqs: ColabFold's pipeline on its databases "
        f"(default {HmmerSettings.engine})",
    )
    parser.add_argument(
        "--msa-server",
        metavar="URL",
        help="send the sequences to this MSA server, which makes the alignments (default: nothing leaves this machine)",
    )


def add_worker_option(parser: Any) -> None:
    """Add ``--cpu`` to a parser or a group."""
    parser.add_argument(
        "--cpu",
        "--num-workers",
        dest="num_workers",
        type=positive_number,
        metavar="N",
        help="processes that search databases (default: one per core)",
    )


def positive_number(text: str) -> int:
    """Parse a whole number of at least one; an argument type."""
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 to 2147483647")
    return int(text)


def alignment_engines(options: argparse.Namespace) -> Engines:
    """Return the engines for the options of :func:`add_source_options`; none without databases or server.

    Args:
        options: Parsed options. Fields of :class:`~fastfold.data.search.settings.HmmerSettings`, ``memory`` and ``gpu``
            count too, if present.

    Raises:
        ConfigError: Options contradict each other, or a program is missing.
        InputError: A database cannot be used.
    """
    if options.msa_server is not None or options.engine == MMSEQS:
        return _colabfold_source(options)
    if not options.db:
        return ()
    require_package("pyhmmer", "a search of FASTA files (--db)")
    from fastfold.data.search.local import LocalSearch

    given = {one.name: getattr(options, one.name) for one in fields(HmmerSettings) if one.name in options}
    memory = getattr(options, "memory", None)
    return LocalSearch(tuple(options.db), HmmerSettings(**given), options.num_workers, memory).engines()


def _colabfold_source(options: argparse.Namespace) -> ColabFoldSource:
    """Return the source of alignments like ColabFold's, which has its own settings."""
    misplaced = [
        flag
        for name, flag in _FLAGS.items()
        if getattr(options, name, None) not in (None, getattr(HmmerSettings, name, None))
    ]
    if options.msa_server is not None and options.engine != HmmerSettings.engine:
        misplaced.append("--engine")
    if misplaced:
        raise ConfigError(
            f"{', '.join(misplaced)}: not for this way to search, whose settings are ColabFold's"
        )
    if options.msa_server is not None:
        return _server(options)
    if len(options.db) != 1:
        raise ConfigError("--engine mmseqs takes one folder of databases: --db FOLDER")
    from fastfold.data.search.colabfold.mmseqs import MmseqsSource

    return MmseqsSource(Path(options.db[0]), threads=options.num_workers, gpu=getattr(options, "gpu", False))


def _server(options: argparse.Namespace) -> ColabFoldSource:
    """Return the MSA server of the options."""
    if options.db:
        raise ConfigError("--db searches on this machine, --msa-server on another one; give one of the two")
    from fastfold.data.search.colabfold.msa_server import MsaServer
    from fastfold.data.search.colabfold.tickets import TicketServer

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    return MsaServer(TicketServer(options.msa_server, say=say), say=say)
