"""Parse YAML, JSON and tables that come from a user; every failure is an error for the user."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastfold.errors import InputError
from fastfold.utils.text_files import PathLike, is_special, read_text_bytes, split_lines

if TYPE_CHECKING:
    from yaml import SafeLoader

MAX_YAML_BYTES: Final = 1 << 22
"""Largest YAML text in bytes; a megabyte takes about two seconds."""

_INTEGER = re.compile(r"[-+]?[0-9]+$")
_FLOAT = re.compile(
    r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
_DELIMITERS = (",", "\t", ";")
_MOST_SHOWN = 40


def first_few(names: Sequence[str], limit: int) -> str:
    """Join names for a message, at most ``limit`` of them and the number of the others.

    Example:
        >>> from fastfold.utils.foreign_text import first_few
        >>> first_few(["MSE 1", "TPO 2", "SEP 5"], 2)
        'MSE 1, TPO 2 and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{', '.join(names[:limit])}{more}"


def shown(value: object) -> str:
    """Return a value as messages quote it, cut after 40 letters."""
    return cut(repr(value), _MOST_SHOWN)


def cut(text: str, length: int) -> str:
    """Return a text of at most a number of letters, with dots in place of a longer one's end."""
    return text if len(text) <= length else text[: length - 3] + "..."


def plain_float(text: str) -> float:
    """Return a number in ASCII, or raise ValueError; Python reads ``1_0`` as 10 and digits of any script."""
    return float(_plain(text, "a number"))


def plain_int(text: str) -> int:
    """Return a whole number in ASCII, or raise ValueError, as :func:`plain_float`."""
    return int(_plain(text, "a whole number"))


def _plain(text: str, kind: str) -> str:
    if "_" in text or not text.isascii():
        raise ValueError(f"expected {kind}, found {text!r}")
    return text


def read_settings_text(path: PathLike, *, limit: int) -> str:
    """Read a text file in UTF-8 that must be a regular file.

    A pipe without a writer would be waited for, and a device has no end.

    Raises:
        InputError: See :func:`fastfold.utils.text_files.read_text_bytes`; or the file is a pipe or a device, or not
            text in UTF-8.
    """
    if is_special(Path(path)):
        raise InputError("is not a regular file; save its content in one", path=path)
    return _decoded(read_text_bytes(path, limit=limit), path)


def parse_yaml(text: str | bytes, path: PathLike, *, as_text: bool = False) -> Any:
    """Parse one YAML document of plain values, or JSON.

    Values are null, true or false, decimal numbers, texts, lists and mappings; dates stay texts. Aliases and tags are
    refused, because a small file with them may mean a huge one or build objects of other types.

    Args:
        text: The content; bytes are UTF-8.
        path: Its file, for messages.
        as_text: Return all values but null as they are written: ``no``, ``007``.

    Raises:
        InputError: The text is larger than ``MAX_YAML_BYTES``, is not YAML, has an alias, a tag or a repeated key, or
            is nested too deeply. Names the line if it is known.
    """
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise InputError(f"is larger than {MAX_YAML_BYTES:,} bytes, the most that is read of YAML", path=path)
    try:
        return yaml.load(_decoded(text, path), _plain_loader(as_text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or ""
        if problem.startswith("but "):
            problem = f"{error.context}, {problem}"
        raise InputError(
            f"is not plain YAML: {problem}",
            path=path,
            line=None if mark is None else mark.line + 1,
        ) from None
    except yaml.reader.ReaderError as error:
        raise InputError(
            f"is not plain YAML: it has the character #x{error.character:04x}", path=path
        ) from None
    except RecursionError:
        raise InputError("is nested too deeply; check its brackets and indentation", path=path) from None
    except ValueError:  # Python does not read integers of more than 4,300 digits
        raise InputError("has a number that is too long", path=path) from None


def parse_json(text: str | bytes, path: PathLike, *, remedy: str = "check the file's syntax") -> Any:
    """Parse a JSON text.

    Args:
        text: The content; bytes are UTF-8.
        path: Its file, for messages.
        remedy: End of each message.

    Raises:
        InputError: The text is not JSON, repeats a key in an object, or is nested too deeply. Names the line if it is
            known.
    """
    try:
        return json.loads(_decoded(text, path, remedy), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise InputError(f"is not valid JSON ({error.msg}); {remedy}", path=path, line=error.lineno) from None
    except _RepeatedKey as error:
        raise InputError(
            f"has the key {shown(error.args[0])} twice in an object; {remedy}", path=path
        ) from None
    except RecursionError:
        raise InputError(f"is nested too deeply; {remedy}", path=path) from None
    except ValueError:  # Python does not read integers of more than 4,300 digits
        raise InputError(f"has a number that is too long; {remedy}", path=path) from None


def read_json_object(path: PathLike, holds: str, *, limit: int) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: The file.
        holds: Keys and values of the object in messages: "names to scores".
        limit: Maximum size in bytes.

    Raises:
        InputError: See :func:`fastfold.utils.text_files.read_text_bytes` and :func:`parse_json`; or the content is not
            an object.
    """
    table = parse_json(read_text_bytes(path, limit=limit), path, remedy="make it again")
    if not isinstance(table, dict):
        raise InputError(f"must map {holds}; make it again", path=path)
    return table


def json_object_or_none(source: Path | str | bytes) -> dict[str, Any] | None:
    """Return the JSON object of a text or a regular file; None if it is missing, damaged, or holds anything else."""
    try:
        if isinstance(source, Path):
            source = source.read_bytes() if source.is_file() else b""
        content = parse_json(source, "")
    except (OSError, InputError):
        return None
    return content if isinstance(content, dict) else None


def package_json(package: str, name: str) -> Any:
    """Return the content of a JSON file of this package."""
    return json.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def table_delimiter(text: str) -> str:
    """Return the separator of a table, the one that splits its first line into the most columns.

    Spreadsheets write ``;`` or tabs into ``.csv`` files.
    """
    first = next((line for line in split_lines(text) if line.strip()), "")
    return max(_DELIMITERS, key=first.count)


def table_rows(
    text: str, path: PathLike, delimiter: str, *, comment: str = ""
) -> list[tuple[int, list[str]]]:
    """Return the rows that are not blank, with the line where each begins.

    Args:
        text: The table.
        path: Its file, for messages.
        delimiter: Separator of its cells; cells that contain it are quoted.
        comment: Begin of lines that are left out; none if empty.

    Raises:
        InputError: A quoted cell does not end, or a cell has over 131,072 letters.
    """
    lines = _NumberedLines(text, comment)
    rows = []
    try:
        for cells in csv.reader(lines, delimiter=delimiter, strict=True):
            if any(cell.strip() for cell in cells):
                rows.append((lines.first, cells))
            lines.first = 0
    except csv.Error as error:
        raise InputError(f"is not a table: {error}; check the quotes", path=path, line=lines.first) from None
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


class _RepeatedKey(ValueError):
    """Error for an object of JSON with the same key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise _RepeatedKey(pairs[_first_repeated([key for key, _ in pairs])][0])
    return table


def _first_repeated(keys: Sequence[Hashable]) -> int:
    """Return the place of the first key that equals an earlier one."""
    known: set[Hashable] = set()
    for place, key in enumerate(keys):
        if key in known:
            return place
        known.add(key)
    raise ValueError("expected a repeated key")


def _decoded(text: str | bytes, path: PathLike, remedy: str = "save it as UTF-8") -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"is not text in UTF-8; {remedy}", path=path) from None


@cache
def _plain_loader(as_text: bool) -> type[SafeLoader]:
    """Return PyYAML's safe loader without aliases, tags, repeated keys, dates and numbers of base 60.

    With ``as_text``, values other than null are texts.
    """
    import yaml

    kept = {f"tag:yaml.org,2002:{kind}" for kind in (("null",) if as_text else ("bool", "null"))}
    resolvers = {
        letter: [(tag, pattern) for tag, pattern in rules if tag in kept]
        for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    class PlainLoader(yaml.SafeLoader):
        """Loader of plain values."""

        yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = resolvers

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            """Compose a node as the base class does; refuse an alias and a tag."""
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                problem = f"an alias (*{event.anchor[:_MOST_SHOWN]}); write its content in full"
                raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
            if tag := getattr(event, "tag", None):
                problem = f"a tag ({tag[:_MOST_SHOWN]}); leave it out"
                raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            """Construct a mapping as the base class does; refuse a repeated key."""
            mapping = super().construct_mapping(node, deep=deep)
            if len(mapping) < len(node.value):
                keys = [self.construct_object(key, deep=True) for key, _ in node.value]
                place = _first_repeated(keys)
                problem = f"the key {shown(keys[place])} again"
                raise yaml.constructor.ConstructorError(None, None, problem, node.value[place][0].start_mark)
            return mapping

    numbers = (("int", _INTEGER, "-+0123456789"), ("float", _FLOAT, "-+.0123456789"))
    for kind, pattern, first in () if as_text else numbers:
        PlainLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", pattern, list(first))
    PlainLoader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    return PlainLoader


class _NumberedLines:
    """Lines of a table without comments; knows the line where a row begins."""

    def __init__(self, text: str, comment: str) -> None:
        self._lines = split_lines(text)
        self._comment = comment
        self.first = 0  #: Line where the current row begins; 0 before its first line

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._lines, 1):
            if self._comment and line.lstrip().startswith(self._comment):
                continue
            self.first = self.first or number
            yield line + "\n"
