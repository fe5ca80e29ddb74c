"""Lists of residue pairs: AlphaLink's cross-links and distances, and contacts in CASP's format RR."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from fastfold.errors import InputError
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import Restraint
from fastfold.inference.restraints.rows import Row, collect, limited, read_number, read_share
from fastfold.protein.residue_constants import mask_unknown
from fastfold.utils.foreign_text import plain_float, shown

ALPHALINK_MAX = 10.0
"""Limit in Å between CA of AlphaLink's pairs with a false-discovery rate, for which its network is trained."""

ALPHALINK2_MAX = 25.0
"""Limit in Å between CA of AlphaLink2's pairs, for which its network is trained."""

CONTACT_MAX = 8.0
"""Limit in Å between CB of CASP's contacts without limits."""

_DEFAULT_RATE = 0.05  # AlphaLink's false-discovery rate of pairs without one
_LEAST_PROBABILITY = 0.5
_DEVIATIONS = 2.0
_TAIL = 0.5 * math.erfc(_DEVIATIONS / math.sqrt(2.0))  # share of a normal distribution beyond them
_BIN, _FIRST_BIN, _BINS = 0.3125, 2.3125, 128
_FARTHEST = 1000.0

_PAIR = ("residuefrom", "residueto")
_LINKS = (*_PAIR, "fdr")
_LINKS2 = ("residuefrom", "chain1", "residueto", "chain2", "fdr")
_DISTANCES = (*_PAIR, "meandistance", "standarddeviation", "distributiontype")
_DISTOGRAM = (*_PAIR, *(f"bin{number}" for number in range(1, _BINS + 1)))
_CONTACTS = ("residue1", "residue2", "min", "max", "probability")
_SPELLINGS = {
    "meandist": "meandistance",
    "mean": "meandistance",
    "stdev": "standarddeviation",
    "sd": "standarddeviation",
    "type": "distributiontype",
}
_DISTRIBUTIONS = ("normal", "log-normal")

_CASP_RECORDS = ("TARGET", "AUTHOR", "SCORE", "REMARK", "METHOD", "RMODE", "ENDMDL")


class ListColumns(NamedTuple):
    """Columns of a list, with or without a header."""

    names: tuple[str, ...]
    has_header: bool = False


def list_columns(cells: Sequence[str]) -> ListColumns | None:
    """Return the columns of a list by the cells of its first row; None for a table with other columns."""
    if cells[0] == "PFRMAT" or re.fullmatch(r"[A-Z-]{5,}", " ".join(cells), re.ASCII):
        return ListColumns(_CONTACTS)
    names = [re.sub(r"[\s_]", "", cell).lower() for cell in cells]
    names = [_SPELLINGS.get(name, name) for name in names]
    if set(_PAIR) & set(names):
        return ListColumns(tuple(names), has_header=True)
    number, residue = r"[-+.\de]+", r"[A-Za-z]?\d+(\.\d*)?(e\+\d+)?"
    # A number in place of a chain makes a contact: 1 9 0 8 0.7.
    forms = {
        _CONTACTS: rf"{residue} {residue} {number} {number} {number}",
        _LINKS2: rf"{residue} [A-Za-z\d]+ {residue} [A-Za-z\d]+ {number}",
        _DISTANCES: rf"{residue} {residue} {number} {number} [A-Za-z-]+",
        _LINKS: rf"{residue} {residue}( {number})?",
        _DISTOGRAM: rf"{residue} {residue}( {number}){{{_BINS}}}",
    }
    row = " ".join(cells)
    columns = next((form for form, pattern in forms.items() if re.fullmatch(pattern, row, re.ASCII)), None)
    return None if columns is None else ListColumns(columns)


def read_list(
    path: Path, rows: Sequence[Row], columns: ListColumns, residues: Residues, notes: list[str]
) -> list[Restraint]:
    """Read a list with the columns of :func:`list_columns`.

    ``notes`` receives a line about pairs and properties that the fit leaves out.

    Raises:
        InputError: The list cannot be read; names each line that cannot be used.
    """
    if columns.names == _CONTACTS:
        return _read_contacts(path, rows, residues, notes)
    readers = {_LINKS: _link, _LINKS2: _link2, _DISTANCES: _distance, _DISTOGRAM: _distogram}
    readers[_PAIR] = _link
    form = next((one for one in readers if sorted(one) == sorted(columns.names)), None)
    if form is None:
        raise InputError(
            f"has the columns {', '.join(columns.names)}; expected AlphaLink's: {', '.join(_LINKS)}, or "
            f"{', '.join(_LINKS2)}, or {', '.join(_DISTANCES)}",
            path=path,
        )
    if form == _LINKS and not columns.has_header and _have_high_rates(rows):
        raise InputError(
            "most third numbers are over 0.5, as probabilities of contacts and not false-discovery rates of AlphaLink: "
            "begin contacts with a line 'PFRMAT RR', or rates with a line 'residueFrom,residueTo,FDR'",
            path=path,
        )
    if form != _LINKS2:
        _note_numbering(residues, notes)

    def restraints_of(cells: list[str]) -> list[Restraint]:
        shortest = len(_PAIR) if form == _LINKS else len(columns.names)
        if not shortest <= len(cells) <= len(columns.names):
            names = ", ".join(columns.names[:6]) + (", …" if len(columns.names) > 6 else "")
            raise ValueError(f"expected {len(columns.names)} values ({names}), found {len(cells)}")
        return readers[form](dict(zip(columns.names, cells, strict=False)), residues)

    data = rows[1:] if columns.has_header else rows
    return collect(path, data, restraints_of)


def _have_high_rates(rows: Sequence[Row]) -> bool:
    """Return True if most rows with three numbers have a third one that is over 0.5 and at most 1."""
    rates = []
    for row in rows:
        with suppress(IndexError, ValueError):
            rates.append(plain_float(row.cells[2]))
    return 2 * sum(_LEAST_PROBABILITY < rate <= 1 for rate in rates) > len(rates)


def _note_numbering(residues: Residues, notes: list[str]) -> None:
    if len({chain.sequence for chain in residues.chains}) > 1 or residues.chains[0].regions:
        through = "the whole proteins of " if any(chain.regions for chain in residues.chains) else ""
        notes.append(f"names no chains; its residues are counted through {through}all chains of the target")


def _linked(cells: Mapping[str, str], residues: Residues) -> list[tuple[int, int]]:
    """Return the pairs of residues that a row without chains may be about."""
    first, second = (residues.numbered(_whole(cells[name])) for name in _PAIR)
    return residues.ambiguous_pairs(first, second)


def _whole(text: str) -> str:
    """Return a whole number such as ``1.28e+02`` without its decimals."""
    try:
        value = plain_float(text)
    except ValueError:
        return text
    return str(int(value)) if math.isfinite(value) and value == int(value) else text


def _link(cells: Mapping[str, str], residues: Residues) -> list[Restraint]:
    return limited(_linked(cells, residues), 0.0, ALPHALINK_MAX, atoms="CA", weight=_trust(cells))


def _link2(cells: Mapping[str, str], residues: Residues) -> list[Restraint]:
    ends = (("chain1", "residuefrom"), ("chain2", "residueto"))
    first, second = (residues.place(cells[chain], _whole(cells[residue])) for chain, residue in ends)
    pairs = residues.ambiguous_pairs(first, second)
    return limited(pairs, 0.0, ALPHALINK2_MAX, atoms="CA", weight=_trust(cells))


def _trust(cells: Mapping[str, str]) -> float:
    """Return the share of true links among those of a false-discovery rate, AlphaLink's input for them."""
    rate = read_share(cells, "fdr", _DEFAULT_RATE)
    if rate == 1:
        raise ValueError("fdr: expected a number under 1, found 1; remove the line")
    return 1.0 - rate


def _distance(cells: Mapping[str, str], residues: Residues) -> list[Restraint]:
    """Read a distribution of distances, whose limits are two standard deviations from its mean.

    The mean and standard deviation of a log-normal one are those of the logarithm, as AlphaLink's script draws them.
    """
    kind = cells["distributiontype"].lower()
    if kind not in _DISTRIBUTIONS:
        raise ValueError(f"distribution type: expected {' or '.join(_DISTRIBUTIONS)}, found {kind!r}")
    mean, deviation = (read_number(cells, name, 0.0) for name in ("meandistance", "standarddeviation"))
    if not deviation:
        raise ValueError("standard deviation: expected a number over 0")
    low, high = mean - _DEVIATIONS * deviation, mean + _DEVIATIONS * deviation
    if kind == "log-normal":
        if high > math.log(_FARTHEST):
            raise ValueError(
                f"log-normal: expected mean and standard deviation of the logarithm of the distance, found {mean:g} "
                f"and {deviation:g}"
            )
        low, high = math.exp(low), math.exp(high)
    return limited(_linked(cells, residues), max(low, 0.0), high, atoms="CA")


def _distogram(cells: Mapping[str, str], residues: Residues) -> list[Restraint]:
    """Read probabilities of distance bins, whose limits leave out as much as those of a normal distribution."""
    shares = [read_share(cells, name, 0.0) for name in _DISTOGRAM[2:]]
    *sums, total = accumulate(shares)
    if abs(total - 1) > 0.01:
        raise ValueError(f"expected probabilities whose sum is 1, found {total:.3g}")
    first = sum(value <= _TAIL * total for value in sums)
    last = sum(value < (1 - _TAIL) * total for value in sums)
    low = _FIRST_BIN + first * _BIN if first else 0.0
    high = _FIRST_BIN + (last + 1) * _BIN if last < _BINS - 1 else math.inf
    return limited(_linked(cells, residues), low, high, atoms="CA")


def _casp_parts(path: Path, rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the sequence of a file in CASP's format, empty if it has none, and the rows of contacts."""
    data, sequence, models = [], "", 0
    for row in takewhile(lambda row: row.cells[0] != "END", rows):
        match row.cells:
            case ["PFRMAT", *kind]:
                if kind != ["RR"]:
                    raise InputError(
                        f"is in CASP's format {shown(' '.join(kind))}; expected RR, which has contacts",
                        path=path,
                    )
            case ["MODEL", *_]:
                models += 1
            case [letters] if letters != "ENDMDL" and re.fullmatch(r"[A-Za-z-]+", letters, re.ASCII):
                sequence += letters.upper()
            case [key, *_] if key not in _CASP_RECORDS:
                data.append(row)
    if models > 1:
        raise InputError(f"has {models} models; keep one of them", path=path)
    return sequence, data


def _read_contacts(path: Path, rows: Sequence[Row], residues: Residues, notes: list[str]) -> list[Restraint]:
    sequence, data = _casp_parts(path, rows)
    wholes = {residues.whole_letters, *(chain.uncut.sequence for chain in residues.chains)}
    if sequence and mask_unknown(sequence) not in wholes:
        raise InputError(
            f"has contacts of another sequence of {len(sequence)} residues; fold that sequence, or number the contacts "
            "by the target's and remove the sequence",
            path=path,
        )
    improbable: list[str] = []
    names_chains = [any(cell[:1].isalpha() for cell in row.cells[:2]) for row in data]
    if not all(names_chains):
        _note_numbering(residues, notes)

    def restraints_of(row: Row) -> list[Restraint]:
        restraints, probability = _contact(row.cells, residues)
        if probability < _LEAST_PROBABILITY:
            improbable.append(row.place)
            return []
        return restraints

    restraints = collect(path, [(row.place, row) for row in data], restraints_of)
    if improbable:
        note = f"{len(improbable)} of {len(data)} contacts have a probability under {_LEAST_PROBABILITY}"
        if not restraints:
            raise InputError(f"{note}, and no others; restraints need probable ones", path=path)
        notes.append(f"{note} and are left out")
    return restraints


def _contact(cells: Sequence[str], residues: Residues) -> tuple[list[Restraint], float]:
    """Return the restraints of a contact, and its probability, which is their weight."""
    if len(cells) not in (3, len(_CONTACTS), 13):
        raise ValueError(f"expected two residues, limits and a probability, found {len(cells)} values")
    if len(cells) == len(_CONTACTS):
        values = dict(zip(_CONTACTS, cells, strict=True))
    else:  # CASP14: a probability of a contact, and those of distance bins
        values = {"probability": cells[2]}
    low, high = read_number(values, "min", 0.0), read_number(values, "max", CONTACT_MAX)
    probability = read_share(values, "probability", 0.0)
    ends = [re.fullmatch(r"([A-Za-z]+)(\d+)", cell, re.ASCII) for cell in cells[:2]]
    if all(ends):
        first, second = (residues.place(end[1], end[2]) for end in ends if end)
        pairs = [(first, second)]
    elif any(ends):
        raise ValueError(f"expected chains for both residues or for none, found {cells[0]} and {cells[1]}")
    else:
        pairs = residues.ambiguous_pairs(*(residues.numbered(cell) for cell in cells[:2]))
    return limited(pairs, low, high, atoms="CB", weight=probability or 1.0), probability
