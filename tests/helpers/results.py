"""Invented predictions whose structures look like proteins, and folders of results."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from fastfold.data.msa.msa import Msa
from fastfold.data.msa.sampling import alignment_coverage
from fastfold.inference.output.prediction import Prediction
from fastfold.products.design.saved import film_pdb
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.interface import ChainConfidence

# Cylindrical coordinates of an alpha helix: radius in Å, angle in degrees, height in Å.
_HELIX = {
    "N": (1.55, -27.5, -0.89),
    "CA": (2.28, 0.0, 0.0),
    "C": (1.66, 26.3, 1.10),
    "O": (2.01, 21.8, 2.31),
    "CB": (3.29, -17.9, -0.60),
}


def helix_prediction(name: str = "helices", *lengths: int, seed: int = 0, **changes: Any) -> Prediction:
    """A prediction of parallel helices, one per chain, 9 Å apart; of 30 and 20 residues by default."""
    lengths = lengths or (30, 20)
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    aatype = rng.integers(0, 20, n)
    starts = np.cumsum([0, *lengths])
    parts = [
        helix_atoms(aatype[a:b], x=9.0 * chain) for chain, (a, b) in enumerate(itertools.pairwise(starts))
    ]
    positions, mask = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    chain_index = np.repeat(np.arange(len(lengths)), lengths)
    apart = np.abs(np.arange(n)[:, None] - np.arange(n)) / 8.0 + 8.0 * (chain_index[:, None] != chain_index)
    pae = np.clip(1.0 + apart + rng.normal(0, 0.8, (n, n)), 0.2, 31.7)
    pairs = np.full((len(lengths),) * 2, 0.55)
    confidence = ChainConfidence(np.full(len(lengths), 0.7), pairs, pairs + 0.1, 0.65)
    fields: dict[str, Any] = {
        "name": name,
        "sequences": tuple(rc.aatype_to_sequence(aatype[a:b]) for a, b in itertools.pairwise(starts)),
        "model_name": "model_1_multimer_v3",
        "is_multimer": True,
        "seed": seed,
        "num_recycles": 3,
        "aatype": aatype,
        "residue_index": np.concatenate([np.arange(length) for length in lengths]),
        "chain_index": chain_index,
        "atom_positions": positions,
        "atom_mask": mask,
        "plddt": np.clip(72 + 25 * np.sin(np.arange(n) / 7) + rng.normal(0, 3, n), 20, 98),
        "pae": pae,
        "max_pae": 31.75,
        "ptm": 0.71,
        "iptm": 0.62,
        "chain_confidence": confidence,
    }
    return Prediction(**(fields | changes))


def helix_atoms(aatype: np.ndarray, *, x: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Positions ``[N, 37, 3]`` in Å and mask ``[N, 37]`` of an upright helix, backbone and CB, with its axis at x."""
    at = np.arange(len(aatype))
    positions, mask = np.zeros((len(at), 37, 3), np.float32), np.zeros((len(at), 37), np.float32)
    for atom, (radius, angle, height) in _HELIX.items():
        turn = np.radians(angle + 100.0 * at)
        place = radius * np.cos(turn) + x, radius * np.sin(turn), height + 1.5 * at
        positions[:, rc.atom_order[atom]] = np.stack(place, 1)
        mask[:, rc.atom_order[atom]] = 1.0
    mask[aatype == rc.restype_order["G"], rc.atom_order["CB"]] = 0.0
    return positions, mask


def save_coverage(folder: Path, prediction: Prediction, rows: int = 40) -> Path:
    """Invent an alignment of each chain, and write the coverage of the prediction's target."""
    rng = np.random.default_rng(1)
    alignments = []
    for sequence in prediction.sequences:
        letters = np.array(list(sequence))
        found = [sequence]
        for _ in range(rows):
            row = np.where(rng.random(len(letters)) < rng.uniform(0.1, 0.9), letters, "A")
            row[: rng.integers(0, len(letters))] = "-"
            found.append("".join(row))
        alignments.append(
            ([Msa(tuple(found), np.zeros((len(found), len(letters)), np.int32), tuple(found))], [])
        )
    path = folder / f"{prediction.name}_coverage.json"
    lengths = [len(sequence) for sequence in prediction.sequences]
    path.write_text(json.dumps(alignment_coverage(alignments, lengths=lengths)))
    return path


def many_targets(folder: Path, targets: int, predictions: int, *lengths: int) -> None:
    """A folder of many targets, the files of each prediction copied from those of one."""
    source = folder / "source"
    one = helix_prediction("source", *lengths)
    paths = one.save(source, rank=1, plots=False)
    texts = {kind: path.read_text() for kind, path in paths.items()}
    endings = {"pdb": ".pdb", "cif": ".cif", "scores": "_scores.json", "pae": "_pae.json"}
    for target in range(targets):
        for rank in range(1, predictions + 1):
            stem = f"target_{target:03d}_rank_{rank:03d}_model_{rank}_multimer_v3_seed_0"
            for kind, ending in endings.items():
                text = texts[kind].replace("source", f"target_{target:03d}")
                text = text.replace("model_1_multimer_v3", f"model_{rank}_multimer_v3")
                (folder / f"{stem}{ending}").write_text(text)
    for path in source.iterdir():
        path.unlink()
    source.rmdir()


def screen_results(folder: Path, baits: int, preys: int) -> None:
    """Write scores files of all pairs of baits and preys; ipSAE grows from 0 with the number of the pair."""
    folder.mkdir(exist_ok=True)
    one = helix_prediction("source", 12, 10).scores()
    text = json.dumps(one)
    for i, j in itertools.product(range(baits), range(preys)):
        scores = json.loads(text) | {"name": f"bait{i}_and_prey{j}"}
        share = round((preys * i + j) / (baits * preys), 4)
        scores["interfaces"]["pairs"]["A-B"]["ipsae"] = scores["interfaces"]["ipsae_max"] = share
        stem = f"bait{i}_and_prey{j}_rank_001_model_1_multimer_v3_seed_0"
        (folder / f"{stem}_scores.json").write_text(json.dumps(scores))


def design_results(folder: Path) -> np.ndarray:
    """Write a design of two chains with three steps, its fold, and those of a redesign and an off-target.

    Returns the CA atoms ``[3, 22, 3]`` of the steps in Å.
    """
    ends = ("", "_mpnn_1", "_off_1")
    folds = [helix_prediction(f"d_seed_000{end}", 12, 10) for end in ends]
    for fold in folds:
        fold.save(folder, rank=1, plots=False)
    ca = folds[0].atom_positions[:, rc.atom_order["CA"]]
    trace = np.stack([ca * size for size in (0.5, 0.8, 1.0)])
    trajectories = folder / "trajectories"
    trajectories.mkdir()
    steps = zip((3.0, 2.0, 1.0), (40.0, 50.0, 60.0), ("soft", "soft", "hard"), strict=True)
    lines = [json.dumps({"loss": loss, "mean_plddt": plddt, "stage": stage}) for loss, plddt, stage in steps]
    (trajectories / "d_seed_000.jsonl").write_text("\n".join(lines))
    (trajectories / "d_seed_000.pdb").write_text(film_pdb(trace, folds[0].chain_index))
    (folder / "designs.tsv").write_text(
        "name\tloss\tsequence\tfilters\tnote\nd_seed_000\t1.25\tMKVL:AC\tpassed\t\n"
        "d_seed_000_mpnn_1\t\tMKVI:AC\tAverage_pLDDT 0.4 < 0.8\tcharge +9, not 0 to 2\n"
    )
    (folder / "statistics.tsv").write_text(
        "kind\tname\tcount\tof\tshare\nsequence\taccepted\t1\t2\t0.500\nfilter\tAverage_pLDDT\t1\t2\t0.500\n"
    )
    return trace


def relaxed_results(folder: Path) -> None:
    """Write a relaxed structure with its record, and records of one that is not relaxed and one that failed."""
    figures = {"ramachandran_favoured": 0.9, "ramachandran_outliers": 0.0125, "overlaps": 4}
    record = {
        "relaxed": True,
        "reason": "",
        "energy_before_kj_per_mol": 4858.4,
        "energy_after_kj_per_mol": -4267.2,
        "heavy_atom_rmsd_angstrom": 0.1894,
        "violating_residues_before": 3,
        "violating_residues": [],
        "geometry_before": figures,
        "geometry": figures | {"ramachandran_favoured": 0.95, "overlaps": 0},
    }
    (folder / "good_relaxed.cif").write_text("data_good\n")
    bad = record | {"relaxed": False, "reason": "its energy <b>stays</b> positive"}
    failed = bad | {"energy_after_kj_per_mol": None, "heavy_atom_rmsd_angstrom": None, "geometry": None}
    for name, content in {"good": record, "bad": bad, "failed": failed}.items():
        (folder / f"{name}_relax.json").write_text(json.dumps(content))
