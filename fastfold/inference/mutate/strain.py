"""Effective strain: local change between structures of one chain, without a superposition of the whole."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fastfold.protein.metrics.tm_score import best_rotation

NEIGHBOURS_WITHIN = 13.0  #: Largest distance in Å of CA atoms that are neighbours


def effective_strain(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Compute the effective strain of each residue between two groups of structures.

    McBride et al. 2023 (doi:10.1103/PhysRevLett.131.218401). The neighbours of residue i are within 13 Å in all
    structures, and ``r`` are the vectors to their CA atoms, turned onto each other and averaged within a group. The
    strain is the mean of ``|r2 - r1| / |r1|`` after the best rotation of ``r2`` onto ``r1``.

    Args:
        first: CA positions ``[A, N, 3]`` in Å of the reference, for example of the wild type.
        second: ``[B, N, 3]``.

    Returns:
        ``[N]`` float64; NaN for a residue without neighbours.
    """
    one, is_near_one = _neighbourhoods(torch.from_numpy(np.asarray(first, np.float64)))
    two, is_near_two = _neighbourhoods(torch.from_numpy(np.asarray(second, np.float64)))
    shared = (is_near_one & is_near_two).double()
    difference = (_turned(two, one, shared) - one).norm(dim=-1) / one.norm(dim=-1).clamp(min=1e-12)
    return ((difference * shared).sum(-1) / shared.sum(-1)).numpy()


def _neighbourhoods(structures: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean vectors ``[N, N, 3]`` from each residue to the others, and the neighbours ``[N, N]``."""
    vectors = structures[:, None, :, :] - structures[:, :, None, :]
    distances = vectors.norm(dim=-1)
    is_near = ((distances > 0) & (distances <= NEIGHBOURS_WITHIN)).all(0)
    shared = is_near.double()
    turned = [vectors[0], *(_turned(other, vectors[0], shared) for other in vectors[1:])]
    return torch.stack(turned).mean(0), is_near


def _turned(moving: Tensor, fixed: Tensor, weights: Tensor) -> Tensor:
    """Turn vectors ``[N, N, 3]`` of each residue onto their partners, by those of weight 1."""
    covariance = torch.einsum("ij,ija,ijb->iab", weights, fixed, moving)
    return torch.einsum("iab,ijb->ija", best_rotation(covariance), moving)
