"""Records of structures that are objects of Biotite, Biopython or MDAnalysis, as of structure files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from fastfold.errors import ConfigError, InputError
from fastfold.protein.io.records import MAX_VALUE, WATERS, AtomRecord, FileRecords, is_hydrogen

_UNNAMED = "structure"
_NO_ALTERNATE = (".", "?")


_Row = tuple[str, int, str, bool, str, str, str, float, Sequence[float], float]
"""Chain, residue number, insertion code, True for HETATM, residue name, alternate location, atom name, occupancy,
position in Å and B-factor of an atom."""


def library_of(source: Any) -> str | None:
    """Return the package of a structure object: ``biotite``, ``Bio`` or ``MDAnalysis``; None for other objects."""
    for kind in type(source).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _MARKS:
            return package if hasattr(source, _MARKS[package]) else None
    return None


def object_name(source: Any) -> str:
    """Return the name of a structure object: Biopython's id, the file of a ``Universe``, otherwise ``structure``."""
    if library_of(source) == "Bio":
        return str(source.get_full_id()[0]) or _UNNAMED
    file = getattr(getattr(source, "universe", None), "filename", None)
    if isinstance(file, (str, os.PathLike)):
        return os.path.basename(os.fspath(file)).partition(".")[0]
    return _UNNAMED


def object_records(source: Any) -> FileRecords:
    """Return the records of a structure object, without hydrogens and waters.

    Args:
        source: Biotite's ``AtomArray`` or ``AtomArrayStack`` (its first model), Biopython's ``Structure``, ``Model``
            (the first) or ``Chain``, MDAnalysis' ``Universe`` or ``AtomGroup`` (in the current frame).

    Raises:
        ConfigError: The object is of another class.
        InputError: It lacks positions or atom names, has a value that is not finite, or repeats an atom.
    """
    library = library_of(source)
    if library is None:
        raise ConfigError(
            "expected a structure: a PDB or mmCIF file, or an object of Biotite, Biopython or MDAnalysis; found "
            f"{type(source).__name__}"
        )
    records = FileRecords()
    for row in _ROWS[library](source, records.warnings):
        chain_id, number, insertion, is_hetero, residue, alternate, name, occupancy, (x, y, z), b_factor = row
        residue, name, insertion = residue.strip(), name.strip(), insertion.strip()
        if is_hetero:
            records.hetero.add(residue)
        if residue in WATERS:
            records.waters += 1
            continue
        if is_hydrogen(name):
            continue
        if not all(-MAX_VALUE < value < MAX_VALUE for value in (occupancy, x, y, z, b_factor)):
            raise InputError(
                f"{object_name(source)}: atom {name} of {residue} {number}{insertion} has a value that is not finite "
                "or too large; correct or remove it"
            )
        alternate = "" if alternate in _NO_ALTERNATE else alternate.strip()
        atom = AtomRecord(residue, alternate, name, occupancy, x, y, z, b_factor)
        problem = records.chain(chain_id.strip()).add_atom(atom, number, insertion, hetero=is_hetero)
        if problem:
            raise InputError(f"{object_name(source)}: {problem}")
    return records


def _biotite_rows(source: Any, warnings: list[str]) -> Iterator[_Row]:
    if hasattr(source, "stack_depth"):
        if source.stack_depth() > 1:
            warnings.append("The stack has several models; the first one is read.")
        source = source[0]
    known = source.get_annotation_categories()

    def column(name: str, default: Any) -> list[Any]:
        return list(source.get_annotation(name).tolist()) if name in known else [default] * len(source)

    places = (
        column(name, "") for name in ("chain_id", "res_id", "ins_code", "hetero", "res_name", "altloc_id")
    )
    atoms = (
        column("atom_name", ""),
        column("occupancy", 1.0),
        source.coord.tolist(),
        column("b_factor", 0.0),
    )
    return zip(*places, *atoms, strict=True)


def _biopython_rows(source: Any, warnings: list[str]) -> Iterator[_Row]:
    if source.level not in ("S", "M", "C"):
        raise ConfigError(f"expected Biopython's Structure, Model or Chain, found {type(source).__name__}")
    chains = [source] if source.level == "C" else list(source)
    if source.level == "S":
        if len(chains) > 1:
            warnings.append("The structure has several models; the first one is read.")
        chains = list(chains[0]) if chains else []
    for chain in chains:
        for residue in chain.get_unpacked_list():
            flag, number, insertion = residue.id
            for atom in residue.get_unpacked_list():
                occupancy = 1.0 if atom.get_occupancy() is None else atom.get_occupancy()
                residue_and_atom = residue.resname, atom.get_altloc(), atom.name
                values = occupancy, atom.coord.tolist(), atom.get_bfactor()
                yield chain.id, number, insertion, flag != " ", *residue_and_atom, *values


def _mdanalysis_rows(source: Any, warnings: list[str]) -> Iterator[_Row]:
    atoms = source.atoms

    def column(name: str, default: Any = None) -> list[Any]:
        values = getattr(atoms, name, None)  # MDAnalysis' NoDataError is an AttributeError
        if values is None and default is None:
            raise InputError(
                f"{object_name(source)}: the {type(source).__name__} has no {name}; load a topology that has them"
            )
        return [default] * len(atoms) if values is None else list(values.tolist())

    chains = column("chainIDs", "")
    if not any(map(str.strip, chains)):
        chains = column("segids", "")
    is_hetero = [kind == "HETATM" for kind in column("record_types", "ATOM")]
    places = (
        chains,
        column("resids"),
        column("icodes", ""),
        is_hetero,
        column("resnames"),
        column("altLocs", ""),
    )
    values = (column("names"), column("occupancies", 1.0), column("positions"), column("tempfactors", 0.0))
    return zip(*places, *values, strict=True)


_MARKS = {"biotite": "get_annotation", "Bio": "level", "MDAnalysis": "atoms"}
"""Attribute that structures of a package have."""
_ROWS = {"biotite": _biotite_rows, "Bio": _biopython_rows, "MDAnalysis": _mdanalysis_rows}
