"""Plans of the longest folds, on simulated GPUs under a model of PyTorch's allocator, with estimated hours.

Usage: python benchmarks/long_plans.py [--residues N ...] [--segments KIND ...] [--blocks B]
       [--cliff] [--json OUT]

Each case runs the whole network, with all blocks, four templates, 64 alignment rows and one recycle, on tensors without
contents, on a device that refuses allocations beyond its budget (benchmarks/simulation/fold.py): no measurement. Hours
are those of four passes, uncalibrated: data sheets' rates times assumed shares. ``--cliff`` prints instead the smallest
budget of 20,000 residues for several sizes of host memory.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.long_sequence import config_of, features
from benchmarks.simulation.fold import AllocatorKind, simulate
from fastfold.evoformer.config import model_config
from fastfold.inference.planning.planner import Planner
from fastfold.inference.planning.report import fold_costs, fold_time
from fastfold.memory import BudgetError, DeviceFull
from fastfold.parallel.planner.hardware import FOLDING, rates
from fastfold.utils.units import GIB

GB = 10**9


@dataclass(frozen=True)
class Case:
    """Fold of one length on one kind of GPU.

    Attributes:
        residues: N.
        gpu: Name of the GPU whose rates give the hours.
        budget: Memory of each GPU, in bytes.
        host: Host memory for offloaded tensors of each GPU, in bytes.
        gpus: Number of GPUs that share the target.
    """

    residues: int
    gpu: str
    budget: int
    host: int
    gpus: int = 1


CASES = [
    Case(n, gpu, budget, host, gpus)
    for lengths, gpu, budget, host, gpus in (
        ((10_000, 9_999), "a100-40gb", 40 * GB, 30 * GIB, 1),
        ((10_000, 9_999), "a100-40gb", 30 * GB, 40 * GIB, 1),
        ((20_000, 19_999), "h200", 139 * GIB, 96 * GIB, 1),
        ((20_000, 19_999), "h200", 139 * GIB, 120 * GIB, 1),
        ((20_000, 19_999), "h200", 139 * GIB, 200 * GIB, 1),
        ((30_000, 29_999), "h100", 80 * GB, 32 * GIB, 8),
    )
    for n in lengths
]
"""Headline lengths, and odd ones."""


def run(case: Case, kind: AllocatorKind, blocks: int) -> dict[str, Any]:
    """Simulate a case with one kind of segments.

    Args:
        case: Fold to simulate.
        kind: Kind of segments.
        blocks: Blocks in each stack; the extra MSA stack has at most four, the templates' two.
    """
    config = model_config("model_1_ptm") if blocks == 48 else config_of(blocks)
    speeds, given, start = rates(case.gpu, FOLDING), features(case.residues, 32, 32), time.monotonic()
    costs = fold_costs(speeds, 2)
    found: dict[str, Any] = {"residues": case.residues, "gpus": case.gpus, "budget": case.budget}
    found |= {"host_limit": case.host, "segments": kind, "blocks": blocks, "gpu": case.gpu}
    try:
        one = simulate(
            config,
            lambda *_: dict(given),
            case.residues,
            case.budget,
            rows=64,
            host_memory=case.host,
            ranks=case.gpus,
            allocator=kind,
            costs=costs,
        )
    except (DeviceFull, BudgetError) as error:
        return found | {"holds": False, "why": str(error), "simulation_seconds": time.monotonic() - start}
    whole = model_config("model_1_ptm")
    planner = Planner(whole, 2, "cuda", costs=costs, host_memory=case.host, ranks=case.gpus, rows=64)
    hours = fold_time(whole, planner.fold(case.residues), one.plan, speeds, 4)
    return found | {
        "holds": True,
        "allocated": one.peak,
        "reserved": one.reserved,
        "planned": one.plan.peak,
        "host": one.host,
        "copied_two_passes": one.copied,
        "sent_two_passes": one.sent,
        "uncalibrated_hours_four_passes": hours.seconds / 3600,
        "copied_four_passes": hours.copied,
        "chunks": {name: words for name, words, _ in one.plan.table()},
        "simulation_seconds": time.monotonic() - start,
    }


def cliff() -> list[dict[str, int]]:
    """Return the smallest budgets of 20,000 residues by GiB of host memory."""
    config = model_config("model_1_ptm")
    found = []
    for gib in (0, *range(16, 209, 16)):
        planner = Planner(config, 2, "cuda", host_memory=gib * GIB, parameters=190 * 10**6, rows=64)
        found.append({"host_gib": gib, "smallest": planner.smallest(20_000)})
        print(f"{gib:>4} GiB of the host: {found[-1]['smallest'] / GB:,.1f} GB on the device", flush=True)
    return found


def line(found: dict[str, Any]) -> str:
    """Describe a case in words."""
    where = f"N {found['residues']:>6} on {found['gpus']} x {found['budget'] / GB:.1f} GB, "
    where += f"{found['host_limit'] / GIB:.0f} GiB of the host, {found['segments']:<10}: "
    if not found["holds"]:
        return where + f"out of memory: {found['why']}"
    return where + (
        f"allocated {found['allocated'] / GB:.1f}, reserved {found['reserved'] / GB:.1f} GB, host "
        f"{found['host'] / GB:.1f} GB, {found['uncalibrated_hours_four_passes']:.2f} h (uncalibrated), "
        f"simulated in {found['simulation_seconds']:.0f} s"
    )


def main() -> None:
    """Simulate the cases, print them, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=48, help="blocks of the Evoformer stack (default 48)")
    parser.add_argument("--residues", type=int, nargs="+", help="only these lengths")
    parser.add_argument("--segments", nargs="+", choices=("segments", "expandable"), default=["expandable"])
    parser.add_argument("--cliff", action="store_true", help="print the smallest budgets by host memory")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    options = parser.parse_args()
    if options.cliff:
        results: dict[str, Any] = {"smallest_budgets_of_20000_residues": cliff()}
    else:
        found = []
        for case in CASES:
            for kind in options.segments if not options.residues or case.residues in options.residues else ():
                found.append(run(case, kind, options.blocks))
                print(line(found[-1]), flush=True)
        results = {f"{options.blocks}_blocks": found}
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(before | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
