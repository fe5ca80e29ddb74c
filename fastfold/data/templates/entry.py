"""PDB entry for templates: sequences of its protein chains, and their atoms.

The decisions are those of AlphaFold's template pipeline, and differ from
:func:`fastfold.protein.io.read.read_structure`, which is for training. Every atom of atom37 is used, regardless of its
residue's type. Alternate locations are chosen for each atom. An entry is not used if atoms of a polymer lack a place
in its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.cif_tables import CifTable, read_cif_tables
from fastfold.utils.foreign_text import plain_float
from fastfold.utils.text_files import PathLike

_CATEGORIES = ("_atom_site", "_chem_comp", "_entity_poly_seq", "_pdbx_audit_revision_history", "_struct_asym")
_ITEMS = (
    *("label_asym_id", "auth_asym_id", "label_seq_id", "label_comp_id", "label_atom_id"),
    *("occupancy", "cartn_x", "cartn_y", "cartn_z"),
)
_MAX_COORDINATE = 1e6


@dataclass(frozen=True, eq=False)
class EntryChain:
    """Protein chain of an entry, with ``N`` residues of its sequence, observed or not."""

    sequence: str  #: ``N`` letters, ``X`` for unknown residues
    positions: np.ndarray  #: ``[N, 37, 3]`` float32 in Å, zero where the mask is
    mask: np.ndarray  #: ``[N, 37]`` float32


class _Polymer(NamedTuple):
    sequence: str  #: Letters of a protein
    first: int  #: Lowest number in its sequence


class TemplateEntry:
    """Protein chains of an mmCIF file's lines, whose path is for messages.

    Attributes:
        release_date: Oldest revision, ``YYYY-MM-DD``; empty if unknown.
        sequences: Letters of each chain by the author's chain name, in the order of the file. With
            ``alternatives_count`` each of several residue types at one place (microheterogeneity) counts as a residue,
            as in AlphaFold, which shifts later atoms by one residue; otherwise the first one is used.

    Raises:
        InputError: The file is damaged, or an atom of a protein lacks a place in its sequence.
    """

    def __init__(self, lines: Sequence[str], *, path: PathLike, alternatives_count: bool = False) -> None:
        blocks = read_cif_tables(lines, _CATEGORIES, path=path)
        tables = next((block for block in blocks if "_atom_site" in block), blocks[0])
        dates = tables.get("_pdbx_audit_revision_history", CifTable()).column("revision_date")
        self.release_date = min((date for date in dates if date), default="")
        self._path = path
        polymers = _proteins(tables, path, alternatives_count=alternatives_count)
        self._polymers: dict[str, _Polymer] = {}
        self._atoms: dict[str, list[tuple[str, ...]]] = {}
        self._read_atoms(tables.get("_atom_site", CifTable()), polymers)
        self.sequences = {chain_id: polymer.sequence for chain_id, polymer in self._polymers.items()}

    def _read_atoms(self, table: CifTable, polymers: dict[str, _Polymer]) -> None:
        """Sort the first model's atoms by chain, in the order of the polymers."""
        models = table.column("pdbx_pdb_model_num")
        columns = [table.column(item) for item in _ITEMS]
        names: dict[str, str] = {}
        for i, row in enumerate(zip(*columns, strict=True)):
            if models[i] != models[0]:
                break
            asym, author, place = row[:3]
            if asym not in polymers:
                continue
            if not place.isdecimal():
                raise InputError(
                    "an atom of a protein lacks a place in its sequence (label_seq_id)",
                    path=self._path,
                    line=table.line(i),
                )
            if asym not in names:
                # If two polymers share an author's name, the last one has it.
                names[asym] = author
                self._atoms[author] = []
            self._atoms[names[asym]].append(row[2:])
        for asym, polymer in polymers.items():
            if asym in names:
                self._polymers[names[asym]] = polymer

    def chain(self, chain_id: str) -> EntryChain:
        """Read the atoms of a chain.

        Raises:
            InputError: A coordinate is not a number.
        """
        polymer = self._polymers[chain_id]
        length = len(polymer.sequence)
        positions = np.zeros((length, rc.atom_type_num, 3), np.float32)
        mask = np.zeros((length, rc.atom_type_num), np.float32)
        residues: dict[int, list[tuple[str, ...]]] = {}
        for row in self._atoms[chain_id]:
            residues.setdefault(int(row[0]) - polymer.first, []).append(row)
        for place, rows in residues.items():
            if 0 <= place < length:
                atoms = self._residue(rows)
                for slot, xyz in atoms.items():
                    positions[place, slot], mask[place, slot] = xyz, 1.0
        return EntryChain(polymer.sequence, positions, mask)

    def _residue(self, rows: list[tuple[str, ...]]) -> dict[int, np.ndarray]:
        """Return the positions of one residue's atoms by their atom37 place."""
        best: dict[str, tuple[float, tuple[str, ...]]] = {}
        totals: dict[str, float] = {}
        for row in rows:
            totals[row[1]] = totals.get(row[1], 0.0) + _number(row[3] or "1", self._path)
        name = max(totals, key=lambda key: totals[key])
        for row in rows:
            if row[1] != name:
                continue
            occupancy = _number(row[3] or "1", self._path)
            if row[2] not in best or occupancy > best[row[2]][0]:
                best[row[2]] = (occupancy, row)
        atoms: dict[int, np.ndarray] = {}
        for atom, (_, row) in best.items():
            slot = rc.atom_order.get(atom)
            if slot is None and atom.upper() == "SE" and name == "MSE":
                slot = rc.atom_order["SD"]
            if slot is not None:
                atoms[slot] = np.array([_number(text, self._path) for text in row[4:7]], np.float32)
        if name == "ARG":
            _name_arginine_nitrogens(atoms)
        return atoms


def _proteins(
    tables: dict[str, CifTable], path: PathLike, *, alternatives_count: bool
) -> dict[str, _Polymer]:
    """Return the proteins by the file's own chain name."""
    listed = tables.get("_entity_poly_seq", CifTable())
    rows = zip(listed.column("entity_id"), listed.column("num"), listed.column("mon_id"), strict=True)
    monomers: dict[str, list[tuple[int, str]]] = {}
    for i, (entity, number, name) in enumerate(rows):
        if not number.isdecimal():
            raise InputError("a residue of the sequence lacks a number", path=path, line=listed.line(i))
        monomers.setdefault(entity, []).append((int(number), name))
    components = tables.get("_chem_comp", CifTable())
    peptides = {
        name
        for name, kind in zip(components.column("id"), components.column("type"), strict=True)
        if "peptide" in kind.lower()
    }
    proteins = {}
    for entity, members in monomers.items():
        if any(name in peptides for _, name in members):
            first = min(number for number, _ in members)
            names = [name for _, name in members]
            if not alternatives_count:
                by_number: dict[int, str] = {}
                for place, name in members:
                    by_number.setdefault(place, name)
                names = list(by_number.values())
            proteins[entity] = _Polymer("".join(_letters().get(name, "X") for name in names), first)
    chains = tables.get("_struct_asym", CifTable())
    pairs = list(zip(chains.column("id"), chains.column("entity_id"), strict=True))
    return {asym: proteins[entity] for wanted in proteins for asym, entity in pairs if entity == wanted}


@cache
def _letters() -> dict[str, str]:
    """Return one-letter codes of all residue names known to Biopython."""
    from Bio.Data.PDBData import protein_letters_3to1_extended

    known = {name.strip(): letter for name, letter in protein_letters_3to1_extended.items()}
    return {name: letter for name, letter in known.items() if len(letter) == 1 and letter.isalpha()}


def _number(text: str, path: PathLike) -> float:
    """Parse a coordinate or an occupancy."""
    try:
        value = plain_float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < _MAX_COORDINATE:
        raise InputError(f"expected a number for an atom, found {text[:20]!r}", path=path)
    return value


def _name_arginine_nitrogens(atoms: dict[int, np.ndarray]) -> None:
    """Swap NH1 and NH2 if NH2 is nearer to CD (AlphaFold's supplement, section 1.2.1)."""
    cd, first, second = (rc.atom_order[name] for name in ("CD", "NH1", "NH2"))
    if not {cd, first, second} <= set(atoms):
        return
    if np.linalg.norm(atoms[first] - atoms[cd]) > np.linalg.norm(atoms[second] - atoms[cd]):
        atoms[first], atoms[second] = atoms[second], atoms[first]
