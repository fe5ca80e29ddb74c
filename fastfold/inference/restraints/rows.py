"""Rows of restraint files: their cells, their numbers, and one error that names all unusable rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from fastfold.errors import InputError
from fastfold.inference.restraints.restraint import Atoms, Restraint
from fastfold.utils.foreign_text import cut, plain_float, table_rows
from fastfold.utils.text_files import split_lines

_Content = TypeVar("_Content")
_DELIMITERS = "\t;,"
_MOST_LINES = 20
_MOST_LETTERS = 160  # of the text about a line


class Row(NamedTuple):
    """Cells of a row, and its place in the file."""

    place: str  #: ``line 3``
    cells: list[str]  #: Cells without blanks around them


def split_rows(path: Path, text: str) -> list[Row]:
    """Return the rows of a table, whose cells are separated by tabs, ``;``, commas or blanks.

    Empty lines and those that begin with ``#`` are left out.

    Raises:
        InputError: A quoted cell does not end.
    """
    lines = [
        (number, line)
        for number, line in enumerate(split_lines(text), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    head = lines[0][1] if lines else ""
    delimiter = max(_DELIMITERS, key=head.count)
    if delimiter not in head:
        return [Row(f"line {number}", line.split()) for number, line in lines]
    rows = table_rows(text, path, delimiter, comment="#")
    return [Row(f"line {number}", [cell.strip() for cell in cells]) for number, cells in rows]


def refuse_lines(path: Path, problem: str, errors: list[str]) -> None:
    """Raise an InputError that names lines, if there are any."""
    if errors:
        more = f"\n... and {len(errors) - _MOST_LINES} more" if len(errors) > _MOST_LINES else ""
        raise InputError(f"{problem}:\n" + "\n".join(errors[:_MOST_LINES]) + more, path=path)


def collect(
    path: Path, rows: Iterable[tuple[str, _Content]], read: Callable[[_Content], list[Restraint]]
) -> list[Restraint]:
    """Read rows by their places, and name all that cannot be used in one InputError.

    Restraints of a row without a group become one, because one of them suffices.
    """
    restraints: list[Restraint] = []
    errors: list[str] = []
    for place, row in rows:
        try:
            pairs = read(row)
        except (ValueError, InputError) as error:
            errors.append(f"{place}: {cut(str(error), _MOST_LETTERS)}")
            continue
        group = place if len(pairs) > 1 else ""
        restraints += [replace(one, line=place, group=one.group or group) for one in pairs]
    refuse_lines(path, "has unusable restraints", errors)
    return restraints


def read_number(cells: Mapping[str, object], name: str, default: float) -> float:
    """Return a number from 0 on, the default for an empty or absent cell, or raise ValueError."""
    if not (text := str(cells.get(name, ""))):
        return default
    try:
        value = plain_float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, found {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: expected a number from 0, found {text!r}")
    return value


def read_share(cells: Mapping[str, object], name: str, default: float) -> float:
    """Return a number from 0 to 1, or raise ValueError."""
    value = read_number(cells, name, default)
    if value > 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, found {value:g}")
    return value


def limited(
    pairs: Iterable[tuple[int, int]],
    low: float,
    high: float,
    *,
    atoms: Atoms,
    weight: float = 1.0,
    group: str = "",
) -> list[Restraint]:
    """Return restraints of residue pairs with the same limits in Å, or raise ValueError."""
    restraints = [Restraint(first, second, low, high, weight, group, atoms=atoms) for first, second in pairs]
    if not restraints or any(one.first == one.second for one in restraints):
        raise ValueError("restrains a residue to itself; name two residues")
    if not low and math.isinf(high):
        raise ValueError("needs min, max or a crosslinker")
    if low > high:
        raise ValueError(f"min {low:g} is larger than max {high:g}")
    if not weight:
        raise ValueError("weight: expected a positive number, found 0")
    return restraints
