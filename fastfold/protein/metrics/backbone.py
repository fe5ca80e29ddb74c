"""Geometry of protein backbones: torsions, bond lengths and angles, and how they differ from those of proteins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

PLANAR = 30.0  #: Largest deviation of omega from 0 or 180 degrees in a planar peptide bond
PEPTIDE_BOND = rc.between_res_bond_length_c_n[0]  #: Length of the bond between C and the next N in Å
PEPTIDE_TOLERANCE = 0.05  #: Allowed deviation of that length in Å

_ALPHA = ((-110.0, -30.0), (-80.0, 0.0))  #: Phi and psi of helices and turns, in degrees
_BETA_PHI = -30.0  #: Largest phi of strands and polyproline in degrees
_BETA_PSI = (80.0, 210.0)  #: Psi of strands and polyproline in degrees, across 180


@dataclass(frozen=True)
class BackboneGeometry:
    """Geometry of N residues' backbones; NaN where an atom or a bonded neighbour is missing.

    Fields with two residues belong to the later one, as omega does: the peptide bond before a residue.
    """

    phi: Tensor  #: ``[N]`` in degrees from -180 to 180
    psi: Tensor  #: ``[N]`` in degrees from -180 to 180
    omega: Tensor  #: ``[N]`` in degrees from -180 to 180, near 180 for trans
    n_ca: Tensor  #: Length ``[N]`` of the bond N-CA in Å
    ca_c: Tensor  #: Length ``[N]`` of the bond CA-C in Å
    c_n: Tensor  #: Length ``[N]`` of the peptide bond before the residue in Å
    ca_ca: Tensor  #: Distance ``[N]`` to the CA before, in Å
    n_ca_c: Tensor  #: Angle ``[N]`` at CA in degrees
    ca_c_n: Tensor  #: Angle ``[N]`` at the C before, in degrees
    c_n_ca: Tensor  #: Angle ``[N]`` at N in degrees


def measure_backbone(
    positions: Tensor, mask: Tensor, residue_index: Tensor, chain_index: Tensor
) -> BackboneGeometry:
    """Measure torsions, bond lengths and bond angles of a backbone.

    Args:
        positions: atom37 ``[N, 37, 3]`` in Å.
        mask: ``[N, 37]``, 1 where the atom is present.
        residue_index: ``[N]`` residue numbers; neighbours in a chain differ by 1.
        chain_index: ``[N]``.

    Returns:
        The geometry, float64. Neighbours count as bonded by their numbers, however far apart they are.
    """
    slots = [rc.atom_order[name] for name in ("N", "CA", "C")]
    atoms = positions[:, slots].double().masked_fill(~(mask[:, slots] > 0.5)[..., None], torch.nan)
    n, ca, c = atoms.unbind(1)
    bonded = (residue_index[1:] - residue_index[:-1] == 1) & (chain_index[1:] == chain_index[:-1])
    gap = torch.full_like(n[:1], torch.nan)
    before_ca, before_c = (torch.cat([gap, _known(x[:-1], bonded)]) for x in (ca, c))
    next_n = torch.cat([_known(n[1:], bonded), gap])
    return BackboneGeometry(
        phi=torsion(before_c, n, ca, c),
        psi=torsion(n, ca, c, next_n),
        omega=torsion(before_ca, before_c, n, ca),
        n_ca=_length(n, ca),
        ca_c=_length(ca, c),
        c_n=_length(before_c, n),
        ca_ca=_length(before_ca, ca),
        n_ca_c=bond_angle(n, ca, c),
        ca_c_n=bond_angle(before_ca, before_c, n),
        c_n_ca=bond_angle(before_c, n, ca),
    )


def torsion(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Return the torsion angle ``[*]`` of four points ``[*, 3]``, in degrees from -180 to 180."""
    axis = c - b
    first, second = torch.linalg.cross(b - a, axis), torch.linalg.cross(axis, d - c)
    sine = (torch.linalg.cross(first, second) * axis).sum(-1) / torch.linalg.vector_norm(axis, dim=-1)
    return torch.rad2deg(torch.atan2(sine, (first * second).sum(-1)))


def bond_angle(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return the angle ``[*]`` at ``b`` of three points ``[*, 3]``, in degrees from 0 to 180."""
    u, v = a - b, c - b
    sine = torch.linalg.vector_norm(torch.linalg.cross(u, v), dim=-1)
    return torch.rad2deg(torch.atan2(sine, (u * v).sum(-1)))


def off_planar(omega: Tensor) -> Tensor:
    """Return the deviation ``[*]`` of omega ``[*]`` from cis or trans, whichever is nearer, in degrees."""
    return torch.minimum(omega.abs(), 180.0 - omega.abs())


def in_helix_or_strand(phi: Tensor, psi: Tensor) -> Tensor:
    """Return a mask ``[*]`` of torsions ``[*]`` in degrees in the alpha or beta region of the Ramachandran plot.

    Alpha is phi from -110 to -30 and psi from -80 to 0; beta is phi below -30 and psi from 80 to -150 across 180. About
    90% of the residues of experimental structures other than glycine are in one of them.
    """
    (low_phi, high_phi), (low_psi, high_psi) = _ALPHA
    alpha = (phi > low_phi) & (phi < high_phi) & (psi > low_psi) & (psi < high_psi)
    start, end = _BETA_PSI
    return alpha | ((phi < _BETA_PHI) & ((psi > start) | (psi < end - 360.0)))


def backbone_figures(geometry: BackboneGeometry, aatype: Tensor) -> dict[str, float]:
    """Summarise a backbone in figures that show whether it is that of a protein.

    Args:
        geometry: Of :func:`measure_backbone`.
        aatype: ``[N]`` residue types.

    Returns:
        Figures by name, without those that no residue has. Of residues other than glycine with phi and psi:
        ``phi_positive``, the share with phi above 0, and ``alpha_beta``, that of :func:`in_helix_or_strand`. Of peptide
        bonds: ``omega_off_planar``, the share more than 30 degrees off cis and trans; ``c_n_near``, the share of C-N
        bonds within 0.05 Å of 1.329 Å, with the extremes ``c_n_min`` and ``c_n_max`` in Å; ``ca_ca`` and ``ca_ca_sd``,
        mean and standard deviation of distances of neighbouring CA atoms in Å.
    """
    counted = (aatype != rc.restype_order["G"]) & ~(geometry.phi + geometry.psi).isnan()
    figures: dict[str, float] = {}
    if bool(counted.any()):
        phi, psi = geometry.phi[counted], geometry.psi[counted]
        figures["phi_positive"] = float((phi > 0).double().mean())
        figures["alpha_beta"] = float(in_helix_or_strand(phi, psi).double().mean())
    omega, c_n, ca_ca = (x[~x.isnan()] for x in (geometry.omega, geometry.c_n, geometry.ca_ca))
    if len(omega):
        figures["omega_off_planar"] = float((off_planar(omega) > PLANAR).double().mean())
    if len(c_n):
        figures["c_n_near"] = float(((c_n - PEPTIDE_BOND).abs() <= PEPTIDE_TOLERANCE).double().mean())
        figures |= {"c_n_min": float(c_n.min()), "c_n_max": float(c_n.max())}
    if len(ca_ca):
        figures |= {"ca_ca": float(ca_ca.mean()), "ca_ca_sd": float(ca_ca.std(correction=0))}
    return figures


def _known(points: Tensor, known: Tensor) -> Tensor:
    return points.masked_fill(~known[:, None], torch.nan)


def _length(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vector_norm(a - b, dim=-1)
