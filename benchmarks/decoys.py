"""Rank perturbed copies of real structures by ``fastfold score``: does the native structure come first?

Usage: python benchmarks/decoys.py WEIGHTS STRUCTURE [STRUCTURE ...] [--initial-guess] [--decoys 8] [--json OUT]

A decoy is made from the first chain of a structure by turns about the bonds N-CA of random residues, so that all bonds
and angles stay. Decoys have 1 to 8 turns of 5 to 40 degrees. Prints for each structure the rank of the native by
each score, from 1, and Spearman's correlation of the score with the decoys' TM-score to the native; then the means. The
baseline is the compactness, a small radius of gyration, which knows nothing of proteins.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fastfold.inference.config import InferConfig
from fastfold.inference.request import InferRequest, RunOptions
from fastfold.products.score.run import TABLE, Protocol, run_scores
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure, structure_name
from fastfold.protein.metrics.compactness import radius_of_gyration
from fastfold.protein.metrics.tm_score import tm_score
from fastfold.protein.protein import Protein
from fastfold.protein.structure import ChainStructure
from fastfold.utils.atomic_files import write_atomic

SCORES = ("composite", "plddt", "ptm", "tm_score")
BASELINE = "compactness"
NATIVE = "native"


def resolved(chain: ChainStructure) -> Protein:
    """Return the residues of a chain with a whole backbone."""
    known = chain.mask[:, [rc.atom_order[atom] for atom in ("N", "CA", "C")]].min(-1) > 0
    aatype = rc.sequence_to_aatype(chain.sequence)[known]
    return Protein(
        atom_positions=chain.positions[known],
        atom_mask=chain.mask[known] * rc.restype_atom37_mask[aatype],
        aatype=aatype,
        residue_index=np.arange(1, known.sum() + 1),
        chain_index=np.zeros(int(known.sum()), np.int32),
        b_factors=np.zeros((int(known.sum()), 37)),
    )


def turned(positions: np.ndarray, turns: int, degrees: float, rng: np.random.Generator) -> np.ndarray:
    """Return positions ``[N, 37, 3]`` with all atoms behind random bonds N-CA turned about these."""
    found = positions.copy()
    n, ca = rc.atom_order["N"], rc.atom_order["CA"]
    for at in rng.choice(len(found) - 1, size=turns, replace=False):
        start = found[at, ca]
        axis = (start - found[at, n]) / np.linalg.norm(start - found[at, n])
        angle = np.radians(degrees) * rng.choice([-1.0, 1.0])
        cross = np.array([[0, -axis[2], axis[1]], [axis[2], 0, -axis[0]], [-axis[1], axis[0], 0]])
        turn = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
        fixed = found[at, [n, ca]].copy()
        found[at:] = (found[at:] - start) @ turn.T + start
        found[at, [n, ca]] = fixed
    return found


def write_decoys(path: Path, folder: Path, count: int) -> tuple[dict[str, float], dict[str, float]]:
    """Write a native chain and its decoys; return TM-scores to the native, and compactness, by name."""
    native = resolved(read_structure(path).chains[0])
    rng = np.random.default_rng(0)
    found, compact = {}, {}
    true = torch.from_numpy(native.atom_positions[:, 1].astype(np.float64))
    for number in range(count + 1):
        positions = np.asarray(native.atom_positions, np.float64)
        if number:
            positions = turned(positions, int(rng.integers(1, 9)), float(rng.uniform(5, 40)), rng)
        positions = positions - positions[:, 1].mean(0)
        name = f"decoy_{number}" if number else NATIVE
        moved = Protein(**{**vars(native), "atom_positions": positions * (native.atom_mask[..., None] > 0.5)})
        write_atomic(folder / f"{name}.pdb", to_pdb(moved))
        points = torch.from_numpy(positions[:, 1])
        found[name] = tm_score(points, true, torch.ones(len(true)))
        compact[name] = -float(radius_of_gyration(points, torch.ones(len(true))))
    return found, compact


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's correlation of two lists; ties are rare and keep their order."""
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Score, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("structures", nargs="+", type=Path)
    parser.add_argument("--initial-guess", action="store_true")
    parser.add_argument("--num-recycles", type=int)
    parser.add_argument("--decoys", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    protocol = Protocol("initial_guess" if options.initial_guess else "template")
    rows = []
    for path in options.structures:
        with tempfile.TemporaryDirectory() as name:
            folder, out = Path(name) / "decoys", Path(name) / "out"
            folder.mkdir()
            truth, compact = write_decoys(path, folder, options.decoys)
            config = InferConfig(plots=False, pae=False, num_recycles=options.num_recycles)
            request = InferRequest((), out, [options.weights], config, RunOptions(quiet=True))
            run_scores([folder], request, protocol=protocol)
            with (out / TABLE).open() as file:
                table = {row["name"]: row for row in csv.DictReader(file, delimiter="\t")}
        row: dict[str, float | str] = {"structure": structure_name(path)}
        for score in (*SCORES, BASELINE):
            values = {name: float(one[score]) for name, one in table.items()} if score in SCORES else compact
            row[f"{score}_rank"] = 1 + sum(value > values[NATIVE] for value in values.values())
            row[f"{score}_spearman"] = spearman([truth[name] for name in values], list(values.values()))
        rows.append(row)
        print({key: round(x, 3) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
    for score in (*SCORES, BASELINE):
        first = sum(row[f"{score}_rank"] == 1 for row in rows)
        mean = np.mean([float(row[f"{score}_spearman"]) for row in rows])
        print(f"{score}: the native is first in {first} of {len(rows)}, mean correlation {mean:.2f}")
    if options.json is not None:
        write_atomic(
            options.json, json.dumps({"weights": str(options.weights), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
