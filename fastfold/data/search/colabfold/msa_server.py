"""Alignments from an MSA server, whose owner can see the sequences.

One sequence is one query, so that each is requested once and stored separately; the chains of a complex are a query for
pairing. Modes are ColabFold's: ``env`` searches UniRef30 and environmental sequences and filters, ``all`` UniRef30
alone; ``pairgreedy`` pairs rows of one species in two chains or more, ``paircomplete`` in all chains.

A query is posted, then its ticket is polled until it is finished:

- ``POST /ticket/msa`` (or ``/ticket/pair``) with the form fields ``q``, FASTA text, and ``mode``; the answer is JSON
  with ``id`` and ``status``.
- ``GET /ticket/<id>``: the same answer. ``PENDING`` and ``RUNNING`` mean to wait, ``RATELIMIT`` to try later,
  ``COMPLETE`` that a result is ready. ``ERROR`` ends the query, ``MAINTENANCE`` all of them. A server that was just
  started or has forgotten a ticket answers ``UNKNOWN``.
- ``GET /result/download/<id>``: a ``tar.gz`` of files.
- ``GET /template/<name>,<name>``: a ``tar.gz`` of profiles and structures of template hits.

A server answers the same query from its memory, so that a run that was interrupted finds its result there.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from urllib.parse import urlencode

from fastfold.data.search.colabfold.server_templates import MAX_HITS, check_templates, read_archive
from fastfold.data.search.colabfold.source import (
    FILE,
    FIRST_QUERY,
    TEMPLATES,
    Chains,
    ColabFoldSource,
    Files,
    fasta_of,
    split_queries,
)
from fastfold.data.search.settings import ColabFoldModes
from fastfold.errors import InputError, NetworkError, spelled
from fastfold.utils.download.answers import Retries, Say, json_answer, read_answer, tell_nobody
from fastfold.utils.download.http import check_url
from fastfold.utils.download.remote_file import RemoteFile
from fastfold.utils.foreign_text import shown
from fastfold.utils.units import clock

Endpoint = Literal["msa", "pair"]

MAX_RESULT = 1 << 30  #: Largest compressed result in bytes

_MAX_ANSWER = 1 << 20
_DOWNLOAD_S = 3600.0
_SERVER = "an MSA server"
_WAITING = frozenset(("UNKNOWN", "RATELIMIT", "PENDING", "RUNNING"))
_FIRST_WAIT_S, _LONGEST_WAIT_S, _GROWTH = 4.0, 60.0, 1.3


class QueryFailedError(NetworkError):
    """Query that the server cannot answer, while others may succeed."""


class TicketServer:
    """Client of an MSA server at an address.

    ``secrets`` are headers that name the user, for a private server. A query is given up after ``patience_s`` seconds,
    and a connection may be silent for ``timeout_s`` seconds. ``say`` is told of waits and of connections that broke;
    ``pause`` waits a number of seconds of the clock ``now``, which never goes back.

    Raises:
        ConfigError: The address is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        secrets: Mapping[str, str] | None = None,
        patience_s: float = 7200.0,
        timeout_s: float = 60.0,
        say: Say = tell_nobody,
        pause: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = check_url(url, setting="`SearchSources.server`")
        self._secrets = dict(secrets or {})
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._say, self._pause, self._now = say, pause, now

    def result(self, endpoint: Endpoint, query: str, mode: str) -> bytes:
        """Send a query, FASTA text, in a mode of the server, and wait for its ``tar.gz``.

        Raises:
            QueryFailedError: The server fails on this query.
            NetworkError: The server cannot be reached, refuses the query, gives an invalid answer, or takes too long.
        """
        end = self._now() + self._patience_s
        form = urlencode({"q": query, "mode": mode}).encode("ascii")
        ticket, wait = None, _FIRST_WAIT_S
        said = ""
        while True:
            path, data = (f"/ticket/{endpoint}", form) if ticket is None else (f"/ticket/{ticket}", None)
            answer = self._ask(path, data)
            status = answer.get("status")
            if status == "COMPLETE":
                path = f"/result/download/{self._ticket(answer, ticket)}"
                return self._fetch(path)
            if not isinstance(status, str) or status not in _WAITING:
                raise self._failed(status)
            if status in ("PENDING", "RUNNING"):
                ticket = self._ticket(answer, ticket)
            elif status == "UNKNOWN":
                ticket = None  # forgotten, or not accepted yet: send the query again
            if status != said:
                said = str(status)
                self._say(f"{self.url}: {_MEANINGS[said]}")
            if self._now() + wait > end:
                raise NetworkError(
                    f"{self.url}: no result after {clock(self._patience_s)} (the server says {status}). Received "
                    "results are kept; run the same command later to ask again, or search local databases "
                    "(`SearchSources.databases`)"
                )
            self._pause(wait * random.uniform(0.9, 1.1))
            wait = min(wait * _GROWTH, _LONGEST_WAIT_S)

    def structures(self, names: Sequence[str]) -> bytes:
        """Download a ``tar.gz`` of the structures and profiles of template hits such as ``1abc_A``.

        Profiles are a database ``pdb70`` of HH-suite, structures an mmCIF file per entry.

        Raises:
            NetworkError: The server cannot be reached or refuses the request.
        """
        return self._fetch(f"/template/{','.join(names)}")

    def _failed(self, status: object) -> NetworkError:
        kept = "What has arrived is kept"
        if status == "MAINTENANCE":
            return NetworkError(
                f"{self.url}: the server is under maintenance. {kept}; run the same command later"
            )
        if status == "ERROR":
            return QueryFailedError(
                f"{self.url}: the server failed on this query (ERROR). {kept}; run the same command in an hour, or "
                "search local databases (`SearchSources.databases`)"
            )
        return NetworkError(
            f"{self.url}: the server answers with the unknown status {str(status)[:40]!r}; is this the address of an "
            "MSA server?"
        )

    def _ticket(self, answer: dict[str, Any], before: str | None) -> str:
        """Return the number of a ticket, which becomes a part of an address."""
        ticket = answer.get("id", before)
        if not isinstance(ticket, str) or re.fullmatch(r"[A-Za-z0-9_-]{1,200}", ticket) is None:
            raise NetworkError(f"{self.url}: expected a ticket from the server, found {str(ticket)[:40]!r}")
        return ticket

    def _ask(self, path: str, form: bytes | None) -> dict[str, Any]:
        """Send a request whose answer is a ticket."""
        url = f"{self.url}{path}"
        with self._explained():
            text = read_answer(
                url,
                limit=_MAX_ANSWER,
                data=form,
                secrets=self._secrets,
                timeout=self._timeout_s,
                retries=Retries(pause=self._pause, say=self._say),
                now=self._now,
            )
            answer = json_answer(url, text, server=_SERVER)
            if not isinstance(answer, dict):
                raise NetworkError(
                    f"{url}: expected a ticket, found {shown(answer)}; is this the address of {_SERVER}?"
                )
            return answer

    def _fetch(self, path: str) -> bytes:
        """Return a whole file, resumed after a broken connection."""
        with (
            self._explained(),
            RemoteFile(
                f"{self.url}{path}",
                timeout=self._timeout_s,
                seconds=_DOWNLOAD_S,
                secrets=self._secrets,
                retries=Retries(pause=self._pause, say=self._say),
                now=self._now,
            ) as file,
        ):
            return file.read_rest(limit=MAX_RESULT)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to an error that results are kept, or the options of a login if the server refuses a request."""
        try:
            yield
        except NetworkError as error:
            hint = _LOGIN if error.status in (401, 403) else "Received results are kept"
            raise NetworkError(f"{error}. {hint}", status=error.status) from None


_LOGIN = (
    "A private server wants `ServerAccess.username` and `ServerAccess.password`, or `ServerAccess.api_key`; check "
    "them, or ask its owner"
)
_MEANINGS = {
    "UNKNOWN": "the query is not known yet; asking again",
    "RATELIMIT": "too many queries at once; waiting for a turn",
    "PENDING": "the query is waiting in line",
    "RUNNING": "the search is running",
}


_UNIREF, _ENVIRONMENT, _PAIRED = "uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m", "pair.a3m"
_HITS = "pdb70.m8"
_HIT_NAME = re.compile(r"[0-9][0-9A-Za-z]{3}_[0-9A-Za-z]{1,4}", re.ASCII)


class MsaServer(ColabFoldSource):
    """Source of alignments by an MSA server."""

    def __init__(
        self,
        server: TicketServer,
        *,
        modes: ColabFoldModes | None = None,
        say: Say = tell_nobody,
    ) -> None:
        self.modes = modes or ColabFoldModes()
        self._server, self._say = server, say
        self._ignored_templates = False
        self._search_mode = "env" if self.modes.has_environment else "all"
        self._pair_mode = f"pair{self.modes.pair_strategy}"
        if self.modes.has_environment_pairs:
            self._pair_mode += "-env"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The address and the modes; what databases the server has is not known."""
        settings = {
            "engine": "msa server",
            "url": self._server.url,
            "modes": [self._search_mode, self._pair_mode],
        }
        return {**settings, "templates": True} if self.modes.templates else settings

    def announce(self, sequences: Sequence[str], complexes: Sequence[Chains], say: Say) -> None:
        """Announce that sequences leave the machine, with their number and destination."""
        sent = list(dict.fromkeys((*sequences, *(s for chains in complexes for s in chains))))
        number = f"{len(sent)} sequences" if len(sent) > 1 else "1 sequence"
        leaving = (
            f"`SearchSources.server`: leaving this machine for {self._server.url}, whose owner can read and keep the "
            "data: "
        )
        say(spelled(f"{leaving}{number} ({sum(map(len, sent)):,} residues)"))

    def unpaired(self, sequences: Sequence[str]) -> Iterator[tuple[str, Files | QueryFailedError]]:
        for sequence in sequences:
            try:
                data = self._server.result("msa", fasta_of([sequence]), self._search_mode)
            except QueryFailedError as error:
                yield sequence, error
                continue
            files = read_archive(data, frozenset((_UNIREF, _ENVIRONMENT, _HITS)), origin=self._server.url)
            if _UNIREF not in files:
                raise InputError(f"the result lacks {_UNIREF}; is this an MSA server?", path=self._server.url)
            text = self._only(files[_UNIREF], sequence)
            if _ENVIRONMENT in files and self.modes.has_environment:
                text += self._only(files[_ENVIRONMENT], sequence)
            yield sequence, {FILE: text.encode("ascii"), **self._templates(files.get(_HITS, b""))}

    def paired(self, complexes: Sequence[Chains]) -> Iterator[tuple[Chains, list[str] | QueryFailedError]]:
        for chains in complexes:
            try:
                data = self._server.result("pair", fasta_of(chains), self._pair_mode)
            except QueryFailedError as error:
                yield chains, error
                continue
            files = read_archive(data, frozenset((_PAIRED,)), origin=self._server.url)
            if _PAIRED not in files:
                raise InputError(f"the result lacks {_PAIRED}; is this an MSA server?", path=self._server.url)
            yield chains, split_queries(files[_PAIRED], chains, origin=f"{self._server.url} ({_PAIRED})")

    def _only(self, content: bytes, sequence: str) -> str:
        (text,) = split_queries(content, [sequence], origin=self._server.url)
        return text

    def _templates(self, table: bytes) -> Files:
        """Return the file with the best hits' structures and profiles; nothing without hits."""
        if not self.modes.templates and table.strip() and not self._ignored_templates:
            self._ignored_templates = True
            unused = f"{self._server.url} also sent template hits ({_HITS}), which are not used; "
            self._say(
                spelled(f"{unused}`templates` without files fetches their structures from the server, too")
            )
        names = _hit_names(table) if self.modes.templates else []
        if not names:
            return {}
        data = self._server.structures(names)
        check_templates(data, origin=self._server.url)
        return {TEMPLATES: data}


def _hit_names(table: bytes) -> list[str]:
    """Return the PDB chains of a server's best template hits, such as ``1abc_A``."""
    rows = (line.split() for line in table.decode("ascii", "replace").splitlines())
    names = (row[1] for row in rows if len(row) > 1 and row[0] == str(FIRST_QUERY))
    return [name for name in dict.fromkeys(names) if _HIT_NAME.fullmatch(name)][:MAX_HITS]
