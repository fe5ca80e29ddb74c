"""Chain breaks between residues with consecutive numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.protein import Protein

MAX_PEPTIDE_BOND = 2.5
"""Distance in Å of C and N above which two residues are not bonded; a peptide bond has 1.33."""
_MAX_ALPHA_DISTANCE = 4.6
"""The same limit for alpha carbons, if C or N is missing; across a peptide bond they are 3.8 apart."""


def chain_breaks(protein: Protein, names: AuthorNames | None = None) -> dict[int, str]:
    """Return the residues too far from their predecessor, with a description of each break."""
    present = protein.atom_mask > 0.5
    breaks: dict[int, str] = {}
    for i in np.flatnonzero(follows(protein)).tolist():
        for before, after, limit in (("C", "N", MAX_PEPTIDE_BOND), ("CA", "CA", _MAX_ALPHA_DISTANCE)):
            a, b = (i - 1, rc.atom_order[before]), (i, rc.atom_order[after])
            if present[a] and present[b]:
                distance = float(np.linalg.norm(protein.atom_positions[b] - protein.atom_positions[a]))
                if distance > limit:
                    ends = f"{residue_label(protein, i - 1, names)} and {residue_label(protein, i, names)}"
                    breaks[i] = f"{ends} ({before}-{after} {distance:.1f} Å)"
                break
    return breaks


def open_breaks(protein: Protein, breaks: dict[int, str]) -> Protein:
    """Return the structure with residue numbers that are consecutive only between bonded residues."""
    tied = follows(protein)
    tied[list(breaks)] = False
    return replace(protein, residue_index=np.cumsum(np.where(tied, 1, 2)))


def follows(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with the next number after their predecessor, in the same chain."""
    same_chain = np.diff(protein.chain_index) == 0
    return np.concatenate([[False], same_chain & (np.diff(protein.residue_index) == 1)])
