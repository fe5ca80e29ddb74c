"""Modes of a search by ColabFold's pipeline, under ColabFold's names, and credentials for a private MSA server."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fastfold.errors import ConfigError
from fastfold.utils.option_fields import option

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas


MsaMode = Literal["mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair", "mmseqs2_uniref", "single_sequence"]
PairMode = Literal["unpaired_paired", "paired", "unpaired"]
PairStrategy = Literal["greedy", "complete"]

PUBLIC_SERVER = "https://api.colabfold.com"
"""Address of ColabFold's public MSA server; requests go there only if a user names it."""
PUBLIC_SERVER_TERMS = (
    f"--msa-server {PUBLIC_SERVER} asks ColabFold's public server, which sees the sequences and allows one query at a "
    "time from one address"
)


@dataclass(frozen=True)
class ColabFoldModes:
    """Databases that are searched, and rows that a complex gets."""

    #: UniRef30 with or without environmental sequences; ``envpair`` pairs chains in both
    msa_mode: MsaMode = "mmseqs2_uniref_env"
    #: Rows of a complex: each chain's own, those that pair chains, or both
    pair_mode: PairMode = "unpaired_paired"
    #: ``greedy`` pairs rows of a species in two chains or more, ``complete`` in all chains
    pair_strategy: PairStrategy = "greedy"
    templates: bool = False  #: Fetch the structures of the server's template hits

    @property
    def has_environment(self) -> bool:
        """True if environmental sequences are searched."""
        return self.msa_mode in ("mmseqs2_uniref_env", "mmseqs2_uniref_env_envpair")

    @property
    def has_environment_pairs(self) -> bool:
        """True if environmental sequences are paired, too."""
        return self.msa_mode == "mmseqs2_uniref_env_envpair"


def select_rows(alignments: Sequence[ChainMsas], pair_mode: PairMode) -> list[ChainMsas]:
    """Keep the rows of a complex that a pair mode selects.

    Args:
        alignments: Own and paired alignments of each chain.
        pair_mode: ``unpaired`` keeps of paired alignments the query alone; ``paired`` drops each chain's own.
    """
    if pair_mode == "paired":
        return [([], paired) for _, paired in alignments]
    if pair_mode == "unpaired":
        return [(own, [msa.take([0]) for msa in paired]) for own, paired in alignments]
    return list(alignments)


_PASSWORD, _API_KEY, _API_KEY_HEADER = "FASTFOLD_MSA_PASSWORD", "FASTFOLD_MSA_API_KEY", "X-API-Key"


def _credential(name: str, metavar: str, help: str, *, is_secret: bool = False) -> Any:
    """Return a field with an option, which can be written with underscores as well."""
    return option(
        f"--{name}",
        f"--{name.replace('-', '_')}",
        default=None,
        group="sources",
        metavar=metavar,
        is_rare=True,
        is_secret=is_secret,
        help=help,
    )


@dataclass(frozen=True)
class ServerAccess:
    """Credentials for an MSA server: a user with a password, or an API key."""

    username: str | None = _credential("msa-server-username", "NAME", "user of a private MSA server")
    password: str | None = _credential(
        "msa-server-password",
        "TEXT",
        f"the user's password (default: {_PASSWORD} of the environment, which other users cannot see)",
        is_secret=True,
    )
    api_key: str | None = _credential(
        "api-key-value",
        "TEXT",
        f"API key of a private MSA server (default: {_API_KEY} of the environment)",
        is_secret=True,
    )
    api_key_header: str | None = _credential(
        "api-key-header", "NAME", f"header of requests that holds the API key (default {_API_KEY_HEADER})"
    )

    def headers(self, server: str) -> dict[str, str]:
        """Return the headers that name the user to a server; empty without credentials.

        The public server gets no key of the environment.

        Raises:
            ConfigError: A part of the credentials is missing or invalid, or there are two kinds.
        """
        key = self.api_key
        if "@" in server:
            raise ConfigError(
                "--msa-server: expected an address without a user; give --msa-server-username NAME"
            )
        if self.username is None and self.password is not None:
            raise ConfigError("--msa-server-password needs --msa-server-username NAME")
        if self.username is not None:
            password = self.password or os.environ.get(_PASSWORD)
            if password is None:
                raise ConfigError(
                    f"--msa-server-username needs a password: set {_PASSWORD} in the environment"
                )
            if key is not None or self.api_key_header is not None:
                raise ConfigError(
                    "an MSA server takes a user with a password, or an API key; give one of the two"
                )
            login = base64.b64encode(f"{self.username}:{password}".encode()).decode("ascii")
            return {"Authorization": f"Basic {login}"}
        is_public = server.rstrip("/") == PUBLIC_SERVER
        key = key or (None if is_public else os.environ.get(_API_KEY))
        name = self.api_key_header or _API_KEY_HEADER
        if key is None:
            if self.api_key_header is not None:
                raise ConfigError(f"--api-key-header needs a key: set {_API_KEY} in the environment")
            return {}
        if re.fullmatch(r"[A-Za-z0-9-]+", name, re.ASCII) is None:
            raise ConfigError(f"--api-key-header: expected letters, digits and hyphens, found {name[:40]!r}")
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("the API key has a character that no header can hold; copy the key again")
        return {name: key}
