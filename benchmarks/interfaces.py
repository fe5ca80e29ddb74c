"""Figures of interfaces of crystal complexes against those of other programs.

    python benchmarks/interfaces.py FOLDER --sc SC > benchmarks/results/interfaces.json

FOLDER has PDB files of complexes, whose second chain is the binder; SC is the program of sc-rs
(https://github.com/cytokineking/sc-rs). FreeSASA (``pip install freesasa``) computes areas.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import freesasa
import numpy as np

from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface.geometry import interface_geometry
from fastfold.protein.structure import structure_to_protein


def main() -> None:
    """Print a row of figures for each complex."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sc", required=True)
    options = parser.parse_args()
    freesasa.setVerbosity(freesasa.nowarnings)
    rows = []
    for path in sorted(options.folder.glob("*.pdb")):
        structure = read_structure(path)
        if len(structure.chains) != 2:
            continue
        protein = structure_to_protein(structure)
        ours = interface_geometry(
            protein.atom_positions, protein.atom_mask, protein.aatype, protein.chain_index == 1
        )
        first, second = (chain.chain_id for chain in structure.chains)
        answer = subprocess.run(
            [options.sc, str(path), first, second], capture_output=True, text=True, check=True
        ).stdout
        rows.append(
            {
                "complex": path.stem,
                "sc": round(ours.complementarity or 0.0, 3),
                "sc_rs": float(answer.split()[1]),
                "buried_area": round(ours.buried_area),
                "freesasa": round(_area(path, first) + _area(path, second) - _area(path, first + second)),
                "bonds": ours.bonds,
                "unsatisfied": ours.unsatisfied,
                "interface_residues": int(ours.residues.sum()),
                "hydrophobicity": round(ours.hydrophobicity or 0.0, 2),
                "surface_hydrophobicity": round(ours.surface_hydrophobicity or 0.0, 2),
            }
        )
    fit = np.array([[row["sc"], row["sc_rs"]] for row in rows])
    largest = float(np.abs(fit[:, 0] - fit[:, 1]).max())
    print(json.dumps({"largest_difference_sc": round(largest, 3), "complexes": rows}, indent=1))


def _area(path: Path, chains: str) -> float:
    lines = [line for line in path.read_text().splitlines() if line.startswith("ATOM") and line[21] in chains]
    with tempfile.NamedTemporaryFile("w", suffix=".pdb") as file:
        file.write("\n".join([*lines, ""]))
        file.flush()
        area: float = freesasa.calc(freesasa.Structure(file.name)).totalArea()
        return area


if __name__ == "__main__":
    main()
