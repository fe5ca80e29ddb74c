"""Distances that restraints limit: of CA, of CB, or of the closest heavy atoms of two residues.

A fit needs a smooth distance. With ``n`` pairs of atoms at distances ``d`` and a temperature ``t``, the smooth minimum
``-t·log Σ exp(-d/t)`` is at most the minimum, and at least the minimum less ``t·log n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fastfold.evoformer.losses.violation import distance_bounds
from fastfold.inference.restraints.restraint import ATOMS, Restraint
from fastfold.protein import residue_constants as rc

TEMPERATURE = 0.1
"""Temperature in Å of the smooth minimum over pairs of atoms.

Its error is at most 0.53 Å, for the 14 · 14 atoms of two tryptophans that were all equally far apart.
"""

_CA, _CB = 1, 4  # slots of atom14
_SPREAD = 4.0
"""Bonds and angles of a residue are within this number of standard deviations."""


def smooth_minimum(values: Tensor, temperature: float) -> Tensor:
    """Return the smooth minimum over the last axis, without it; infinite values do not count."""
    return -temperature * torch.logsumexp(-values / temperature, -1)


@cache
def _atom_masks() -> np.ndarray:
    """Return the atoms of each kind of restraint by residue type, ``[3, 21, 14]``, in the order of :data:`ATOMS`."""
    masks = np.zeros((len(ATOMS), rc.restype_num + 1, 14), bool)
    masks[ATOMS.index("CA"), : rc.restype_num, _CA] = True
    masks[ATOMS.index("CB"), : rc.restype_num, _CB] = True
    masks[ATOMS.index("CB"), rc.restype_order["G"]] = masks[ATOMS.index("CA"), rc.restype_order["G"]]
    masks[ATOMS.index("any")] = rc.restype_atom14_mask > 0
    return masks


@cache
def atom_reach(origin: Literal["CA", "CB"]) -> np.ndarray:
    """Return the largest distance of a heavy atom from a residue's CA or CB in Å, by residue type ``[21]``.

    The bound is the shortest path over distances of atoms one bond and one angle apart, as in distance geometry. CB is
    CA in glycine.
    """
    _, upper = distance_bounds(0.0, _SPREAD)
    paths = np.where(upper > 0, upper, np.inf).astype(np.float64)
    for middle in range(14):
        paths = np.minimum(paths, paths[:, :, middle, None] + paths[:, None, middle])
    starts = _atom_masks()[ATOMS.index(origin)]
    reach = np.zeros(len(paths))
    for kind in range(rc.restype_num):
        others = _atom_masks()[ATOMS.index("any"), kind] & ~starts[kind]
        reach[kind] = paths[kind, starts[kind].argmax(), others].max()
    return reach


_NEARER = 0.2
"""Part of the reach of both side chains by which their nearest atoms are closer than CB.

The mean in experiments is 0.35; with less, side chains that point away hold as well.
"""


def beta_limits(restraint: Restraint, first: int, second: int) -> tuple[float, float]:
    """Return the limits of a restraint in Å as those of the distance of CB, of two residue types.

    CB is one of the closest heavy atoms, or farther by a part of the reach of the side chains. CA counts as CB.
    """
    if restraint.atoms != "any":
        return restraint.low, restraint.high
    reach = atom_reach("CB")
    nearer = _NEARER * float(reach[first] + reach[second])
    return restraint.low + nearer * (restraint.low > 0), restraint.high + nearer


class RestrainedAtoms:
    """Pairs of atoms whose distances restraints limit.

    Args:
        restraints: ``R`` restraints.
        aatype: Residue types ``[N]`` of a structure, int64.
        order: Index ``[N]`` in that structure of each residue of the target; None for the target's own order.

    Raises:
        ValueError: A residue lacks such atoms, because its type is unknown.
    """

    def __init__(self, restraints: Sequence[Restraint], aatype: Tensor, order: Tensor | None = None) -> None:
        device = aatype.device
        ends = torch.tensor([(one.first, one.second) for one in restraints], dtype=torch.int64, device=device)
        kinds = torch.tensor([ATOMS.index(one.atoms) for one in restraints], dtype=torch.int64, device=device)
        ends = ends.reshape(-1, 2)
        self.first, self.second = (ends if order is None else order[ends]).unbind(-1)
        masks = torch.from_numpy(_atom_masks()).to(device)
        types = aatype.long().clamp(max=rc.unk_restype_index)
        first, second = (masks[kinds, types[places]] for places in (self.first, self.second))
        self._mask = (first[:, :, None] & second[:, None]).flatten(1)
        if not bool(self._mask.any(-1).all()):
            raise ValueError(
                "a restraint names an unknown residue (X), which lacks atoms in a prediction; leave it out"
            )

    def _distances(self, atom14: Tensor) -> Tensor:
        """Return the distance of each pair of atoms in Å, ``[R, 14·14]``, infinite for absent ones."""
        delta = atom14[self.first][:, :, None] - atom14[self.second][:, None]
        return torch.where(self._mask, (delta.square().sum(-1) + 1e-6).sqrt().flatten(1), torch.inf)

    def closest(self, atom14: Tensor) -> Tensor:
        """Return the smallest distance of each restraint's atoms in Å, ``[R]``, from ``atom14 [N, 14, 3]``."""
        return self._distances(atom14).amin(-1)

    def smooth_bounds(self, atom14: Tensor) -> tuple[Tensor, Tensor]:
        """Return smooth distances ``[R]`` in Å, never above and never below those of :meth:`closest`.

        They differ by :data:`TEMPERATURE` times the logarithm of the number of pairs: by nothing for CA and CB.
        """
        under = smooth_minimum(self._distances(atom14), TEMPERATURE)
        return under, under + TEMPERATURE * self._mask.sum(-1).to(under.dtype).log()


def restraint_distances(
    restraints: Sequence[Restraint], positions: np.ndarray, aatype: np.ndarray
) -> np.ndarray:
    """Return the distance of each restraint's atoms in Å, ``[R]``.

    ``positions [N, 37, 3]`` in Å and residue types ``aatype [N]`` are in the order of the target.
    """
    types = np.minimum(aatype, rc.unk_restype_index)
    atom14 = np.take_along_axis(positions, rc.restype_atom14_to_atom37[types][..., None], 1)
    atoms = RestrainedAtoms(restraints, torch.from_numpy(np.asarray(aatype, np.int64)))
    return atoms.closest(torch.from_numpy(np.ascontiguousarray(atom14))).numpy()
