"""Stereochemistry of a structure: chain breaks, violations, and rings that bonds pass through.

Violations are AlphaFold's (supplement, section 1.9.11), wrong hands, twisted peptides and long backbone bonds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.losses.violation import find_violations
from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import gather_atoms, lookup
from fastfold.protein.geometry import follows, without_bond
from fastfold.protein.labels import AuthorNames, residue_label
from fastfold.protein.metrics.backbone import BackboneGeometry, measure_backbone, off_planar
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.build import BACKBONE
from fastfold.protein.side_chains.rings import PiercedRing, pierced_rings
from fastfold.protein.validation.covalent import CHIRAL_CENTERS, hands, wrong_hands


def open_breaks(protein: Protein) -> Protein:
    """Return the structure with residue numbers that are consecutive only between bonded residues."""
    tied = follows(protein.chain_index, protein.residue_index)
    tied[1:] &= ~without_bond(protein.atom_positions, protein.atom_mask)
    return replace(protein, residue_index=np.cumsum(np.where(tied, 1, 2)))


def chain_breaks(protein: Protein, names: AuthorNames | None = None) -> dict[tuple[int, int], str]:
    """Return pairs of neighbours in a chain that no bond joins, with their distance in words.

    Residues are indices in the protein's arrays; those without atoms are left out.
    """
    present = protein.atom_mask > 0.5
    rows = np.flatnonzero(present.any(-1))
    before, after = rows[:-1], rows[1:]
    is_next = protein.residue_index[after] - protein.residue_index[before] == 1
    ends = (protein.chain_index[before] == protein.chain_index[after]) & ~is_next
    breaks = {}
    for i, j in zip(before[ends].tolist(), after[ends].tolist(), strict=True):
        text = f"{residue_label(protein, i, names)} and {residue_label(protein, j, names)}"
        for one, other in (("C", "N"), ("CA", "CA")):
            a, b = (i, rc.atom_order[one]), (j, rc.atom_order[other])
            if present[a] and present[b]:
                distance = float(np.linalg.norm(protein.atom_positions[b] - protein.atom_positions[a]))
                text += f" ({one}-{other} {distance:.1f} Å)"
                break
        breaks[i, j] = text
    return breaks


_LEAST_MIRRORED = 3  #: Number of wrong hands from which a chain can be a mirror image
_LEAST_PHI = 8  #: Number of positive phi angles from which a chain without beta carbons can be a mirror image
MAX_TWIST = 45.0  #: Largest deviation of omega from cis or trans, in degrees
_MAX_STRETCH = 0.2  #: Largest deviation of a backbone bond from its length, in Å
_BACKBONE_BONDS = (("N", "CA", 1.458), ("CA", "C", 1.525), ("C", "O", 1.231))
"""Bonds within a residue and their lengths in Å."""
_PEPTIDE_BOND = 1.33


def check_not_mirrored(protein: Protein, names: AuthorNames) -> None:
    """Raise InputError for a chain of mostly D-amino acids, or, without beta carbons, of positive phi angles."""
    of_alpha, phi = hands(protein, *CHIRAL_CENTERS[0]), _measured(protein).phi.numpy()
    phi[protein.aatype == rc.restype_order["G"]] = np.nan
    for name, rows in zip(names.chain_ids, protein.chains, strict=True):
        known = of_alpha[rows][of_alpha[rows] != 0]
        count, least, what = int((known < 0).sum()), _LEAST_MIRRORED, "alpha carbons are of D-amino acids"
        if not len(known):
            known = phi[rows][np.isfinite(phi[rows])]
            count, least, what = int((known > 0).sum()), _LEAST_PHI, "phi angles are positive"
        if count >= least and 2 * count > len(known):
            raise InputError(
                f"chain {name} is the mirror image of a protein: {count} of {len(known)} {what}; invert the sign of "
                "one coordinate of all atoms"
            )


def _measured(protein: Protein) -> BackboneGeometry:
    arrays = (protein.atom_positions, protein.atom_mask, protein.residue_index, protein.chain_index)
    return measure_backbone(*map(torch.from_numpy, arrays))


def twisted_residues(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues after a peptide bond with omega far from cis and trans."""
    after = np.flatnonzero((off_planar(_measured(protein).omega) > MAX_TWIST).numpy())
    return _both_ends(after - 1, after, np.ones(len(after), bool), len(protein))


def stretched_residues(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with a backbone bond of wrong length."""
    every = np.arange(len(protein))
    stretched = np.zeros(len(protein), bool)
    bonds = [(every, first, every, second, length) for first, second, length in _BACKBONE_BONDS]
    after = np.flatnonzero(follows(protein.chain_index, protein.residue_index))
    for rows, first, others, second, length in [*bonds, (after - 1, "C", after, "N", _PEPTIDE_BOND)]:
        a, b = (rows, rc.atom_order[first]), (others, rc.atom_order[second])
        known = (protein.atom_mask[a] > 0.5) & (protein.atom_mask[b] > 0.5)
        distance = np.linalg.norm(protein.atom_positions[a] - protein.atom_positions[b], axis=-1)
        is_wrong = known & (np.abs(distance - length) > _MAX_STRETCH)
        stretched |= _both_ends(rows, others, is_wrong, len(protein))
    return stretched


def _both_ends(before: np.ndarray, after: np.ndarray, chosen: np.ndarray, count: int) -> np.ndarray:
    ends = np.zeros(count, bool)
    ends[before[chosen]] = ends[after[chosen]] = True
    return ends


@dataclass(frozen=True)
class Violation:
    """Residue with violations."""

    index: int  #: Index in the protein's arrays
    residue: str  #: Name, for example ``LYS 15 of chain A``
    #: ``clash`` (atoms of two residues overlap by more than 1.5 Å), ``bond`` (a peptide bond or an adjacent angle is
    #: off by more than 12 standard deviations, or a backbone bond by 0.2 Å), ``geometry`` (distances within the
    #: residue are), ``chirality`` (a carbon has the wrong hand), ``omega`` (a peptide bond is more than 45° from cis
    #: and trans)
    kinds: tuple[str, ...]


def violating_residues(protein: Protein, names: AuthorNames | None = None) -> tuple[Violation, ...]:
    """Return all residues with a violation; residues of unknown type are not checked."""
    aatype = torch.from_numpy(protein.aatype).long()
    index = lookup("restype_atom14_to_atom37", aatype)
    exists = torch.from_numpy(protein.atom_mask).gather(-1, index) * lookup("restype_atom14_mask", aatype)
    batch = {
        "atom14_atom_exists": exists,
        "residue_index": torch.from_numpy(protein.residue_index),
        "aatype": aatype,
        "asym_id": torch.from_numpy(protein.chain_index),
    }
    positions = gather_atoms(torch.from_numpy(protein.atom_positions), index)
    violations = find_violations(positions, batch, model_config("model_1").model.heads.structure_module)
    between, within = violations["between_residues"], violations["within_residues"]
    masks = {
        "clash": between["clashes_per_atom_clash_mask"].amax(-1) > 0.5,
        "bond": (between["connections_per_residue_violation_mask"] > 0.5)
        | torch.from_numpy(stretched_residues(protein)),
        "geometry": within["per_atom_violations"].amax(-1) > 0.5,
        "chirality": torch.from_numpy(wrong_hands(protein)),
        "omega": torch.from_numpy(twisted_residues(protein)),
    }
    some = torch.stack(list(masks.values())).any(0)
    return tuple(
        Violation(i, residue_label(protein, i, names), tuple(kind for kind, mask in masks.items() if mask[i]))
        for i in some.nonzero()[:, 0].tolist()
        if protein.aatype[i] != rc.unk_restype_index
    )


def rings_with_bonds(protein: Protein) -> tuple[PiercedRing, ...]:
    """Return the rings that a covalent bond passes through."""
    tied = follows(protein.chain_index, protein.residue_index)
    return pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied)


def describe_ring(ring: PiercedRing, protein: Protein, names: AuthorNames | None = None) -> str:
    """Return the names of a ring's residue and of the bond through it, for messages."""
    (first, one), (second, other) = ring.bond
    atoms = f"{rc.atom_types[one]}-{rc.atom_types[other]} of {residue_label(protein, first, names)}"
    if second != first:
        atoms += f" and {residue_label(protein, second, names)}"
    return f"{residue_label(protein, ring.residue, names)} by {atoms}"


def side_chains_to_rebuild(rings: Iterable[PiercedRing], protein: Protein) -> set[int]:
    """Return the residues whose rotamers can free rings from bonds: those of the rings, and of bonds past CB."""
    residues = set()
    for ring in rings:
        if rc.restypes_with_x[protein.aatype[ring.residue]] != "P":  # proline's ring is part of the backbone
            residues.add(ring.residue)
        residues |= {residue for residue, slot in ring.bond if slot not in BACKBONE}
    return residues
