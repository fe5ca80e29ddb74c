"""Folds of several targets in one pass against one by one: targets per second, and dispatches per target.

Usage: python benchmarks/batched_folds.py [--lengths 40 100 200] [--batches 2 4 8] [--rounds 5] [--json FILE]

Both ways fold the same random sequences by ``mini`` in one process, in turn, and the best of all rounds counts. Times
are those of the process on all its threads, so that other programs disturb them less. Dispatches are those of a pass on
Triton's path, counted on tensors of the device ``meta``: the host's work on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.dispatches import count
from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.api import load_model
from fastfold.inference.config import InferConfig
from fastfold.inference.folding.batch import Answer, BatchFolder, Request, pad_features
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.planning.planner import FOLDING_POLICY
from fastfold.protein.residue_constants import restypes

SEED = 0


def predictors(model: AlphaFold, length: int, number: int) -> list[TargetPredictor]:
    """Return predictors of random sequences of one length."""
    rng = np.random.default_rng(SEED)
    targets = [
        target_from_sequence("".join(rng.choice(restypes, length)), f"target_{i}") for i in range(number)
    ]
    config, device = InferConfig(device="cpu"), torch.device("cpu")
    return [
        TargetPredictor(target, [model], [([], [])], config, device=device, say=print) for target in targets
    ]


def seconds(model: AlphaFold, made: list[TargetPredictor], batch: int) -> float:
    """Return the processor time of folding targets in batches."""
    start = time.process_time()
    for first in range(0, len(made), batch):
        requests = [Request(one, model, SEED) for one in made[first : first + batch]]
        for answer in BatchFolder(print).predict(requests):
            assert isinstance(answer, Answer), answer
            assert answer.shared == batch, "the batch was made smaller"
    return time.process_time() - start


def dispatches(model: AlphaFold, made: list[TargetPredictor], batch: int) -> float:
    """Return the operators dispatched for one pass, per target."""
    samples = [one.target_fold(model, SEED).features(0, 0) for one in made[:batch]]
    features = {key: value.to("meta") for key, value in pad_features(samples).items()}
    with torch.device("meta"):
        twin = AlphaFold(model.config).eval()
    set_policy(twin, FOLDING_POLICY)

    def run() -> None:
        with torch.no_grad():
            twin.iterate([dict(features)], twin.first_previous(features))

    return sum(count(run)[0].values()) / batch


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[40, 100, 200])
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    model = load_model("mini", device="cpu")
    number = max(options.batches)
    found: list[dict[str, Any]] = []
    print(f"{torch.get_num_threads()} threads; processor seconds per target")
    print(f"{'residues':>8} {'batch':>6} {'seconds':>8} {'times as fast':>14} {'dispatches per pass':>20}")
    for length in options.lengths:
        made = predictors(model, length, number)
        best: dict[int, float] = {}
        for _ in range(options.rounds):
            for batch in (1, *options.batches):
                best[batch] = min(best.get(batch, np.inf), seconds(model, made, batch) / number)
        for batch, took in best.items():
            line = {
                "residues": length,
                "batch": batch,
                "seconds": took,
                "faster": best[1] / took,
                "dispatches": dispatches(model, made, batch),
            }
            found.append(line)
            print(
                f"{length:>8} {batch:>6} {took:>8.3f} {line['faster']:>14.2f} {line['dispatches']:>20.0f}",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
