"""Interface of search engines: sequences in, sets of files out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fastfold.data.search.store import SearchKey, SearchStore


class Found(NamedTuple):
    """Result for one sequence."""

    sequence: str
    files: Mapping[str, bytes]  #: Contents by file name in the folder of a chain
    facts: Mapping[str, Any]  #: Further facts, for example the number of hits


class Step(NamedTuple):
    """Finished piece of work."""

    cost: float  #: Its part of :meth:`SearchEngine.cost`
    cells: float = 0.0  #: Compared residues of sequences times residues of the database; 0 if unknown


Report = Callable[[Step], None]


class SearchEngine(Protocol):
    """Search in one database or server: a program with its settings, or a server."""

    @property
    def name(self) -> str:
        """Name of the database or server in lines and in the key, for example ``uniref90``."""

    def key(self, store: SearchStore) -> SearchKey:
        """Return the inputs of the results other than sequences."""

    def cost(self, sequences: Sequence[str]) -> float:
        """Return the work of a search, for example in database bytes compared with one residue."""

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for distinct sequences in upper case; yield each result when it is finished, in any order."""
