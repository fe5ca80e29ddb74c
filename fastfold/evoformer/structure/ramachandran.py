"""Ramachandran potential: the negative log density of phi and psi of each residue in experimental structures.

The densities are mixtures of products of von Mises densities. ``ramachandran.json`` was fitted to the training chains
of ``mini`` by ``examples/fit_ramachandran.py``.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.utils.foreign_text import package_json

GRID = 72  #: Points of each axis of :meth:`RamachandranPotential.at_grid`, 5 degrees apart

_BEFORE_PROLINE, _KINDS = 21, 22
"""Kinds of residues: the 20 types, 20 for unknown ones, and those before proline."""
_LEFT_HANDED = 0.005
"""Factor of components with phi above 0 for residues other than glycine.

A fold of uncertain distances would have many more residues there than experiments.
"""
_UNIFORM = 0.001
"""Factor of the uniform components, so that residues far from all others are still pulled to one."""


class _Mixtures(NamedTuple):
    """Mixtures of the kinds of residues, with ``K`` components each."""

    log_scale: (
        Tensor  #: ``[kinds, K]``: weights, norms, and the uniform density that energies are relative to
    )
    mean: Tensor  #: ``[kinds, K, 2]`` in radians
    concentration: Tensor  #: ``[kinds, K, 2]``


class RamachandranPotential:
    """Energies of phi and psi of N residues in nats, relative to a uniform density."""

    def __init__(self, aatype: Tensor, bonded: Tensor, like: Tensor) -> None:
        """Choose the mixture of each residue.

        Args:
            aatype: ``[N]``.
            bonded: ``[N - 1]``, True where a residue and the next are neighbours in a chain.
            like: Tensor with the dtype and the device of the angles.
        """
        kinds = aatype.long().clamp(max=rc.unk_restype_index)
        special = (kinds == rc.restype_order["G"]) | (kinds == rc.restype_order["P"])
        before = bonded & (aatype[1:] == rc.restype_order["P"]) & ~special[:-1]
        kinds[:-1] = torch.where(before, _BEFORE_PROLINE, kinds[:-1])
        self._kinds = kinds
        tables = _Mixtures(*(x.to(like) for x in _mixtures()))
        self._log_scale = tables.log_scale[kinds]
        # Phi and psi come first, because sums over a last axis of two are slow.
        self._mean, self._concentration = (x[kinds].movedim(-1, 0).contiguous() for x in tables[1:])

    def slopes(self, torsions: Tensor) -> Tensor:
        """Return the derivatives ``[N, 2]`` of the energies by phi and psi, ``torsions [N, 2]`` in radians."""
        turned = torsions.mT[..., None] - self._mean
        # A softmax over so few components is slow. The uniform one is never 0, and the norms keep all others finite.
        density = (self._log_scale + (self._concentration * turned.cos()).sum(0)).exp()
        share = density / density.sum(-1, keepdim=True)
        return (share * self._concentration * turned.sin()).sum(-1).mT

    def energies(self, torsions: Tensor) -> Tensor:
        """Return the energies ``[N]`` of phi and psi, ``torsions [N, 2]`` in radians."""
        turned = torsions.mT[..., None] - self._mean
        return -(self._log_scale + (self._concentration * turned.cos()).sum(0)).logsumexp(-1)

    def at_grid(self, rows: slice, phi: Tensor, psi: Tensor) -> Tensor:
        """Return energies ``[n, a, b]`` of some residues at points of a grid of angles.

        Points are numbered from 0 at -180 degrees to ``GRID`` at 180 degrees.

        Args:
            rows: Slice of ``n`` residues.
            phi: Numbers ``[n, a, b]``, int64.
            psi: Numbers ``[n, a, b]``, int64.
        """
        table = _energies_on_grid(self._mean.dtype, self._mean.device)
        place = torch.add(psi, phi, alpha=GRID + 1).add_(self._kinds[rows, None, None], alpha=(GRID + 1) ** 2)
        return table.index_select(0, place.flatten()).view_as(place)


@functools.cache
def _energies_on_grid(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the energies of all kinds of residues, at phi and psi from -180 to 180 degrees, flat."""
    log_scale, mean, concentration = (x.to(device, dtype) for x in _mixtures())
    angle = 2 * math.pi / GRID * torch.arange(GRID, device=device, dtype=dtype) - math.pi
    turned = angle[:, None, None] - mean[:, None]  # [kinds, GRID, K, 2]
    factor = (concentration[:, None] * (turned.cos() - 1)).exp()
    weight = (log_scale + concentration.sum(-1)).exp()
    density = (factor[..., 0] * weight[:, None]) @ factor[..., 1].mT
    return torch.nn.functional.pad(-density.log(), (0, 1, 0, 1), mode="circular").flatten()


@functools.cache
def _mixtures() -> _Mixtures:
    """Read the table, float64 on the CPU."""
    groups = package_json("fastfold.evoformer.structure", "ramachandran.json")
    components = max(len(group["mean"]) for group in groups.values())
    weight = torch.zeros(_KINDS, components).double()
    mean, concentration = torch.zeros(2, _KINDS, components, 2).double()
    for kind in range(_KINDS):
        letter = rc.restypes_with_x[kind] if kind < _BEFORE_PROLINE else "*"
        name = {"G": "glycine", "P": "proline", "*": "before_proline"}.get(letter, "general")
        group = groups[name]
        of_types = torch.tensor(list(group["weights"].values())).double()
        own = group["weights"].get(letter if name == "general" else "*")
        number = of_types.shape[1]
        weight[kind, :number] = of_types.mean(0) if own is None else torch.tensor(own).double()
        mean[kind, :number] = torch.deg2rad(torch.tensor(group["mean"]).double())
        concentration[kind, :number] = torch.tensor(group["concentration"]).double()
    left = (mean[..., 0] > 0) & (concentration[..., 0] > 0)
    left[rc.restype_order["G"]] = False
    weight = torch.where(left, _LEFT_HANDED * weight, weight)
    weight = torch.where((concentration == 0).all(-1), _UNIFORM * weight, weight).clamp(min=1e-12)
    # The norm of exp(k cos x) is 2 pi I0(k), so that of a uniform density cancels.
    norm = torch.special.i0e(concentration).log() + concentration
    return _Mixtures(weight.log() - norm.sum(-1), mean, concentration)
