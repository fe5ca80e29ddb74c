"""Two antiparallel helices in contact, whose figures other programs computed."""

from __future__ import annotations

import numpy as np

from fastfold.protein import residue_constants as rc
from tests.helpers.results import helix_atoms

SEQUENCE = "ALEVKLAELSKR" * 3


def packed_helices() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Positions, mask, residue types, and residues of the second helix."""
    aatype = rc.sequence_to_aatype(SEQUENCE)
    first, mask = helix_atoms(aatype)
    second = first * [-1, 1, -1] + np.array([8.4, 1.0, 52.0]) * mask[..., None]
    positions, masks = np.concatenate([first, second]), np.concatenate([mask, mask])
    return positions, masks, np.r_[aatype, aatype], np.repeat([False, True], len(aatype))
