"""Files of distance restraints: our table, cross-link tables, and files of other programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fastfold.data.targets import Target
from fastfold.errors import InputError
from fastfold.inference.restraints.boltz import read_boltz
from fastfold.inference.restraints.bounds import check_bounds
from fastfold.inference.restraints.lists import list_columns, read_list
from fastfold.inference.restraints.residues import Residues
from fastfold.inference.restraints.restraint import ATOMS, Atoms, Restraint
from fastfold.inference.restraints.rows import Row, collect, limited, read_number, read_share, split_rows
from fastfold.utils.foreign_text import read_settings_text, shown

CROSSLINKERS = {"DSS": 30.0, "BS3": 30.0, "DSSO": 30.0, "DSBU": 30.0, "EDC": 20.0}
"""Largest distance of CA atoms in Å by crosslinker.

DSS and BS3: Merkley et al., 2014 (doi:10.1002/pro.2458), 26 to 30 Å. The others: usual bounds for their spacers
(Rappsilber, 2011, doi:10.1016/j.jsb.2010.10.014).
"""

_OURS = ("chain1", "residue1", "chain2", "residue2")
_OPTIONAL = ("min", "max", "weight", "group", "crosslinker", "atoms", "ambiguous")
_XIVIEW = {"protein1": "chain1", "abspos1": "residue1", "protein2": "chain2", "abspos2": "residue2"}
"""Columns of xiVIEW's cross-link tables, in lower case, by ours."""

_CHAI = ("chainA", "res_idxA", "chainB", "res_idxB", "connection_type")
_CHAI_OPTIONAL = ("restraint_id", "confidence", "min_distance_angstrom", "max_distance_angstrom", "comment")
_CHAI_MAX = 10.0
"""Chai's limit in Å of a row without one."""

_MAX_BYTES = 2**24


def read_restraints(
    path: Path, target: Target, *, say: Callable[[str], None] | None = None
) -> list[Restraint]:
    r"""Read the restraints of a target, in the order of the file, and check them against each other.

    Args:
        path: A table of FastFold, of cross-links or of Chai, a YAML file of Boltz, a list of AlphaLink, or contacts in
            CASP's format RR (docs/restraints.md). Chains are A, B and so on in the order of the target, and residues
            are counted from 1 in each whole protein; those of a given structure have the names and numbers of its file.
        target: The target.
        say: Receives a line about each property of the file that the fit leaves out; None for silence.

    Raises:
        InputError: The file cannot be read; names each line that cannot be used, or that no structure meets.

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
    text = read_settings_text(path, limit=_MAX_BYTES)
    notes: list[str] = []
    if path.suffix.lower() in (".yaml", ".yml"):
        residues, restraints = read_boltz(path, text, target, notes)
    else:
        residues = Residues(target)
        rows = split_rows(path, text)
        if rows and (columns := list_columns(rows[0].cells)) is not None:
            restraints = read_list(path, rows, columns, residues, notes)
        else:
            restraints = _from_table(path, rows, residues)
    if not restraints:
        raise InputError("has no restraint", path=path)
    check_bounds(path, restraints, residues)
    if say is not None:
        for note in notes:
            say(f"{path.name}: {note}")
    return restraints


def _from_table(path: Path, rows: Sequence[Row], residues: Residues) -> list[Restraint]:
    header = rows[0].cells if rows else []
    columns, names_proteins = _translated(header, path)
    if set(_CHAI) <= set(columns):
        known, read = {*_CHAI, *_CHAI_OPTIONAL}, _chai_row
    elif set(_OURS) <= set(columns):
        known = {*_OURS, *_OPTIONAL, *(name for name in columns if name.startswith("other "))}
        read = _protein_row if names_proteins else _own_row
    else:
        missing = next(name for name in _OURS if name not in columns)
        raise InputError(
            f"has no column {missing!r}; expected {', '.join(_OURS)} with max or crosslinker, or the columns of "
            "xiVIEW, Chai, AlphaLink or CASP",
            path=path,
        )
    if repeated := next((name for name in columns if columns.count(name) > 1), None):
        raise InputError(f"has the column {shown(repeated)} more than once", path=path)
    if unknown := sorted(set(columns) - known):
        raise InputError(f"has an unknown column {shown(unknown[0])}; remove or rename it", path=path)

    def restraints_of(cells: list[str]) -> list[Restraint]:
        if len(cells) > len(columns):
            raise ValueError("has more cells than the header")
        padded = [*cells, *[""] * (len(columns) - len(cells))]
        return read(dict(zip(columns, padded, strict=True)), residues)

    return collect(path, rows[1:], restraints_of)


def _translated(columns: Sequence[str], path: Path) -> tuple[list[str], bool]:
    """Return our names for a table's columns, and True for a cross-link table, which names proteins.

    Other columns of a cross-link table get names that are ignored.
    """
    places = {name.lower() for name in columns}
    spelling = _XIVIEW
    if "abspos1" not in places:
        spelling = {key.replace("abs", "seq"): ours for key, ours in _XIVIEW.items()}
    named = [spelling.get(name.lower(), name.lower()) for name in columns]
    if set(_OURS) <= set(columns) or not set(_OURS) <= set(named):
        return list(columns), False
    if not {"max", "min", "crosslinker"} & set(named):
        raise InputError(
            "has cross-links without a distance; add a column crosslinker with names such as DSS, or max",
            path=path,
        )
    names_proteins = "protein1" in places
    known = [
        name if name in (*_OURS, *_OPTIONAL) or not names_proteins else f"other {i}"
        for i, name in enumerate(named)
    ]
    return known, names_proteins


def _protein_row(cells: dict[str, str], residues: Residues) -> list[Restraint]:
    """Read a cross-link between proteins, which are ambiguous where the target has copies of them."""
    chains = {name: residues.protein_chain(cells[name]) for name in ("chain1", "chain2")}
    return _own_row({**cells, **chains, "ambiguous": cells.get("ambiguous") or "yes"}, residues)


def _own_row(cells: dict[str, str], residues: Residues) -> list[Restraint]:
    first, second = (residues.place(cells[f"chain{i}"], cells[f"residue{i}"]) for i in (1, 2))
    high, atoms = read_number(cells, "max", math.inf), _atoms(cells.get("atoms", ""))
    linker = cells.get("crosslinker", "")
    if linker:
        if linker.upper() not in CROSSLINKERS:
            raise ValueError(f"unknown crosslinker {linker!r}; known: {', '.join(CROSSLINKERS)}, or give max")
        if atoms != "CA":
            raise ValueError(
                f"atoms: the limit of a crosslinker is between CA, found {atoms!r}; give max instead"
            )
        high = min(high, CROSSLINKERS[linker.upper()])
    ambiguous = cells.get("ambiguous", "").lower() or ("yes" if linker else "no")
    if ambiguous not in ("yes", "no"):
        raise ValueError(f"ambiguous: expected yes or no, found {cells['ambiguous']!r}")
    pairs = residues.ambiguous_pairs(first, second) if ambiguous == "yes" else [(first, second)]
    low, weight = read_number(cells, "min", 0.0), read_number(cells, "weight", 1.0)
    return limited(pairs, low, high, atoms=atoms, group=cells.get("group", ""), weight=weight)


def _atoms(cell: str) -> Atoms:
    names = {name.lower(): name for name in ATOMS}
    if cell and cell.lower() not in names:
        raise ValueError(f"atoms: expected {', '.join(ATOMS)}, found {cell!r}")
    return names.get(cell.lower(), "CA")


def _chai_row(cells: dict[str, str], residues: Residues) -> list[Restraint]:
    """Read a contact, or a pocket: any residue of the first chain may be near the second residue."""
    kind = cells["connection_type"]
    if kind not in ("contact", "pocket"):
        raise ValueError(f"connection type {kind!r} is not supported; contact and pocket are")
    low = read_number(cells, "min_distance_angstrom", 0.0)
    high = read_number(cells, "max_distance_angstrom", _CHAI_MAX)
    weight = read_share(cells, "confidence", 1.0)
    if not weight:
        raise ValueError("confidence: expected a number over 0, found 0; remove the row")
    (chain, residue), other = [(cells[f"chain{side}"], cells[f"res_idx{side}"]) for side in "AB"]
    second = residues.place(*other)
    if kind == "contact":
        pairs, group = [(residues.place(chain, residue), second)], ""
    elif residue:
        raise ValueError(f"res_idxA: a pocket is near any residue of chain {chain}, found {residue!r}")
    else:
        pairs = [(first, second) for first in residues.atoms_of_chain(chain)]
        # Pockets with other limits are restraints of their own.
        group = f"pocket {'/'.join((chain, *other))} {low:g} to {high:g} Å"
    return limited(pairs, low, high, atoms="any", group=group, weight=weight)
