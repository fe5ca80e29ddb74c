"""Scores of two chains from their contacts: pDockQ, pDockQ2, interface pLDDT and interface PAE.

Residues touch if their CB atoms (CA of glycine) are within 8 Å. pDockQ is from Bryant et al. 2022
(doi:10.1038/s41467-022-28865-w), pDockQ2 from Zhu et al. 2023 (doi:10.1093/bioinformatics/btad424).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc

CONTACT_DISTANCE = 8.0  #: Residues touch if their CB atoms are at most this far apart, in Å

_BLOCK = 1 << 20
_PDOCKQ2_D0 = 10.0  #: Scale of aligned errors in a score between 0 and 1, in Å


@dataclass(frozen=True, eq=False)
class InterfaceContacts:
    """Contacts of two chains of ``n`` and ``m`` residues.

    Both arrays are the residues ``[contacts]`` int of a chain.
    """

    first: np.ndarray
    second: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def turned(self) -> InterfaceContacts:
        """Return the same contacts with the chains exchanged."""
        return InterfaceContacts(self.second, self.first)

    def interface_plddt(self, first: np.ndarray, second: np.ndarray) -> float | None:
        """Return the mean pLDDT, 0 to 100, of residues that touch the other chain, of both chains' ``[n]`` and ``[m]``.

        Without contacts it is None.
        """
        if not len(self):
            return None
        values = [np.asarray(first)[np.unique(self.first)], np.asarray(second)[np.unique(self.second)]]
        return float(np.concatenate(values).astype(np.float64).mean())

    def interface_pae(self, pae: np.ndarray) -> float | None:
        """Return the mean aligned error in Å of the pairs that touch; None without contacts.

        ``pae [n, m]`` in Å has the errors of the second chain when aligned on the first.
        """
        return float(np.asarray(pae, np.float64)[self.first, self.second].mean()) if len(self) else None

    def pdockq(self, first: np.ndarray, second: np.ndarray) -> float:
        """Predict DockQ, 0 to 0.742, from the number of contacts and their pLDDT; 0 without contacts.

        Arguments as of :meth:`interface_plddt`.
        """
        plddt = self.interface_plddt(first, second)
        if plddt is None:
            return 0.0
        return _logistic(plddt * np.log10(len(self)), top=0.724, slope=0.052, middle=152.611, floor=0.018)

    def pdockq2(self, first: np.ndarray, second: np.ndarray, pae: np.ndarray) -> float:
        """Predict DockQ, 0 to 1.315, from pLDDT and aligned errors of the contacts; 0 without contacts.

        Arguments as of :meth:`interface_plddt` and :meth:`interface_pae`.
        """
        plddt = self.interface_plddt(first, second)
        if plddt is None:
            return 0.0
        errors = np.asarray(pae, np.float64)[self.first, self.second]
        sure = (1.0 / (1.0 + (errors / _PDOCKQ2_D0) ** 2)).mean()
        return _logistic(plddt * sure, top=1.31, slope=0.075, middle=84.733, floor=0.005)


def interface_contacts(
    first: np.ndarray, second: np.ndarray, *, distance: float = CONTACT_DISTANCE
) -> InterfaceContacts:
    """Find the residues of two chains that touch.

    Positions ``[n, 3]`` and ``[m, 3]`` in Å are from :func:`contact_points`; residues with NaN touch nothing.
    """
    found = [np.empty((0, 2), np.intp)]
    step = max(1, _BLOCK // max(1, len(second)))
    for start in range(0, len(first), step):
        difference = first[start : start + step, None, :] - second[None, :, :]
        with np.errstate(invalid="ignore"):
            near = np.sqrt(np.square(difference).sum(-1)) <= distance
        found.append(np.argwhere(near) + np.array([start, 0]))
    pairs = np.concatenate(found)
    return InterfaceContacts(pairs[:, 0], pairs[:, 1])


def contact_points(atom_positions: np.ndarray, atom_mask: np.ndarray) -> np.ndarray:
    """Return the contact point ``[N, 3]`` float64 of each residue in Å: CB, else CA, else NaN.

    Positions are rounded to the three decimals of structure files, so that scores equal those of the files.

    ``atom_positions`` are ``[N, 37, 3]`` in Å, and ``atom_mask [N, 37]`` is 1 where the atom is present.
    """
    ca, cb = rc.atom_order["CA"], rc.atom_order["CB"]
    points = np.where(atom_mask[:, [cb]] > 0.5, atom_positions[:, cb], atom_positions[:, ca])
    points = points.astype(np.float64)
    points[(atom_mask[:, ca] <= 0.5) & (atom_mask[:, cb] <= 0.5)] = np.nan
    return np.round(points, 3)


def _logistic(x: float, *, top: float, slope: float, middle: float, floor: float) -> float:
    return float(top / (1.0 + np.exp(-slope * (x - middle))) + floor)
