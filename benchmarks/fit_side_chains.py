"""Fit the table of rotamers to experimental structures, and print statistics of disulfide bonds.

Usage: python benchmarks/fit_side_chains.py STRUCTURES [--chains 1600] [--out NPZ]

STRUCTURES is a folder of PDB or mmCIF files. Chains are taken evenly over the sorted files. The table is that of
``fastfold/protein/side_chains/side_chains.npz``; its rotamers are means of chi angles within bins, with energies over
phi and psi smoothed by von Mises kernels.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fastfold.protein import residue_constants as rc
from fastfold.protein.all_atom import chi_angles
from fastfold.protein.geometry import backbone_torsions
from fastfold.protein.io.read import read_structure
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains.disulfides import find_disulfides
from fastfold.protein.side_chains.rotamers import ENERGY_UNIT, GRID_STEP
from fastfold.protein.structure import structure_to_protein

_MAX_B_FACTOR = 40.0
_MAX_PEPTIDE_BOND = 1.6
_SULPHUR_BOND = 2.5
_KERNEL_WIDTH = 16.0  # degrees
_PRIOR_COUNT, _PRIOR_OF_REST = 5.0, 10.0  # residues that a backbone-independent probability counts as
_LEAST_PROBABILITY = 0.0015
_STAGGERED, _PLANAR, _GUANIDINIUM = 120.0, 30.0, 60.0
_PLANAR_LAST = "DEFHNQWY"  # residues whose last chi angle rotates a planar group
_CA, _CB, _SG = (rc.atom_order[name] for name in ("CA", "CB", "SG"))


@dataclass(frozen=True)
class Residues:
    """Types ``[N]``, chi angles ``[N, 4]``, phi and psi ``[N, 2]`` in degrees, and side chains' B-factors ``[N]``."""

    aatype: np.ndarray
    chi: np.ndarray
    torsions: np.ndarray
    b_factors: np.ndarray


def bonded(protein: Protein) -> np.ndarray:
    """Return a mask ``[N]`` of residues with a peptide bond to the residue before."""
    c, n = (protein.atom_positions[:, rc.atom_order[name]] for name in ("C", "N"))
    present = [protein.atom_mask[:, rc.atom_order[name]] > 0.5 for name in ("C", "N")]
    is_near = np.linalg.norm(n[1:] - c[:-1], axis=-1) < _MAX_PEPTIDE_BOND
    same_chain = np.diff(protein.chain_index) == 0
    return np.concatenate([[False], is_near & same_chain & present[0][:-1] & present[1][1:]])


def read_residues(protein: Protein) -> Residues:
    """Return the torsion angles of a structure."""
    side = np.ones(rc.atom_type_num, bool)
    side[[rc.atom_order[name] for name in ("N", "CA", "C")]] = False
    b_factors = np.where(side & (protein.atom_mask > 0.5), protein.b_factors, 0.0).max(-1)
    torsions = backbone_torsions(protein.atom_positions, protein.atom_mask, bonded(protein))
    atoms = (protein.aatype, protein.atom_positions.astype(np.float64), protein.atom_mask)
    chi, exists = chi_angles(*map(torch.from_numpy, atoms))
    degrees = np.where(exists.numpy() > 0.5, np.degrees(chi.numpy()), np.nan)
    return Residues(protein.aatype, degrees, torsions, b_factors)


def bins(aatype: int) -> list[tuple[float, float, float]]:
    """Return start, width and period in degrees of the bins of each chi angle."""
    letter, count = rc.restypes[aatype], int(rc.chi_angles_mask[aatype].sum())
    layout = []
    for k in range(count):
        period = 180.0 if rc.chi_pi_periodic[aatype, k] else 360.0
        if letter == "P":
            layout.append((0.0, 180.0, period))
        elif k == count - 1 and letter in _PLANAR_LAST:
            layout.append((-_PLANAR / 2, _PLANAR, period))
        elif letter == "R" and k == count - 1:
            layout.append((-_GUANIDINIUM / 2, _GUANIDINIUM, period))
        else:
            layout.append((0.0, _STAGGERED, period))
    return layout


def fit_rotamers(aatype: int, residues: Residues) -> tuple[np.ndarray, np.ndarray]:
    """Return chi angles ``[R, n]`` and energies ``[R, 1 + grid points]`` of a residue type's rotamers.

    The first energy is independent of the backbone. Chi1 and chi2 depend on phi and psi, the others on chi1 and chi2.
    """
    layout = bins(aatype)
    count = len(layout)
    kept = (residues.aatype == aatype) & np.isfinite(residues.chi[:, :count]).all(-1)
    kept &= (residues.b_factors > 1.0) & (residues.b_factors < _MAX_B_FACTOR)
    chi, torsions = residues.chi[kept, :count], residues.torsions[kept]
    sizes = [round(period / width) for _, width, period in layout]
    places = [
        (((chi[:, k] - start) % period) // width).astype(int)
        for k, (start, width, period) in enumerate(layout)
    ]
    index = np.ravel_multi_index(places, sizes)
    means = np.zeros((math.prod(sizes), count))
    for k, (_, _, period) in enumerate(layout):
        turns = np.exp(2j * np.pi * chi[:, k] / period)
        sums = np.bincount(index, turns.real, len(means)) + 1j * np.bincount(index, turns.imag, len(means))
        means[:, k] = np.angle(sums) * period / (2.0 * np.pi)
    counts = np.bincount(index, minlength=len(means))

    first = math.prod(sizes[:2])
    anywhere, by_backbone = fit_backbone(
        np.ravel_multi_index(places[:2], sizes[:2]), first, torsions=torsions
    )
    # The further angles depend on chi1 and chi2, with the probability by chi2 alone as prior.
    rest = counts.reshape(-1, sizes[1] if count > 1 else 1, len(means) // first).astype(float)
    by_second = rest.sum(0) + 0.2
    by_second /= by_second.sum(-1, keepdims=True)
    rest = (rest + _PRIOR_OF_REST * by_second) / (rest.sum(-1, keepdims=True) + _PRIOR_OF_REST)
    rest = rest.reshape(first, -1)
    independent = (anywhere[:, None] * rest).ravel()
    dependent = (by_backbone[:, None] * rest[..., None]).reshape(len(means), -1)

    highest = np.maximum(independent, 0.05 * dependent.max(-1))
    order = np.argsort(-independent, kind="stable")
    order = order[(counts[order] > 0) & (highest[order] > _LEAST_PROBABILITY)]
    energies = -np.log(np.concatenate([independent[order, None], dependent[order]], 1))
    return means[order], energies


def fit_backbone(index: np.ndarray, count: int, *, torsions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of ``count`` bins: at any backbone ``[count]``, and by phi and psi ``[count, points²]``."""
    anywhere = np.bincount(index, minlength=count) + 0.1
    anywhere /= anywhere.sum()
    known = np.isfinite(torsions).all(-1)
    concentration = 1.0 / np.radians(_KERNEL_WIDTH) ** 2
    differences = np.radians(torsions[known][..., None] - np.arange(-180.0, 180.0, GRID_STEP))
    kernels = np.exp(concentration * (np.cos(differences) - 1.0))
    members = np.eye(count)[index[known]]
    sums = np.einsum("np,nq,nr->rpq", kernels[:, 0], kernels[:, 1], members, optimize=True)
    prior = _PRIOR_COUNT * anywhere[:, None, None]
    return anywhere, ((sums + prior) / (sums.sum(0) + _PRIOR_COUNT)).reshape(count, -1)


def fit_table(residues: Residues) -> dict[str, np.ndarray]:
    """Return the arrays of the table: chi angles as whole degrees, energies as bytes."""
    table = {}
    for aatype, letter in enumerate(rc.restypes):
        if rc.chi_angles_mask[aatype].any():
            chi, energies = fit_rotamers(aatype, residues)
            table[f"{letter}_chi"] = np.round(chi).astype(np.int16)
            table[f"{letter}_energy"] = np.clip(np.round(energies / ENERGY_UNIT), 0, 255).astype(np.uint8)
    return table


def cysteine_pairs(protein: Protein) -> tuple[list[tuple[float, float, bool, bool]], int]:
    """Return CB and CA distances in Å of near cysteines, if they are bonded, and if their backbones say so.

    The second value counts chains with a bond that does not exist.
    """
    slots = [rc.atom_order[name] for name in ("N", "CA", "C", "CB", "SG")]
    whole = (protein.aatype == rc.restype_order["C"]) & (protein.atom_mask[:, slots] > 0.5).all(-1)
    cysteines = np.flatnonzero(whole).tolist()
    mask = protein.atom_mask.copy()
    mask[:, _SG] = 0
    torsions = backbone_torsions(protein.atom_positions, mask, bonded(protein))
    bonds = find_disulfides(
        protein.atom_positions, mask, protein.aatype, chain_index=protein.chain_index, torsions=torsions
    )
    by_backbone = {bond.residues for bond in bonds}
    rows = []
    for place, i in enumerate(cysteines):
        for j in cysteines[place + 1 :]:
            beta, alpha, sulphurs = (
                float(np.linalg.norm(protein.atom_positions[i, slot] - protein.atom_positions[j, slot]))
                for slot in (_CB, _CA, _SG)
            )
            if beta < 6.5:
                rows.append((beta, alpha, sulphurs < _SULPHUR_BOND, (i, j) in by_backbone))
    return rows, int(any(predicted and not is_bonded for *_, is_bonded, predicted in rows))


def print_disulfides(proteins: list[Protein]) -> None:
    """Print distances of bonded and other cysteines, and the share that the backbone decides rightly."""
    per_chain = [cysteine_pairs(protein) for protein in proteins]
    rows = np.array([row for rows, _ in per_chain for row in rows])
    is_bonded, predicted = rows[:, 2] > 0.5, rows[:, 3] > 0.5
    print(
        f"{is_bonded.sum()} bonds, {(is_bonded & predicted).sum()} by the backbone; {(~is_bonded).sum()} other pairs, "
        f"{(~is_bonded & predicted).sum()} by the backbone, in {sum(wrong for _, wrong in per_chain)} of "
        f"{len(proteins)} chains"
    )
    for name, chosen in (("bonded", is_bonded), ("others", ~is_bonded)):
        for percentile in (0, 1, 50, 99, 100):
            beta, alpha = np.percentile(rows[chosen, :2], percentile, axis=0)
            print(f"{name}, percentile {percentile}: CB {beta:.2f} Å, CA {alpha:.2f} Å")


def main() -> None:
    """Fit the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("structures", type=Path)
    parser.add_argument("--chains", type=int, default=1600)
    parser.add_argument("--out", type=Path, default=Path("side_chains.npz"))
    options = parser.parse_args()
    paths = sorted(path for path in options.structures.iterdir() if path.is_file())
    count = min(options.chains, len(paths))
    paths = [paths[i * len(paths) // count] for i in range(count)]
    proteins = [structure_to_protein(read_structure(path)) for path in paths]
    parts = [read_residues(protein) for protein in proteins]
    residues = replace(
        parts[0],
        aatype=np.concatenate([part.aatype for part in parts]),
        chi=np.concatenate([part.chi for part in parts]),
        torsions=np.concatenate([part.torsions for part in parts]),
        b_factors=np.concatenate([part.b_factors for part in parts]),
    )
    source = (
        f"Fitted by benchmarks/fit_side_chains.py to {count:,} chains of the Protein Data Bank (CC0), side chains with "
        f"B-factors below {_MAX_B_FACTOR:.0f} Å²"
    )
    np.savez_compressed(options.out, source=np.array(source), **fit_table(residues))
    print(f"{len(residues.aatype):,} residues; wrote {options.out}")
    print_disulfides(proteins)


if __name__ == "__main__":
    main()
