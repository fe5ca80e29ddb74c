"""Options of a server: address, limits and groups."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from fastfold.errors import ConfigError

DEFAULT_PORT = 8470  #: Port of a server, unless another is given


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server other than the fold's.

    Raises:
        ConfigError: A number is out of range, or the address is invalid, or other machines reach it without tokens.
    """

    data: Path  #: Folder of the queue and the results
    host: str = "127.0.0.1"  #: Address to listen on; others than the loopback need tokens
    port: int = DEFAULT_PORT  #: Port; 0 for a free one
    #: File of tokens (:func:`fastfold.inference.serve.tokens.read_tokens`); None for one user without token
    tokens: Path | None = None
    group: int = 8  #: Largest number of jobs of similar length that a worker gets together
    max_jobs: int = 100  #: Largest number of unfinished jobs of a user
    max_queue: int = 10_000  #: Largest number of unfinished jobs of all users
    #: Largest number of residues of a target; None for the memory's limit alone
    max_residues: int | None = None
    max_body: int = 64 << 20  #: Largest number of bytes of a request
    body_seconds: float = 30.0  #: Seconds in which a request must have arrived
    head_seconds: float = 10.0  #: Seconds in which the head of a request must have arrived
    send_seconds: float = 60.0  #: Seconds in which a client must take a piece of an answer
    max_connections: int = 200  #: Largest number of connections
    #: Days after which finished jobs and their files are removed; None to keep them
    keep_days: float | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65_535),
            ("group", 1, 1000),
            ("max_jobs", 1, 1_000_000),
            ("max_queue", 1, 1_000_000),
            ("max_connections", 1, 100_000),
        ):
            if not least <= getattr(self, name) <= most:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must be from {least} to {most:,}, found {getattr(self, name):,}")
        if self.max_residues is not None and self.max_residues < 1:
            raise ConfigError(f"--max-residues must be at least 1, found {self.max_residues:,}")
        try:
            is_private = is_loopback(self.host)
        except ValueError:
            raise ConfigError(
                f"--host {self.host}: expected an IP address, for example 0.0.0.0 for all of IPv4"
            ) from None
        if self.tokens is None and not is_private:
            raise ConfigError(
                f"--host {self.host} is reachable from other machines, so requests need tokens: give a file with "
                "--tokens, or leave out --host to serve this machine only"
            )


def is_loopback(host: str) -> bool:
    """Return True for an address of this machine alone, or ``localhost``; raise ValueError if it is neither."""
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
