"""Choose one of a residue's alternate locations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.io.records import (
    BACKBONE,
    TERMINAL_OXYGENS,
    UNKNOWN,
    AtomRecord,
    ResidueRecord,
    amino_acid,
)

_SLOTS: Final = {
    letter: {name: rc.atom_order[name] for name in (*(n for n in names if n), "OXT")}
    for letter, names in zip(rc.restypes, rc.restype_atom14_names[:20], strict=True)
} | {UNKNOWN: {name: rc.atom_order[name] for name in (*BACKBONE, "CB")}}
_SLOTS["M"]["SE"] = rc.atom_order["SD"]
_SLOTS["I"]["CD"] = rc.atom_order["CD1"]  # CHARMM
for _slots in _SLOTS.values():
    _slots.update({name: _slots[usual] for name, usual in TERMINAL_OXYGENS.items() if usual in _slots})


@dataclass
class Conformer:
    """Residue with one location per atom."""

    name: str  #: Residue name in the file
    letter: str  #: One of the twenty, or X
    known: bool  #: True if its name is that of an amino acid (an unknown name may be that of a ligand)
    record: ResidueRecord  #: Record of the residue
    #: Atoms by atom37 slot; the selenium of selenomethionine is in the slot of SD
    atoms: dict[int, AtomRecord]

    def position(self, name: str) -> np.ndarray | None:
        """Return coordinates ``[3]`` in Å of the atom with this atom37 name, None if it is missing."""
        atom = self.atoms.get(rc.atom_order[name])
        return None if atom is None else np.array([atom.x, atom.y, atom.z])


def choose_conformer(record: ResidueRecord, parents: Mapping[str, str]) -> Conformer | None:
    """Choose the alternate location with the highest mean occupancy, the first among equals.

    The choice is for the whole residue, so that a side chain is never combined from two locations. Only missing atoms
    are taken from the next best location of the same amino acid. A residue of unknown name and atoms counts as an amino
    acid (X) if it has N, CA and C. The result is None if the residue is not an amino acid or lacks all atoms of its
    type.
    """
    groups: dict[tuple[str, str], list[AtomRecord]] = {}
    shared: list[AtomRecord] = []
    for atom in record.atoms:
        if atom.alternate:
            groups.setdefault((atom.residue_name, atom.alternate), []).append(atom)
        else:
            shared.append(atom)
    ranked = sorted(groups.values(), key=lambda atoms: -sum(a.occupancy for a in atoms) / len(atoms))
    ordered = [*(ranked[0] if ranked else ()), *shared, *(atom for atoms in ranked[1:] for atom in atoms)]
    if not ordered:
        return None
    name = ordered[0].residue_name
    own = [atom for atom in ordered if atom.residue_name == name]
    letter, known = rc.restype_3to1.get(name), True
    if letter is None:
        own_names = {atom.name for atom in own}
        heavy = own_names | {atom for residue, atom in record.other_atoms if residue == name}
        letter, known = amino_acid(name, parents, heavy), amino_acid(name, parents) is not None
        if letter is None:
            if not {"N", "CA", "C"} <= own_names:
                return None
            letter = UNKNOWN
    slots = _SLOTS[letter]
    atoms: dict[int, AtomRecord] = {}
    for atom in own:
        slot = slots.get(atom.name)
        if slot is not None:
            atoms.setdefault(slot, atom)
    if not atoms:
        return None
    conformer = Conformer(name, letter, known, record, atoms)
    if letter == "R":
        _name_arginine_nitrogens(conformer)
    return conformer


def _name_arginine_nitrogens(residue: Conformer) -> None:
    """Swap NH1 and NH2 if NH2 is nearer to CD (AlphaFold supplement, section 1.2.1)."""
    delta, first, second = (residue.position(name) for name in ("CD", "NH1", "NH2"))
    if delta is None or first is None or second is None:
        return
    if np.linalg.norm(first - delta) > np.linalg.norm(second - delta):
        one, two = rc.atom_order["NH1"], rc.atom_order["NH2"]
        residue.atoms[one], residue.atoms[two] = residue.atoms[two], residue.atoms[one]


def bonded(before: Conformer, after: Conformer) -> bool | None:
    """Return True if C and N of two residues are within 2 Å; None if one is missing."""
    carbon, nitrogen = before.position("C"), after.position("N")
    if carbon is None or nitrogen is None:
        return None
    return bool(np.linalg.norm(carbon - nitrogen) < 2.0)
