"""Alignments from an MSA server, whose owner can see the sequences.

One sequence is one query, so that each is requested once and stored separately; the chains of a complex are a query for
pairing. Modes are ColabFold's: ``env`` searches UniRef30 and environmental sequences and filters, ``pairgreedy`` pairs
rows of one species in two chains or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastfold.data.search.colabfold.join import fasta_of, split_queries
from fastfold.data.search.colabfold.source import Chains
from fastfold.data.search.colabfold.tickets import QueryFailedError, TicketServer
from fastfold.data.search.colabfold.unpack import read_archive
from fastfold.errors import InputError

_UNIREF, _ENVIRONMENT, _PAIRED = "uniref.a3m", "bfd.mgnify30.metaeuk30.smag30.a3m", "pair.a3m"
_TEMPLATES = "pdb70.m8"
_SEARCH_MODE, _PAIR_MODE = "env", "pairgreedy"


class MsaServer:
    """Source of alignments by an MSA server.

    Args:
        server: The server.
        say: Called with a line about unused parts of results.
    """

    def __init__(self, server: TicketServer, *, say: Callable[[str], None] = lambda line: None) -> None:
        self._server, self._say = server, say
        self._ignored_templates = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """The address and the modes; what databases the server has is not known."""
        return {"engine": "msa server", "url": self._server.url, "modes": [_SEARCH_MODE, _PAIR_MODE]}

    def announce(
        self, sequences: Sequence[str], complexes: Sequence[Chains], say: Callable[[str], None]
    ) -> None:
        """Announce that sequences leave the machine, with their number and destination."""
        sent = list(dict.fromkeys((*sequences, *(s for chains in complexes for s in chains))))
        number = f"{len(sent)} sequences" if len(sent) > 1 else "1 sequence"
        say(
            f"--msa-server: leaving this machine for {self._server.url}, whose owner can read and keep the data: "
            f"{number} ({sum(map(len, sent)):,} residues)"
        )

    def unpaired(self, sequences: Sequence[str]) -> Iterator[tuple[str, str | QueryFailedError]]:
        """Ask for the alignment of each sequence; an error takes the place of one that the server cannot do.

        Raises:
            NetworkError: See :meth:`~fastfold.data.search.colabfold.tickets.TicketServer.result`.
            InputError: The result is invalid.
        """
        for sequence in sequences:
            try:
                data = self._server.result("msa", fasta_of([sequence]), _SEARCH_MODE)
            except QueryFailedError as error:
                yield sequence, error
                continue
            files = read_archive(
                data, frozenset((_UNIREF, _ENVIRONMENT, _TEMPLATES)), origin=self._server.url
            )
            self._mention(files.get(_TEMPLATES, b""))
            if _UNIREF not in files:
                raise InputError(f"the result lacks {_UNIREF}; is this an MSA server?", path=self._server.url)
            text = self._only(files[_UNIREF], sequence)
            if _ENVIRONMENT in files:
                text += self._only(files[_ENVIRONMENT], sequence)
            yield sequence, text

    def paired(self, complexes: Sequence[Chains]) -> Iterator[tuple[Chains, list[str] | QueryFailedError]]:
        """Request the paired rows of each combination of chains; errors are as in :meth:`unpaired`.

        Raises:
            NetworkError: See :meth:`~fastfold.data.search.colabfold.tickets.TicketServer.result`.
            InputError: The result is invalid.
        """
        for chains in complexes:
            try:
                data = self._server.result("pair", fasta_of(chains), _PAIR_MODE)
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

    def _mention(self, templates: bytes) -> None:
        """Say once that template hits are left out."""
        if templates.strip() and not self._ignored_templates:
            self._ignored_templates = True
            self._say(
                f"{self._server.url} also sent template hits ({_TEMPLATES}), which are not used: structures would have "
                "to come from the server as well"
            )
