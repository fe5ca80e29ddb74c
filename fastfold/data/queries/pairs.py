"""Complexes from lists of proteins: all against all, baits against candidates, and tables of partners.

The complex of ``P1`` and ``P2`` is named ``P1_and_P2``, and its chains keep the names of their records, by which their
alignments are found. Therefore the alignment of a protein serves all of its complexes. A complex occurs once,
regardless of the order of its proteins.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fastfold.data.fasta import MAX_FASTA_BYTES, Record, check_identifier, found_target
from fastfold.data.queries.read import TABLE_ENDINGS, read_targets
from fastfold.data.queries.table import table_delimiter, table_rows
from fastfold.data.targets import FoundTarget, Target, parse_sequence, unique_targets
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, read_text_bytes

_PARTNER = re.compile(r"chain_([1-9]\d{0,2})")
_JOINED = "_and_"


def read_proteins(path: PathLike) -> tuple[list[Target], list[InputError]]:
    """Read the proteins of a list, as :func:`fastfold.data.queries.read.read_targets` reads targets.

    Args:
        path: FASTA file, table or folder; ``:`` in a sequence joins chains that stay together.

    Returns:
        The proteins, and one error for each invalid record.
    """
    targets, errors = read_targets([path])
    usable = []
    for target in targets:
        if target.alignments is None:
            usable.append(target)
            continue
        message = (
            "has an alignment, which cannot be used for a complex from a list; put the alignment into the folder of "
            "alignments and the sequence into a FASTA file"
        )
        errors.append(InputError(message, path=target.source, record=target.record))
    return usable, errors


def all_against_all(proteins: Sequence[Target], *, homodimers: bool = False) -> list[Target]:
    """Return every pair of the proteins of a list.

    Args:
        proteins: The proteins.
        homodimers: Pair each protein with itself as well.

    Returns:
        Pairs in the order of the list.
    """
    pairs = itertools.combinations_with_replacement if homodimers else itertools.combinations
    return _complexes(pairs(proteins, 2))


def baits_against_candidates(baits: Sequence[Target], candidates: Sequence[Target]) -> list[Target]:
    """Return every bait with every candidate; a protein in both lists is also paired with itself.

    Args:
        baits: First of each pair.
        candidates: Second of each pair.

    Raises:
        InputError: A name has one sequence among the baits and another among the candidates.
    """
    known = {bait.record: bait for bait in baits}
    for candidate in candidates:
        bait = known.get(candidate.record, candidate)
        if _sequences(bait) != _sequences(candidate):
            raise InputError(
                f"has another sequence among the baits ({bait.source}); rename one of the two",
                path=candidate.source,
                record=candidate.record,
            )
    return _complexes(itertools.product(baits, candidates))


def is_pair_table(path: PathLike) -> bool:
    """Return True if a file is a readable table with a column ``chain_1``."""
    if not _is_table(path):
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
    """Read the complexes of a table: one per row, with partners in columns ``chain_1``, ``chain_2``, ...

    A column ``id`` may name the complexes; other columns are ignored. Cells at the end of a row may be empty. Unnamed
    rows with the same partners, in any order, are one complex.

    Args:
        path: File with suffix ``.csv`` or ``.tsv``, plain or ``.gz``.
        proteins: Proteins by the partners' names; None if the table contains sequences.

    Returns:
        The complexes, and one error for each invalid row.

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
    read = partial(_read_row, path, header, [i for _, i in columns], known)
    found: dict[object, FoundTarget] = {}
    errors: list[InputError] = []
    for line, cells in rows[1:]:
        try:
            one = read(line, cells)
        except InputError as error:
            errors.append(error)
            continue
        # Partners in another order are the same complex, unless the table names it.
        named = "id" in header and bool(cells[header.index("id")].strip())
        key: object = line if named else tuple(sorted(cells[i].strip() for i in (c for _, c in columns)))
        if key in found:
            first = found[key]
            doubt = (
                f"line {line} of {Path(path).name} has the same partners as line {first.line}; folded once"
            )
            warnings = (*first.target.warnings, doubt)
            found[key] = first._replace(target=replace(first.target, warnings=warnings))
        else:
            found[key] = one
    return unique_targets(list(found.values()), errors), errors


def _read_row(
    path: PathLike,
    header: Sequence[str],
    columns: Sequence[int],
    known: dict[str, Target] | None,
    line: int,
    cells: Sequence[str],
) -> FoundTarget:
    """Parse the complex of a row."""
    if len(cells) != len(header):
        raise InputError(
            f"has {len(cells)} columns, the first line names {len(header)}; quote cells that contain the separator",
            path=path,
            line=line,
        )
    partners = [cells[i].strip() for i in columns]
    while partners and not partners[-1]:
        partners.pop()
    if not all(partners) or not partners:
        message = "lacks a chain in a column before another; fill the columns from chain_1 on"
        raise InputError(message, path=path, line=line)
    name = cells[header.index("id")].strip() if "id" in header else ""
    if known is None and not name:
        message = "lacks a name; add a column id to a table of sequences"
        raise InputError(message, path=path, line=line)
    name = name or _JOINED.join(partners)
    check_identifier(name, path, line)
    members = [_member(partner, known, path, line, name) for partner in partners]
    return _joined(members, name, path, line)


def _member(partner: str, known: dict[str, Target] | None, path: PathLike, line: int, name: str) -> Record:
    """Return a partner: the protein of that name, or the given sequence."""
    if known is None:
        sequences, warnings = parse_sequence([partner], path=path, record=name, first_line=line)
        return Record("", line, sequences, warnings)
    if partner not in known:
        raise InputError(
            f"the list of proteins lacks {partner[:60]!r}; add it there, or correct the name",
            path=path,
            line=line,
            record=name,
        )
    return _record(known[partner])


def _record(protein: Target) -> Record:
    return Record(protein.record, 1, list(_sequences(protein)), list(protein.warnings))


def _sequences(protein: Target) -> tuple[str, ...]:
    """Return the sequences of a protein's chains as given."""
    return tuple(chain.letters or chain.sequence for chain in protein.chains)


def _complexes(groups: Iterable[Sequence[Target]]) -> list[Target]:
    """Build a target for each group of proteins that did not occur in another order."""

    def found() -> Iterator[FoundTarget]:
        seen = set()
        for group in groups:
            key = tuple(sorted(protein.record for protein in group))
            if key not in seen:
                seen.add(key)
                name = _JOINED.join(protein.record for protein in group)
                yield _joined([_record(protein) for protein in group], name, group[0].source, 1)

    errors: list[InputError] = []
    targets = unique_targets(list(found()), errors)
    if errors:
        raise errors[0]
    return targets


def _joined(members: Sequence[Record], name: str, path: PathLike, line: int) -> FoundTarget:
    """Join some proteins to a complex, whose chains have the names of their records."""
    sequences = [sequence for member in members for sequence in member.sequences]
    records = [m.identifier if len(m.sequences) == 1 else "" for m in members for _ in m.sequences]
    doubts = dict.fromkeys(
        f"{member.identifier}: {warning}" if member.identifier else warning
        for member in members
        for warning in member.warnings
    )
    return found_target(path, line, name, sequences, warnings=list(doubts), records=records)


def _is_table(path: PathLike) -> bool:
    return os.path.splitext(os.fspath(path).lower().removesuffix(".gz"))[1] in TABLE_ENDINGS
