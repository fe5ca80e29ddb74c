"""Twist of neighbouring strands, which tells a fold from its mirror image.

Strands that pair are turned against each other, always to the same side (Chothia, J. Mol. Biol. 75, 1973). Distances
are the same in a mirror image, and its twist has the other sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMOOTH, _REACH = 3, 4
"""Residues on each side whose mean smooths the chain, and residues on each side that give its direction."""
_EXTENDED = 8.0
"""Least distance in Å of CA atoms four residues apart in a strand; 6 in a helix, 13 in a strand."""
_NEAR = 13.0  #: Largest distance in Å of neighbours in a sheet, also of the second next
_APART = 8  #: Least separation in the chain of two strands


def strand_twist(ca: Tensor, residue_index: Tensor) -> Tensor:
    """Return the twist of a chain, a scalar: positive in 80% of proteins, negative in their mirror images.

    Each pair of near residues in extended parts adds the sine of the angle of their directions about the line between
    them, times the cosine. So parallel and antiparallel pairs agree.

    The CA positions are ``[N, 3]`` in Å; a gap in ``residue_index [N]`` parts chains.
    """
    if len(ca) <= 2 * _REACH:
        return ca.new_zeros(())
    reach = torch.arange(_REACH, len(ca) - _REACH, device=ca.device)
    whole = residue_index[reach + _REACH] - residue_index[reach - _REACH] == 2 * _REACH
    extended = whole & (torch.linalg.vector_norm(ca[reach + 2] - ca[reach - 2], dim=-1) > _EXTENDED)
    centred = ca - ca.mean(0)
    padded = torch.cat([centred[:1].expand(_SMOOTH, 3), centred, centred[-1:].expand(_SMOOTH, 3)])
    smooth = padded.unfold(0, 2 * _SMOOTH + 1, 1).mean(-1)
    reach = reach[extended]
    point = smooth[reach]
    way = torch.nn.functional.normalize(smooth[reach + _REACH] - smooth[reach - _REACH], dim=-1)
    # (a x b) . (q - p) for directions a and b at p and q, in products of matrices.
    moment = way @ torch.linalg.cross(way, point).T
    distance = torch.cdist(point, point)
    counted = (distance < _NEAR) & (reach[None] - reach[:, None] >= _APART)
    twist = -(moment + moment.T) * (way @ way.T) / distance.clamp(min=1e-3)
    return twist[counted].sum()
