"""Time of each stage from sequences alone to relaxed structures, and its share.

For every target, jackhmmer searches its alignment in a FASTA database, the network predicts its structure (with
features), and the structure is relaxed. The stages run one after the other, as in ``fastfold infer --db --relax``,
on one thread each by default. The time of the relaxation depends on the quality of the structures: one with violations
takes up to three rounds.

    python benchmarks/pipeline.py --data DATA --json pipeline.json

DATA is a folder of structures/msas/*.a3m.gz, see benchmarks/search.py. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import fastfold
from benchmarks.search import choose_queries, make_database
from fastfold.inference.relax import RelaxConfig, relax_prediction

STAGES = ("search", "prediction", "relaxation")


class Stages:
    """Sums of the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


def measure(
    queries: dict[str, str], database: Path, weights: str, num_recycles: int | None
) -> dict[str, object]:
    """Fold all queries.

    Args:
        queries: Sequences by name.
        database: FASTA file.
        weights: Name or file of the network.
        num_recycles: Passes of the network after the first; None for its own number.

    Returns:
        Seconds of each stage, and the result of each target.
    """
    stages = Stages()
    model = fastfold.load_model(weights)
    targets = {}
    with tempfile.TemporaryDirectory() as folder:
        with stages.timed("search"):
            fastfold.search(queries, f"uniref90={database}", folder)
        for name, sequence in queries.items():
            with stages.timed("prediction"):
                prediction = fastfold.predict(
                    sequence, model, msa=Path(folder), name=name, num_recycles=num_recycles
                )
            with stages.timed("relaxation"):
                result = relax_prediction(prediction, RelaxConfig(platform="CPU")).result
            targets[name] = {
                "residues": len(sequence),
                "mean_plddt": round(float(prediction.mean_plddt), 1),
                "relaxed": result.relaxed,
                "rounds": result.rounds,
                "iterations": result.iterations,
                "relaxation_seconds": round(result.seconds, 2),
            }
            print(f"{name}: {targets[name]}", file=sys.stderr, flush=True)
    return {"seconds": {stage: round(stages.seconds[stage], 2) for stage in STAGES}, "targets": targets}


def main() -> None:
    """Measure the stages and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--targets", type=int, default=10, metavar="N")
    parser.add_argument(
        "--longest", type=int, default=120, metavar="N", help="maximum residues of a target (default 120)"
    )
    parser.add_argument("--weights", default="mini", metavar="FILE")
    parser.add_argument("--num-recycles", type=int, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "database.fasta"
        sequences, residues = make_database(options.data, database)
        queries = choose_queries(options.data, options.targets, longest=options.longest)
        found = measure(queries, database, options.weights, options.num_recycles)
    found |= {
        "database": {"sequences": sequences, "residues": residues},
        "weights": options.weights,
        "threads": options.threads,
        "processor": platform.processor() or platform.machine(),
        "versions": {"fastfold": fastfold.__version__, "torch": torch.__version__},
    }
    seconds: dict[str, float] = found["seconds"]  # type: ignore[assignment]
    total = sum(seconds.values())
    print(f"{len(queries)} targets, {sequences:,} sequences in the database, {options.weights}")
    for stage in STAGES:
        print(f"{stage:12} {seconds[stage]:8.1f} s  {seconds[stage] / total:5.0%}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
