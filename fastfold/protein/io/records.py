"""Records of PDB and mmCIF files, amino acids by name and atoms, and the choice of alternate locations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import MAX_PEPTIDE_BOND

UNKNOWN: Final = "X"
BACKBONE: Final = ("N", "CA", "C", "O")
TERMINAL_OXYGENS: Final = {"OT1": "O", "OT2": "OXT", "OC1": "O", "OC2": "OXT"}
"""C-terminal oxygens of CHARMM and GROMACS, with the PDB's names."""
_PROTONATION_STATES: Final = {
    name: letter
    for letter, names in {
        "H": ("HID", "HIE", "HIP", "HSD", "HSE", "HSP"),
        "C": ("CYM", "CYX"),
        "D": ("ASH",),
        "E": ("GLH",),
        "K": ("LYN",),
    }.items()
    for name in names
}
_SIDE_CHAINS: Final = {
    letter: frozenset(name for name in names if name and name not in BACKBONE)
    for letter, names in zip(rc.restypes, rc.restype_atom14_names[:20], strict=True)
}
# A truncated side chain may look like glycine or alanine, an unbranched one like proline.
_BY_SIDE_CHAIN: Final = {atoms: letter for letter, atoms in _SIDE_CHAINS.items() if letter not in "AGP"}


def amino_acid(name: str, parents: Mapping[str, str], atoms: Collection[str] | None = None) -> str | None:
    """Return the one-letter type of a residue, ``X`` for UNK, or None if it may not be an amino acid.

    Some names have several meanings: HSE is homoserine in the PDB and histidine in CHARMM. The first meaning whose side
    chain has all observed heavy atoms is used, if these are given. If none has, a complete side chain of one of the
    twenty amino acids decides. Upper and lower case are the same. ``parents`` are the file's statements about modified
    residues.
    """
    stated = rc.restype_3to1.get(parents.get(name, "").upper())
    name = name.upper()
    if name in rc.restype_3to1:
        return rc.restype_3to1[name]
    if name == "UNK":
        return UNKNOWN
    modified, force_field = _parents_of_modified().get(name), _force_field_type(name)
    if atoms is not None:
        side_chain = frozenset(atoms).difference(BACKBONE, TERMINAL_OXYGENS, ("OXT",))
        for letter in (stated, force_field, modified):
            if letter and side_chain <= _SIDE_CHAINS[letter]:
                return letter
        if {"N", "CA", "C"} <= set(atoms):
            by_atoms = _cut_terminal_type(name, side_chain) or _BY_SIDE_CHAIN.get(side_chain)
            if by_atoms:
                return by_atoms
    return stated or modified or force_field


def is_modified(name: str, letter: str) -> bool:
    """Return True if a residue's name is that of a modified amino acid, read as the standard one of a letter.

    Names of force fields, such as HIE, are other names of standard ones.
    """
    return name.upper() in _parents_of_modified() and letter not in (
        rc.restype_3to1.get(name.upper()),
        _force_field_type(name.upper()),
    )


def _force_field_type(name: str) -> str | None:
    """Return the meaning of a name in Amber, CHARMM or GROMACS: HIE, NALA, NHIE, HISE."""
    if len(name) == 4:
        name = name[1:] if name[0] in "NC" else name[:3]
    return _PROTONATION_STATES.get(name) or rc.restype_3to1.get(name)


def _cut_terminal_type(name: str, side_chain: frozenset[str]) -> str | None:
    """Return the meaning of an Amber name cut to three letters, such as NAL of NALA."""
    if len(name) != 3 or name[0] not in "NC":
        return None
    possible = [letter for known, letter in rc.restype_3to1.items() if known.startswith(name[1:])]
    fitting = [letter for letter in possible if side_chain <= _SIDE_CHAINS[letter]]
    whole = [letter for letter in fitting if side_chain == _SIDE_CHAINS[letter]]
    return (whole or fitting)[0] if whole or len(fitting) == 1 else None


@cache
def _parents_of_modified() -> dict[str, str]:
    """Return one-letter parents of the modified amino acids that Biopython knows by name."""
    from Bio.Data.PDBData import protein_letters_3to1_extended

    return {
        name.strip(): letter
        for name, letter in protein_letters_3to1_extended.items()
        if letter in rc.restypes
    }


WATERS: Final = frozenset(("HOH", "DOD", "WAT", "H2O", "TIP", "TIP3", "SOL"))
_NUCLEOTIDES: Final = frozenset(
    (*"ACGUINT", "DA", "DC", "DG", "DT", "DU", "DI", "DN", "+A", "+C", "+G", "+U", "+T", "+I")
)
_RIBOSE: Final = frozenset(("C1'", "C1*"))
ATOM_NAMES: Final = frozenset((*rc.atom_types, "SE", *TERMINAL_OXYGENS))
"""Names of the atoms that are kept, without hydrogens; SE is the selenium of selenomethionine."""
MAX_VALUE: Final = 1e8  #: Limit of coordinates, occupancies and B-factors; larger values are not measurements
MAX_NUMBER: Final = 10_000_000


def is_hydrogen(name: str) -> bool:
    """Return True if an atom of this name is a hydrogen or deuterium."""
    return name.lstrip("0123456789'\"")[:1] in ("H", "D")


class AtomRecord(NamedTuple):
    """Atom of a residue; positions in Å."""

    residue_name: str
    alternate: str
    name: str
    occupancy: float
    x: float
    y: float
    z: float
    b_factor: float


@dataclass
class ResidueRecord:
    """Residue with all alternate locations."""

    number: int  #: The author's residue number
    insertion: str  #: Insertion code or an empty string
    hetero: bool  #: True if it is in HETATM records
    position: int | None = None  #: Place in the polymer's sequence counted from 0, if the file states it
    atoms: list[AtomRecord] = field(default_factory=list)  #: Its atoms in the order of the file
    #: Residue name and name of each heavy atom that is not kept
    other_atoms: dict[tuple[str, str], None] = field(default_factory=dict)

    @property
    def is_nucleotide(self) -> bool:
        """True if name or ribose identify a nucleotide of DNA or RNA."""
        return self.names[0].upper() in _NUCLEOTIDES or any(atom in _RIBOSE for _, atom in self.other_atoms)

    @property
    def names(self) -> list[str]:
        """Residue names in the order of the file; several if alternates are different amino acids."""
        own = (atom.residue_name for atom in self.atoms)
        return list(dict.fromkeys((*own, *(residue for residue, _ in self.other_atoms))))


@dataclass
class RecordedChain:
    """Chain of a structure file."""

    chain_id: str  #: The author's chain name
    #: Residues by number and insertion code (or by another key that distinguishes residues)
    residues: dict[tuple[int, str], ResidueRecord] = field(default_factory=dict)
    #: Residue names of the whole polymer, None if the file does not list them
    sequence: list[str] | None = None
    #: Numbers of the residues that the file lists as missing
    missing: list[int] = field(default_factory=list)
    #: True if the file states that the polymer is a protein; None without a statement
    protein: bool | None = None
    segment: str = ""  #: CHARMM's segment name, which may distinguish chains of one name

    def add_atom(
        self, atom: AtomRecord, number: int, insertion: str, *, hetero: bool, position: int | None = None
    ) -> str:
        """Add an atom to its residue, created with its first atom; return a problem with a remedy, or no text.

        A HETATM atom (``hetero``) that contradicts earlier atoms belongs to a ligand with the number of a residue, and
        is left out. Of an atom outside the atom37 table, only the name is kept. A residue is identified by the author's
        number and its insertion code, or by its position in the sequence, counted from 0, if the file states it.
        """
        key = (number, insertion) if position is None else (position, "")
        residue = self.residues.get(key)
        kept = atom.name in ATOM_NAMES
        if hetero and not kept and (residue is None or atom.residue_name not in residue.names):
            return ""
        if residue is None:
            residue = self.residues[key] = ResidueRecord(number, insertion, hetero, position)
        if not kept:
            residue.other_atoms[atom.residue_name, atom.name] = None
            return ""
        label = f"{number}{insertion}"
        for other in residue.atoms:
            if other.residue_name != atom.residue_name:
                if not (atom.alternate and other.alternate):
                    problem = f"is {other.residue_name} in an earlier record and {atom.residue_name} here"
                    break
            elif other.name == atom.name and other.alternate == atom.alternate:
                label, problem = f"{atom.residue_name} {label}", f"has its atom {atom.name} twice"
                break
        else:
            residue.atoms.append(atom)
            return ""
        if hetero:
            return ""
        return (
            f"residue {label} of chain {self.chain_id!r} {problem}; "
            "give each chain a unique letter and each residue a unique number"
        )


@dataclass
class FileRecords:
    """Records of one file."""

    chains: dict[str, RecordedChain] = field(default_factory=dict)  #: Chains by name in the order of the file
    #: Names of modified residues, with their standard residues
    parents: dict[str, str] = field(default_factory=dict)
    resolution: float | None = None  #: Resolution of the experiment, in Å
    method: str = ""  #: Experimental method in lower case
    release_date: str = ""  #: ``YYYY-MM-DD``
    waters: int = 0  #: Number of atoms of water, which are not in ``chains``
    hetero: set[str] = field(default_factory=set)  #: Names of residues in HETATM records, also of waters
    warnings: list[str] = field(default_factory=list)  #: Decisions made while reading

    def chain(self, chain_id: str) -> RecordedChain:
        """Return the chain of this name, created at the first call."""
        return self.chains.setdefault(chain_id, RecordedChain(chain_id))


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
    """Return True if C and N of two residues are near enough for a peptide bond; None if one is missing."""
    carbon, nitrogen = before.position("C"), after.position("N")
    if carbon is None or nitrogen is None:
        return None
    return bool(np.linalg.norm(carbon - nitrogen) <= MAX_PEPTIDE_BOND)
