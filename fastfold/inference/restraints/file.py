"""Files of distance restraints: our table, cross-link tables, Chai's table and Boltz' YAML."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.protein.protein import chain_name
from fastfold.utils.text_files import read_text_bytes

CROSSLINKERS = {"DSS": 30.0, "BS3": 30.0, "DSSO": 30.0, "DSBU": 30.0, "EDC": 20.0}
"""Largest distance of CA atoms in Å by crosslinker.

DSS and BS3: Merkley et al., 2014 (doi:10.1002/pro.2458), 26 to 30 Å. The others: usual bounds for their spacers
(Rappsilber, 2011, doi:10.1016/j.jsb.2010.10.014).
"""

_CONTACT = 8.0
_OURS = ("chain1", "residue1", "chain2", "residue2")
_CHAI = ("chainA", "res_idxA", "chainB", "res_idxB", "connection_type")
_OPTIONAL = ("min", "max", "weight", "group", "crosslinker")
_XIVIEW = {"protein1": "chain1", "abspos1": "residue1", "protein2": "chain2", "abspos2": "residue2"}
"""Columns of xiVIEW's cross-link tables, in lower case, by ours."""

_MAX_BYTES = 2**24


@dataclass(frozen=True)
class Restraint:
    """Distance of CA atoms of two residues, whose places in the target are counted from 0.

    Bounds are in Å, ``high`` is infinite for none. One restraint of a group must hold. ``line`` is its place in the
    file.

    Example:
        >>> from fastfold.inference.restraints import Restraint
        >>> Restraint(first=11, second=47, low=0.0, high=8.0).weight
        1.0
    """

    first: int
    second: int
    low: float
    high: float
    weight: float = 1.0
    group: str = ""
    line: str = ""


def read_restraints(path: Path, target: Target) -> list[Restraint]:
    r"""Read the restraints of a target, in the order of the file.

    Args:
        path: CSV with the columns ``chain1, residue1, chain2, residue2`` and ``max``, ``min`` or ``crosslinker``;
            ``weight`` and ``group`` are optional. Or the same with the columns ``Protein1, AbsPos1`` (or ``SeqPos1``),
            ``Protein2, AbsPos2`` of cross-link tables, whose other columns are ignored. Or CSV of Chai, or YAML of
            Boltz with ``constraints``. Chains are A, B and so on in the order of the target, and residues are counted
            from 1 in each.
        target: The target.

    Raises:
        InputError: The file cannot be read; names each line that cannot be used.

    Example:
        >>> from pathlib import Path
        >>> from fastfold.data import read_fasta
        >>> from fastfold.inference.restraints import read_restraints
        >>> _ = Path("query.fasta").write_text(">query\nMTYKLILNGK\n")
        >>> _ = Path("links.csv").write_text("chain1,residue1,chain2,residue2,max\nA,K4,A,K10,8\n")
        >>> (target,) = read_fasta("query.fasta")
        >>> [(one.first, one.second, one.high) for one in read_restraints(Path("links.csv"), target)]
        [(3, 9, 8.0)]
    """
    try:
        text = read_text_bytes(path, limit=_MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("is not text in UTF-8", path=path) from None
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    found = (_from_yaml if is_yaml else _from_table)(path, text, target)
    if not found:
        raise InputError("has no restraint", path=path)
    return found


def _from_table(path: Path, text: str, target: Target) -> list[Restraint]:
    head = text.partition("\n")[0]
    rows = csv.DictReader(io.StringIO(text), delimiter=";" if head.count(";") > head.count(",") else ",")
    columns = _translated([name.strip() for name in rows.fieldnames or []], path)
    others = {name for name in columns if name.startswith("other ")}
    rows.fieldnames = columns
    if set(_CHAI) <= set(columns):
        read: Callable[[Mapping[str, str], Target], list[Restraint]] = _chai_row
    elif set(_OURS) <= set(columns):
        if unknown := set(columns) - {*_OURS, *_OPTIONAL, *others}:
            raise InputError(f"has an unknown column {sorted(unknown)[0]!r}", path=path)
        read = _own_row
    else:
        missing = next(name for name in _OURS if name not in columns)
        raise InputError(
            f"has no column {missing!r}; expected {', '.join(_OURS)} with max or crosslinker, or Chai's columns",
            path=path,
        )
    return _collect(path, ((f"line {rows.line_num}", row) for row in rows), lambda row: read(row, target))


def _translated(columns: Sequence[str], path: Path) -> list[str]:
    """Return our names for the columns of a cross-link table; other columns get names that are ignored."""
    places = {name.lower() for name in columns}
    spelling = _XIVIEW
    if "abspos1" not in places:
        spelling = {key.replace("abs", "seq"): ours for key, ours in _XIVIEW.items()}
    named = [spelling.get(name.lower(), name.lower()) for name in columns]
    if set(_OURS) <= set(columns) or not set(_OURS) <= set(named):
        return list(columns)
    if not {"max", "min", "crosslinker"} & set(named):
        raise InputError(
            "has cross-links without a distance; add a column crosslinker with names such as DSS, or max",
            path=path,
        )
    return [name if name in (*_OURS, *_OPTIONAL) else f"other {i}" for i, name in enumerate(named)]


def _collect(
    path: Path, rows: Iterable[tuple[str, Any]], read: Callable[[Any], list[Restraint]]
) -> list[Restraint]:
    """Read rows, and name all that cannot be used in one error."""
    found: list[Restraint] = []
    errors: list[str] = []
    for place, row in rows:
        try:
            found += [replace(one, line=place) for one in read(row)]
        except (ValueError, InputError) as error:
            errors.append(f"{place}: {error}")
    if errors:
        more = f"\n... and {len(errors) - 20} more" if len(errors) > 20 else ""
        raise InputError("has unusable restraints:\n" + "\n".join(errors[:20]) + more, path=path)
    return found


def _own_row(row: Mapping[str, str], target: Target) -> list[Restraint]:
    cells = {key: (value or "").strip() for key, value in row.items() if key is not None}
    if None in row:
        raise ValueError("has more cells than the header")
    first, second = (_place(target, cells[f"chain{i}"], cells[f"residue{i}"]) for i in (1, 2))
    high = _number(cells, "max", math.inf)
    if linker := cells.get("crosslinker", ""):
        if linker.upper() not in CROSSLINKERS:
            raise ValueError(f"unknown crosslinker {linker!r}; known: {', '.join(CROSSLINKERS)}, or give max")
        high = min(high, CROSSLINKERS[linker.upper()])
    low, weight = _number(cells, "min", 0.0), _number(cells, "weight", 1.0)
    return _checked([first], second, low, high, group=cells.get("group", ""), weight=weight)


def _chai_row(row: Mapping[str, str], target: Target) -> list[Restraint]:
    """Read a contact, or a pocket: any residue of the first chain may be near the second residue."""
    cells = {key: (value or "").strip() for key, value in row.items() if key is not None}
    kind = cells["connection_type"]
    if kind not in ("contact", "pocket"):
        raise ValueError(f"connection type {kind!r} is not supported; contact and pocket are")
    low = _number(cells, "min_distance_angstrom", 0.0)
    high = _number(cells, "max_distance_angstrom", _CONTACT)
    sides = [(cells[f"chain{side}"], cells[f"res_idx{side}"]) for side in "AB"]
    if kind == "contact":
        return _checked([_place(target, *sides[0])], _place(target, *sides[1]), low, high)
    (chain, _), second = sides[0], _place(target, *sides[1])
    group = f"pocket {'/'.join((chain, *sides[1]))}"
    return _checked(_chain_places(target, chain), second, low, high, group=group)


def _from_yaml(path: Path, text: str, target: Target) -> list[Restraint]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"is not YAML: {str(error).splitlines()[0]}", path=path) from error
    entries = content.get("constraints") if isinstance(content, Mapping) else None
    if not isinstance(entries, list):
        raise InputError("expected a list 'constraints', as Boltz has it", path=path)
    rows = [(f"constraint {number}", entry) for number, entry in enumerate(entries, 1)]
    return _collect(path, rows, lambda entry: _boltz_entry(entry, target))


def _boltz_entry(entry: Any, target: Target) -> list[Restraint]:
    if not (isinstance(entry, Mapping) and len(entry) == 1):
        raise ValueError("expected one of contact and pocket")
    ((kind, value),) = entry.items()
    if kind not in ("contact", "pocket") or not isinstance(value, Mapping):
        raise ValueError(f"{kind!r} is not supported; contact and pocket are")
    high = _number(value, "max_distance", _CONTACT if kind == "contact" else 6.0)
    if kind == "contact":
        first, second = (_token(value.get(f"token{i}"), target) for i in (1, 2))
        return _checked([first], second, 0.0, high)
    contacts = value.get("contacts")
    if not isinstance(contacts, list):
        raise ValueError("pocket: expected a list 'contacts'")
    found = []
    for second in (_token(token, target) for token in contacts):
        binder = _chain_places(target, str(value.get("binder", "")))
        found += _checked(binder, second, 0.0, high, group=f"pocket {value.get('binder')}/{second}")
    return found


def _token(token: Any, target: Target) -> int:
    if not (isinstance(token, Sequence) and not isinstance(token, str) and len(token) == 2):
        raise ValueError(f"expected a chain and a residue such as [A, 10], found {token!r}")
    return _place(target, str(token[0]), str(token[1]))


def _chain_places(target: Target, chain: str) -> range:
    names = [chain_name(number) for number in range(len(target.chains))]
    if chain not in names:
        raise ValueError(f"unknown chain {chain!r}; the target has {', '.join(names)}")
    number = names.index(chain)
    start = sum(len(one.sequence) for one in target.chains[:number])
    return range(start, start + len(target.chains[number].sequence))


def _place(target: Target, chain: str, residue: str) -> int:
    """Return the place of a residue such as ``10``, ``K10`` or ``10`` with its type checked."""
    places = _chain_places(target, chain)
    if (match := re.fullmatch(r"([A-Z])?(\d{1,9})", residue, re.ASCII)) is None:
        raise ValueError(f"expected a residue number such as 10 or K10, found {residue!r}")
    number = int(match[2])
    if not 1 <= number <= len(places):
        raise ValueError(f"chain {chain} has residues 1 to {len(places)}, found {number}")
    whole = "".join(one.sequence for one in target.chains)
    letter = whole[places[number - 1]]
    if match[1] and match[1] != letter:
        raise ValueError(f"residue {number} of chain {chain} is {letter}, found {residue}")
    return places[number - 1]


def _number(cells: Mapping[str, Any], name: str, default: float) -> float:
    if not (text := str(cells.get(name, ""))):
        return default
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, found {text!r}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}: expected a number from 0, found {text!r}")
    return value


def _checked(
    firsts: Iterable[int], second: int, low: float, high: float, *, group: str = "", weight: float = 1.0
) -> list[Restraint]:
    """Return the restraints of residues to a second one."""
    found = [Restraint(first, second, low, high, weight, group) for first in firsts]
    if any(one.first == second for one in found):
        raise ValueError("restrains a residue to itself")
    if not low and math.isinf(high):
        raise ValueError("needs min, max or a crosslinker")
    if low > high:
        raise ValueError(f"min {low:g} is larger than max {high:g}")
    if not weight:
        raise ValueError("weight: expected a positive number, found 0")
    return found
