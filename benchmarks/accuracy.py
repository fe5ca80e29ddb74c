"""Accuracy of a network on chains of known structure: lDDT-CA, TM-score, and whether its pLDDT is honest.

Usage: python benchmarks/accuracy.py WEIGHTS DATA [--split valid] [--chains 50 | --names 1igd,1ctf] [--single-sequence]
                                     [--plot PNG] [--json OUT]

DATA is a folder as ``fastfold train`` takes it. Chains are taken evenly over the split; each is folded with the
network's own number of recycles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from fastfold.cli.environment import prepare_environment

prepare_environment()  # as the command line does, before PyTorch is loaded

import numpy as np  # noqa: E402

import fastfold  # noqa: E402
from fastfold.data.training.dataset import open_training_set  # noqa: E402
from fastfold.data.training.entry import Entry, read_entry  # noqa: E402
from fastfold.training.report.calibration import calibrate, calibration_png  # noqa: E402
from fastfold.training.validation import ChainScore, score_chain  # noqa: E402


def choose(entries: tuple[Entry, ...], chains: int, names: list[str]) -> list[Entry]:
    """The chains of these names (or beginnings of names), or so many of all, spread evenly."""
    if names:
        return [entry for entry in entries if any(entry.id.startswith(name) for name in names)]
    count = min(chains, len(entries))
    return [entries[i * len(entries) // count] for i in range(count)]


def summary(scores: list[ChainScore]) -> dict[str, Any]:
    """Means and medians over chains, and the calibration of pLDDT over residues."""
    lddt = [score.lddt_ca for score in scores]
    tm = [score.tm_score for score in scores]
    predicted, true = (np.concatenate([getattr(s, key) for s in scores]) for key in ("predicted", "true"))
    calibration = calibrate(predicted, true)
    return {
        "chains": len(scores),
        "lddt_ca_mean": statistics.mean(lddt),
        "lddt_ca_median": statistics.median(lddt),
        "tm_score_mean": statistics.mean(tm),
        "tm_score_median": statistics.median(tm),
        "plddt_pearson": calibration.pearson,
        "plddt_bias": calibration.bias,
        "plddt_calibration_error": calibration.error,
    }


def main() -> None:
    """Fold, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights")
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="valid")
    parser.add_argument("--chains", type=int, default=50)
    parser.add_argument("--names", type=lambda text: text.split(","), default=[])
    parser.add_argument("--single-sequence", action="store_true", help="leave the alignments out")
    parser.add_argument("--recycles", type=int, help="default: the network's own number")
    parser.add_argument("--plot", type=Path, help="write the calibration of pLDDT as a picture")
    parser.add_argument("--json", type=Path, help="write all scores to this file")
    options = parser.parse_args()
    model = fastfold.load_model(options.weights)
    recycles = model.config.model.num_recycle if options.recycles is None else options.recycles
    entries = open_training_set(options.data, split=options.split).entries
    scores = []
    for entry in choose(entries, options.chains, options.names):
        data = read_entry(entry)
        alignments = () if options.single_sequence else data.alignments
        score = score_chain(model, entry.id, data.chain, alignments, model.config, recycles)
        scores.append(score)
        print(
            f"{entry.id:<20} {score.residues:4d} residues  lDDT-CA {score.lddt_ca:.3f}  TM-score {score.tm_score:.3f}"
            f"  predicted lDDT {score.mean_plddt:.3f}",
            flush=True,
        )
    found = summary(scores)
    print("  ".join(f"{name} {value:.3f}" for name, value in found.items() if name != "chains"))
    if options.plot:
        predicted, true = (np.concatenate([getattr(s, key) for s in scores]) for key in ("predicted", "true"))
        options.plot.write_bytes(calibration_png(calibrate(predicted, true), title=f"{len(scores)} chains"))
    if options.json:
        chains = [
            {key: getattr(s, key) for key in ("id", "residues", "lddt_ca", "tm_score", "mean_plddt")}
            for s in scores
        ]
        options.json.write_text(json.dumps(found | {"scores": chains}, indent=1) + "\n")


if __name__ == "__main__":
    main()
