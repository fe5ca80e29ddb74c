"""Violations of stereochemistry: bonds, angles and clashes (supplement, section 1.9.11)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor
from torch.nn import functional as F

from fastfold.evoformer.losses.clashes import between_residue_clashes
from fastfold.evoformer.losses.masked import masked_mean
from fastfold.protein import residue_constants as rc

Violations = dict[str, Any]


def find_violations(positions: Tensor, batch: dict[str, Tensor], config: ConfigDict) -> Violations:
    """Find all violations of a prediction, soft (losses) and hard (masks).

    Args:
        positions: Predicted atom14 positions ``[*, N, 14, 3]`` in Å.
        batch: ``atom14_atom_exists [*, N, 14]``, ``residue_index [*, N]``, ``aatype [*, N]``; for a complex also
            ``asym_id [*, N]``, so that consecutive residues of different chains do not count as bonded.
        config: Official ``structure_module`` config node.

    Returns:
        AlphaFold's tree: ``between_residues``, ``within_residues``, ``total_per_residue_violations_mask``.
    """
    exists = batch["atom14_atom_exists"].to(positions.dtype)
    index, aatype = batch["residue_index"].long(), batch["aatype"]
    chain = batch.get("asym_id")
    connected = _neighbors(index, chain)
    bonds = _between_residue_bonds(positions, exists, connected, aatype, config.violation_tolerance_factor)
    clashes = between_residue_clashes(positions, exists, index, chain, aatype, config.clash_overlap_tolerance)
    within = _within_residues(positions, exists, aatype, config)
    per_residue = torch.stack(
        [
            bonds["connections_per_residue_violation_mask"],
            clashes["clashes_per_atom_clash_mask"].amax(-1),
            within["per_atom_violations"].amax(-1),
        ]
    ).amax(0)
    return {
        "between_residues": bonds | clashes,
        "within_residues": within,
        "total_per_residue_violations_mask": per_residue,
    }


def violation_loss(violations: Violations, batch: dict[str, Tensor], config: ConfigDict = None) -> Tensor:
    """Return the violation loss ``[*]`` (section 1.9.11, equations 44 to 46).

    Args:
        violations: Result of :func:`find_violations`.
        batch: Has ``atom14_atom_exists [*, N, 14]``.
        config: Config node ``violation`` of a multimer network: ``angle_weight``, and ``mean_of_clashing_atoms`` for
            the mean overlap of clashing atoms instead of all atoms (Evans et al. 2021). None for the supplement's loss.
    """
    between, within = violations["between_residues"], violations["within_residues"]
    counted = batch["atom14_atom_exists"]
    if config is not None and config.mean_of_clashing_atoms:
        counted = torch.maximum(between["clashes_per_atom_clash_mask"], within["per_atom_violations"])
    overlaps = (between["clashes_per_atom_loss_sum"] + within["per_atom_loss_sum"]).sum((-2, -1))
    angles = between["angles_ca_c_n_loss_mean"] + between["angles_c_n_ca_loss_mean"]
    if config is not None:
        angles = config.angle_weight * angles
    return between["bonds_c_n_loss_mean"] + angles + overlaps / (1e-6 + counted.sum((-2, -1)))


def violation_metrics(
    positions: Tensor, violations: Violations, batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the shares ``[*]`` of residues (or neighbours) with a hard violation, under AlphaFold's names.

    ``positions`` are predicted atom14 positions ``[*, N, 14, 3]`` in Å.
    """
    exists, seq_mask = batch["atom14_atom_exists"], batch["seq_mask"]
    ca, ca_exists = positions[..., 1, :], exists[..., 1]
    distance = ((ca[..., :-1, :] - ca[..., 1:, :]).square().sum(-1) + 1e-6).sqrt()
    extreme = (distance - rc.ca_ca_distance > 1.5).to(positions.dtype)
    mask = ca_exists[..., :-1] * ca_exists[..., 1:] * _neighbors(batch["residue_index"], batch.get("asym_id"))
    between, within = violations["between_residues"], violations["within_residues"]
    per_residue = {
        "violations_between_residue_bond": between["connections_per_residue_violation_mask"],
        "violations_between_residue_clash": between["clashes_per_atom_clash_mask"].amax(-1),
        "violations_within_residue": within["per_atom_violations"].amax(-1),
        "violations_per_residue": violations["total_per_residue_violations_mask"],
    }
    shares = {name: masked_mean(seq_mask, value, 1) for name, value in per_residue.items()}
    return {"violations_extreme_ca_ca_distance": masked_mean(mask, extreme, 1), **shares}


def _neighbors(residue_index: Tensor, chain: Tensor | None) -> Tensor:
    """Return 1 for neighbours ``[*, N - 1]`` that are consecutive in one chain, 0 for others."""
    follows = residue_index[..., 1:] - residue_index[..., :-1] == 1
    if chain is not None:
        follows = follows & (chain[..., 1:] == chain[..., :-1])
    return follows.float()


def _length(v: Tensor) -> Tensor:
    return (v.square().sum(-1) + 1e-6).sqrt()


def _between_residue_bonds(
    positions: Tensor, exists: Tensor, neighbors: Tensor, aatype: Tensor, tolerance: float
) -> dict[str, Tensor]:
    n, ca, c = (positions[..., i, :] for i in range(3))
    has_n, has_ca, has_c = (exists[..., i] for i in range(3))
    this_c, next_n = c[..., :-1, :], n[..., 1:, :]
    peptide = next_n - this_c
    to_ca, from_n = ca[..., :-1, :] - this_c, ca[..., 1:, :] - next_n
    peptide_length = _length(peptide)
    peptide_unit = peptide / peptide_length[..., None]
    to_ca_unit, from_n_unit = to_ca / _length(to_ca)[..., None], from_n / _length(from_n)[..., None]

    proline = (aatype[..., 1:] == rc.restype_order["P"]).to(positions.dtype)

    def by_residue(values: tuple[float, ...]) -> Tensor:
        return values[0] * (1.0 - proline) + values[1] * proline

    connected = has_c[..., :-1] * has_n[..., 1:] * neighbors.to(positions.dtype)
    terms: dict[str, tuple[Any, Any, Any, Tensor]] = {
        "bonds_c_n": (
            peptide_length,
            by_residue(rc.between_res_bond_length_c_n),
            by_residue(rc.between_res_bond_length_stddev_c_n),
            connected,
        ),
        "angles_ca_c_n": (
            (to_ca_unit * peptide_unit).sum(-1),
            *rc.between_res_cos_angles_ca_c_n,
            connected * has_ca[..., :-1],
        ),
        "angles_c_n_ca": (
            (-peptide_unit * from_n_unit).sum(-1),
            *rc.between_res_cos_angles_c_n_ca,
            connected * has_ca[..., 1:],
        ),
    }
    result: dict[str, Tensor] = {}
    losses, hard = [], []
    for name, (value, mean, stddev, mask) in terms.items():
        error = ((value - mean).square() + 1e-6).sqrt()
        loss = F.relu(error - tolerance * stddev)
        result[f"{name}_loss_mean"] = masked_mean(mask, loss, 1, eps=1e-6)
        losses.append(loss)
        hard.append(mask * (error > tolerance * stddev))
    # Each neighbour gets half of a bond's loss.
    total = sum(losses[1:], losses[0])
    result["connections_per_residue_loss_sum"] = 0.5 * (F.pad(total, (0, 1)) + F.pad(total, (1, 0)))
    worst = torch.stack(hard).amax(0)
    result["connections_per_residue_violation_mask"] = torch.maximum(
        F.pad(worst, (0, 1)), F.pad(worst, (1, 0))
    )
    return result


@cache
def distance_bounds(overlap_tolerance: float, bond_tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds ``[21, 14, 14]`` in Å for distances within a residue.

    Bonded atoms and atoms one angle apart stay within ``bond_tolerance`` standard deviations of their mean; all
    others may overlap by ``overlap_tolerance`` Å.
    """
    all_bonds, all_angles = rc.stereochemistry()
    lower, upper = np.zeros((2, 21, 14, 14), np.float32)
    for i, names in enumerate(rc.restype_atom14_names[:20]):
        radii = np.array([rc.element_radius[name[0]] if name else 0.0 for name in names])
        present = np.array([bool(name) for name in names])
        apart = present[:, None] & present[None, :] & ~np.eye(14, dtype=bool)
        lower[i][apart] = (radii[:, None] + radii[None, :] - overlap_tolerance)[apart]
        upper[i][apart] = 1e10
        residue = rc.resnames[i]
        bonds = {frozenset((a, b)): (mean, std) for r, a, b, mean, std in all_bonds if r == residue}
        fixed = dict(bonds)
        for r, a, b, c, mean, std in all_angles:
            if r == residue:
                pair = _across_angle(bonds[frozenset((a, b))], bonds[frozenset((b, c))], mean, std)
                fixed[frozenset((a, c))] = pair
        for pair_names, (mean, std) in fixed.items():
            a, b = (names.index(name) for name in pair_names)
            lower[i, a, b] = lower[i, b, a] = mean - bond_tolerance * std
            upper[i, a, b] = upper[i, b, a] = mean + bond_tolerance * std
    return lower, upper


def _across_angle(
    first: tuple[float, float], second: tuple[float, float], degrees: float, stddev: float
) -> tuple[float, float]:
    """Return the distance of two atoms bonded to a third, and its standard deviation.

    By the law of cosines, with uncorrelated errors.
    """
    (a, sa), (b, sb), gamma = first, second, math.radians(degrees)
    length = math.sqrt(a * a + b * b - 2 * a * b * math.cos(gamma))
    by_gamma = a * b * math.sin(gamma) / length * math.radians(stddev)
    by_a = (a - b * math.cos(gamma)) / length * sa
    by_b = (b - a * math.cos(gamma)) / length * sb
    return length, math.sqrt(by_gamma**2 + by_a**2 + by_b**2)


def _within_residues(
    positions: Tensor, exists: Tensor, aatype: Tensor, config: ConfigDict
) -> dict[str, Tensor]:
    tables = distance_bounds(config.clash_overlap_tolerance, config.violation_tolerance_factor)
    types = aatype.long().clamp(max=rc.unk_restype_index)
    lower, upper = (torch.from_numpy(t).to(positions)[types] for t in tables)
    mask = exists[..., :, None] * exists[..., None, :]
    mask = mask * (1.0 - torch.eye(14, dtype=positions.dtype, device=positions.device))
    delta = positions[..., :, None, :] - positions[..., None, :, :]
    distance = (delta.square().sum(-1) + 1e-10).sqrt()
    loss = mask * (F.relu(lower - distance) + F.relu(distance - upper))
    hard = mask * ((distance < lower) | (distance > upper))
    return {
        "per_atom_loss_sum": loss.sum(-2) + loss.sum(-1),
        "per_atom_violations": torch.maximum(hard.amax(-2), hard.amax(-1)),
    }
