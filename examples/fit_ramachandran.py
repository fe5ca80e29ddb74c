"""Fit the Ramachandran table that the descent of ``mini`` uses, on the training chains of a folder.

    python examples/fit_ramachandran.py DATA ramachandran.json [--chains 800]

A table has four groups of residues: glycine, proline, residues before proline, and the other 18 types. The density of
phi and psi in a group is a mixture of products of von Mises densities, fitted by expectation maximisation. The 18 types
share the components and have weights of their own. The last component of each group is uniform.

The same data give the same table. ``fastfold/evoformer/structure/ramachandran.json`` was written by this program.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import Entry, select_chain
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.backbone import measure_backbone

COMPONENTS = {"general": 12, "glycine": 8, "proline": 6, "before_proline": 8}
STARTS = 2  # the better of these fits is written
STEPS = 80
PRIOR = 50.0  # residues with the weights of all types, which are added to those of each
LONGEST = 1.9  # Å; a longer peptide bond is a gap in the chain
MAX_MEAN = 0.985  # of a resultant vector, so that no component becomes a point


def torsions(entries: Sequence[Entry]) -> tuple[Tensor, Tensor, Tensor]:
    """Return types ``[n]``, types of the next residue ``[n]``, and phi and psi ``[n, 2]`` in radians."""
    found = []
    for entry in entries:
        chain = select_chain(read_structure(entry.structure), entry)
        positions, mask, numbers = (
            torch.as_tensor(x) for x in (chain.positions, chain.mask, chain.residue_index)
        )
        geometry = measure_backbone(positions, mask, numbers, torch.zeros_like(numbers))
        aatype = torch.as_tensor(rc.sequence_to_aatype(chain.sequence)).long()
        bond = torch.cat([geometry.c_n[1:], geometry.c_n[:1]])
        known = (geometry.c_n < LONGEST) & (bond < LONGEST) & (aatype < rc.restype_num)
        known &= ~(geometry.phi + geometry.psi).isnan()
        angles = torch.deg2rad(torch.stack([geometry.phi, geometry.psi], -1))
        found.append((aatype[known], aatype.roll(-1)[known], angles[known]))
    types, following, angles = (torch.cat(x) for x in zip(*found, strict=True))
    return types, following, angles


def fit(angles: Tensor, types: Tensor, components: int, seed: int) -> tuple[float, Tensor, Tensor, Tensor]:
    """Fit a mixture to ``angles [n, 2]`` with weights for each of the ``types [n]``, 0 to 19.

    Returns:
        The mean log density, weights ``[20, K]``, means ``[K, 2]`` in radians, and concentrations ``[K, 2]``.
    """
    generator = torch.Generator().manual_seed(seed)
    mean = angles[torch.randperm(len(angles), generator=generator)[:components]].clone()
    concentration = torch.full_like(mean, 8.0)
    concentration[-1] = 0.0
    weights = torch.full((rc.restype_num, components), 1 / components).double()
    counts = torch.bincount(types, minlength=rc.restype_num).double()[:, None]
    cosine, sine = angles.cos(), angles.sin()
    density = 0.0
    for _ in range(STEPS):
        scale = (2 * math.pi * torch.special.i0e(concentration)).log() + concentration
        logits = (concentration * mean.cos()) @ cosine.T + (concentration * mean.sin()) @ sine.T
        logits = logits.T - scale.sum(-1) + (weights[types] + 1e-12).log()
        density = float(logits.logsumexp(-1).mean())
        share = logits.softmax(-1)
        total = share.sum(0)
        mean = torch.atan2(share.T @ sine, share.T @ cosine)
        length = torch.hypot(share.T @ sine, share.T @ cosine) / total[:, None]
        concentration = inverse_mean(length.clamp(max=MAX_MEAN))
        concentration[-1] = 0.0
        own = torch.zeros_like(weights).index_add_(0, types, share)
        weights = (own + PRIOR * total / len(angles)) / (counts + PRIOR)
    return density, weights, mean, concentration


def inverse_mean(length: Tensor) -> Tensor:
    """Return the concentrations whose von Mises densities have mean vectors of these lengths, by bisection."""
    low, high = torch.zeros_like(length), torch.full_like(length, 100.0)
    for _ in range(50):
        middle = (low + high) / 2
        shorter = torch.special.i1e(middle) / torch.special.i0e(middle) < length
        low, high = torch.where(shorter, middle, low), torch.where(shorter, high, middle)
    return low


def table(types: Tensor, following: Tensor, angles: Tensor) -> dict[str, object]:
    """Return the table's groups, with angles in degrees."""
    glycine, proline = (types == rc.restype_order[letter] for letter in "GP")
    before = (following == rc.restype_order["P"]) & ~glycine & ~proline
    rows = {
        "general": ~(glycine | proline | before),
        "glycine": glycine,
        "proline": proline,
        "before_proline": before,
    }
    groups = {}
    for name, components in COMPONENTS.items():
        of_group = types[rows[name]] if name == "general" else torch.zeros_like(types[rows[name]])
        fits = [fit(angles[rows[name]], of_group, components, seed) for seed in range(STARTS)]
        density, weights, mean, concentration = max(fits, key=lambda x: x[0])
        letters = rc.restypes if name == "general" else "*"
        groups[name] = {
            "residues": int(rows[name].sum()),
            "weights": {
                x: rounded(row, 4) for x, row in zip(letters, weights, strict=False) if x not in "GP"
            },
            "mean": [rounded(x, 1) for x in torch.rad2deg(mean)],
            "concentration": [rounded(x, 2) for x in concentration],
        }
        print(f"{name}: {int(rows[name].sum())} residues, mean log density {density:.4f}")
    return groups


def rounded(x: Tensor, digits: int) -> list[float]:
    return [round(value, digits) for value in x.tolist()]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--chains", type=int, default=800, help="taken evenly; 0: all (default: 800)")
    options = parser.parse_args(arguments)
    entries = open_dataset(options.data, split="train").entries
    count = min(options.chains or len(entries), len(entries))
    chosen = [entries[i * len(entries) // count] for i in range(count)]
    lines = [f'  "{name}": {json.dumps(group)}' for name, group in table(*torsions(chosen)).items()]
    options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
