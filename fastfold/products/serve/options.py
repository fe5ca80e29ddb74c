"""Options of a server: address, limits and groups."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import LARGEST, check_options, check_whole, option
from fastfold.utils.units import parse_bytes

DEFAULT_PORT = 8470  #: Port of a server, unless another is given
_access = partial(option, group="access")
_limit = partial(option, group="limits", metavar="N")
_JOBS = (1, 1_000_000)


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server other than the fold's, explained by comments or their help.

    A ConfigError tells that one is invalid, or that other machines would reach the server without tokens.
    """

    data: Path = option(
        is_required=True,
        parse=Path,
        group="data",
        metavar="DIR",
        help="folder of the queue and of all results",
    )
    #: Address to listen on; others than the loopback need tokens
    host: str = _access(default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1")
    port: int = _access(
        default=DEFAULT_PORT, bounds=(0, 65_535), help=f"0 for a free one (default {DEFAULT_PORT})"
    )
    #: File of tokens (:func:`fastfold.products.serve.tokens.read_tokens`); None for one user without token
    tokens: Path | None = _access(default=None, parse=Path, metavar="FILE", help="users and their tokens")
    group: int = option(
        default=8,
        bounds=(1, 1000),
        group="machine",
        help="jobs of similar length that a worker gets together (default 8)",
    )
    max_jobs: int = _limit(default=100, bounds=_JOBS, help="unfinished jobs of a user (default 100)")
    max_queue: int = _limit(
        default=10_000, bounds=_JOBS, help="unfinished jobs of all users (default 10,000)"
    )
    max_residues: int | None = _limit(
        default=None, bounds=(1, LARGEST), help="longest target (default: as the memory allows)"
    )
    max_body: int = _limit(
        metavar="SIZE",
        default=64 << 20,
        parse=parse_bytes,
        help="largest request (default 64MiB); an alignment counts in full",
    )
    body_seconds: float = 30.0  #: Seconds in which a request must have arrived
    head_seconds: float = 10.0  #: Seconds in which the head of a request must have arrived
    send_seconds: float = 60.0  #: Seconds in which a client must take a piece of an answer
    max_connections: int = 200  #: Largest number of connections
    keep_days: float | None = _limit(
        default=None, bounds=(0.0, 100_000.0), help="remove finished jobs after N days (default: keep them)"
    )
    quiet: bool = option(default=False, group="messages", help="print only errors")

    def __post_init__(self) -> None:
        check_options(self)
        check_whole("max_connections", self.max_connections, 1, 100_000)
        try:
            is_private = is_loopback(self.host)
        except ValueError:
            raise ConfigError(
                f"`host={self.host}`: expected an IP address, for example 0.0.0.0 for all of IPv4"
            ) from None
        if self.tokens is None and not is_private:
            raise ConfigError(
                f"`host={self.host}` is reachable from other machines, so requests need tokens: give a file with "
                "`tokens`, or leave out `host` to serve this machine only"
            )


def is_loopback(host: str) -> bool:
    """Return True for an address of this machine alone, or ``localhost``; raise ValueError if it is neither."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
