"""Geometry of the interface between a binder and the chains that it binds, without a force field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.accessible_area import accessible_area
from fastfold.protein.metrics.interface.dot_surface import touches
from fastfold.protein.metrics.interface.hydrogen_bonds import hydrogen_bonds, polar_atoms
from fastfold.protein.metrics.interface.shape_complementarity import shape_complementarity

HYDROPHOBIC = "ACFILMPVWY"  #: Residues that count as hydrophobic at an interface, BindCraft's
APOLAR = "AFILMPVWY"  #: Residues that count as apolar on a surface, Rosetta's hydrophobic ones and the aromatic ones

TOUCH = 4.0  #: Residues with atoms of both sides within this distance in Å are at the interface
CLASH = 2.4  #: Atoms of different chains nearer than this clash, in Å, as in BindCraft

_PROBE, _BURIED = 1.1, 0.2  #: Probe in Å and largest area in Å² of a buried polar atom
_SURFACE_NEIGHBORS = 2.0  #: Most neighbours of a residue on the surface


@dataclass(frozen=True)
class InterfaceGeometry:
    """Figures of the interface of a binder with all other chains."""

    residues: np.ndarray  #: ``[N]`` bool, residues of the binder with an atom within 4 Å of another chain
    buried_area: float  #: Area in Å² of both sides that the complex buries
    binder_area: float  #: Area in Å² of the binder that stays accessible in the complex
    complementarity: float | None  #: Shape complementarity Sc; None if no surface is buried
    bonds: int  #: Hydrogen bonds between the binder and other chains
    #: Buried polar atoms without a hydrogen bond that are not buried without it in the separate chains
    unsatisfied: int
    hydrophobicity: float | None  #: Share of :data:`HYDROPHOBIC` among ``residues``, 0 to 1; None without any
    surface_hydrophobicity: float | None  #: Share of :data:`APOLAR` on the binder's own surface, 0 to 1


def interface_geometry(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, is_binder: np.ndarray
) -> InterfaceGeometry:
    """Compute the geometry of the interface between a binder and the rest.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``, 0 to 20.
        is_binder: ``[N]`` bool, residues of the binder.
    """
    sides = [np.flatnonzero(is_binder), np.flatnonzero(~is_binder)]
    areas = [float(accessible_area(positions[one], mask[one], aatype[one]).sum()) for one in sides]
    whole = accessible_area(positions, mask, aatype)
    bonds = hydrogen_bonds(positions, mask, aatype)
    near = touching_residues(positions, mask, is_binder)
    fit = shape_complementarity(positions, mask, aatype, is_binder)
    apart = sum(_unsatisfied(positions[one], mask[one], aatype[one]) for one in sides)
    return InterfaceGeometry(
        residues=near,
        buried_area=sum(areas) - float(whole.sum()),
        binder_area=float(whole[is_binder].sum()),
        complementarity=None if fit is None else fit.score,
        bonds=int((is_binder[bonds[:, 0]] != is_binder[bonds[:, 2]]).sum()),
        unsatisfied=_unsatisfied(positions, mask, aatype) - apart,
        hydrophobicity=_share(aatype[near], HYDROPHOBIC),
        surface_hydrophobicity=_surface_hydrophobicity(
            positions[is_binder], mask[is_binder], aatype[is_binder]
        ),
    )


def touching_residues(positions: np.ndarray, mask: np.ndarray, is_binder: np.ndarray) -> np.ndarray:
    """Return ``[N]`` bool, residues of the binder with an atom within 4 Å of an atom of the rest."""
    residue, slot = np.nonzero(mask > 0.5)
    atoms, own = positions[residue, slot].astype(np.float64), is_binder[residue]
    near = touches(atoms[own], atoms[~own], np.full((~own).sum(), TOUCH))
    is_touching = np.zeros(len(is_binder), bool)
    is_touching[residue[own][near]] = True
    return is_touching


def count_chain_clashes(positions: np.ndarray, mask: np.ndarray, chain: np.ndarray) -> int:
    """Return the number of pairs of atoms of different chains that are nearer than 2.4 Å.

    Positions are ``[N, 37, 3]`` in Å, the mask ``[N, 37]`` is 1 for present atoms, and chains have numbers ``[N]``.
    """
    residue, slot = np.nonzero(mask > 0.5)
    atoms, own = positions[residue, slot].astype(np.float64), chain[residue]
    count = 0
    for number in np.unique(own)[1:]:
        before = atoms[own < number]
        for atom in atoms[own == number]:
            count += int((np.square(before - atom).sum(-1) < CLASH**2).sum())
    return count


def _unsatisfied(positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray) -> int:
    """Return the number of buried polar atoms without a hydrogen bond."""
    gives, takes = polar_atoms(aatype)
    polar = (gives | takes) & (mask > 0.5)
    bonds = hydrogen_bonds(positions, mask, aatype)
    polar[bonds[:, 0], bonds[:, 1]] = False
    polar[bonds[:, 2], bonds[:, 3]] = False
    area = accessible_area(positions, mask, aatype, probe=_PROBE)
    return int((polar & (area < _BURIED)).sum())


def _share(aatype: np.ndarray, letters: str) -> float | None:
    types = [rc.restype_order[letter] for letter in letters]
    return float(np.isin(aatype, types).mean()) if len(aatype) else None


def _surface_hydrophobicity(positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray) -> float | None:
    """Return the share of apolar residues among those with few neighbours in the direction of their side chain.

    Neighbours count by distance and direction of their CB, as in Rosetta's layers (Koga et al. 2012).
    """
    n, ca, c = (positions[:, rc.atom_order[name]].astype(np.float64) for name in ("N", "CA", "C"))
    complete = (mask[:, [rc.atom_order[name] for name in ("N", "CA", "C")]] > 0.5).all(-1)
    b, a = ca - n, c - ca
    beta = -0.58273431 * np.cross(b, a) + 0.56802827 * b - 0.54067466 * a + ca  # ideal CB
    arm = (beta - ca) / np.linalg.norm(beta - ca, axis=-1, keepdims=True).clip(1e-9)
    between = beta[None] - beta[:, None]
    distance = np.linalg.norm(between, axis=-1)
    cosine = np.einsum("ik,ijk->ij", arm, between) / distance.clip(1e-9)
    counted = ((cosine + 0.5) / 1.5).clip(0.0) ** 2 / (1.0 + np.exp(distance - 9.0))
    np.fill_diagonal(counted, 0.0)
    counted[:, ~complete] = 0.0
    return _share(aatype[complete & (counted.sum(-1) < _SURFACE_NEIGHBORS)], APOLAR)
