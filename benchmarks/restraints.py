"""Folds of validation chains from the sequence alone: without restraints, with true ones, and with wrong ones.

Usage: python benchmarks/restraints.py WEIGHTS DATA [--atoms any] [--chains 12] [--restraints 20] [--longest 100]
           [--json OUT]

True restraints are pairs of residues 12 and more apart in the sequence whose CA atoms are within 10 Å. Their limit is
the distance plus 1 Å. Wrong ones are pairs that are more than 20 Å apart, with a limit of 9 Å. With ``--atoms any``,
true ones are pairs with heavy atoms within 6 Å, and all limits are 6 Å, as in Boltz. Prints a line for each chain and
the means.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastfold
from fastfold.data.training.dataset import open_dataset
from fastfold.data.training.entry import read_entry
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.lddt import lddt
from fastfold.protein.metrics.tm_score import tm_score
from fastfold.protein.structure import ChainStructure
from fastfold.utils.atomic_files import write_atomic

KINDS = ("none", "true", "wrong")
CONTACT = 6.0  #: Limit in Å of the closest heavy atoms
FIGURES = ("lddt_ca", "tm_score", "plddt", "satisfied", "seconds")


def contact_distances(chain: ChainStructure) -> np.ndarray:
    """Return the distances ``[N, N]`` in Å of the closest heavy atoms of residues."""
    residues, slots = np.nonzero(chain.mask > 0)
    atoms = chain.positions[residues, slots]
    closest = np.full((len(chain), len(chain)), np.inf)
    for residue, atom in zip(residues, atoms, strict=True):
        np.minimum.at(closest[residue], residues, np.linalg.norm(atoms - atom, axis=-1))
    return closest


def pairs(chain: ChainStructure, kind: str, count: int, atoms: str = "CA") -> list[tuple[int, int, float]]:
    """Draw pairs of residues with an upper limit in Å; the same for a chain each time."""
    ca, known = (x[:, rc.atom_order["CA"]] for x in (chain.positions, chain.mask))
    distance = np.linalg.norm(ca[:, None] - ca[None], axis=-1)
    near = distance <= 10.0 if atoms == "CA" else contact_distances(chain) <= CONTACT
    apart = np.arange(len(chain))[None] - np.arange(len(chain))[:, None] >= 12
    usable = apart & (known[:, None] * known[None] > 0)
    chosen = np.argwhere(usable & (near if kind == "true" else distance > 20.0))
    rng = np.random.default_rng(0)
    drawn = chosen[rng.permutation(len(chosen))[:count]]
    if atoms == "any":
        return [(int(i), int(j), CONTACT) for i, j in drawn]
    return [(int(i), int(j), float(distance[i, j]) + 1.0 if kind == "true" else 9.0) for i, j in drawn]


def fold(
    model: Any, chain: ChainStructure, kind: str, count: int, folder: Path, atoms: str
) -> dict[str, float]:
    """Fold a chain and return :data:`FIGURES`."""
    settings: dict[str, Any] = {}
    if kind != "none":
        rows = [f"A,{i + 1},A,{j + 1},{high:.2f},{atoms}" for i, j, high in pairs(chain, kind, count, atoms)]
        path = folder / "restraints.csv"
        write_atomic(path, "\n".join(["chain1,residue1,chain2,residue2,max,atoms", *rows, ""]))
        settings["restraints"] = path
    start = time.perf_counter()
    found = fastfold.predict(chain.sequence, model, **settings)
    ca = rc.atom_order["CA"]
    predicted, true, mask = (
        torch.from_numpy(x[:, ca]) for x in (found.atom_positions, chain.positions, chain.mask)
    )
    report = found.restraints or {"satisfied": 0, "total": 1}
    return {
        "lddt_ca": float((lddt(predicted, true, mask) * mask).sum() / mask.sum()),
        "tm_score": tm_score(predicted, true, mask),
        "plddt": found.mean_plddt,
        "satisfied": report["satisfied"] / report["total"],
        "seconds": time.perf_counter() - start,
    }


def main() -> None:
    """Fold, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--atoms", choices=("CA", "any"), default="CA")
    parser.add_argument("--chains", type=int, default=12)
    parser.add_argument("--restraints", type=int, default=20)
    parser.add_argument("--longest", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = fastfold.load_model(options.weights)
    chains = []
    for entry in open_dataset(options.data, split="valid").entries:
        chain = read_entry(entry).chain
        if (
            60 <= len(chain) <= options.longest
            and len(pairs(chain, "true", options.restraints, options.atoms)) >= 10
        ):
            chains.append((entry.id, chain))
    step = max(1, len(chains) // options.chains)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, chain in chains[::step][: options.chains]:
            row = {
                kind: fold(model, chain, kind, options.restraints, Path(folder), options.atoms)
                for kind in KINDS
            }
            rows.append({"chain": name, "residues": len(chain), **row})
            line = "  ".join(
                f"{kind}: " + " ".join(f"{row[kind][key]:.3f}" for key in FIGURES) for kind in KINDS
            )
            print(f"{name} {len(chain)}  {line}", flush=True)
    means = {
        kind: {key: float(np.mean([row[kind][key] for row in rows])) for key in FIGURES} for kind in KINDS
    }
    print(f"means of {len(rows)} chains ({', '.join(FIGURES)})")
    for kind, values in means.items():
        print(kind, " ".join(f"{values[key]:.3f}" for key in FIGURES))
    if options.json:
        write_atomic(options.json, json.dumps({"means": means, "chains": rows}, indent=1))


if __name__ == "__main__":
    main()
