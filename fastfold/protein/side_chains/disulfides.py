"""Disulfide bonds: which cysteines are bonded by their backbones or sulphurs, and where missing sulphurs are.

The limits are fitted to bonded and other cysteines of experimental structures; ``benchmarks/fit_side_chains.py`` prints
their distributions.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import angle_difference, angles, dihedrals
from fastfold.protein.side_chains.build import axis_slots, place_group, side_chain_groups
from fastfold.protein.side_chains.rotamers import rotamers

_CYSTEINE = rc.restype_order["C"]
_CA, _CB, _SG = (rc.atom_order[name] for name in ("CA", "CB", "SG"))
_CHI1 = side_chain_groups(_CYSTEINE)[0]
_STEP = 5.0  #: Degrees between the chi angles that are tried

_LENGTH, _ANGLE, _DIHEDRAL = (2.04, 0.1), (104.0, 6.0), (90.0, 20.0)
"""Mean and tolerance of the bond in Å, of its angles with CB, and of the dihedral angle about it in degrees."""
_CHI_WIDTH, _MAX_CHI_ENERGY = 10.0, 8.0
_MAX_ENERGY, _MAX_ENERGY_WITH_OTHERS = 5.0, 14.0
"""Energies above which cysteines are not bonded: in a chain without, and with another disulfide bond.

Cysteines are bonded where a protein is secreted, so one bond makes others probable.
"""
_BETA_DISTANCES, _ALPHA_DISTANCES = (3.2, 4.6), (3.8, 6.9)
"""Distances in Å of CB and of CA between bonded cysteines: percentiles 1 and 99 in experimental structures."""

_MOTIF_STEPS, _SITE_SIZE = (2, 3, 4), 7.0
"""Steps along the sequence within a metal-binding pair, and largest distance in Å of CB within a site of two pairs."""

BOND_LENGTH = 2.3  #: Distance in Å of two sulphurs up to which they are bonded, whatever their backbones are
NEAR_SULPHURS = (
    3.0  #: Distance in Å of two known sulphurs up to which they are bonded if their backbones allow it
)


@dataclass(frozen=True)
class Disulfide:
    """Bond between the sulphurs of two cysteines.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.side_chains import Disulfide
        >>> Disulfide((2, 18), np.array([[0.0, 0.0, 0.0], [2.04, 0.0, 0.0]])).residues
        (2, 18)
    """

    residues: tuple[int, int]  #: Indices of both residues, in order
    sulphurs: np.ndarray  #: ``[2, 3]`` float64 positions of SG in Å


def find_disulfides(
    positions: np.ndarray,
    mask: np.ndarray,
    aatype: np.ndarray,
    *,
    chain_index: np.ndarray,
    torsions: np.ndarray,
) -> tuple[Disulfide, ...]:
    """Return the disulfide bonds of a structure, with positions of sulphurs that it lacks.

    Two known sulphurs are bonded by their distance. If one or both are missing, the backbones decide: chi angles must
    exist that give the bond its usual geometry, at distances of CA and CB seen in experimental structures. A chain with
    one bond may have others of less usual geometry. Missing sulphurs of metal sites, which are two near pairs C-x-x-C,
    are not bonded. No cysteine has two bonds; the best ones are taken first.

    Args:
        positions: Atom37 positions ``[N, 37, 3]`` in Å, with CB of every cysteine that counts.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: ``[N]`` residue types.
        chain_index: ``[N]`` chain of each residue.
        torsions: ``[N, 2]`` phi and psi in degrees, or NaN.

    Example:
        >>> import fastfold
        >>> from fastfold.protein.geometry import backbone_torsions, follows
        >>> from fastfold.protein.side_chains import find_disulfides
        >>> protein = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).protein
        >>> atoms = protein.atom_positions, protein.atom_mask
        >>> torsions = backbone_torsions(*atoms, follows(protein.chain_index, protein.residue_index))
        >>> find_disulfides(*atoms, protein.aatype, chain_index=protein.chain_index, torsions=torsions)
        ()
    """
    xyz, present = np.asarray(positions, np.float64), np.asarray(mask) > 0.5
    axis = axis_slots(_CYSTEINE, _CHI1)
    cysteines = np.flatnonzero((aatype == _CYSTEINE) & present[:, axis].all(-1))
    possible: list[tuple[float, Disulfide]] = []
    at_metal = _metal_sites(xyz, cysteines, chain_index)
    options = {i: _sulphurs(xyz, present, i, torsions[i]) for i in cysteines.tolist()}
    for place, i in enumerate(cysteines.tolist()):
        near = (
            np.linalg.norm(xyz[cysteines[place + 1 :], _CB] - xyz[i, _CB], axis=-1) < 2.0 * _BETA_DISTANCES[1]
        )
        for j in cysteines[place + 1 :][near].tolist():
            if present[i, _SG] and present[j, _SG]:
                distance = float(np.linalg.norm(xyz[i, _SG] - xyz[j, _SG]))
                if distance < BOND_LENGTH or (distance < NEAR_SULPHURS and _is_allowed(xyz, i, j)):
                    possible.append((distance - 10.0, Disulfide((i, j), xyz[[i, j], _SG])))
            elif _is_allowed(xyz, i, j) and not {i, j} & at_metal:
                energy, sulphurs = _best_bond(xyz[i, _CB], *options[i], xyz[j, _CB], *options[j])
                if energy < _MAX_ENERGY_WITH_OTHERS:
                    possible.append((energy, Disulfide((i, j), sulphurs)))
    bonds: list[Disulfide] = []
    bonded, chains = set[int](), set[int]()
    for energy, bond in sorted(possible, key=lambda one: (one[0], one[1].residues)):
        of_bond = {int(chain_index[i]) for i in bond.residues}
        if not bonded & set(bond.residues) and (energy < _MAX_ENERGY or chains & of_bond):
            bonds.append(bond)
            bonded |= set(bond.residues)
            chains |= of_bond
    return tuple(sorted(bonds, key=lambda bond: bond.residues))


def _metal_sites(xyz: np.ndarray, cysteines: np.ndarray, chain_index: np.ndarray) -> set[int]:
    """Return the cysteines of sites that bind a metal, as zinc ribbons and rubredoxins have."""
    pairs = [
        (i, j)
        for i, j in itertools.combinations(cysteines.tolist(), 2)
        if j - i in _MOTIF_STEPS and chain_index[i] == chain_index[j]
    ]
    sites = set[int]()
    for first, second in itertools.combinations(pairs, 2):
        site = sorted({*first, *second})
        beta = xyz[site, _CB]
        if len(site) == 4 and np.linalg.norm(beta[:, None] - beta, axis=-1).max() < _SITE_SIZE:
            sites |= set(site)
    return sites


def _is_allowed(xyz: np.ndarray, i: int, j: int) -> bool:
    limits = ((_CB, _BETA_DISTANCES), (_CA, _ALPHA_DISTANCES))
    return all(low <= np.linalg.norm(xyz[i, slot] - xyz[j, slot]) <= high for slot, (low, high) in limits)


def _sulphurs(
    xyz: np.ndarray, present: np.ndarray, i: int, torsions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return possible positions of a sulphur ``[K, 3]`` and their energies ``[K]``; a known one is the only one."""
    if present[i, _SG]:
        return xyz[i, [_SG]], np.zeros(1)
    degrees = np.arange(-180.0, 180.0, _STEP)
    axis = np.broadcast_to(xyz[i, axis_slots(_CYSTEINE, _CHI1)], (len(degrees), 3, 3))
    chi, energies = rotamers(_CYSTEINE, *torsions)
    off = angle_difference(degrees[:, None], chi[:, 0]) / _CHI_WIDTH
    of_chi = (np.minimum(0.5 * off**2, _MAX_CHI_ENERGY) + energies).min(-1)
    return place_group(_CYSTEINE, _CHI1, [_SG], axis, degrees)[:, 0], of_chi


def _best_bond(
    beta: np.ndarray,
    sulphurs: np.ndarray,
    energies: np.ndarray,
    other_beta: np.ndarray,
    other_sulphurs: np.ndarray,
    other_energies: np.ndarray,
) -> tuple[float, np.ndarray]:
    """Return the least energy of a bond, and its sulphurs ``[2, 3]``."""
    s, t = np.broadcast_arrays(sulphurs[:, None], other_sulphurs[None])
    b, c = np.broadcast_to(beta, s.shape), np.broadcast_to(other_beta, s.shape)
    terms = [
        (np.linalg.norm(s - t, axis=-1), _LENGTH),
        (angles(b, s, t), _ANGLE),
        (angles(c, t, s), _ANGLE),
        (np.abs(dihedrals(b, s, t, c)), _DIHEDRAL),
    ]
    energy = sum(0.5 * ((value - mean) / width) ** 2 for value, (mean, width) in terms)
    energy = energy + energies[:, None] + other_energies
    k, m = np.unravel_index(int(energy.argmin()), energy.shape)
    return float(energy[k, m]), np.stack([sulphurs[k], other_sulphurs[m]])
