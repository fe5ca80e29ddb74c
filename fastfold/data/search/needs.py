"""Decide for which chains of a target a search is needed: those without an alignment in the folder.

Files of the user, and results of another kind of source, are used as they are. Results of the same kind are requested
again, which finds them in the store unless a setting or a database has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastfold.data.msa.choose import ChosenFiles, ChosenRows
from fastfold.data.msa.find import chosen_files, read_chosen
from fastfold.data.search.database import PAIRING
from fastfold.data.search.settings import PairMode
from fastfold.data.targets import Target
from fastfold.utils.foreign_text import first_few

COLABFOLD = "colabfold"  #: Name of searches by an MSA server or MMseqs2
_MOST_FILES = 3


@dataclass(frozen=True)
class SearchNeeds:
    """Chains of a target to search for, and the files of the others."""

    target: Target  #: The target with all residues of its proteins
    own: frozenset[str]  #: Sequences without an alignment
    pairs: frozenset[str]  #: Sequences without rows that are paired with other chains'
    files: ChosenFiles  #: Files that replace a search
    #: True if the species of rows pair the target's chains, which differ or are other parts of one protein
    is_paired: bool = False

    @property
    def is_hetero(self) -> bool:
        """True if the target has chains of different sequences."""
        return len(self.files.own) > 1

    def has_pairing(self, pair_mode: PairMode) -> bool:
        """Return True if a search of whole complexes pairs the chains.

        Own rows count as the alignment of a chain, unless the mode uses pairs alone.
        """
        is_searched = bool(self.own) or pair_mode == "paired"
        return self.is_hetero and pair_mode != "unpaired" and is_searched and bool(self.pairs)

    def wants(self, sequence: str, database: str) -> bool:
        """Return True if a sequence is searched for in a database on this machine."""
        return sequence in (self.pairs if database == PAIRING else self.own)

    def check(self) -> None:
        """Read the files that replace a search, or raise InputError."""
        read_chosen(self.files, self.target)

    def line(self, *, has_pairing: bool) -> str:
        """Return a line about the files that replace a search, empty without any.

        ``has_pairing`` is True if a search pairs the chains.
        """
        name, chains = self.target.name, self.target.chains
        used: dict[tuple[Path, ...], list[str]] = {}
        for chain in chains:
            if paths := self.files.own[chain.sequence].files:
                used.setdefault(paths, []).append(chain.id)
        if not used:
            return ""
        texts = []
        for paths, ids in used.items():
            who = f"chain{'s' if len(ids) > 1 else ''} {', '.join(ids)} " if len(chains) > 1 else ""
            texts.append(f"{who}{'use' if len(ids) > 1 else 'uses'} {_listed(paths)}")
        missing = [chain.id for chain in chains if chain.sequence in self.own]
        rest = "not searched"
        if missing:
            rest = f"searching chain{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        end = ", pairing all chains" if has_pairing else ""
        return f"{name}: {', '.join(texts)}; {rest}{end}"


def find_needs(out: Path, target: Target, *, by_colabfold: bool) -> SearchNeeds:
    """Find the chains of a target without an alignment in its input or in a folder, which may not exist.

    ``by_colabfold`` is True for MSA servers and MMseqs2, and False for databases on this machine.

    Raises:
        InputError: The folder cannot be searched.
    """
    whole = target.uncut
    sequences = frozenset(chain.sequence for chain in whole.chains)
    nothing = dict.fromkeys(sequences, ChosenRows())
    files = ChosenFiles(nothing, nothing)
    if out.exists():
        chosen = chosen_files(out, whole)

        def select(rows: Mapping[str, ChosenRows]) -> dict[str, ChosenRows]:
            def repeats(search: str) -> bool:
                return (search == COLABFOLD) == by_colabfold

            return {
                sequence: one if one.is_given(repeats) else ChosenRows() for sequence, one in rows.items()
            }

        files = ChosenFiles(select(chosen.own), select(chosen.pairs))
    decided = {chain.sequence for index, chain in enumerate(whole.chains) if target.has_alignment(index)}
    own = frozenset(s for s in sequences - decided if not files.own[s].files)
    unpaired = frozenset(s for s in sequences - decided if not files.pairs[s].files)
    is_paired = len({chain.sequence for chain in target.chains}) > 1
    # UniProt's hits of a single kind of chain are of no use next to an alignment that is there.
    has_use = len(sequences) > 1 or (is_paired and not by_colabfold)
    return SearchNeeds(whole, own, unpaired if has_use else unpaired & own, files, is_paired)


def _listed(files: tuple[Path, ...]) -> str:
    return first_few([str(file) for file in files], _MOST_FILES)
