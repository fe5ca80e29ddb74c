"""Residues of a target by the names of restraint files."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from fastfold.data.targets import Target
from fastfold.protein.metrics.chain_mapping import corresponding_residues

_PREFIXES = {"sp", "tr"}
"""Names of databases in front of UniProt's accessions, as in ``sp|P02768|ALBU_HUMAN``."""


class Residues:
    """Residues of a target, whose places are counted from 0 through all chains.

    Residues have the names of outputs: chains and numbers of a given structure, otherwise chains of the input or A, B
    and so on, and numbers in the whole protein from 1.

    Args:
        target: The target.
        names: Name of each chain in a file, whose residues are counted from 1; None for those of the target.
    """

    def __init__(self, target: Target, names: Sequence[str] | None = None) -> None:
        self.chains = target.chains
        self.names = [chain.id for chain in self.chains] if names is None else names
        self.letters = "".join(chain.sequence for chain in self.chains)
        #: Letters of the whole proteins, through which residues without chain names are counted
        self.whole_letters = "".join(chain.uncut.sequence for chain in self.chains)
        self._starts = [0, *accumulate(len(chain.sequence) for chain in self.chains)]
        before = accumulate((len(chain.uncut.sequence) for chain in self.chains), initial=0)
        counted = [
            start + number
            for start, chain in zip(before, self.chains, strict=False)
            for number in chain.numbers
        ]
        self._by_count = {count: place for place, count in enumerate(counted)}
        self._index = [number for chain in self.chains for number in chain.residue_index.tolist()]
        self._numbers = [
            number
            for chain in self.chains
            for number in (
                chain.residue_labels if names is None else map(str, range(1, len(chain.sequence) + 1))
            )
        ]
        self._by_number = {
            (name, self._numbers[place]): place for name in self.names for place in self.chain_places(name)
        }

    def chain_places(self, name: str) -> range:
        """Return the places of a chain's residues, or raise ValueError."""
        if name not in self.names:
            raise ValueError(f"unknown chain {name!r}; the target has {', '.join(self.names)}")
        number = list(self.names).index(name)
        return range(self._starts[number], self._starts[number + 1])

    def atoms_of_chain(self, name: str) -> list[int]:
        """Return the places of a chain's residues that have atoms in a prediction, or raise ValueError."""
        return [place for place in self.chain_places(name) if self.letters[place] != "X"]

    def protein_chain(self, protein: str) -> str:
        """Return the name of a protein's first chain, or raise ValueError.

        A protein is named by a chain, by the identifier of a chain's FASTA record, or by a part of one between ``|``.
        """
        records = [chain.record for chain in self.chains]
        parts = set(protein.split("|")) - _PREFIXES
        by_record = [protein == record for record in records]
        if not any(by_record):
            by_record = [bool(parts & (set(record.split("|")) - _PREFIXES - {""})) for record in records]
        matching = [number for number, matches in enumerate(by_record) if matches]
        if protein in self.names:
            number = list(self.names).index(protein)
            if matching and number not in matching:
                raise ValueError(
                    f"protein {protein!r} is chain {protein}, and the record of chain {self.names[matching[0]]}; "
                    "rename the record"
                )
            return protein
        if not matching:
            records = [record for record in dict.fromkeys(records) if record]
            raise ValueError(
                f"unknown chain {protein!r}; the target has {', '.join([*self.names, *records])}; name proteins by "
                "chains or FASTA records"
            )
        if len({self.chains[number].sequence for number in matching}) > 1:
            names = ", ".join(self.names[number] for number in matching)
            raise ValueError(f"protein {protein!r} may be each of the chains {names}; name the chain")
        return self.names[matching[0]]

    def place(self, chain: str, residue: str) -> int:
        """Return the place of a residue such as ``10``, ``K10`` or ``52A`` of a chain, or raise ValueError."""
        places = self.chain_places(chain)
        if "@" in residue:
            raise ValueError(f"atoms such as {residue!r} are not supported; name the residue alone")
        if (match := re.fullmatch(r"([A-Z])?(-?)0*(\d{1,9}[A-Za-z]?)", residue, re.ASCII)) is None:
            raise ValueError(f"expected a residue number such as 10 or K10, found {residue!r}")
        number = match[2] + match[3]
        if (place := self._by_number.get((chain, number))) is None:
            first, last = (self._numbers[one] for one in (places[0], places[-1]))
            raise ValueError(f"chain {chain} has residues {first} to {last}, found {number}")
        letter = self.letters[place]
        if match[1] and match[1] != letter:
            raise ValueError(f"residue {number} of chain {chain} is {letter}, found {residue}")
        return self._with_atoms(place)

    def numbered(self, residue: str) -> int:
        """Return the place of a residue counted from 1 through all whole proteins, or raise ValueError."""
        if re.fullmatch(r"\d{1,9}", residue, re.ASCII) is None:
            raise ValueError(f"expected a residue number such as 10, found {residue!r}")
        number, total = int(residue), len(self.whole_letters)
        if not 1 <= number <= total:
            raise ValueError(f"the target has residues 1 to {total}, found {number}")
        if (place := self._by_count.get(number)) is None:
            raise ValueError(
                f"residue {number} of {total} is not in the parts that the target has of its proteins"
            )
        return self._with_atoms(place)

    def _with_atoms(self, place: int) -> int:
        if self.letters[place] == "X":
            raise ValueError(
                f"residue {self.label(place)} is unknown (X) and has no atoms in a prediction; remove it"
            )
        return place

    def chain_number(self, place: int) -> int:
        """Return the number of a residue's chain, from 0."""
        return bisect_right(self._starts, place) - 1

    def label(self, place: int) -> str:
        """Return a residue as messages name it: ``A:K10``."""
        number = self.chain_number(place)
        return f"{self.names[number]}:{self.letters[place]}{self._numbers[place]}"

    def separation(self, first: int, second: int) -> int | None:
        """Return the number of peptide bonds between two residues; None for two chains.

        Residues left out between parts of a protein count.
        """
        if self.chain_number(first) != self.chain_number(second):
            return None
        return abs(self._index[first] - self._index[second])

    def copies(self, place: int) -> list[int]:
        """Return the places of a residue in all copies of its chain that have it, its own first."""
        own = self.chain_number(place)
        others = (
            self._starts[other] + offset
            for other in range(len(self.chains))
            if other != own and (offset := self._in_copy(own, other, place - self._starts[own])) is not None
        )
        return [place, *others]

    def _in_copy(self, own: int, other: int, offset: int) -> int | None:
        """Return the number in a copy of the residue ``offset`` of a chain; None in chains that lack it."""
        chain, copy = self.chains[own], self.chains[other]
        if chain.sequence == copy.sequence:
            return offset
        if chain.entity == copy.entity:  # copies in a structure, which lack different residues
            residues = corresponding_residues(
                chain.sequence, copy.sequence, chain.residue_index, copy.residue_index
            )
            return dict(residues.tolist()).get(offset)
        are_parts = not (chain.indices or copy.indices) and chain.uncut.sequence == copy.uncut.sequence
        number = chain.numbers[offset]
        return copy.numbers.index(number) if are_parts and number in copy.numbers else None

    def ambiguous_pairs(self, first: int, second: int) -> list[tuple[int, int]]:
        """Return the pairs of residues that an experiment cannot tell apart, the named one first.

        Each end is in any copy of its chain. Raises ValueError if a residue can only pair with itself.
        """
        unique: dict[frozenset[int], tuple[int, int]] = {}
        for a in self.copies(first):
            for b in self.copies(second):
                if a != b:
                    unique.setdefault(frozenset((a, b)), (a, b))
        if not unique:
            raise ValueError(
                f"links residue {self.label(first)} to itself, and the target has one copy of its chain; add a copy, "
                "or remove the line"
            )
        return list(unique.values())
