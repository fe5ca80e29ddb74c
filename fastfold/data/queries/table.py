"""Tables of queries: CSV or TSV with the columns ``id`` and ``sequence``, and ``a3mpath`` for alignments.

``:`` in a sequence joins the chains of a complex. Other columns are ignored.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial

from fastfold.data.fasta import Record, check_identifier, file_stem, targets_of_records
from fastfold.data.queries.a3m import add_alignments
from fastfold.data.targets import FoundTarget, parse_sequence
from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

_DELIMITERS = (",", "\t", ";")
_COLUMNS = ("id", "sequence")
_ALIGNMENT = "a3mpath"


def parse_table(
    data: bytes, path: PathLike, errors: list[InputError], *, complex_: bool = False
) -> list[FoundTarget]:
    """Parse the targets of a table.

    Args:
        data: Content of the file.
        path: Path of the file; relative paths of alignments start at its folder.
        errors: Receives an error for each invalid row.
        complex_: Join all rows to one complex, which has the file's name.

    Raises:
        InputError: The column names are missing, or there are no rows.
    """
    text = data.decode("utf-8", "surrogateescape")
    rows = table_rows(text, path, table_delimiter(text))
    header = [name.strip().lower() for name in rows[0][1]] if rows else []
    if not all(header.count(name) == 1 for name in _COLUMNS) or header.count(_ALIGNMENT) > 1:
        raise InputError(
            "the first line must name the columns, 'id' and 'sequence' among them, each once",
            path=path,
            line=rows[0][0] if rows else None,
        )
    if len(rows) == 1:
        raise InputError("the table contains no row after the column names; add one per target", path=path)
    is_complex = complex_ and len(rows) > 2
    readers: list[Callable[[], Record]] = []
    places: dict[int, str] = {}
    for number, (line, cells) in enumerate(rows[1:], 1):
        readers.append(partial(_record, path, number, line, header, cells))
        if _ALIGNMENT in header and len(cells) == len(header):
            place = cells[header.index(_ALIGNMENT)].strip()
            if place:
                places[line] = place
    if places and is_complex:
        message = "column 'a3mpath' has alignments of single rows, but all rows are one complex; remove one of the two"
        raise InputError(message, path=path, line=min(places))
    found = []
    for one in targets_of_records(readers, path, errors, complex_=is_complex):
        try:
            found.append(add_alignments(one, places[one.line]) if one.line in places else one)
        except InputError as error:
            errors.append(error)
    return found


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


def _record(path: PathLike, number: int, line: int, header: list[str], cells: list[str]) -> Record:
    """Parse the ``number``-th row of a file."""
    if len(cells) != len(header):
        raise InputError(
            f"has {len(cells)} columns, the first line names {len(header)}; quote cells that contain the separator",
            path=path,
            line=line,
        )
    identifier = cells[header.index("id")].strip()
    check_identifier(identifier, path, line)
    name = identifier or f"{file_stem(path)}_{number}"
    text = cells[header.index("sequence")]
    if not text.strip():
        raise InputError(
            "lacks a sequence; write its residues or remove the row", path=path, line=line, record=name
        )
    # A sequence may be wrapped within its quotes; its first line is usually that of the row.
    sequences, warnings = parse_sequence(split_lines(text), path=path, record=name, first_line=line)
    if not identifier:
        warnings.insert(0, f"line {line} lacks an id; it is named {name!r}")
    return Record(name, line, sequences, warnings)
