"""Tables with column names in their first line, separated by commas, tabs or semicolons."""

from __future__ import annotations

import csv
from collections.abc import Sequence

from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, split_lines

_DELIMITERS = (",", "\t", ";")


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


def table_cells(header: Sequence[str], cells: Sequence[str], *, path: PathLike, line: int) -> dict[str, str]:
    """Return the cells of a row by the column's name; refuse another number of cells than of columns."""
    if len(cells) != len(header):
        raise InputError(
            f"has {len(cells)} columns, the first line names {len(header)}; quote cells that contain the separator",
            path=path,
            line=line,
        )
    return dict(zip(header, cells, strict=True))
