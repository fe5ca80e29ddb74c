"""Check of a structure alone: is its geometry that of a protein?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein.geometry import follows
from fastfold.protein.metrics.backbone import PLANAR, measure_backbone, off_planar
from fastfold.protein.metrics.lddt import count_clashes
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains import pierced_rings
from fastfold.protein.validation.covalent import measure_angles, measure_bonds, wrong_hands
from fastfold.protein.validation.ramachandran import (
    ALLOWED,
    FAVORED,
    OUTLIER,
    UNDEFINED,
    ramachandran_regions,
    residue_kinds,
)
from fastfold.utils.option_fields import check_kind

_MIN_COUNT = 2  #: Number of residues from which a share above its limit is a problem
MAX_OUTLIERS = 0.05  #: Largest share of Ramachandran outliers in a physical structure
MAX_TWISTED = 0.02  #: Largest share of twisted peptide bonds
MAX_BOND_OUTLIERS = 0.03  #: Largest share of bonds of unusual length
MAX_ANGLE_OUTLIERS = 0.08  #: Largest share of unusual bond angles
MAX_WRONG_HANDS = 0.01  #: Largest share of residues with a mirrored carbon
MAX_CLASHES = 0.1  #: Largest number of overlapping pairs of atoms a residue


@dataclass(frozen=True)
class StructureCheck:
    """Geometry of a structure of N residues against that of proteins.

    Example:
        >>> import fastfold
        >>> check = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0).structure_check
        >>> check.wrong_hands, check.pierced_rings, len(check.phi)
        (0, 0, 10)
    """

    phi: np.ndarray  #: ``[N]`` in degrees, NaN where undefined
    psi: np.ndarray  #: ``[N]`` in degrees, NaN where undefined
    regions: np.ndarray  #: ``[N]`` of :func:`.ramachandran_regions`
    peptide_bonds: int  #: Peptide bonds with omega
    twisted: int  #: Those more than 30 degrees from cis and trans
    cis: int  #: Cis peptide bonds before residues other than proline
    bonds: int  #: Bonds between present heavy atoms
    bond_outliers: int  #: Those more than 4 standard deviations from Engh and Huber's lengths
    angles: int  #: Bond angles within residues
    angle_outliers: int  #: Those more than 4 standard deviations from Engh and Huber's angles
    wrong_hands: int  #: Residues with a mirrored CA, or CB of threonine or isoleucine
    clashes: int  #: Pairs of heavy atoms of different residues whose radii overlap by more than 1.5 Å
    pierced_rings: int  #: Rings of side chains with a bond through them

    def share(self, region: int) -> float | None:
        """Return the share of residues with phi and psi in a region of the plot; None without such residues."""
        counted = self.regions != UNDEFINED
        return float((self.regions == region).sum() / counted.sum()) if counted.any() else None

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the structure is not that of a protein, a phrase each; empty for a physical one.

        At least 97% of experimental chains are within each limit.
        """
        outliers, residues = int((self.regions == OUTLIER).sum()), len(self.regions)
        shares = (
            (
                outliers,
                int((self.regions != UNDEFINED).sum()),
                MAX_OUTLIERS,
                "residues are Ramachandran outliers",
            ),
            (self.twisted, self.peptide_bonds, MAX_TWISTED, "peptide bonds are twisted"),
            (self.bond_outliers, self.bonds, MAX_BOND_OUTLIERS, "bonds have an unusual length"),
            (self.angle_outliers, self.angles, MAX_ANGLE_OUTLIERS, "bond angles are unusual"),
            (self.wrong_hands, residues, MAX_WRONG_HANDS, "residues are mirror images"),
        )
        reasons = [
            f"{100 * count / total:.0f}% of its {what}"
            for count, total, limit, what in shares
            if count >= _MIN_COUNT and count > limit * total
        ]
        if self.clashes >= _MIN_COUNT and self.clashes > MAX_CLASHES * residues:
            reasons.append(f"{self.clashes:,} pairs of atoms overlap")
        if self.pierced_rings:
            reasons.append(
                f"bonds pass through {self.pierced_rings} ring{'s' if self.pierced_rings > 1 else ''}"
            )
        return tuple(reasons)

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Numbers for tables and files by name, shares from 0 to 1."""
        return {
            "ramachandran_favoured": self.share(FAVORED),
            "ramachandran_allowed": self.share(ALLOWED),
            "ramachandran_outliers": self.share(OUTLIER),
            "twisted_peptides": self.twisted,
            "cis_peptides": self.cis,
            "bond_outliers": self.bond_outliers,
            "angle_outliers": self.angle_outliers,
            "wrong_hands": self.wrong_hands,
            "overlaps": self.clashes,
            "pierced_rings": self.pierced_rings,
        }

    @property
    def verdict(self) -> str:
        """The problems in words, or ``ok``."""
        return "; ".join(self.problems) or "ok"

    def to_dict(self) -> dict[str, Any]:
        """Return figures, problems, and phi, psi (degrees) and region of each residue, in JSON's types."""
        phi, psi = (
            [None if np.isnan(angle) else round(float(angle), 1) for angle in angles]
            for angles in (self.phi, self.psi)
        )
        figures = {key: round(x, 4) if isinstance(x, float) else x for key, x in self.figures.items()}
        return figures | {
            "problems": list(self.problems),
            "phi": phi,
            "psi": psi,
            "regions": self.regions.tolist(),
        }


def check_structure(protein: Protein) -> StructureCheck:
    """Measure a structure's geometry against that of proteins.

    The Ramachandran plot, omega, lengths and angles of bonds, hands, overlaps of heavy atoms and pierced rings are
    checked. Absent atoms are not counted. Residues with consecutive numbers in a chain count as bonded.

    Example:
        >>> import fastfold
        >>> from fastfold.protein.validation import check_structure
        >>> prediction = fastfold.predict("MTYKLILNGK", "mini", num_recycles=0)
        >>> check_structure(prediction.protein).wrong_hands
        0
    """
    check_kind("protein", protein, Protein, "a Protein, such as prediction.protein")
    tensors = (torch.from_numpy(x) for x in (protein.atom_positions, protein.atom_mask))
    positions, mask = tensors
    numbers, chains = (torch.from_numpy(x).long() for x in (protein.residue_index, protein.chain_index))
    geometry = measure_backbone(positions, mask, numbers, chains)
    phi, psi, omega = (x.numpy() for x in (geometry.phi, geometry.psi, geometry.omega))
    is_proline = protein.aatype == rc.restype_order["P"]
    tied = follows(protein.chain_index, protein.residue_index)
    before_proline = np.append(tied[1:] & is_proline[1:], False)
    known = ~np.isnan(omega)
    twist = off_planar(geometry.omega).numpy()
    bonds, angles = measure_bonds(protein), measure_angles(protein)
    return StructureCheck(
        phi=phi,
        psi=psi,
        regions=ramachandran_regions(phi, psi, residue_kinds(protein.aatype, before_proline, omega)),
        peptide_bonds=int(known.sum()),
        twisted=int((twist[known] > PLANAR).sum()),
        cis=int((np.abs(omega[known & ~is_proline]) < PLANAR).sum()),
        bonds=len(bonds.values),
        bond_outliers=int(bonds.outliers.sum()),
        angles=len(angles.values),
        angle_outliers=int(angles.outliers.sum()),
        wrong_hands=int(wrong_hands(protein).sum()),
        clashes=count_clashes(positions, mask, numbers, chains),
        pierced_rings=len(pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied)),
    )
