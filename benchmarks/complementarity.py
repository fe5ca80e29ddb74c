"""Shape complementarity of crystal complexes against the values that CCP4's ``sc`` published for them.

Usage: python benchmarks/complementarity.py CPDOCK [--complexes 1acb 1oeb] [--json OUT --machine NAME]

CPDOCK is a checkout of https://github.com/nemo8130/CPdock (Basu, J. Mol. Model. 24, 8), whose test runs hold the
coordinates of two chains each and the log of CCP4's ``sc`` 2.0, the program of Lawrence and Colman. With the package
``shape-complementarity``, sc-rs computes the same structures. Prints for each complex Sc, the median distance and the
area by each program, the number of atoms that CCP4 and FastFold have read, and the largest differences.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.protein.io.read import read_structure
from fastfold.protein.metrics.interface.shape_complementarity import shape_complementarity
from fastfold.protein.structure import structure_to_protein
from fastfold.utils.atomic_files import write_atomic

_SCORE = re.compile(r"Shape complementarity statistic Sc =\s+([\d.]+)")
_MEDIANS = re.compile(r"^ Median +[\d.]+ +[\d.]+ +([\d.]+)", re.MULTILINE)
_CHAINS = re.compile(r"Number of atoms selected in chain (\w) =")
_ATOMS = re.compile(r"Total number of atoms +(\d+)")


def compare(run: Path) -> dict[str, Any]:
    """Return the figures of a complex from its folder."""
    name = run.name.removeprefix("OUT")
    log = (run / "Sc.log").read_text(encoding="utf-8", errors="replace")
    structure = read_structure(run / f"{name}.pdb")
    first, second = _CHAINS.findall(log)
    chains = tuple(chain for chain in structure.chains if chain.chain_id in (first, second))
    protein = structure_to_protein(replace(structure, chains=chains))
    ours = shape_complementarity(
        protein.atom_positions, protein.atom_mask, protein.aatype, protein.chain_index == 0
    )
    assert ours is not None
    row: dict[str, Any] = {
        "complex": name,
        "ccp4": float(_SCORE.findall(log)[-1]),
        "fastfold": round(ours.score, 3),
        "ccp4_distance": float(_MEDIANS.findall(log)[0]),
        "distance": round(ours.distance, 3),
        "ccp4_atoms": int(_ATOMS.findall(log)[0]),
        "atoms": int(protein.atom_mask.sum()),
    }
    if importlib.util.find_spec("shape_complementarity") is not None:
        from shape_complementarity import from_pdb  # type: ignore[import-not-found]

        theirs = from_pdb(run / f"{name}.pdb", [first], [second], altloc_policy="highest_occupancy")
        row["sc_rs"] = round(theirs.sc, 3)
    return row


def main() -> None:
    """Print a line for each complex, and the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cpdock", type=Path)
    parser.add_argument("--complexes", nargs="+", help="names; all by default")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--machine", default="", help="name of the machine in the file")
    options = parser.parse_args()
    runs = sorted(path.parent for path in options.cpdock.glob("RUNTEST/OUT*/Sc.log"))
    if not runs:
        parser.error(f"{options.cpdock} has no RUNTEST/OUT*/Sc.log; it is not a checkout of CPdock")
    if options.complexes is not None:
        runs = [options.cpdock / "RUNTEST" / f"OUT{name}" for name in options.complexes]
    rows = []
    for run in runs:
        rows.append(compare(run))
        print(json.dumps(rows[-1]), flush=True)
    gaps = np.array([row["fastfold"] - row["ccp4"] for row in rows])
    figures: dict[str, Any] = {
        "mean_difference": round(float(np.abs(gaps).mean()), 4),
        "largest_difference": round(float(np.abs(gaps).max()), 4),
    }
    if all("sc_rs" in row for row in rows):
        gaps = np.array([row["sc_rs"] - row["ccp4"] for row in rows])
        figures["sc_rs_mean_difference"] = round(float(np.abs(gaps).mean()), 4)
        figures["sc_rs_largest_difference"] = round(float(np.abs(gaps).max()), 4)
    print(json.dumps(figures))
    if options.json is not None:
        report = {"machine": options.machine, **figures, "complexes": rows}
        write_atomic(options.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
