"""ipSAE in all its variants, and LIS: scores of two chains from the predicted aligned error only.

Both have a direction, from the chain that is aligned on (rows of the error matrix) to the scored chain (columns).
ipSAE and ipTM_d0chn are from Dunbrack 2025 (doi:10.1101/2025.02.10.637595), equal to version 4 of the paper's program.
LIS is from Kim et al. 2024 (doi:10.1101/2024.02.19.580970).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PAE_CUTOFF = 15.0  #: Aligned errors under this count for ipSAE, in Å: the program's setting for AlphaFold 2

LIS_CUTOFF = 12.0  #: Aligned errors under this count for LIS, in Å


@dataclass(frozen=True, eq=False)
class DirectedScores:
    """Scores of one chain aligned on another one of ``n`` residues, 0 to 1; 0 if no error is under the cutoff.

    Each is the largest value of any residue that is aligned on. The suffix names the length from which d0 is computed:
    ``d0res`` the residue's partners under the cutoff, ``d0chn`` both chains, ``d0dom`` the residues of both chains
    that have a partner.
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
    residues of the other. Those under the cutoff count for ipSAE.
    """
    pae = np.asarray(pae, np.float64)
    near = pae < cutoff
    partners = near.sum(1)
    aligned, scored = int(near.any(1).sum()), int(near.any(0).sum())
    n0chn, n0dom = sum(pae.shape), aligned + scored
    d0res = _d0_of_residues(partners)
    d0chn, d0dom = _d0_of_length(n0chn), _d0_of_length(n0dom)
    by_d0res = _mean_over(near, _tm(pae, d0res[:, None]))
    tm_chn = _tm(pae, d0chn)
    by_d0chn, by_d0dom = _mean_over(near, tm_chn), _mean_over(near, _tm(pae, d0dom))
    iptm = tm_chn.mean(1)
    best = int(by_d0res.argmax())
    local = pae[pae < LIS_CUTOFF]
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


def _d0_of_residues(partners: np.ndarray) -> np.ndarray:
    """Return TM-score's d0 of each residue in Å; lengths under 26 count as 26."""
    return np.maximum(1.0, 1.24 * (np.maximum(partners, 26) - 15.0) ** (1 / 3) - 1.8)
