"""Scores of two chains, from their contacts and from the predicted aligned error.

Contacts give pDockQ, pDockQ2, interface pLDDT and interface PAE. Residues touch if their CB atoms (CA of glycine) are
within 8 Å. pDockQ is from Bryant et al. 2022 (doi:10.1038/s41467-022-28865-w), pDockQ2 from Zhu et al. 2023
(doi:10.1093/bioinformatics/btad424).

The aligned error gives ipSAE in all its variants, and LIS. Both have a direction, from the chain that is aligned on
(rows of the error matrix) to the scored chain (columns). ipSAE and ipTM_d0chn are from Dunbrack 2025
(doi:10.1101/2025.02.10.637595), equal to version 4 of the paper's program. LIS is from Kim et al. 2024
(doi:10.1101/2024.02.19.580970).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.protein import check_shape

CONTACT_DISTANCE = 8.0  #: Residues touch if their CB atoms are at most this far apart, in Å

_BLOCK = 1 << 20
_PDOCKQ2_D0 = 10.0  #: Scale of aligned errors in a score between 0 and 1, in Å


@dataclass(frozen=True, eq=False)
class InterfaceContacts:
    """Contacts of two chains of ``n`` and ``m`` residues.

    Both arrays are the residues ``[contacts]`` int of a chain.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import InterfaceContacts, interface_contacts
        >>> apart = interface_contacts(np.zeros((1, 3)), np.full((1, 3), 20.0))
        >>> isinstance(apart, InterfaceContacts), len(apart.first)
        (True, 0)
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
        check_shape("pae", pae, (len(first), len(second)))
        errors = np.asarray(pae, np.float64)[self.first, self.second]
        sure = (1.0 / (1.0 + (errors / _PDOCKQ2_D0) ** 2)).mean()
        return _logistic(plddt * sure, top=1.31, slope=0.075, middle=84.733, floor=0.005)


CONTACT_SCORES: dict[str, Callable[[InterfaceContacts, np.ndarray, np.ndarray, np.ndarray], float | None]] = {
    "pdockq2": InterfaceContacts.pdockq2,
    "interface_pae": lambda contacts, _first, _second, pae: contacts.interface_pae(pae),
}
"""Function of each score of a direction that needs contacts, by the key of its row.

Arguments are contacts, pLDDT of both chains, and aligned errors of the second chain when aligned on the first.
"""


def interface_contacts(
    first: np.ndarray, second: np.ndarray, *, distance: float = CONTACT_DISTANCE
) -> InterfaceContacts:
    """Find the residues of two chains that touch.

    Positions ``[n, 3]`` and ``[m, 3]`` in Å are from :func:`contact_points`; residues with NaN touch nothing.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import interface_contacts
        >>> first, second = np.array([[0.0, 0, 0], [20.0, 0, 0]]), np.array([[0.0, 6, 0], [0.0, 9, 0]])
        >>> contacts = interface_contacts(first, second)
        >>> contacts.first.tolist(), contacts.second.tolist()
        ([0], [0])
    """
    first, second = np.asarray(first), np.asarray(second)
    for points in (first, second):
        check_shape("points of a chain", points, (len(points), 3))
    blocks = [np.empty((0, 2), np.intp)]
    step = max(1, _BLOCK // max(1, len(second)))
    for start in range(0, len(first), step):
        difference = first[start : start + step, None, :] - second[None, :, :]
        with np.errstate(invalid="ignore"):
            near = np.sqrt(np.square(difference).sum(-1)) <= distance
        blocks.append(np.argwhere(near) + np.array([start, 0]))
    pairs = np.concatenate(blocks)
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


PAE_CUTOFF = 15.0  #: Aligned errors under this count for ipSAE, in Å: the program's setting for AlphaFold 2

LIS_CUTOFF = 12.0  #: Aligned errors under this count for LIS, in Å


@dataclass(frozen=True, eq=False)
class DirectedScores:
    """Scores of one chain aligned on another one of ``n`` residues, 0 to 1; 0 if no error is under the cutoff.

    Each is the largest value of any residue that is aligned on. The suffix names the length from which d0 is computed:
    ``d0res`` the residue's partners under the cutoff, ``d0chn`` both chains, ``d0dom`` the residues of both chains
    that have a partner.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import directed_scores
        >>> unsure = directed_scores(np.full((40, 60), 30.0))
        >>> unsure.ipsae_d0res, unsure.num_pairs, unsure.ipsae_d0res_by_residue.shape
        (0.0, 0, (40,))
    """

    ipsae_d0res: float  #: The score that is called ipSAE
    ipsae_d0chn: float  #: ipSAE with d0 of both chains
    ipsae_d0dom: float  #: ipSAE with d0 of the residues that have a partner
    iptm_d0chn: float  #: ipTM of the expected errors, without a cutoff, with d0 of both chains
    lis: float  #: Local interaction score
    #: ``[n]`` float64, for each residue that is aligned on, as the next three
    ipsae_d0res_by_residue: np.ndarray
    ipsae_d0chn_by_residue: np.ndarray  #: ``[n]``
    ipsae_d0dom_by_residue: np.ndarray  #: ``[n]``
    iptm_d0chn_by_residue: np.ndarray  #: ``[n]``
    n0res_by_residue: np.ndarray  #: ``[n]`` int, number of partners under the cutoff
    d0res_by_residue: np.ndarray  #: ``[n]`` in Å
    n0res: int  #: Number of partners of the residue with the best ``ipsae_d0res``
    n0chn: int  #: Number of residues of both chains
    n0dom: int  #: Number of residues of both chains with a partner
    d0res: float  #: d0 of the residue with the best ``ipsae_d0res``, in Å
    d0chn: float  #: d0 of both chains, in Å
    d0dom: float  #: d0 of the residues with a partner, in Å
    num_pairs: int  #: Number of pairs of residues under the cutoff
    aligned_residues: int  #: Number of residues of the aligned chain with a partner
    scored_residues: int  #: Number of residues of the scored chain with a partner


def directed_scores(pae: np.ndarray, *, cutoff: float = PAE_CUTOFF) -> DirectedScores:
    """Compute the scores of one chain aligned on another.

    ``pae [n, m]`` in Å has the errors of the ``m`` residues of the scored chain when aligned on each of the ``n``
    residues of the other. Those under the cutoff count for ipSAE. Scores of errors that are NaN are NaN.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.metrics.interface import directed_scores
        >>> scores = directed_scores(np.full((40, 60), 2.0))
        >>> round(scores.ipsae_d0res, 2), scores.num_pairs
        (0.63, 2400)
    """
    pae = np.asarray(pae, np.float64)
    if pae.ndim != 2 or not pae.size:
        raise ValueError(f"expected the aligned errors of two chains [n, m], found shape {list(pae.shape)}")
    near = ~(pae >= cutoff)  # NaN counts, so that its scores are NaN
    partners = near.sum(1)
    aligned, scored = int(near.any(1).sum()), int(near.any(0).sum())
    n0chn, n0dom = sum(pae.shape), aligned + scored
    # Lengths under 26 count as 26.
    d0res = np.maximum(1.0, 1.24 * (np.maximum(partners, 26) - 15.0) ** (1 / 3) - 1.8)
    d0chn, d0dom = _d0_of_length(n0chn), _d0_of_length(n0dom)
    by_d0res = _mean_over(near, _tm(pae, d0res[:, None]))
    tm_chn = _tm(pae, d0chn)
    by_d0chn, by_d0dom = _mean_over(near, tm_chn), _mean_over(near, _tm(pae, d0dom))
    iptm = tm_chn.mean(1)
    best = int(by_d0res.argmax())
    local = pae[~(pae >= LIS_CUTOFF)]
    return DirectedScores(
        ipsae_d0res=float(by_d0res[best]),
        ipsae_d0chn=float(by_d0chn.max()),
        ipsae_d0dom=float(by_d0dom.max()),
        iptm_d0chn=float(iptm.max()),
        lis=float(((LIS_CUTOFF - local) / LIS_CUTOFF).mean()) if len(local) else 0.0,
        ipsae_d0res_by_residue=by_d0res,
        ipsae_d0chn_by_residue=by_d0chn,
        ipsae_d0dom_by_residue=by_d0dom,
        iptm_d0chn_by_residue=iptm,
        n0res_by_residue=partners,
        d0res_by_residue=d0res,
        n0res=int(partners[best]),
        n0chn=n0chn,
        n0dom=n0dom,
        d0res=float(d0res[best]),
        d0chn=d0chn,
        d0dom=d0dom,
        num_pairs=int(near.sum()),
        aligned_residues=aligned,
        scored_residues=scored,
    )


def _tm(pae: np.ndarray, d0: np.ndarray | float) -> np.ndarray:
    return 1.0 / (1.0 + (pae / d0) ** 2)


def _mean_over(near: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the mean of each row ``[n]`` over its near pairs; 0 in a row without near pairs."""
    return np.where(near, values, 0.0).sum(1) / np.maximum(near.sum(1), 1)


def _d0_of_length(length: int) -> float:
    """Return TM-score's d0 of two chains or domains, in Å: 1 for up to 27 residues."""
    return max(1.0, 1.24 * (length - 15) ** (1 / 3) - 1.8) if length > 27 else 1.0
