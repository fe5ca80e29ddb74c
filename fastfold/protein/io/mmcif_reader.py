"""Read records of mmCIF files (the dictionary of the Protein Data Bank, including ModelCIF)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastfold.errors import InputError
from fastfold.protein.io.cif_tables import CifTable, read_cif_tables
from fastfold.protein.io.records import (
    ATOM_NAMES,
    MAX_NUMBER,
    MAX_VALUE,
    WATERS,
    AtomRecord,
    FileRecords,
    is_hydrogen,
)
from fastfold.utils.foreign_text import plain_float, plain_int
from fastfold.utils.text_files import PathLike

_CATEGORIES: Final = frozenset(
    (
        *("_atom_site", "_chem_comp", "_database_pdb_rev", "_em_3d_reconstruction", "_entity_poly"),
        *("_entity_poly_seq", "_exptl", "_pdbx_audit_revision_history", "_pdbx_poly_seq_scheme"),
        *("_pdbx_struct_mod_residue", "_refine", "_reflns"),
    )
)
_RESOLUTIONS = (
    ("_refine", "ls_d_res_high"),
    ("_em_3d_reconstruction", "resolution"),
    ("_reflns", "d_resolution_high"),
)
_RELEASES = (("_pdbx_audit_revision_history", "revision_date"), ("_database_pdb_rev", "date"))
_DATE = re.compile(r"\d{4}-\d\d-\d\d$")
_ATOM_ITEMS = (
    *("group_pdb", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id", "label_entity_id"),
    *("label_seq_id", "auth_seq_id", "pdbx_pdb_ins_code", "auth_asym_id", "pdbx_pdb_model_num"),
    *("cartn_x", "cartn_y", "cartn_z", "occupancy", "b_iso_or_equiv"),
)
_DEFAULTS = ("nan", "nan", "nan", "1", "0")  #: Defaults of missing values; a position must be given
_NEEDED = ("label_atom_id", "label_comp_id", "cartn_x", "cartn_y", "cartn_z")


@dataclass
class _Polymers:
    """Polymers of a file."""

    #: Polymer entities with True for a protein, False for another polymer, None if the type leaves it open
    protein: dict[str, bool | None] = field(default_factory=dict)
    sequences: dict[str, list[str]] = field(default_factory=dict)  #: Residue names by entity
    #: Residue names by chain (label), if not by entity
    by_asym: dict[str, list[str]] = field(default_factory=dict)


def parse_mmcif(lines: Sequence[str], *, path: PathLike) -> FileRecords:
    """Read the first model of the first data block with atoms of an mmCIF file.

    Chains have the author's names. ``label_seq_id`` gives the place of a residue in the polymer's ``_entity_poly_seq``
    (or ``_pdbx_poly_seq_scheme``). Molecules other than polymers are left out. Lines are without line ends; the path is
    that of messages.

    Raises:
        InputError: The ``_atom_site`` table is missing, or a table or atom is damaged; with its line.
    """
    blocks = [one for one in read_cif_tables(lines, _CATEGORIES, path=path) if "_atom_site" in one]
    if not blocks:
        raise InputError(
            "contains no atoms (no _atom_site table); is it truncated? Download or copy it again", path=path
        )
    tables, atoms = blocks[0], blocks[0]["_atom_site"]
    if absent := [item for item in _NEEDED if item not in atoms.columns]:
        raise InputError(
            f"_atom_site lacks {absent[0]}; write the file again", path=path, line=atoms.first_line
        )
    records = FileRecords(parents=_parents(tables))
    if len(blocks) > 1:
        records.warnings.append(
            f"The file has {len(blocks)} data blocks with atoms; the first one is read. Save each to its own file."
        )
    end = next(line for line in reversed(lines) if line.strip())
    if end.startswith(("ATOM", "HETATM")) and any(line.strip() == "#" for line in lines):
        records.warnings.append(
            "The file ends with its last atom, without a closing mark; it may be truncated."
        )
    _read_atoms(atoms, _polymers(tables), records, path)
    records.resolution = _resolution(tables)
    records.method = ", ".join(m.lower() for m in tables.get("_exptl", CifTable()).column("method") if m)
    for category, item in _RELEASES:
        dates = [date for date in tables.get(category, CifTable()).column(item) if _DATE.match(date)]
        if dates:
            records.release_date = min(dates)
            break
    return records


def _read_atoms(table: CifTable, polymers: _Polymers, records: FileRecords, path: PathLike) -> None:
    columns = {item: table.column(item) for item in _ATOM_ITEMS}
    numbered = any(columns["label_seq_id"])
    author_numbered = any(columns["auth_seq_id"])
    unplaced = _unplaced_chains(columns)
    models = columns["pdbx_pdb_model_num"]
    names: dict[tuple[str, str], str] = {}
    for i, row in enumerate(zip(*columns.values(), strict=True)):
        group, name, alternate, residue, asym, entity, *rest = row
        seq, author_seq, insertion, author_asym, model, *values = rest
        if model != models[0]:
            records.warnings.append("The file has several models; the first one is read.")
            break
        if group == "HETATM":
            records.hetero.add(residue)
        if residue in WATERS:
            records.waters += 1
            continue
        key = (asym, author_asym)
        if (
            is_hydrogen(name)
            or (group == "HETATM" and name not in ATOM_NAMES and key not in names)
            or (numbered and not seq and key not in unplaced)
            or (group != "ATOM" and polymers.protein and entity and entity not in polymers.protein)
        ):
            continue

        def fail(message: str, row: int = i) -> InputError:
            return InputError(message, path=path, line=table.line(row))

        try:
            x, y, z, occupancy, b_factor = (
                plain_float(v or default) for v, default in zip(values, _DEFAULTS, strict=True)
            )
            # PyMOL leaves out auth_seq_id, and writes the author's number as place in the sequence.
            is_place = seq and key not in unplaced and (author_numbered or entity in polymers.sequences)
            position = plain_int(seq) - 1 if is_place else None
            number = plain_int(author_seq or seq)
        except ValueError:
            raise fail(
                "the position or residue number of an atom is not a number; download or copy the file again"
            ) from None
        if (
            not all(-MAX_VALUE < v < MAX_VALUE for v in (x, y, z, occupancy, b_factor))
            or abs(number) > MAX_NUMBER
        ):
            raise fail("a value of an atom is not finite or too large; correct or remove it")
        if key not in names:
            # Each polymer has one author's name; if two share one, the second keeps its label.
            chain_id = author_asym or asym
            is_polymer = numbered or key in unplaced
            is_repeated = is_polymer and chain_id in records.chains and asym and asym not in records.chains
            names[key] = asym if is_repeated else chain_id
            chain = records.chain(names[key])
            chain.protein = polymers.protein.get(entity)
            chain.sequence = polymers.sequences.get(entity) or polymers.by_asym.get(asym)
        chain = records.chains[names[key]]
        length = MAX_NUMBER if chain.sequence is None else len(chain.sequence)
        if position is not None and not 0 <= position < length:
            raise fail(
                f"label_seq_id {seq} is outside the {length:,} residues of its polymer; correct the file"
            )
        problem = chain.add_atom(
            AtomRecord(residue, alternate, name, occupancy, x, y, z, b_factor),
            number,
            insertion,
            hetero=group == "HETATM" and position is None,
            position=position,
        )
        if problem:
            raise fail(problem)


def _unplaced_chains(columns: Mapping[str, list[str]]) -> set[tuple[str, str]]:
    """Return the chains, by label and author's name, with ATOM rows without a place in the sequence."""
    rows = zip(
        *(columns[item] for item in ("group_pdb", "label_seq_id", "label_asym_id", "auth_asym_id")),
        strict=True,
    )
    return {(asym, author) for group, seq, asym, author in rows if group == "ATOM" and not seq}


def _polymers(tables: Mapping[str, CifTable]) -> _Polymers:
    """Return types and sequences of the polymers, with the first of several residues at one place."""
    polymers = _Polymers()
    if poly := tables.get("_entity_poly"):
        for entity, kind in zip(poly.column("entity_id"), poly.column("type"), strict=True):
            # polypeptide(L), polyribonucleotide, polysaccharide(D); other types (a chain of glycines is "other") are
            # decided by their residues.
            kind = kind.lower()
            polymers.protein[entity] = kind.startswith("polypeptide") if kind.startswith("poly") else None
    for category, key, place, into in (
        ("_entity_poly_seq", "entity_id", "num", polymers.sequences),
        ("_pdbx_poly_seq_scheme", "asym_id", "seq_id", polymers.by_asym),
    ):
        if table := tables.get(category):
            last: dict[str, str] = {}
            for polymer, number, name in zip(
                table.column(key), table.column(place), table.column("mon_id"), strict=True
            ):
                if last.get(polymer) != number:
                    into.setdefault(polymer, []).append(name)
                last[polymer] = number
    return polymers


def _parents(tables: Mapping[str, CifTable]) -> dict[str, str]:
    parents = {}
    for category, name, parent in (
        ("_chem_comp", "id", "mon_nstd_parent_comp_id"),
        ("_pdbx_struct_mod_residue", "label_comp_id", "parent_comp_id"),
    ):
        if table := tables.get(category):
            parents.update({n: p for n, p in zip(table.column(name), table.column(parent), strict=True) if p})
    return parents


def _resolution(tables: Mapping[str, CifTable]) -> float | None:
    """Return the first stated resolution: of refinement, electron microscopy, then data collection."""
    for category, item in _RESOLUTIONS:
        for text in tables.get(category, CifTable()).column(item):
            try:
                value = plain_float(text)
            except ValueError:
                continue
            if 0 < value < 1000:
                return value
    return None
