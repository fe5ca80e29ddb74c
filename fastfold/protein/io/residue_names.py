"""Determine a residue's amino acid from its name, the file's statements and its atoms."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Final

from fastfold.protein import residue_constants as rc

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
