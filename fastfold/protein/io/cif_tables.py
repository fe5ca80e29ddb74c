"""Read tables of a CIF file with gemmi's parser, including the line of each row."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike

if TYPE_CHECKING:
    from gemmi import cif

_PROBLEM = re.compile(r"data(?::(\d+))?\S*(?: in data_\S*)?: (.*)", re.DOTALL)
_WRONG_COUNT = re.compile(r"Wrong number of values in loop (.*)\.\*")
_BLOCK_NAME = re.compile(r"^data_[^\s#]*(?: +(?!loop_|save_)[^\s_#]\S*)+ *$", re.IGNORECASE | re.MULTILINE)
"""Block name with blanks, as Biopython writes the id of a structure."""
_END = re.compile(r"\s*(_|loop_|data_|save_|stop_|global_)", re.IGNORECASE)


@dataclass
class CifTable:
    """Category of a CIF file."""

    #: Values as text by item name in lower case, empty if unknown or not applicable
    columns: dict[str, list[str]] = field(default_factory=dict)
    size: int = 0  #: Number of rows
    first_line: int = 0  #: Line of its ``loop_`` or its first item, counted from 1
    lines: Sequence[str] = ()  #: Lines of the file

    def column(self, name: str) -> list[str]:
        """Return all values of an item, empty texts if it is absent."""
        return self.columns.get(name, [""] * self.size)

    def line(self, row: int) -> int:
        """Return the line where a row begins, counted from 1."""
        before = row * len(self.columns)
        for number, count in _count_values(self.lines, self.first_line):
            before -= count
            if before < 0:
                return number
        return self.first_line


def read_cif_tables(
    lines: Sequence[str], categories: Collection[str], *, path: PathLike
) -> list[dict[str, CifTable]]:
    """Read the categories that have rows, of those named in lower case such as ``_atom_site``, of all data blocks.

    Lines are without line ends; the path is that of messages.

    Raises:
        InputError: The text violates CIF's grammar, or a category is repeated or lacks a value; with its line.
    """
    from gemmi import cif

    try:
        # CIF allows only ASCII outside quotes; an escaped letter still identifies its chain or residue.
        text = _BLOCK_NAME.sub(lambda match: match[0].replace(" ", "_"), "\n".join(lines))
        document = cif.read_string(text.encode("ascii", "backslashreplace"), check_level=0)
        return [_block_tables(block, categories, lines, path) for block in document]
    except (ValueError, RuntimeError) as error:
        raise _syntax_error(str(error), lines, path) from None


def _block_tables(
    block: cif.Block, categories: Collection[str], lines: Sequence[str], path: PathLike
) -> dict[str, CifTable]:
    tables: dict[str, CifTable] = {}
    loops: set[str] = set()
    tags: set[str] = set()
    for item in block:
        pair = cast("tuple[str, str] | None", item.pair)
        tag, value = pair or (item.loop.tags[0] if item.loop else "", "")
        category = tag.partition(".")[0].lower()
        if category not in categories:
            continue
        if tag.lower() in tags or category in loops or (item.loop and category in tables):
            raise InputError(f"{tag} is given twice; remove one", path=path, line=item.line_number)
        if not item.loop and not value:
            raise InputError(
                f"expected a value of {tag}, found none; add one", path=path, line=item.line_number
            )
        tags.add(tag.lower())
        loops.update([category] if item.loop else ())
        tables.setdefault(category, CifTable(first_line=item.line_number, lines=lines))
    for category, table in tables.items():
        values = block.get_mmcif_category(f"{category}.")
        table.columns = {name.lower(): [value or "" for value in column] for name, column in values.items()}
        table.size = len(next(iter(table.columns.values())))
    return {category: table for category, table in tables.items() if table.size}


def _count_values(lines: Sequence[str], first_line: int) -> Iterator[tuple[int, int]]:
    """Yield the lines of a loop's values, and the number of values that begin in each."""
    in_header, in_text = True, False
    for number, line in enumerate(lines[first_line - 1 :], first_line):
        if line.startswith(";"):
            in_text, in_header = not in_text, False
            if in_text:
                yield number, 1
        elif not in_text and line.strip() and not line.lstrip().startswith("#"):
            if _END.match(line):
                if not in_header:
                    return
            else:
                in_header = False
                yield number, _count_in_line(line)


def _count_in_line(line: str) -> int:
    from gemmi import cif

    if any(mark in line for mark in "'\"#"):
        with suppress(ValueError):
            return len(cif.read_string(f"data_\nloop_\n_a\n{line}").sole_block().find_loop("_a"))
    return len(line.split())


def _syntax_error(message: str, lines: Sequence[str], path: PathLike) -> InputError:
    match = _PROBLEM.match(message)
    line = int(match[1]) if match and match[1] else None
    problem = match[2] if match else message
    if line and (loop := _WRONG_COUNT.match(problem)):
        line, width = _first_odd_row(lines, line)
        problem = f"expected {width} values in each row of {loop[1]}, found another number from here on"
    elif line and problem == "parse error":
        text = lines[line - 1].strip()[:60]
        problem = f"unexpected {text!r}" if text else "unexpected end"
    return InputError(
        f"is not valid CIF: {problem}; is it truncated? Download or copy it again", path=path, line=line
    )


def _first_odd_row(lines: Sequence[str], loop_line: int) -> tuple[int, int]:
    """Return the line from which a loop's rows are broken, and its number of columns."""
    counts = list(_count_values(lines, loop_line))
    header = lines[loop_line - 1 : counts[0][0] - 1]
    width = sum(word.startswith("_") for line in header for word in line.partition("#")[0].split())
    total, odd = 0, loop_line
    for number, count in counts:
        if total % width == 0:
            odd = number
        total += count
    return odd, width
