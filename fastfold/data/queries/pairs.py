"""Complexes from lists of proteins: all against all, baits against candidates, and tables of partners.

The complex of ``P1`` and ``P2`` is named ``P1_and_P2``, and its chains keep the names of their records, by which their
alignments are found. Therefore the alignment of a protein serves all of its complexes. A complex occurs once,
regardless of the order of its proteins. Partners have AlphaPulldown's notation: ``P``, ``P:2``, ``P:1-100`` and
``P:2:1-100:150-200``.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastfold.data.queries.fasta import MAX_FASTA_BYTES
from fastfold.data.queries.read import TABLE_ENDINGS, file_ending, read_targets
from fastfold.data.queries.records import check_identifier
from fastfold.data.targets import (
    Chain,
    FoundTarget,
    Target,
    make_chains,
    mask_unknown,
    parse_sequence,
    safe_stem,
    unique_targets,
)
from fastfold.errors import InputError
from fastfold.protein.protein import chain_name
from fastfold.utils.foreign_text import table_cells, table_delimiter, table_rows
from fastfold.utils.text_files import PathLike, read_text_bytes, split_lines

_PARTNER = re.compile(r"chain_([1-9]\d{0,2})")
_JOINED = "_and_"
_NO_PROTEINS = "is a list of names, because it has no '>' header; give `proteins=FILE` with their sequences"


def read_proteins(path: PathLike) -> tuple[list[Target], list[InputError]]:
    """Read the proteins of a FASTA file, table or folder, with one error for each invalid record.

    Records are read as by :func:`fastfold.data.queries.read.read_targets`; ``:`` in a sequence joins chains that stay
    together.
    """
    targets, errors = read_targets([path])
    usable = []
    for target in targets:
        if target.alignments is None and target.templates is None:
            doubt = ("the seeds of its input are not used",) if target.seeds else ()
            usable.append(replace(target, warnings=(*target.warnings, *doubt)))
            continue
        kind = "templates, which" if target.alignments is None else "an alignment, which"
        message = (
            f"has {kind} cannot be used for a complex from a list; put the alignment into the folder of alignments and "
            "the sequence into a FASTA file"
        )
        errors.append(InputError(message, path=target.source, record=target.record))
    return usable, errors


def read_partners(
    path: PathLike, proteins: Sequence[Target] | None = None
) -> tuple[list[Partner], list[InputError]]:
    """Read a list of proteins, or of names such as ``P:2`` or ``P:1-100``, with one error for each invalid entry.

    The list is a FASTA file, table or folder (:func:`read_proteins`), or text with a name per line if the ``proteins``
    are given.
    """
    if not is_name_list(path):
        read, errors = read_proteins(path)
        return [Partner(protein) for protein in read], errors
    if proteins is None:
        return [], [InputError(_NO_PROTEINS, path=path)]
    known = {protein.record: protein for protein in proteins}
    partners, errors = [], []
    for line, text in _lines(path):
        try:
            partners.append(parse_partner(text, known, path=path, line=line))
        except InputError as error:
            errors.append(error)
    return partners, errors


def is_name_list(path: PathLike) -> bool:
    """Return True if a file called ``.txt`` holds names and no FASTA."""
    if not os.fspath(path).lower().endswith((".txt", ".txt.gz")):
        return False
    first = next((text for _, text in _lines(path)), "")
    return bool(first) and not first.startswith((">", ";"))


def _lines(path: PathLike) -> list[tuple[int, str]]:
    """Return the lines with text, and their numbers from 1; comments begin with ``#``."""
    text = read_text_bytes(path, limit=MAX_FASTA_BYTES).decode("utf-8", "surrogateescape")
    lines = [(number, line.strip()) for number, line in enumerate(split_lines(text), 1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_complexes(
    path: PathLike, proteins: Sequence[Target] | None
) -> tuple[list[Target], list[InputError]]:
    """Read complexes from lines such as ``P:2+Q:1-100``, with one error for each invalid line.

    AlphaPulldown has such a line per complex, whose partners ``+`` joins. They are names of the ``proteins``.

    Raises:
        InputError: There are no proteins, or the file cannot be read.
    """
    if proteins is None:
        raise InputError(_NO_PROTEINS, path=path)
    known = {protein.record: protein for protein in proteins}
    complexes: dict[object, FoundTarget] = {}
    errors: list[InputError] = []
    for line, text in _lines(path):
        try:
            partners = [parse_partner(one.strip(), known, path=path, line=line) for one in text.split("+")]
        except InputError as error:
            errors.append(error)
            continue
        complexes.setdefault(_key(partners), _joined(partners, path, line))
    return unique_targets(list(complexes.values()), errors), errors


def all_against_all(proteins: Sequence[Partner], *, homodimers: bool = False) -> list[Target]:
    """Return every pair of the proteins of a list, in its order; with ``homodimers`` also each with itself."""
    pairs = itertools.combinations_with_replacement if homodimers else itertools.combinations
    return _complexes(pairs(proteins, 2))


def baits_against_candidates(baits: Sequence[Partner], *candidates: Sequence[Partner]) -> list[Target]:
    """Return every bait with one candidate of each list in every way, in the order of the lists.

    A protein in two lists is also joined with itself.

    Raises:
        InputError: A name has one sequence in a list and another in a later one.
    """
    known: dict[str, Target] = {}
    for protein in (partner.protein for partner in itertools.chain(baits, *candidates)):
        earlier = known.setdefault(protein.record, protein)
        if _sequences(earlier) != _sequences(protein):
            raise InputError(
                f"has another sequence in an earlier list ({earlier.source}); rename one of the two",
                path=protein.source,
                record=protein.record,
            )
    return _complexes(itertools.product(baits, *candidates))


def is_pair_table(path: PathLike) -> bool:
    """Return True if a file is a readable table with a column ``chain_1``."""
    if file_ending(path) not in TABLE_ENDINGS:
        return False
    try:
        text = read_text_bytes(path, limit=MAX_FASTA_BYTES).decode("utf-8", "replace")
    except InputError:
        return False
    first = next((line for line in text.splitlines() if line.strip()), "")
    return "chain_1" in [cell.strip().strip('"').lower() for cell in first.split(table_delimiter(text))]


def read_pair_table(
    path: PathLike, proteins: Sequence[Target] | None = None
) -> tuple[list[Target], list[InputError]]:
    """Read the complexes of a CSV or TSV, with partners in columns ``chain_1``, ``chain_2``, ...

    A column ``id`` may name the complexes; other columns are ignored. Cells at the end of a row may be empty. Unnamed
    rows with the same partners, in any order, are one complex. Cells are names of the ``proteins`` (``P``, ``P:2``,
    ``P:1-100``), or sequences without proteins. Each invalid row is one error.

    Raises:
        InputError: The file cannot be read, or its first line does not name the columns.
    """
    text = read_text_bytes(path, limit=MAX_FASTA_BYTES).decode("utf-8", "surrogateescape")
    rows = table_rows(text, path, table_delimiter(text))
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    columns = sorted(
        (int(match[1]), i) for i, name in enumerate(header) if (match := _PARTNER.fullmatch(name))
    )
    if [number for number, _ in columns] != list(range(1, len(columns) + 1)) or header.count("id") > 1:
        raise InputError(
            "the first line must name the columns chain_1, chain_2 and so on, each once, and optionally id",
            path=path,
            line=rows[0][0] if rows else None,
        )
    if len(rows) < 2:
        raise InputError("the table contains no row after the column names; add one per complex", path=path)
    known = None if proteins is None else {protein.record: protein for protein in proteins}
    complexes: dict[object, FoundTarget] = {}
    errors: list[InputError] = []
    for line, cells in rows[1:]:
        try:
            row = table_cells(header, cells, path=path, line=line)
            name = row.get("id", "").strip()
            members = _row_members([cells[i].strip() for _, i in columns], name, known, path=path, line=line)
        except InputError as error:
            errors.append(error)
            continue
        # Partners in another order are the same complex, unless the table names it.
        key = line if name else _key(members)
        if key in complexes:
            first = complexes[key]
            doubt = (
                f"line {line} of {Path(path).name} has the same partners as line {first.line}; folded once"
            )
            warnings = (*first.target.warnings, doubt)
            complexes[key] = first._replace(target=replace(first.target, warnings=warnings))
        else:
            complexes[key] = _joined(members, path, line, name=name)
    return unique_targets(list(complexes.values()), errors), errors


def _row_members(
    partners: list[str], name: str, known: dict[str, Target] | None, *, path: PathLike, line: int
) -> list[Partner]:
    """Return the partners of a row, by name or, if none are known, of its sequences."""
    while partners and not partners[-1]:
        partners.pop()
    if not all(partners) or not partners:
        message = "lacks a chain in a column before another; fill the columns from chain_1 on"
        raise InputError(message, path=path, line=line)
    if known is None and not name:
        message = "lacks a name; add a column id to a table of sequences"
        raise InputError(message, path=path, line=line)
    shown = name or _JOINED.join(partners)
    check_identifier(shown, path, line)
    if known is None:
        return [_of_sequence(partner, path, line, name) for partner in partners]
    return [parse_partner(one, known, path=path, line=line, record=shown) for one in partners]


def _of_sequence(text: str, path: PathLike, line: int, name: str) -> Partner:
    sequences, warnings = parse_sequence([text], path=path, record=name, first_line=line)
    return Partner(Target("", make_chains(sequences), os.fspath(path), "", tuple(warnings)))


def _name(partners: Sequence[Partner]) -> str:
    return _JOINED.join(partner.name for partner in partners)


def _key(partners: Sequence[Partner]) -> tuple[object, ...]:
    """Return the key of a complex, the same for any order of its partners."""
    return tuple(sorted(one for partner in partners for one in partner.key))


def _sequences(protein: Target) -> tuple[str, ...]:
    """Return the sequences of a protein's chains as given."""
    return tuple(chain.letters or chain.sequence for chain in protein.chains)


def _complexes(groups: Iterable[Sequence[Partner]]) -> list[Target]:
    """Return a target for each group of partners that has not come in another order."""

    def distinct() -> Iterator[FoundTarget]:
        seen = set()
        for group in groups:
            key = _key(group)
            if key not in seen:
                seen.add(key)
                yield _joined(group, group[0].protein.source, None)

    errors: list[InputError] = []
    targets = unique_targets(list(distinct()), errors)
    if errors:
        raise errors[0]
    return targets


def _joined(partners: Sequence[Partner], path: PathLike, line: int | None, *, name: str = "") -> FoundTarget:
    """Return the complex of some partners, named after them by default, whose chains have their records' names."""
    chains = [chain for partner in partners for chain in partner.chains]
    named = tuple(replace(chain, id=chain_name(number)) for number, chain in enumerate(chains))
    doubts = dict.fromkeys(
        f"{partner.protein.record}: {warning}" if partner.protein.record else warning
        for partner in partners
        for warning in partner.protein.warnings
    )
    record, key = (name, ()) if name else (_name(partners), _key(partners))
    target = Target(safe_stem(record), named, os.fspath(path), record, tuple(doubts), partners=key)
    return FoundTarget(target, path, line)


MAX_COPIES = 100

_RANGE = re.compile(r"([0-9]{1,6})-([0-9]{1,6})", re.ASCII)
_COPIES = re.compile(r"[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True)
class Partner:
    """A protein of a complex, or parts of it, in a number of copies."""

    protein: Target  #: The whole protein
    copies: int = 1  #: Number of copies
    #: First and last residue of each part, from 1; empty for all residues
    regions: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        """Name in names of complexes: ``P``, ``P_x2``, ``P_1-100_150-200`` or ``P_1-100_x2``."""
        ranges = "".join(f"_{first}-{last}" for first, last in self.regions)
        return f"{self.protein.record}{ranges}" + (f"_x{self.copies}" if self.copies > 1 else "")

    @property
    def key(self) -> list[tuple[str, tuple[str, ...], tuple[tuple[int, int], ...]]]:
        """Record, sequences and regions of each copy, for comparing complexes."""
        return [(self.protein.record, _sequences(self.protein), self.regions)] * self.copies

    @property
    def chains(self) -> list[Chain]:
        """Chains of all copies, with identifiers that are still to be given."""
        record, has_several = self.protein.record, self.protein.is_complex
        named = [
            replace(chain, record=record, record_chain=chain.id if record and has_several else "")
            for chain in self.protein.chains
        ]
        return [_cut_chain(chain, self.regions) for chain in named] * self.copies


def parse_partner(
    text: str, proteins: Mapping[str, Target], *, path: PathLike, line: int, record: str | None = None
) -> Partner:
    """Parse a partner: a name, ``:`` and a number of copies, ``:`` and a range for each part.

    A name of the ``proteins`` that has colons itself is taken as it is. Errors name ``path`` and ``line``, and the
    ``record`` of the complex.

    Raises:
        InputError: The protein is unknown, or a number or range does not fit it.
    """

    def fail(problem: str) -> InputError:
        return InputError(problem, path=path, line=line, record=record)

    if text in proteins:
        return Partner(proteins[text])
    name, *parts = text.split(":")
    while name not in proteins and parts and not _RANGE.fullmatch(parts[0]):
        name = f"{name}:{parts.pop(0)}"
    if name not in proteins:
        raise fail(
            f"the list of proteins lacks {text.partition(':')[0][:60]!r}; add it there, or correct the name"
        )
    protein, copies = proteins[name], 1
    if parts and _COPIES.fullmatch(parts[0]):
        copies = int(parts.pop(0))
        if not 1 <= copies <= MAX_COPIES:
            raise fail(f"{text[:60]!r}: expected 1 to {MAX_COPIES} copies, found {copies}")
    matches = [_RANGE.fullmatch(part) for part in parts]
    regions = [(int(match[1]), int(match[2])) for match in matches if match is not None]
    if len(regions) < len(parts):
        wrong = next(part for part, match in zip(parts, matches, strict=True) if match is None)
        raise fail(
            f"{text[:60]!r}: expected a range such as 1-100 after the number of copies, found {wrong[:20]!r}"
        )
    if regions and protein.is_complex:
        raise fail(f"{text[:60]!r}: {name} has several chains; give ranges of proteins with one chain")
    before = 0
    for first, last in regions:
        if not before < first <= last <= protein.num_residues:
            raise fail(
                f"{text[:60]!r}: expected ranges from 1 to {protein.num_residues}, the length of {name}, in order and "
                f"without overlap, found {first}-{last}"
            )
        before = last
    whole = regions == [(1, protein.num_residues)]
    return Partner(protein, copies, () if whole else tuple(regions))


def _cut_chain(chain: Chain, regions: Sequence[tuple[int, int]]) -> Chain:
    """Return parts of a whole chain, by first and last residue from 1, as one chain."""
    if not regions:
        return chain
    whole = chain.letters or chain.sequence
    letters = "".join(whole[first - 1 : last] for first, last in regions)
    sequence = mask_unknown(letters)
    return replace(
        chain,
        sequence=sequence,
        letters="" if letters == sequence else letters,
        whole=whole,
        regions=tuple(regions),
    )
