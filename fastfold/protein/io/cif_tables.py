"""Tables of a CIF file: only the categories asked for, with the line of each row.

Biopython's ``MMCIF2Dict`` reads every token of a file and tells no lines; this reader splits plain rows at
once, so that the atoms of a large complex take a second, and a damaged row can be named.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike

_TOKEN = re.compile(
    r"""\s*(?:(?P<comment>\#.*)|'(?P<single>(?:[^']|'(?=\S))*)'(?!\S)|"(?P<double>(?:[^"]|"(?=\S))*)"(?!\S)"""
    r"""|(?P<plain>\S+))"""
)
_KEYWORDS = ("loop_", "data_", "save_", "global_", "stop_")


@dataclass
class CifTable:
    """One category.

    Attributes:
        columns: Item names in lower case, without the category.
        rows: Values as text; ``?`` and ``.`` as they are.
        lines: Line of each row's first value, counted from 1.
        closed: Whether anything, if only a comment, follows the table in the file.
    """

    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    closed: bool = True

    def column(self, name: str) -> list[str]:
        """All values of an item, empty texts where it is unknown, not applicable or absent."""
        if name not in self.columns:
            return [""] * len(self.rows)
        i = self.columns.index(name)
        return ["" if row[i] in ("?", ".") else row[i] for row in self.rows]


def read_cif_tables(
    lines: Sequence[str], categories: Collection[str], *, path: PathLike
) -> dict[str, CifTable]:
    """Reads categories of the first data block.

    Args:
        lines: The file's lines without their ends.
        categories: Names such as ``_atom_site``, in lower case.
        path: The file, for messages.

    Returns:
        The categories that are there. Values are text, whether they were quoted or not.

    Raises:
        InputError: A table or text that the file stops in, a quote that is not closed, a value without a
            name; with its line.
    """
    return _Reader(lines, categories, path).read()


class _Reader:
    """Walks through the lines; ``at`` is the next one."""

    def __init__(self, lines: Sequence[str], categories: Collection[str], path: PathLike) -> None:
        self.lines, self.categories, self.path = lines, categories, path
        self.at = 0
        self.tables: dict[str, CifTable] = {}

    def fail(self, message: str, line: int | None = None) -> InputError:
        return InputError(message, path=self.path, line=self.at if line is None else line)

    def read(self) -> dict[str, CifTable]:
        blocks = 0
        while self.at < len(self.lines):
            start = self.lines[self.at].strip()
            word = start[:7].lower()
            if not start or start[0] == "#":
                self.at += 1
            elif word.startswith("data_"):
                blocks += 1
                if blocks > 1:
                    break
                self.at += 1
            elif word.startswith("loop_"):
                self._loop()
            elif start[0] == "_":
                self._item()
            else:
                raise self.fail(
                    "a value where a name is expected; is the file damaged? Download or copy it again",
                    self.at + 1,
                )
        return self.tables

    def _values(self) -> Iterator[tuple[list[str], int]]:
        """Values and line number, line by line or text by text, up to the next name or keyword."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            if line.startswith(";"):
                yield [self._text()], self.at
                continue
            start = line.lstrip()
            if start.startswith("_") or start[:7].lower().startswith(_KEYWORDS):
                return
            self.at += 1
            if "'" in line or '"' in line or "#" in line:
                yield self._split(line), self.at
            else:
                yield line.split(), self.at

    def _text(self) -> str:
        """A text between two lines that start with a semicolon."""
        first = self.at
        while True:
            self.at += 1
            if self.at >= len(self.lines):
                raise self.fail(
                    "the file stops within the text that starts here; download or copy it again", first + 1
                )
            if self.lines[self.at].startswith(";"):
                break
        text = "\n".join([self.lines[first][1:], *self.lines[first + 1 : self.at]])
        if self.lines[self.at][1:].strip():
            raise self.fail(
                "something follows the end of a text in its line; write it in the next one", self.at + 1
            )
        self.at += 1
        return text

    def _split(self, line: str) -> list[str]:
        values = []
        for match in _TOKEN.finditer(line.rstrip()):
            kind = match.lastgroup
            if kind == "comment":
                break
            value = match[kind or "plain"]
            if kind == "plain" and value[0] in "'\"":
                raise self.fail(f"a quote that is not closed: {line.strip()[:60]!r}; close it")
            values.append(value)
        return values

    def _item(self) -> None:
        """One name with its value, in the same line or the next ones."""
        line_number = self.at + 1
        name, rest = [*self.lines[self.at].split(None, 1), ""][:2]
        name = name.lower()
        self.at += 1
        values = self._split(rest)
        while not values:
            following = next(self._values(), None)
            if following is None:
                raise self.fail(f"{name} has no value; download or copy the file again", line_number)
            values = following[0]
        category, _, item = name.partition(".")
        if category not in self.categories:
            return
        if len(values) > 1:
            raise self.fail(f"{name} has {len(values)} values; quote a value that contains blanks")
        table = self.tables.setdefault(category, CifTable(rows=[[]], lines=[line_number]))
        if len(table.rows) > 1 or item in table.columns:
            raise self.fail(f"{name} is given twice; remove one", line_number)
        table.columns.append(item)
        table.rows[0].append(values[0])

    def _loop(self) -> None:
        """A table: names, then rows."""
        first = self.at + 1
        names = self.lines[self.at].split()[1:]
        self.at += 1
        while self.at < len(self.lines):
            start = self.lines[self.at].strip()
            if start.startswith("_"):
                names += self._split(start)
            elif start and start[0] != "#":
                break
            self.at += 1
        if not names or not all(name.startswith("_") for name in names):
            raise self.fail("a loop_ that is not followed by names; download or copy the file again", first)
        category = names[0].lower().partition(".")[0]
        if category not in self.categories:
            for _ in self._values():
                pass
            return
        if category in self.tables:
            raise self.fail(f"{category} is given twice; remove one", first)
        table = CifTable([name.lower().partition(".")[2] for name in names])
        width = len(names)
        pending: list[str] = []
        row_line = odd_line = first
        for values, line in self._values():
            if not pending:
                row_line = odd_line = line
                if len(values) == width:
                    table.rows.append(values)
                    table.lines.append(line)
                    continue
            pending += values
            while len(pending) >= width:
                table.rows.append(pending[:width])
                table.lines.append(row_line)
                pending, row_line = pending[width:], line
        if pending:
            raise self.fail(
                f"the rows of {category} do not have {width} values each from here on; is the file truncated? "
                "Download or copy it again",
                odd_line,
            )
        table.closed = self.at < len(self.lines) or any(line.startswith("#") for line in self.lines[-3:])
        if table.rows:
            self.tables[category] = table
