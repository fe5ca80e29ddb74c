"""Files of queries, their records, and the targets of these.

Each format has a parser that returns the records of a file. Here they become targets, alike for all formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from fastfold.data.targets import FoundTarget, Target, make_chains, safe_stem
from fastfold.errors import InputError
from fastfold.protein.protein import chain_name
from fastfold.utils.text_files import PathLike

if TYPE_CHECKING:
    from fastfold.data.msa.msa import ChainMsas
    from fastfold.data.templates.features import ForcedTemplate
    from fastfold.data.templates.whole.given import Features


class QueryFile(NamedTuple):
    """Content of a file of queries."""

    path: PathLike  #: Path of the file
    data: bytes  #: Its content, unpacked

    @property
    def stem(self) -> str:
        """Name of the file, for records without one."""
        return file_stem(self.path)


class Record(NamedTuple):
    """Parsed record of a file of queries."""

    identifier: str  #: Name of the record
    line: int  #: Line in the file, from 1
    sequences: list[str]  #: Its chains, upper case
    warnings: list[str]  #: Changes of the input, one sentence each
    #: Per chain, the name of its own record, and its name in that if it has several; None if they share one record
    chain_records: Sequence[tuple[str, str]] | None = None
    chain_ids: Sequence[str] | None = None  #: Per chain, its name in outputs; None for ``A``, ``B``, ...
    #: Per chain, the alignments of the input, or None; None if it has none
    alignments: Sequence[ChainMsas | None] | None = None
    #: True if the file names the record; otherwise its identifier comes from the file's name
    is_named: bool = True
    #: Per chain, raw template features of the input, or None; None if it has none
    templates: tuple[Features | None, ...] | None = None
    #: Per chain, templates that the prediction keeps to; empty for none
    forced_templates: tuple[tuple[ForcedTemplate, ...], ...] = ()
    seeds: tuple[int, ...] = ()  #: Random seeds of the input


def targets_of_records(
    records: Iterable[Record | InputError],
    file: QueryFile,
    errors: list[InputError],
    *,
    complex_: bool = False,
) -> list[FoundTarget]:
    """Build the targets of a file's records; ``errors`` receives the errors.

    ``complex_`` joins several records to one complex, which has the file's name; without a target if one is invalid.

    Raises:
        InputError: A record of a joined complex has alignments.
    """
    records = list(records)
    valid: list[Record] = []
    for record in records:
        try:
            if isinstance(record, InputError):
                raise record
            if record.is_named:
                check_identifier(record.identifier, file.path, record.line)
            valid.append(record)
        except InputError as error:
            errors.append(error)
    if complex_ and len(records) > 1:
        valid = [_joined(valid, file)] if len(valid) == len(records) else []
    return [FoundTarget(_target(record, file.path), file.path, record.line) for record in valid]


def _joined(records: Sequence[Record], file: QueryFile) -> Record:
    """Join the records of a file to one complex."""
    for record in records:
        if record.alignments is not None:
            raise InputError(
                "has alignments of its own, but all records are one complex; remove its a3mpath, or "
                "`RunOptions.complex_`",
                path=file.path,
                line=record.line,
                record=record.identifier,
            )
    return Record(
        file.stem,
        records[0].line,
        [sequence for record in records for sequence in record.sequences],
        [f"record {record.identifier!r}: {doubt}" for record in records for doubt in record.warnings],
        [
            (record.identifier, chain_name(number) if len(record.sequences) > 1 else "")
            for record in records
            for number in range(len(record.sequences))
        ],
    )


def _target(record: Record, path: PathLike) -> Target:
    """Build the target of a record, whose name is not unique yet."""
    return Target(
        name=safe_stem(record.identifier),
        chains=make_chains(record.sequences, record.chain_records, record.chain_ids),
        source=os.fspath(path),
        record=record.identifier,
        warnings=tuple(record.warnings),
        alignments=record.alignments,
        templates=record.templates,
        forced_templates=record.forced_templates,
        seeds=record.seeds,
    )


def file_stem(path: PathLike) -> str:
    """Return the name of a file without its folder, its extension and ``.gz``."""
    name = PurePath(path).name
    if name.lower().endswith(".gz"):
        name = name[:-3]
    return PurePath(name).stem or "targets"


def check_identifier(identifier: str, path: PathLike, line: int) -> None:
    """Refuse a name of unknown letters; the description after it may be anything.

    Raises:
        InputError: The name is not UTF-8.
    """
    shown = identifier.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if shown != identifier:
        message = "the name is not text in UTF-8; save the file as UTF-8, or write the name in ASCII"
        raise InputError(message, path=path, line=line, record=shown)
