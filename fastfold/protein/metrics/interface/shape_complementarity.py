"""Shape complementarity Sc of two molecules (Lawrence & Colman 1993, J. Mol. Biol. 234, 946)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface.dot_surface import DotSurface, dot_surface, nearest, touches

PROBE, DENSITY = 1.7, 15.0
"""Radius of the probe in Å and dots in Å^-2, the defaults of CCP4's ``sc``."""

_NEAR = 8.0  #: Dots cover atoms within this distance of the other molecule, in Å
_BAND = 1.5  #: Dots this near to a dot that stays in contact with solvent do not count
_WEIGHT = 0.5  #: Decay of a dot's score with the squared distance, in Å^-2

_CARBONYL, _METHINE, _METHYLENE, _METHYL = 1.80, 1.85, 1.90, 1.95
_RADII: dict[str, dict[str, float]] = {
    "": {"CA": _METHINE, "C": _CARBONYL, "O": 1.60, "N": 1.65, "CB": _METHYLENE, "OXT": 1.60},
    "ALA": {"CB": _METHYL},
    "ARG": {"CG": _METHYLENE, "CD": _METHYLENE, "NE": 1.65, "CZ": _CARBONYL, "NH1": 1.70, "NH2": 1.70},
    "ASN": {"CG": _CARBONYL, "OD1": 1.60, "ND2": 1.70},
    "ASP": {"CG": _CARBONYL, "OD1": 1.60, "OD2": 1.60},
    "CYS": {"SG": 1.90},
    "GLN": {"CG": _METHYLENE, "CD": _CARBONYL, "OE1": 1.60, "NE2": 1.70},
    "GLU": {"CG": _METHYLENE, "CD": _CARBONYL, "OE1": 1.60, "OE2": 1.60},
    "GLY": {"CA": _METHYLENE},
    "HIS": {"CG": _CARBONYL, "ND1": 1.65, "CD2": _METHYLENE, "CE1": _METHYLENE, "NE2": 1.65},
    "ILE": {"CB": _METHINE, "CG1": _METHYLENE, "CG2": _METHYL, "CD1": _METHYL},
    "LEU": {"CG": _METHINE, "CD1": _METHYL, "CD2": _METHYL},
    "LYS": {"CG": _METHYLENE, "CD": _METHYLENE, "CE": _METHYLENE, "NZ": 1.75},
    "MET": {"CG": _METHYLENE, "SD": 1.90, "CE": _METHYL},
    "PHE": {"CG": _CARBONYL, **dict.fromkeys(("CD1", "CD2", "CE1", "CE2", "CZ"), _METHYLENE)},
    "PRO": {"CG": _METHYLENE, "CD": _METHYLENE},
    "SER": {"OG": 1.70},
    "THR": {"CB": _METHINE, "OG1": 1.70, "CG2": _METHYL},
    "TRP": {
        **dict.fromkeys(("CG", "CD2", "CE2"), _CARBONYL),
        **dict.fromkeys(("CD1", "CE3", "CZ2", "CZ3", "CH2"), _METHYLENE),
        "NE1": 1.65,
    },
    "TYR": {
        **dict.fromkeys(("CG", "CZ"), _CARBONYL),
        **dict.fromkeys(("CD1", "CD2", "CE1", "CE2"), _METHYLENE),
        "OH": 1.70,
    },
    "VAL": {"CB": _METHINE, "CG1": _METHYL, "CG2": _METHYL},
}
"""Radii of atoms with their hydrogens in Å, those of CCP4's ``sc``; the empty name holds for all residues."""


@dataclass(frozen=True)
class ShapeComplementarity:
    """Fit of two surfaces at their interface."""

    score: float  #: Sc from about 0 (unrelated) to 1 (exact fit): the mean of both surfaces' medians
    distance: float  #: Median distance of facing dots in Å, the mean of both surfaces
    area: float  #: Area of the two surfaces that counts, in Å²


@cache
def atom_radii() -> np.ndarray:
    """Return radii in Å of the atoms of each residue type, ``[21, 37]``; 1.8 for atoms that a type lacks."""
    radii = np.full((len(rc.restypes) + 1, rc.atom_type_num), 1.80)
    for aatype, letter in enumerate([*rc.restypes, "X"]):
        own = _RADII.get(rc.restype_1to3.get(letter, ""), {})
        for name, radius in {**_RADII[""], **own}.items():
            radii[aatype, rc.atom_order[name]] = radius
    return radii


def shape_complementarity(
    positions: np.ndarray, mask: np.ndarray, aatype: np.ndarray, is_first: np.ndarray
) -> ShapeComplementarity | None:
    """Return the fit of some residues to the others; None if no surface is buried between them.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for present atoms.
        aatype: Residue types ``[N]``, 0 to 20.
        is_first: ``[N]`` bool, True for residues of the first molecule.
    """
    residue, slot = np.nonzero(mask > 0.5)
    atoms = positions[residue, slot].astype(np.float64)
    radii, first = atom_radii()[aatype[residue], slot], is_first[residue]
    sides = [(atoms[side], radii[side]) for side in (first, ~first)]
    if not all(len(points) for points, _ in sides):
        return None
    facing = [_buried(*own, *other) for own, other in (sides, sides[::-1])]
    if not all(len(one.points) for one in facing):
        return None
    scores, distances = zip(*(_medians(*pair) for pair in (facing, facing[::-1])), strict=True)
    return ShapeComplementarity(
        score=float(np.mean(scores)),
        distance=float(np.mean(distances)),
        area=float(sum(one.areas.sum() for one in facing)),
    )


def _buried(atoms: np.ndarray, radii: np.ndarray, others: np.ndarray, other_radii: np.ndarray) -> DotSurface:
    """Return the dots of a molecule that the other one buries, without the band along their edge."""
    chosen = touches(atoms, others, np.full(len(others), _NEAR))
    if not chosen.any():
        empty = np.zeros((0, 3))
        return DotSurface(empty, empty, empty, np.zeros(0))
    dots = dot_surface(atoms, radii, chosen, probe=PROBE, density=DENSITY)
    buried = touches(dots.probes, others, other_radii + PROBE)
    edge = dots.points[~buried]
    kept = np.flatnonzero(buried)
    kept = kept[~touches(dots.points[kept], edge, np.full(len(edge), _BAND))]
    return DotSurface(dots.points[kept], dots.normals[kept], dots.probes[kept], dots.areas[kept])


def _medians(own: DotSurface, other: DotSurface) -> tuple[float, float]:
    """Return the medians over area of score and distance of a surface's dots to the nearest dots of the other one."""
    index, squared = nearest(own.points, other.points)
    agreement = -np.einsum("dk,dk->d", own.normals, other.normals[index])
    score = agreement * np.exp(-_WEIGHT * squared)
    return _weighted_median(score, own.areas), _weighted_median(np.sqrt(squared.clip(0.0)), own.areas)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = values.argsort()
    share = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(share, share[-1] / 2.0)])
