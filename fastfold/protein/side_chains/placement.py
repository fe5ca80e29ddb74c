"""Place missing side chains on a backbone, by rotamers with the fewest clashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import backbone_torsions, follows
from fastfold.protein.side_chains.assignment import choose, energies_of_choice
from fastfold.protein.side_chains.build import BACKBONE, OXYGEN, axis_slots, place_group
from fastfold.protein.side_chains.candidates import RotamerCandidates, side_chain_candidates
from fastfold.protein.side_chains.crowded import place_again
from fastfold.protein.side_chains.disulfides import Disulfide, find_disulfides
from fastfold.protein.side_chains.overlaps import pair_energies, with_fixed_atoms

_N, _CA, _C, _O, _CB, _SG, _OXT = (rc.atom_order[name] for name in ("N", "CA", "C", "O", "CB", "SG", "OXT"))
_LEAST_BEND = 0.5
"""Product of two bonds and the sine of their angle in Å², below which N, CA and C are collinear."""
_FREE_PSI = -45.0  #: Psi in degrees of a residue whose successor's nitrogen is unknown
_MAX_ENERGY = 8.0  #: Energy above a residue's best candidate from which others are left out
_CROWDED = 10.0  #: Energy of a chosen candidate from which a residue is placed again; a clash has about 14
_MAX_ENERGY_AGAIN = (
    30.0  #: As the maximum above, for residues that are placed again and may need worse candidates
)
_DEVIATIONS = (-30.0, 0.0, 30.0)  #: Degrees from a rotamer's first two angles that are tried for them


@dataclass(frozen=True)
class PlacedSideChains:
    """Structure with all atoms except terminal oxygens, where N, CA and C allow it.

    Example:
        >>> import numpy as np
        >>> from fastfold.protein.side_chains import PlacedSideChains
        >>> PlacedSideChains(np.zeros((1, 37, 3)), np.zeros((1, 37)), disulfides=()).disulfides
        ()
    """

    positions: np.ndarray  #: ``[N, 37, 3]`` in Å, with the dtype of the input, whose kept atoms are unchanged
    mask: np.ndarray  #: ``[N, 37]``, with the dtype of the input
    disulfides: tuple[Disulfide, ...]  #: All disulfide bonds, also those of known sulphurs


def place_side_chains(
    positions: np.ndarray,
    mask: np.ndarray,
    aatype: np.ndarray,
    *,
    chain_index: np.ndarray,
    residue_index: np.ndarray,
    rebuild: np.ndarray | None = None,
    hints: np.ndarray | None = None,
) -> PlacedSideChains:
    """Build the missing heavy atoms of residues that have N, CA and C, except terminal oxygens.

    CB and O have AlphaFold's ideal geometry. Sulphurs of cysteines whose backbones stand as in a disulfide bond are
    bonded (:func:`~fastfold.protein.side_chains.disulfides.find_disulfides`). All other side chains take rotamers
    together, with the least sum of their energies by phi and psi and of overlaps. Where they still overlap, or bonds
    pass through rings, other rotamers and angles between them are tried. Equal inputs give equal results.

    Args:
        positions: Atom37 positions ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 for known atoms, which stay and determine their chi angles.
        aatype: ``[N]`` residue types; unknown ones are left alone.
        chain_index: ``[N]`` chain of each residue.
        residue_index: ``[N]`` residue numbers; consecutive residues of a chain are bonded.
        rebuild: ``[N]`` bool, residues whose side chains are placed again from CB; None for no residue.
        hints: Chi angles ``[N, 4]`` in degrees, or NaN, to try besides the rotamers; None for no hints.

    Example:
        >>> import fastfold, numpy as np
        >>> from fastfold.protein.side_chains import place_side_chains
        >>> protein = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).protein
        >>> placed = place_side_chains(
        ...     protein.atom_positions,
        ...     protein.atom_mask,
        ...     protein.aatype,
        ...     chain_index=protein.chain_index,
        ...     residue_index=protein.residue_index,
        ...     rebuild=np.ones(10, bool),
        ... )
        >>> bool((placed.mask == protein.atom_mask).all())
        True
    """
    xyz, known = np.array(positions, np.float64), np.asarray(mask) > 0.5
    if rebuild is not None:
        known &= ~np.asarray(rebuild, bool)[:, None] | np.isin(np.arange(rc.atom_type_num), BACKBONE)
    kept, tied = known.copy(), follows(chain_index, residue_index)
    torsions = backbone_torsions(xyz, known, tied)
    has_frame = _has_frame(xyz, known)
    _add_backbone_atoms(xyz, known, aatype, torsions, has_frame)
    disulfides = find_disulfides(xyz, known, aatype, chain_index=chain_index, torsions=torsions)
    for bond in disulfides:
        for i, sulphur in zip(bond.residues, bond.sulphurs, strict=True):
            if not known[i, _SG]:
                xyz[i, _SG], known[i, _SG] = sulphur, True
    missing = (rc.restype_atom37_mask[aatype] > 0.5) & ~known
    movable = missing.any(-1) & has_frame

    def candidates_of(
        residues: list[int], deviations: Sequence[float], max_energy: float
    ) -> list[RotamerCandidates]:
        fixed = known.copy()
        fixed[residues] &= ~missing[residues]
        candidates = side_chain_candidates(
            residues, xyz, fixed, aatype, torsions, hints, deviations=deviations
        )
        return with_fixed_atoms(candidates, xyz, fixed, aatype, tied, max_energy)

    candidates = candidates_of(np.flatnonzero(movable).tolist(), [0.0], _MAX_ENERGY)
    own, pairs = [one.energies for one in candidates], pair_energies(candidates, xyz)
    choice = choose(own, pairs)
    for one, k in zip(candidates, choice, strict=True):
        xyz[one.residue, one.slots], known[one.residue, one.slots] = one.points[k, : len(one.slots)], True
    crowded = np.zeros(len(xyz), bool)
    crowded[movable] = energies_of_choice(choice, own, pairs) > _CROWDED
    xyz = place_again(
        xyz,
        known,
        aatype,
        tied,
        movable,
        crowded,
        lambda residues: candidates_of(residues, _DEVIATIONS, _MAX_ENERGY_AGAIN),
    )
    placed = np.array(positions)
    added = known & ~kept
    placed[added] = xyz[added]
    return PlacedSideChains(placed, known.astype(np.asarray(mask).dtype), disulfides)


def _has_frame(xyz: np.ndarray, known: np.ndarray) -> np.ndarray:
    to_n, to_c = xyz[:, _N] - xyz[:, _CA], xyz[:, _C] - xyz[:, _CA]
    is_bent = np.linalg.norm(np.cross(to_n, to_c), axis=-1) > _LEAST_BEND
    return np.asarray(known[:, [_N, _CA, _C]].all(-1) & is_bent)


def _add_backbone_atoms(
    xyz: np.ndarray, known: np.ndarray, aatype: np.ndarray, torsions: np.ndarray, has_frame: np.ndarray
) -> None:
    """Build missing CB and O of residues with a frame, in place."""
    psi = np.where(np.isfinite(torsions[:, 1]), torsions[:, 1], _FREE_PSI)
    lacking = (rc.restype_atom37_mask[aatype] > 0.5) & ~known & has_frame[:, None]
    for slot, group in ((_CB, 0), (_O, OXYGEN)):
        for i in np.flatnonzero(lacking[:, slot]).tolist():
            axis = xyz[i, axis_slots(int(aatype[i]), group)][None]
            xyz[i, slot] = place_group(int(aatype[i]), group, [slot], axis, psi[[i]])[0, 0]
            known[i, slot] = True
