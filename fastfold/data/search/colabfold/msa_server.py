"""Alignments from an MSA server, whose owner can see the sequences.

One sequence is one query, so that each is requested once and stored separately; the chains of a complex are a query for
pairing. Modes are ColabFold's: ``env`` searches UniRef30 and environmental sequences and filters, ``all`` UniRef30
alone; ``pairgreedy`` pairs rows of one species in two chains or more, ``paircomplete`` in all chains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastfold.data.search.colabfold.modes import ColabFoldModes
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
from fastfold.data.search.colabfold.tickets import QueryFailedError, TicketServer
from fastfold.errors import InputError

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
        say: Callable[[str], None] = lambda line: None,
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
            self._say(
                f"{self._server.url} also sent template hits ({_HITS}), which are not used; --templates without files "
                "fetches their structures from the server, too"
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
