"""What every way of searching has in common: sequences go in, sets of files come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from fastfold.data.search.store import SearchKey, SearchStore


class Found(NamedTuple):
    """The result of one sequence.

    Attributes:
        sequence: The sequence.
        files: Contents by file name, as they shall lie in the folder of a chain.
        facts: What else is worth knowing, the number of hits for example.
    """

    sequence: str
    files: Mapping[str, bytes]
    facts: Mapping[str, Any]


class Step(NamedTuple):
    """A piece of work that is done.

    Attributes:
        cost: Its part of :meth:`SearchEngine.cost`.
        cells: Residues of the sequences times residues of the database that were compared; 0 where that is unknown.
    """

    cost: float
    cells: float = 0.0


Report = Callable[[Step], None]


class SearchEngine(Protocol):
    """One way to search in one place: a program with its settings and its database, or a server."""

    @property
    def name(self) -> str:
        """What the place is called where a person reads it, and in the key: ``uniref90`` for example."""

    def key(self, store: SearchStore) -> SearchKey:
        """What decides the results besides the sequences."""

    def cost(self, sequences: Sequence[str]) -> float:
        """Work of a search, in bytes of a database that are compared with one residue, or in anything alike."""

    def search(self, sequences: Sequence[str], report: Report) -> Iterator[Found]:
        """Search for distinct sequences, in upper case.

        Args:
            sequences: Upper-case letters.
            report: Called whenever a piece of the work is done.

        Yields:
            Each result as soon as it is finished, in any order.
        """
