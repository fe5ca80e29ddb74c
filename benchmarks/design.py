"""Gradients of designs on this machine's CPU, against their plan: time and memory.

Usage: python benchmarks/design.py [--blocks 8] [--lengths 64 100 160 224] [--json OUT --machine NAME]

Every case runs in a process of its own, on one thread, with random weights of ``model_1_ptm`` and a number of its 48
Evoformer blocks. Times are processor time, so that other work on the machine counts little. Prints for each case the
share of the rate of a float32 matrix product that the gradient reaches, and the bytes of the process that its plan
does not count as tensors.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from fastfold.evoformer.config import model_config
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.gradient_plan import GradientPlanner
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.gradient_report import product_rate
from fastfold.products.design.tasks.protocols import hallucination
from fastfold.utils.atomic_files import write_atomic

LOSSES = {"con": 1.0, "plddt": 0.1, "pae": 0.1}


def measure(blocks: int, residues: int) -> dict[str, float]:
    """Measure the second gradient of a design, and the memory of this process."""
    torch.set_num_threads(1)
    config = model_config("model_1_ptm")
    config.model.embeddings_and_evoformer.evoformer_num_block = blocks
    task = hallucination(residues)
    evaluator = Evaluator(task, [AlphaFold(config)], LOSSES)
    parameters = torch.randn(residues, 20)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        evaluator(parameters, Relaxation(soft=0.5), dropout=True)
        seconds.append(time.process_time() - start)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    planner = GradientPlanner(config, residues, device="cpu")
    plan = planner.plan(1 << 60)
    tensors = sum(nbytes for name, nbytes in plan.parts.items() if name != "gaps")
    rate = product_rate(time.process_time)
    return {
        "residues": residues,
        "recomputed": plan.policy.recompute,
        "share": plan.flops / min(seconds) / rate,
        "gflops_per_second": rate / 1e9,
        "outside": used - tensors,
        "tensors": tensors,
        "working": plan.parts["working"],
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 100, 160, 224])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--machine", default="", help="name of the machine in the file")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(options.blocks, options.case)))
        return
    found = []
    for residues in options.lengths:
        words = [sys.executable, __file__, "--blocks", str(options.blocks), "--case", str(residues)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        row = json.loads(done.stdout.splitlines()[-1])
        found.append(row)
        print(
            f"{residues:4d} residues: {row['share']:.2f} of {row['gflops_per_second']:.0f} GFLOP/s, "
            f"{row['outside'] / 2**20:,.0f} MiB in addition to {row['tensors'] / 2**20:,.0f} MiB of tensors",
            flush=True,
        )
    if options.json is not None:
        write_atomic(options.json, json.dumps({"machine": options.machine, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
