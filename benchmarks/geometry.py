"""Geometry of written structures: figures of backbone and side chains, and the check that the program writes.

Usage: python benchmarks/geometry.py FILE...

Prints a row in Markdown for each mmCIF or PDB file, and their means, extremes of C-N bonds and shares of files with a
pierced ring and with problems. Figures are those of ``benchmarks/accuracy.py``; clashes are pairs per residue.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from fastfold.protein.geometry import follows
from fastfold.protein.io.read import as_protein
from fastfold.protein.metrics.backbone import backbone_figures, measure_backbone
from fastfold.protein.metrics.lddt import count_clashes
from fastfold.protein.protein import Protein
from fastfold.protein.side_chains import pierced_rings
from fastfold.protein.validation import check_structure

COLUMNS: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "phi_positive": (".1%", statistics.fmean),
    "alpha_beta": (".1%", statistics.fmean),
    "omega_off_planar": (".2%", statistics.fmean),
    "c_n_near": (".2%", statistics.fmean),
    "c_n_min": (".2f", min),
    "c_n_max": (".2f", max),
    "ca_ca": (".2f", statistics.fmean),
    "ca_ca_sd": (".3f", statistics.fmean),
    "clashes": (".3f", statistics.fmean),
    "pierced": (".0%", statistics.fmean),
    "outliers": (".1%", statistics.fmean),
    "problems": (".0%", statistics.fmean),
}
"""Figures, their form, and their summary over files."""


def geometry_figures(protein: Protein) -> dict[str, float]:
    """Return the figures of :data:`COLUMNS` that a structure has."""
    positions, mask = torch.as_tensor(protein.atom_positions), torch.as_tensor(protein.atom_mask)
    numbers, chains = (torch.as_tensor(x).long() for x in (protein.residue_index, protein.chain_index))
    measured = measure_backbone(positions, mask, numbers, chains)
    tied = follows(protein.chain_index, protein.residue_index)
    rings = pierced_rings(protein.atom_positions, protein.atom_mask, protein.aatype, tied)
    check = check_structure(protein)
    return backbone_figures(measured, torch.as_tensor(np.asarray(protein.aatype))) | {
        "clashes": count_clashes(positions, mask, numbers, chains) / len(protein.aatype),
        "pierced": float(len(rings) > 0),
        "outliers": check.figures["ramachandran_outliers"] or 0.0,
        "problems": float(len(check.problems) > 0),
    }


def row(name: str, figures: dict[str, float]) -> str:
    """Format the figures of one file, or of all."""
    cells = [format(figures[key], form) if key in figures else "" for key, (form, _) in COLUMNS.items()]
    return f"| {name} | {' | '.join(cells)} |"


def summary(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    """Summarise the figures of several structures."""
    by_key = {key: [one[key] for one in figures if key in one] for key in COLUMNS}
    return {key: COLUMNS[key][1](values) for key, values in by_key.items() if values}


def table(figures: dict[str, dict[str, float]]) -> str:
    """Format a table of structures by name, with their summary."""
    lines = [f"| structure | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [row(name, one) for name, one in figures.items()]
    return "\n".join([*lines, row(f"all {len(figures)}", summary(list(figures.values())))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the files and print their table."""
    files = [Path(text) for text in (sys.argv[1:] if arguments is None else arguments)]
    if not files:
        sys.exit((__doc__ or "").splitlines()[2])
    print(table({path.stem: geometry_figures(as_protein(path)) for path in files}))


if __name__ == "__main__":
    main()
