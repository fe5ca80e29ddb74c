"""Folds of validation chains from the sequence alone: without restraints, with true ones, and with wrong ones.

Usage: python benchmarks/restraints.py WEIGHTS DATA [--atoms any] [--hashed 38 68] [--restraints 20] [--longest 100]
           [--fit] [--steps 5] [--json OUT]

True restraints are pairs of residues 12 and more apart in the sequence whose CA atoms are within 10 Å. Their limit is
the distance plus 1 Å. Wrong ones are pairs that are more than 20 Å apart, with a limit of 9 Å. Shifted ones are as
wrong, with pairs more than 15 Å apart at the separations of the true ones, so that the separation cannot tell them
apart. With ``--atoms any``, true ones are pairs with heavy atoms within 6 Å, and all limits are 6 Å, as in Boltz.

Chains are chosen as in ``benchmarks/accuracy.py --hashed``. ``--fit`` leaves out the network's descent, so that a bias
is fitted as for AlphaFold's networks. Prints a line for each fold, the means, the geometry of the structures
(``benchmarks/geometry.py``), and how often a figure is higher for a true set than for a wrong one, over all pairs of
sets; 50% tells nothing. Times are processor seconds over those of the fold without restraints.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from fastfold.cli.process import prepare_environment

prepare_environment()  # as the command line does, before PyTorch is loaded

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accuracy import hashed  # noqa: E402
from geometry import geometry_figures, table  # noqa: E402

import fastfold  # noqa: E402
from fastfold.data.training.dataset import open_dataset  # noqa: E402
from fastfold.data.training.entry import read_entry  # noqa: E402
from fastfold.inference.config import InferConfig  # noqa: E402
from fastfold.protein import residue_constants as rc  # noqa: E402
from fastfold.protein.metrics.lddt import lddt  # noqa: E402
from fastfold.protein.metrics.tm_score import tm_score  # noqa: E402
from fastfold.protein.structure import ChainStructure  # noqa: E402
from fastfold.utils.atomic_files import write_atomic  # noqa: E402

KINDS = ("none", "true", "wrong", "shifted")
CONTACT = 6.0  #: Limit in Å of the closest heavy atoms
FIGURES = ("lddt_ca", "tm_score", "plddt", "satisfied", "evidence", "separation", "folds")
TOLD_APART_BY = ("evidence", "satisfied", "plddt", "separation")
"""Figures that are compared between true and wrong sets."""


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
    apart = np.arange(len(chain))[None] - np.arange(len(chain))[:, None]
    usable = (apart >= 12) & (known[:, None] * known[None] > 0)
    chosen = np.argwhere(usable & (distance > 20.0 if kind == "wrong" else near))
    rng = np.random.default_rng(0)
    drawn = chosen[rng.permutation(len(chosen))[:count]]
    if kind == "shifted":
        places = [np.argwhere(usable & (distance > 15.0) & (apart == j - i)) for i, j in drawn]
        drawn = np.array([rng.choice(each) for each in places if len(each)]).reshape(-1, 2)
    if atoms == "any":
        return [(int(i), int(j), CONTACT) for i, j in drawn]
    return [(int(i), int(j), float(distance[i, j]) + 1.0 if kind == "true" else 9.0) for i, j in drawn]


def fold(
    model: Any, chain: ChainStructure, kind: str, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Fold a chain; return :data:`FIGURES`, with processor seconds for ``folds``, and figures of its geometry."""
    settings: dict[str, Any] = {}
    drawn = [] if kind == "none" else pairs(chain, kind, options.restraints, options.atoms)
    if drawn:
        rows = [f"A,{i + 1},A,{j + 1},{high:.2f},{options.atoms}" for i, j, high in drawn]
        path = folder / "restraints.csv"
        write_atomic(path, "\n".join(["chain1,residue1,chain2,residue2,max,atoms", *rows, ""]))
        settings = {"restraints": path, "restraint_steps": options.steps}
    start = time.process_time()
    found = fastfold.predict(chain.sequence, model, **settings)
    seconds = time.process_time() - start
    ca = rc.atom_order["CA"]
    predicted, true, mask = (
        torch.from_numpy(x[:, ca]) for x in (found.atom_positions, chain.positions, chain.mask)
    )
    figures = {
        "lddt_ca": float((lddt(predicted, true, mask) * mask).sum() / mask.sum()),
        "tm_score": tm_score(predicted, true, mask),
        "plddt": found.mean_plddt,
        "folds": seconds,
    }
    if found.restraints is not None:
        figures["satisfied"] = found.restraints["satisfied"] / found.restraints["total"]
        figures["evidence"] = found.restraints["evidence"]
        figures["separation"] = statistics.fmean(j - i for i, j, _ in drawn)
    return figures, geometry_figures(found.protein)


def share_above(first: list[float], second: list[float]) -> float:
    """Return the share of pairs in which the first is higher; equal ones count half."""
    pairs = list(itertools.product(first, second))
    return sum(a > b or 0.5 * (a == b) for a, b in pairs) / len(pairs)


def main() -> None:
    """Fold, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--atoms", choices=("CA", "any"), default="CA")
    parser.add_argument("--hashed", type=int, nargs=2, default=(38, 68), metavar=("FIRST", "END"))
    parser.add_argument("--restraints", type=int, default=20)
    parser.add_argument("--longest", type=int, default=100)
    parser.add_argument("--fit", action="store_true", help="leave out the network's descent")
    parser.add_argument("--steps", type=int, default=InferConfig().restraint_steps)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = fastfold.load_model(options.weights)
    if options.fit:
        model.config.model.heads.structure_module.distogram_descent = None
    rows: list[dict[str, Any]] = []
    shapes: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        for entry in hashed(open_dataset(options.data, split="valid").entries, *options.hashed):
            chain = read_entry(entry).chain
            drawn = [pairs(chain, kind, options.restraints, options.atoms) for kind in KINDS[1:]]
            if len(chain) > options.longest or min(map(len, drawn)) < options.restraints / 2:
                continue
            row: dict[str, Any] = {"chain": entry.id, "residues": len(chain)}
            for kind in KINDS:
                row[kind], shapes[kind][entry.id] = fold(model, chain, kind, options, Path(folder))
                row[kind]["folds"] /= row["seconds"] if kind != "none" else 1.0
                row.setdefault("seconds", row[kind]["folds"])
                cells = " ".join(f"{key} {row[kind][key]:.3f}" for key in FIGURES if key in row[kind])
                print(f"{entry.id} {len(chain)} {kind}: {cells}", flush=True)
            rows.append(row)
    means = {
        kind: {
            key: statistics.fmean(row[kind][key] for row in rows) for key in FIGURES if key in rows[0][kind]
        }
        for kind in KINDS
    }
    print(f"\n| {len(rows)} chains | {' | '.join(FIGURES)} |\n|{'---|' * (len(FIGURES) + 1)}")
    for kind, values in means.items():
        print(f"| {kind} | {' | '.join(f'{values[key]:.3f}' if key in values else '' for key in FIGURES)} |")
    told = {
        kind: {
            key: share_above([row["true"][key] for row in rows], [row[kind][key] for row in rows])
            for key in TOLD_APART_BY
        }
        for kind in KINDS[2:]
    }
    for kind, shares in told.items():
        print(f"true above {kind}: " + ", ".join(f"{key} {share:.0%}" for key, share in shares.items()))
    for kind, figures in shapes.items():
        print(f"\n{kind}\n{table(figures)}")
    if options.json:
        write_atomic(options.json, json.dumps({"means": means, "told_apart": told, "chains": rows}, indent=1))


if __name__ == "__main__":
    main()
