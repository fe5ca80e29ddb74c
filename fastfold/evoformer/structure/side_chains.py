"""Side chains on a moved backbone: rotamers that overlap least, near the predicted ones."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import gather_atoms, lookup
from fastfold.protein.side_chains import place_side_chains


def place_rotamers(
    structure: dict[str, Any], aatype: Tensor, residue_index: Tensor, seq_mask: Tensor
) -> dict[str, Tensor]:
    """Return a structure module's result with rotamers as side chains.

    Args:
        structure: With ``final_atom_positions [*, N, 37, 3]`` in Å, whose N, CA, C, O and CB stay, and the angles of
            ``sidechains``; predicted chi angles are tried with the rotamers.
        aatype: ``[*, N]``.
        residue_index: ``[*, N]``; neighbours in a chain differ by 1.
        seq_mask: ``[*, N]``, 0 for padding.

    Returns:
        ``final_atom_positions`` and ``final_atom14_positions [*, N, 14, 3]`` in Å.
    """
    positions = structure["final_atom_positions"]
    present = lookup("restype_atom37_mask", aatype, positions) * seq_mask[..., None].to(positions)
    sine, cosine = structure["sidechains"]["angles_sin_cos"][-1][..., 3:, :].unbind(-1)
    chi = torch.rad2deg(torch.atan2(sine, cosine))
    placed = torch.empty_like(positions)
    for sample in itertools.product(*map(range, aatype.shape[:-1])):
        length = len(aatype[sample])
        rotamers = place_side_chains(
            positions[sample].cpu().double().numpy(),
            present[sample].cpu().numpy(),
            aatype[sample].clamp(max=rc.unk_restype_index).cpu().numpy(),
            chain_index=np.zeros(length, np.int64),
            residue_index=residue_index[sample].cpu().numpy(),
            rebuild=np.ones(length, bool),
            hints=chi[sample].cpu().double().numpy(),
        )
        placed[sample] = torch.as_tensor(rotamers.positions).to(placed)
    atom14 = gather_atoms(placed, lookup("restype_atom14_to_atom37", aatype))
    atom14 = atom14 * lookup("restype_atom14_mask", aatype, atom14)[..., None]
    return {"final_atom_positions": placed, "final_atom14_positions": atom14}
