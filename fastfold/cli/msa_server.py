"""``--msa-server``: the option by which sequences may leave the machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from fastfold.errors import ConfigError

if TYPE_CHECKING:
    from fastfold.data.search.colabfold.msa_server import MsaServer


def add_server_option(parser: Any) -> None:
    """Add ``--msa-server`` to a parser or a group."""
    parser.add_argument(
        "--msa-server",
        metavar="URL",
        help="send the sequences to this MSA server, which makes the alignments (default: nothing leaves this machine)",
    )


def server_source(options: argparse.Namespace) -> MsaServer:
    """The server that was asked for.

    Args:
        options: ``msa_server``, ``db`` and ``quiet`` count.

    Raises:
        ConfigError: The address is none, or databases are to be searched as well.
    """
    if options.db:
        raise ConfigError("--db searches on this machine, --msa-server elsewhere; give one of the two")
    from fastfold.data.search.colabfold.msa_server import MsaServer
    from fastfold.data.search.colabfold.tickets import TicketServer

    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    return MsaServer(TicketServer(options.msa_server, say=say), say=say)
