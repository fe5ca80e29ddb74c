"""Options for the sources of alignments: databases on this machine, or an MSA server."""

from __future__ import annotations

import argparse
import base64
import os
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from fastfold.cli.options.from_fields import whole_number
from fastfold.cli.options.help_all import mark_rare
from fastfold.data.search.colabfold.modes import (
    PUBLIC_SERVER,
    PUBLIC_SERVER_TERMS,
    ColabFoldModes,
    MsaMode,
    PairMode,
    PairStrategy,
)
from fastfold.data.search.settings import HmmerSettings
from fastfold.errors import ConfigError
from fastfold.utils.packages import require_package

if TYPE_CHECKING:
    from fastfold.data.search.colabfold.source import ColabFoldSource
    from fastfold.inference.alignment_search import Engines

MMSEQS = "mmseqs"
"""Engine that searches ColabFold's databases."""

_PASSWORD, _API_KEY, _API_KEY_HEADER = "FASTFOLD_MSA_PASSWORD", "FASTFOLD_MSA_API_KEY", "X-API-Key"

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
        help="databases to search: FASTA (.gz too), or the beginning of the names of an HH-suite database's files "
        "(…/UniRef30_2021_03; needs hhblits)",
    )
    parser.add_argument(
        "--databases",
        "--data-dir",
        "--data_dir",
        type=Path,
        metavar="DIR",
        help="folder of AlphaFold's databases (uniref90/, mgnify/ ...): search those that it has, for templates too; "
        "'fastfold databases download' fills it",
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
        help="send the sequences to this MSA server, which makes the alignments (default: nothing leaves this "
        f"machine); {PUBLIC_SERVER} is ColabFold's public one, for one query at a time from one address",
    )
    parser.add_argument(
        "--msa-mode",
        choices=get_args(MsaMode),
        help="databases of --msa-server or --engine mmseqs: UniRef30 with or without environmental sequences; "
        "single_sequence: no alignment (default: all that there are)",
    )
    parser.add_argument(
        "--pair-mode",
        choices=get_args(PairMode),
        help="alignment rows of a complex: each chain's own, paired ones, or both (default "
        f"{ColabFoldModes.pair_mode})",
    )
    strategy = parser.add_argument(
        "--pair-strategy",
        choices=get_args(PairStrategy),
        help="greedy: pair rows of a species in two chains or more; complete: in all chains (default "
        f"{ColabFoldModes.pair_strategy})",
    )
    user = parser.add_argument(
        "--msa-server-username", "--msa_server_username", metavar="NAME", help="user of a private MSA server"
    )
    password = parser.add_argument(
        "--msa-server-password",
        "--msa_server_password",
        metavar="TEXT",
        help=f"the user's password (default: {_PASSWORD} of the environment, which other users cannot see)",
    )
    key = parser.add_argument(
        "--api-key-value",
        "--api_key_value",
        metavar="TEXT",
        help=f"API key of a private MSA server (default: {_API_KEY} of the environment)",
    )
    header = parser.add_argument(
        "--api-key-header",
        "--api_key_header",
        metavar="NAME",
        help=f"header of requests that holds the API key (default {_API_KEY_HEADER})",
    )
    for action in (strategy, user, password, key, header):
        mark_rare(action)


def add_worker_option(parser: Any) -> None:
    """Add ``--cpu`` to a parser or a group."""
    parser.add_argument(
        "--cpu",
        "--num-workers",
        dest="num_workers",
        type=whole_number(1),
        metavar="N",
        help="processes that search databases (default: one per core)",
    )


def alignment_engines(options: argparse.Namespace) -> Engines:
    """Return the engines for the options of :func:`add_source_options`; none without databases or server.

    Args:
        options: Parsed options. Fields of :class:`~fastfold.data.search.settings.HmmerSettings`, ``memory`` and ``gpu``
            count too, if present.

    Raises:
        ConfigError: Options contradict each other, or a program is missing.
        InputError: A database cannot be used.
    """
    modes = _modes(options)
    if modes.msa_mode == "single_sequence":
        return ()
    if options.msa_server is not None or options.engine == MMSEQS:
        return _colabfold_source(options, modes)
    if not options.db:
        return ()
    require_package("pyhmmer", "a search of FASTA files (--db)")
    from fastfold.data.search.local import LocalSearch

    given = {one.name: getattr(options, one.name) for one in fields(HmmerSettings) if one.name in options}
    memory = getattr(options, "memory", None)
    return LocalSearch(tuple(options.db), HmmerSettings(**given), options.num_workers, memory).engines()


def find_databases_of(options: argparse.Namespace) -> None:
    """Set ``--db`` and the options of templates by the folder of ``--databases``.

    Raises:
        ConfigError: The folder does not go with another option.
        InputError: The folder has no database.
    """
    if options.databases is None:
        return
    if options.msa_server is not None or options.engine == MMSEQS:
        other = "--msa-server" if options.msa_server is not None else f"--engine {MMSEQS}"
        raise ConfigError(f"--databases searches AlphaFold's databases on this machine; leave out {other}")
    from fastfold.data.databases.layout import find_databases

    found = find_databases(options.databases)
    options.db = [*options.db, *found.sequences]
    has_templates = "template_db" in options
    for remark in found.remarks:
        if not options.quiet and (has_templates or "templates" not in remark):
            print(f"{options.databases}: {remark}", file=sys.stderr, flush=True)
    if has_templates and options.template_db is None and found.template_database is not None:
        options.template_db = found.template_database
        options.template_mmcif_dir = options.template_mmcif_dir or found.mmcif_dir
        options.has_optional_templates = True


def wants_server_templates(options: argparse.Namespace) -> bool:
    """Return True if ``--templates`` was given without files."""
    return getattr(options, "templates", None) in (True, [])


def _modes(options: argparse.Namespace) -> ColabFoldModes:
    """Return the modes of the options.

    Raises:
        ConfigError: A mode does not go with the source of alignments.
    """
    searches = options.msa_server is not None or options.engine == MMSEQS
    templates = wants_server_templates(options)
    if options.msa_mode == "single_sequence":
        others = [
            flag
            for flag, value in (("--db", options.db), ("--msa-dir", getattr(options, "msa_dir", None)))
            if value
        ]
        others += ["--templates without files"] if templates else []
        if others:
            raise ConfigError(
                f"--msa-mode single_sequence uses no alignment and asks no server; leave out {', '.join(others)}"
            )
    elif not searches:
        for flag, value in (("--msa-mode", options.msa_mode), ("--pair-strategy", options.pair_strategy)):
            if value is not None:
                raise ConfigError(
                    f"{flag} {value} needs --msa-server URL, or --engine mmseqs with --db FOLDER; {PUBLIC_SERVER_TERMS}"
                )
    if templates and not searches and getattr(options, "msa_dir", None) is None:
        raise ConfigError(
            "--templates without files fetches the template hits of an MSA server: add --msa-server URL, or name "
            f"structures after it; {PUBLIC_SERVER_TERMS}"
        )
    return ColabFoldModes(
        msa_mode=options.msa_mode or ColabFoldModes.msa_mode,
        pair_mode=options.pair_mode or ColabFoldModes.pair_mode,
        pair_strategy=options.pair_strategy or ColabFoldModes.pair_strategy,
        templates=templates,
    )


def _colabfold_source(options: argparse.Namespace, modes: ColabFoldModes) -> ColabFoldSource:
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
        return _server(options, modes)
    if len(options.db) != 1:
        raise ConfigError("--engine mmseqs takes one folder of databases: --db FOLDER")
    from fastfold.data.search.colabfold.mmseqs import MmseqsSource, has_environment

    folder = Path(options.db[0])
    if options.msa_mode is None and not has_environment(folder):
        modes = replace(modes, msa_mode="mmseqs2_uniref")
    return MmseqsSource(folder, modes=modes, threads=options.num_workers, gpu=getattr(options, "gpu", False))


def _server(options: argparse.Namespace, modes: ColabFoldModes) -> ColabFoldSource:
    """Return the MSA server of the options."""
    if options.db:
        raise ConfigError("--db searches on this machine, --msa-server on another one; give one of the two")
    from fastfold.data.search.colabfold.msa_server import MsaServer
    from fastfold.data.search.colabfold.tickets import TicketServer

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    return MsaServer(
        TicketServer(options.msa_server, secrets=_secrets(options), say=say), modes=modes, say=say
    )


def _secrets(options: argparse.Namespace) -> dict[str, str]:
    """Return the headers that name the user to a private server.

    Raises:
        ConfigError: A part of the credentials is missing, or there are two kinds.
    """
    user, key = options.msa_server_username, options.api_key_value
    if "@" in options.msa_server:
        raise ConfigError("--msa-server: expected an address without a user; give --msa-server-username NAME")
    if user is None and options.msa_server_password is not None:
        raise ConfigError("--msa-server-password needs --msa-server-username NAME")
    if user is not None:
        password = options.msa_server_password or os.environ.get(_PASSWORD)
        if password is None:
            raise ConfigError(f"--msa-server-username needs a password: set {_PASSWORD} in the environment")
        if key is not None or options.api_key_header is not None:
            raise ConfigError(
                "an MSA server takes a user with a password, or an API key; give one of the two"
            )
        secrets = {
            "Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode('ascii')}"
        }
    else:
        is_public = options.msa_server.rstrip("/") == PUBLIC_SERVER
        key = key or (None if is_public else os.environ.get(_API_KEY))
        if key is None and options.api_key_header is not None:
            raise ConfigError(f"--api-key-header needs a key: set {_API_KEY} in the environment")
        if key is None:
            return {}
        secrets = {options.api_key_header or _API_KEY_HEADER: key}
    for name, value in secrets.items():
        if re.fullmatch(r"[A-Za-z0-9-]+", name, re.ASCII) is None:
            raise ConfigError(f"--api-key-header: expected letters, digits and hyphens, found {name[:40]!r}")
        if not (value.isascii() and value.isprintable()):
            raise ConfigError("the API key has a character that no header can hold; copy the key again")
    if options.msa_server.startswith("http://"):
        print("warning: --msa-server begins with http://: credentials are sent unencrypted", file=sys.stderr)
    return secrets
