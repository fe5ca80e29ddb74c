"""Tables of queries: CSV or TSV with the columns ``id`` and ``sequence``, and ``a3mpath`` for alignments.

``:`` in a sequence joins the chains of a complex. Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from fastfold.data.queries.a3m import add_alignments
from fastfold.data.queries.records import QueryFile, Record
from fastfold.data.targets import parse_sequence
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

_DELIMITERS = (",", "\t", ";")
_COLUMNS = ("id", "sequence")
_ALIGNMENT = "a3mpath"


def parse_table(file: QueryFile) -> Iterator[Record | InputError]:
    """Parse the records of a table.

    Args:
        file: The file; relative paths of alignments start at its folder.

    Yields:
        The record of each row, or its error.

    Raises:
        InputError: The column names are missing, or there are no rows.
    """
    text = file.data.decode("utf-8", "surrogateescape")
    rows = table_rows(text, file.path, table_delimiter(text))
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    if not all(header.count(name) == 1 for name in _COLUMNS) or header.count(_ALIGNMENT) > 1:
        raise InputError(
            "the first line must name the columns, 'id' and 'sequence' among them, each once",
            path=file.path,
            line=rows[0][0] if rows else None,
        )
    if len(rows) == 1:
        raise InputError(
            "the table contains no row after the column names; add one per target", path=file.path
        )
    for number, (line, cells) in enumerate(rows[1:], 1):
        try:
            yield _record(file, number, line, header, cells)
        except InputError as error:
            yield error


def table_delimiter(text: str) -> str:
    """Return the separator of a table, the one that splits its first line into the most columns.

    Spreadsheets write ``;`` or tabs into ``.csv`` files.
    """
    first = next((line for line in split_lines(text) if line.strip()), "")
    return max(_DELIMITERS, key=first.count)


def table_rows(text: str, path: PathLike, delimiter: str) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, with the line where each begins."""
    reader = csv.reader((line + "\n" for line in split_lines(text)), delimiter=delimiter, strict=True)
    rows = []
    line = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"is not a table: {error}; check the quotes", path=path, line=line) from None
    return rows


def _record(file: QueryFile, number: int, line: int, header: Sequence[str], cells: Sequence[str]) -> Record:
    """Parse the ``number``-th row of a file."""
    if len(cells) != len(header):
        raise InputError(
            f"has {len(cells)} columns, the first line names {len(header)}; quote cells that contain the separator",
            path=file.path,
            line=line,
        )
    row = dict(zip(header, cells, strict=True))
    identifier = row["id"].strip()
    name = identifier or f"{file.stem}_{number}"
    text = row["sequence"]
    if not text.strip():
        raise InputError(
            "lacks a sequence; write its residues or remove the row", path=file.path, line=line, record=name
        )
    # A sequence may be wrapped within its quotes; its first line is usually that of the row.
    sequences, warnings = parse_sequence(split_lines(text), path=file.path, record=name, first_line=line)
    if not identifier:
        warnings.insert(0, f"line {line} lacks an id; it is named {name!r}")
    record = Record(name, line, sequences, warnings, is_named=bool(identifier))
    place = row.get(_ALIGNMENT, "").strip()
    return add_alignments(record, file.path, place) if place else record
