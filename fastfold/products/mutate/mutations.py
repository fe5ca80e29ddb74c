"""Mutations of a target: read, checked, and applied to its sequences and alignments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.msa.msa import ChainMsas, Msa
from fastfold.data.targets import Chain, Target, unique_stems
from fastfold.errors import ConfigError, InputError
from fastfold.protein.residue_constants import mask_unknown, restypes
from fastfold.utils.text_files import read_text_bytes, split_lines

ALL = "all"  #: Value of ``--mutations`` for every substitution of every residue

_LIMIT = 1 << 26
_MUTATION = re.compile(r"(?:(?P<chain>[A-Za-z0-9]+):)?(?P<old>[A-Z])(?P<number>\d{1,6})(?P<new>[A-Z])")
_RANGE = re.compile(r"(?:(?P<chain>[A-Za-z0-9]+):)?(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?")


@dataclass(frozen=True)
class Mutation:
    """Substitution of one residue."""

    chains: tuple[int, ...]  #: Chains that carry it, by their index; copies of a chain are mutated together
    number: int  #: Residue number in the whole protein, from 1
    old: str  #: Letter of the wild type
    new: str  #: Letter of the mutant
    prefix: str = ""  #: Name of the chain and a colon where the target has several chains, otherwise empty

    def __str__(self) -> str:
        """Return the mutation as ``A24G`` or ``B:A24G``."""
        return f"{self.prefix}{self.old}{self.number}{self.new}"


Variant = tuple[Mutation, ...]  #: Mutations of one mutant


def read_variants(target: Target, mutations: str, positions: str | None = None) -> list[Variant]:
    """Read the mutants of a target, without repetitions, in their order.

    Args:
        target: The wild type.
        mutations: ``all``; a file with a mutant per line; or mutants joined by commas. The mutations of one mutant are
            joined by ``+``: ``A24G``, ``A24G+K30R``, ``B:A24G`` for one chain of a complex. In a line of a file commas
            and blanks join them too.
        positions: For ``all``, residues such as ``5-20,B:3``; None for all residues.

    Raises:
        ConfigError: Positions are given without ``all``.
        InputError: A mutation is malformed or does not fit the target; names its line. Or there is none.
    """
    if mutations == ALL:
        if not (scan := list(_scan(target, positions))):
            raise InputError(
                "no mutation: all of the residues are unknown (X); choose others with `positions`"
            )
        return scan
    if positions is not None:
        raise ConfigError("`positions` chooses the residues of `mutations=all`; leave out one of them")
    path = Path(mutations)
    if os.path.isfile(path):  # False for a list that is too long for a file's name
        lines = split_lines(read_text_bytes(path, limit=_LIMIT).decode("utf-8", "replace"))
        listed = ((number, text.partition("#")[0].strip()) for number, text in enumerate(lines, 1))
        rows = [(number, text) for number, text in listed if text]
        if rows:
            _check_no_header(rows[0][1], path, rows[0][0])
        variants = [_variant(target, text, path, number) for number, text in rows]
    elif all(_MUTATION.fullmatch(part) for one in mutations.split(",") for part in one.split("+")):
        variants = [_variant(target, text, None, None) for text in mutations.split(",")]
    else:
        raise InputError(
            "no such file; give a file with a mutant per line (A24G, A24G+K30R), mutants joined by commas, or all",
            path=path,
        )
    if not variants:
        raise InputError("contains no mutation; write a mutant such as A24G in each line", path=path)
    return list(dict.fromkeys(variants))


def _check_no_header(text: str, path: Path, line: int) -> None:
    """Refuse a first line that names the columns of a table."""
    cells = re.split(r"[+,;\s]+", text)
    if not any(_MUTATION.fullmatch(cell) or any(map(str.isdigit, cell)) for cell in cells):
        message = f"expected a mutant such as A24G in each line, found the header of a table ({text[:40]!r})"
        raise InputError(f"{message}; remove it, and all columns but the mutants", path=path, line=line)


def _variant(target: Target, text: str, path: Path | None, line: int | None) -> Variant:
    try:
        mutations = [_mutation(target, part) for part in re.split(r"[+,\s]+", text)]
        places = [(index, one.number) for one in mutations for index in one.chains]
        if len(set(places)) < len(places):
            raise InputError(f"{text[:40]!r} changes a residue twice")
    except InputError as error:
        raise InputError(str(error), path=path, line=line) from None
    return tuple(sorted(mutations, key=lambda one: (one.chains, one.number)))


def _mutation(target: Target, text: str) -> Mutation:
    if (match := _MUTATION.fullmatch(text)) is None:
        raise InputError(f"expected a mutation such as A24G or B:A24G, found {text[:20]!r}")
    old, number, new = match["old"], int(match["number"]), match["new"]
    chains = _chains(target, match["chain"], text)
    one = target.chains[chains[0]]
    _check_residue(one, number, text)
    index = one.numbers.index(number)
    letter = (one.letters or one.sequence)[index]
    if old not in (letter, one.sequence[index]):  # U, B and Z are also X
        raise InputError(f"{text}: residue {number} is {letter}, not {old}; count residues from 1")
    if new not in restypes:
        raise InputError(f"{text}: {new} is not one of the 20 amino acids")
    if new == old:
        raise InputError(f"{text}: the residue is {old} already; the wild type is folded anyway")
    return Mutation(chains, number, old, new, _prefix(target, chains))


def _chains(target: Target, name: str | None, text: str) -> tuple[int, ...]:
    """Return the chains of a mutation: the named one, or all copies if there is one sequence."""
    ids = [chain.id for chain in target.chains]
    if name is not None:
        for copies in _copies(target):
            if name == "".join(ids[index] for index in copies):  # as the table of results names them
                return copies
        if name not in ids:
            raise InputError(f"{text}: the target has no chain {name!r}; its chains are {', '.join(ids)}")
        return (ids.index(name),)
    if len({chain.sequence for chain in target.chains}) > 1:
        raise InputError(f"{text}: the target has different chains; name one, as in {ids[0]}:{text}")
    return tuple(range(len(ids)))


def _copies(target: Target) -> list[tuple[int, ...]]:
    """Return the chains of each sequence."""
    copies: dict[str, list[int]] = {}
    for index, chain in enumerate(target.chains):
        copies.setdefault(chain.sequence, []).append(index)
    return list(map(tuple, copies.values()))


def _prefix(target: Target, chains: Sequence[int]) -> str:
    """Return the name of the chain before a mutation, if it does not concern all chains."""
    if len(chains) == len(target.chains):
        return ""
    return "".join(target.chains[index].id for index in chains) + ":"


def _check_residue(chain: Chain, number: int, text: str) -> None:
    if number not in chain.numbers:
        raise InputError(
            f"{text}: the chain has no residue {number}; its residues are {chain.numbers[0]} to {chain.numbers[-1]}"
        )


def _scan(target: Target, positions: str | None) -> Iterator[Variant]:
    """Yield every substitution of the positions, of all copies of a chain together."""
    wanted = None if positions is None else _positions(target, positions)
    for chains in _copies(target):
        chain = target.chains[chains[0]]
        for number, old in zip(chain.numbers, chain.sequence, strict=True):
            if old == "X" or (wanted is not None and (chains, number) not in wanted):
                continue
            for new in sorted(restypes):
                if new != old:
                    yield (Mutation(chains, number, old, new, _prefix(target, chains)),)


def _positions(target: Target, text: str) -> set[tuple[tuple[int, ...], int]]:
    """Parse positions such as ``5-20,B:3``."""
    positions = set()
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part.strip())) is None:
            raise ConfigError(f"`positions`: expected residues such as 5-20,30 or B:3, found {part[:20]!r}")
        named = target.chains[_chains(target, match["chain"], part.strip())[0]]
        chains = tuple(i for i, chain in enumerate(target.chains) if chain.sequence == named.sequence)
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if last < first:
            raise ConfigError(f"`positions`: {part.strip()}: the last residue comes before the first")
        for number in range(first, last + 1):
            try:
                _check_residue(named, number, f"`positions={part.strip()}`")
            except InputError as error:
                raise ConfigError(str(error)) from None
            positions.add((chains, number))
    return positions


@dataclass(frozen=True, eq=False)
class MutantAlignments(Sequence[ChainMsas]):
    """Alignments of a mutant's whole chains, made when they are read, because a scan has thousands of mutants."""

    alignments: Sequence[ChainMsas]
    old: tuple[Chain, ...]
    new: tuple[Chain, ...]

    def __len__(self) -> int:
        return len(self.new)

    def __getitem__(self, index: Any) -> Any:
        """Return the alignments of a chain, with the mutant in the query's row."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        old, new = self.old[index].uncut, self.new[index].uncut
        own, paired = self.alignments[index]
        return [_with_query(msa, old, new) for msa in own], [_with_query(msa, old, new) for msa in paired]


def mutant_targets(
    target: Target, alignments: Sequence[ChainMsas], variants: Sequence[Variant]
) -> list[Target]:
    """Return the mutants of a wild type, from the alignments of its whole chains.

    They share its templates and alignments, whose query rows alone differ.
    """
    suffixes = [f"_{'+'.join(map(str, one)).replace(':', '-')}" for one in variants]
    records = [f"{target.record}{suffix}" for suffix in suffixes]
    stems = unique_stems([target.name, *(f"{target.name}{suffix}" for suffix in suffixes)])[1:]
    mutants = []
    for variant, record, stem in zip(variants, records, stems, strict=True):
        chains = tuple(_mutant_chain(chain, index, variant) for index, chain in enumerate(target.chains))
        own = MutantAlignments(alignments, target.chains, chains)
        mutants.append(replace(target, name=stem, record=record, chains=chains, alignments=own, warnings=()))
    return mutants


def _mutant_chain(chain: Chain, index: int, variant: Variant) -> Chain:
    changes = {one.number: one.new for one in variant if index in one.chains}
    if not changes:
        return chain

    def changed(letters: str, numbers: Sequence[int]) -> str:
        pairs = zip(letters, numbers, strict=bool(letters))
        return "".join(changes.get(number, letter) for letter, number in pairs)

    return replace(
        chain,
        sequence=changed(chain.sequence, chain.numbers),
        letters=changed(chain.letters, chain.numbers),
        whole=changed(chain.whole, range(1, len(chain.whole) + 1)),
    )


def _with_query(msa: Msa, old: Chain, new: Chain) -> Msa:
    """Return an alignment whose first row is the mutant, if it was the wild type."""
    if old.sequence == new.sequence or mask_unknown(msa.sequences[0]) != old.sequence:
        return msa
    return replace(msa, sequences=(new.letters or new.sequence, *msa.sequences[1:]))


def mutated_residues(target: Target, variant: Variant) -> np.ndarray:
    """Return the indices of a mutant's changed residues among all residues of a target, int64."""
    starts = np.cumsum([0, *(len(chain.sequence) for chain in target.chains)])
    places = [(index, one.number) for one in variant for index in one.chains]
    residues = [starts[index] + target.chains[index].numbers.index(number) for index, number in places]
    return np.array(residues, np.int64)
