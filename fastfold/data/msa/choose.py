"""Choose the alignment files of a target, chain by chain, the user's before those of searches.

A chain has rows of its own and rows that are paired with other chains'. Both are chosen separately, own rows from the
first of these that exists:

1. files of the user for the chain,
2. files of the user for the whole target,
3. results of a search for the chain in the target's folder,
4. results of a search for the whole target,
5. results of a search for the chain under another name, such as that of its FASTA record.

Chains of a complex with different sequences are paired by UniProt hits of all of them, or by one alignment of the
complex; here as well the user's files come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastfold.data.msa.search_listing import search_of


class PlaceFiles(NamedTuple):
    """Alignment files at one place of a folder of alignments."""

    own: tuple[Path, ...] = ()  #: Rows of a chain, or of a whole target
    paired: tuple[Path, ...] = ()  #: UniProt hits
    complex_pairs: tuple[Path, ...] = ()  #: Rows of a complex that pair its chains, in ColabFold's format
    is_home: bool = False  #: True for the place of a search for the chain
    empty: Path | None = None  #: The place, if it is a folder without an alignment


class ChosenRows(NamedTuple):
    """Files with one kind of a chain's rows."""

    files: tuple[Path, ...] = ()
    of_complex: bool = False  #: True if each file has rows of all chains, in ColabFold's format

    def is_given(self, repeats: Callable[[str], bool]) -> bool:
        """Return True if a file is not from the searches for whose names ``repeats`` is True."""
        return any(name is None or not repeats(name) for name in map(search_of, self.files))


@dataclass(frozen=True)
class ChosenFiles:
    """Alignment files of a target by the sequence of a chain."""

    own: Mapping[str, ChosenRows]  #: Rows of each chain alone
    pairs: Mapping[str, ChosenRows]  #: Rows that are paired with other chains'
    empty: Path | None = None  #: A folder that should have an alignment, and has none

    def files(self, sequence: str) -> list[Path]:
        """Return the files of a chain without repeats, those of its own rows first."""
        return list(dict.fromkeys((*self.own[sequence].files, *self.pairs[sequence].files)))


def choose_files(
    chains: Mapping[str, Sequence[PlaceFiles]],
    whole: Sequence[PlaceFiles],
    *,
    is_complex: bool,
    is_joined: Callable[[Path], bool],
) -> ChosenFiles:
    """Choose files among those at the places of each chain, by sequence, and of the whole target.

    ``is_joined`` tells whether a file is in ColabFold's format for complexes. Errors are those of ``is_joined``.
    """
    is_hetero = len(chains) > 1
    of_chains = {path for places in chains.values() for place in places for path in place.own}
    whole = [place._replace(own=tuple(p for p in place.own if p not in of_chains)) for place in whole]
    if is_hetero and all(any(place.own for place in places) for places in chains.values()):
        # Only needed to pair the chains.
        whole = [place._replace(own=tuple(filter(is_joined, place.own))) for place in whole]
    own = {}
    for sequence, places in chains.items():
        options = (
            ChosenRows(_first(_users(place.own for place in places))),
            ChosenRows(_first(_users(place.own for place in whole)), is_hetero),
            ChosenRows(_first(place.own for place in places if place.is_home)),
            ChosenRows(_first(place.own for place in whole), is_hetero),
            ChosenRows(_first(place.own for place in places)),
        )
        own[sequence] = next((rows for rows in options if rows.files), ChosenRows())
    pairs = _choose_pairs(chains, whole) if is_hetero else _uniprot(chains, whole)
    has_chain_files = any(place.own or place.paired for places in chains.values() for place in places)
    return ChosenFiles(own, pairs, _empty(chains, whole, own, has_chain_files and is_complex))


def _uniprot(
    chains: Mapping[str, Sequence[PlaceFiles]], whole: Sequence[PlaceFiles] = (), *, users: bool = False
) -> dict[str, ChosenRows]:
    """Return the UniProt hits of each chain, of the user alone or also of searches."""
    hits = {}
    for sequence, places in chains.items():
        files = [place.paired for place in (*places, *whole)]
        mine = _first(_users(files))
        hits[sequence] = ChosenRows(mine if users else mine or _first(files))
    return hits


def _choose_pairs(
    chains: Mapping[str, Sequence[PlaceFiles]], whole: Sequence[PlaceFiles]
) -> dict[str, ChosenRows]:
    """Return the first source of pairs that has rows of all chains, or the UniProt hits of some."""
    joined = [files for place in whole for files in (place.complex_pairs, place.own)]
    every = _uniprot(chains)
    options = (
        _uniprot(chains, users=True),
        dict.fromkeys(chains, ChosenRows(_first(_users(joined)), True)),
        every,
        dict.fromkeys(chains, ChosenRows(_first(joined), True)),
    )
    return next((pairs for pairs in options if all(rows.files for rows in pairs.values())), every)


def _empty(
    chains: Mapping[str, Sequence[PlaceFiles]],
    whole: Sequence[PlaceFiles],
    own: Mapping[str, ChosenRows],
    has_chain_files: bool,
) -> Path | None:
    """Return the first empty folder of a chain without files, or of a target without any."""
    if not has_chain_files and any(place.own or place.complex_pairs for place in whole):
        return None
    lacking = [
        place
        for sequence, places in chains.items()
        if not own[sequence].files and not any(place.paired for place in places)
        for place in places
    ]
    candidates = lacking if has_chain_files else [*whole, *lacking]
    return next((place.empty for place in candidates if place.empty is not None), None)


def _users(groups: Iterable[tuple[Path, ...]]) -> Iterable[tuple[Path, ...]]:
    """Yield the groups of files with at least one of the user's."""
    return (files for files in groups if any(search_of(path) is None for path in files))


def _first(groups: Iterable[tuple[Path, ...]]) -> tuple[Path, ...]:
    return next((files for files in groups if files), ())
