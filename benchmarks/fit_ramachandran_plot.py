"""Fit the table of the Ramachandran plot to experimental chains.

    python benchmarks/fit_ramachandran_plot.py DATA fastfold/protein/validation/ramachandran.npz

``DATA`` is a folder of PDB or mmCIF files. Residues whose backbone or CB has a B-factor above 30 Å² are left out. The
density of phi and psi is smoothed by von Mises kernels, which are narrow where residues are many. A first table finds
the chains with more than 1% of their residues among the rarest 0.5%; the final table is of the other chains.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from fastfold.errors import FastFoldError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.backbone import measure_backbone
from fastfold.protein.validation.ramachandran import KINDS, SCALE, interpolate, residue_kinds

B_LIMIT = 30.0
BANDWIDTHS = (4.0, 4.5, 6.0, 5.5, 5.0, 9.0)  #: Width of a kernel in degrees for each kind of residue
RARE, MOST_RARE = 0.005, 0.01
FINE, SIZE = 180, 72  #: Cells along an axis while smoothing, and in the table
LEAST_SHARE = 1e-5


def read_torsions(path: Path) -> np.ndarray:
    """Return phi, psi and kind of a file's residues with low B-factors, ``[n, 3]``; empty for unreadable files."""
    try:
        chains = read_structure(path).chains
    except FastFoldError:
        return np.zeros((0, 3))
    rows = [np.zeros((0, 3))]
    for chain in chains:
        aatype = rc.sequence_to_aatype(chain.sequence)
        geometry = measure_backbone(
            torch.from_numpy(chain.positions),
            torch.from_numpy(chain.mask),
            torch.from_numpy(chain.residue_index),
            torch.zeros(len(chain)),
        )
        phi, psi, omega, bond = (
            x.numpy() for x in (geometry.phi, geometry.psi, geometry.omega, geometry.c_n)
        )
        before_proline = np.append(aatype[1:] == rc.restype_order["P"], False)
        slots = [rc.atom_order[name] for name in ("N", "CA", "C", "O", "CB")]
        is_certain = (chain.b_factors[:, slots] * chain.mask[:, slots]).max(1) < B_LIMIT
        is_bonded = (bond < 1.6) & np.append(bond[1:] < 1.6, False)
        chosen = is_certain & is_bonded & ~np.isnan(phi + psi) & (aatype < rc.restype_num)
        kinds = residue_kinds(aatype, before_proline, omega)
        rows.append(np.stack([phi, psi, kinds], 1)[chosen])
    return np.concatenate(rows)


def smooth(counts: np.ndarray, width: float) -> np.ndarray:
    """Convolve counts ``[n, n]`` on the torus with a von Mises kernel of a width in degrees."""
    angles = np.radians(np.arange(len(counts)) * 360.0 / len(counts))
    kernel = np.exp((np.cos(angles) - 1) / np.radians(width) ** 2)
    spectrum = np.fft.fft(kernel / kernel.sum())
    return np.maximum(np.fft.ifft2(np.fft.fft2(counts) * np.outer(spectrum, spectrum)).real, 0.0)


def count(phi: np.ndarray, psi: np.ndarray) -> np.ndarray:
    """Count angles ``[n]`` in degrees in cells ``[180, 180]``."""
    edges = np.linspace(-180.0, 180.0, FINE + 1)
    return np.histogram2d(phi, psi, bins=(edges, edges))[0]


def density(phi: np.ndarray, psi: np.ndarray, width: float) -> np.ndarray:
    """Return a density ``[180, 180]`` by kernels that widen with the square root of how sparse residues are."""
    pilot = interpolate(smooth(count(phi, psi), width)[None], phi, psi, 0) + 1e-9
    factors = np.clip(np.sqrt(np.exp(np.log(pilot).mean()) / pilot), 0.5, 3.0)
    levels = np.geomspace(0.5, 3.0, 9)
    nearest = np.abs(np.log(factors[:, None] / levels)).argmin(1)
    parts = (
        smooth(count(phi[nearest == n], psi[nearest == n]), width * level) for n, level in enumerate(levels)
    )
    return sum(parts)


def shares(rows: np.ndarray) -> np.ndarray:
    """Return the share of residues in less populated places, ``[6, 180, 180]``, of rows ``[n, 3]``."""
    grids = []
    for kind, width in enumerate(BANDWIDTHS):
        phi, psi = rows[rows[:, 2] == kind, :2].T
        if KINDS[kind] == "glycine":  # without a side chain both hands are alike
            phi, psi = np.concatenate([phi, -phi]), np.concatenate([psi, -psi])
        grid = density(phi, psi, width)
        ranked = np.sort(interpolate(grid[None], phi, psi, 0))
        grids.append(np.searchsorted(ranked, grid) / len(ranked))
    return np.stack(grids)


def without_rough_chains(rows: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return the rows of chains with few rare residues; ``owner [n]`` numbers the chains."""
    share = interpolate(shares(rows), rows[:, 0], rows[:, 1], rows[:, 2].astype(int))
    rare = np.bincount(owner, share < RARE) / np.maximum(np.bincount(owner), 1)
    return rows[rare[owner] <= MOST_RARE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("table", type=Path)
    options = parser.parse_args()
    paths = sorted(path for path in options.data.iterdir() if path.is_file())
    with ProcessPoolExecutor() as pool:
        of_all = list(pool.map(read_torsions, paths, chunksize=20))
    rows, owner = np.concatenate(of_all), np.repeat(np.arange(len(of_all)), list(map(len, of_all)))
    kept = without_rough_chains(rows, owner)
    centers = (np.arange(SIZE) + 0.5) * 360.0 / SIZE - 180.0
    phi, psi = np.meshgrid(centers, centers, indexing="ij")
    table = np.stack([interpolate(grid[None], phi, psi, 0) for grid in shares(kept)])
    rarity = np.rint(-np.log10(np.maximum(table, LEAST_SHARE)) * SCALE).astype(np.uint8)
    np.savez_compressed(options.table, rarity=rarity)
    print(f"{len(kept):,} of {len(rows):,} residues of {len(paths):,} files")


if __name__ == "__main__":
    main()
