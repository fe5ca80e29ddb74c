"""Speed and memory of the kernels on a GPU, side by side with PyTorch and other projects' packages.

Usage: python benchmarks/kernels/run.py [--sizes N ...] [--operators NAME ...] [--dtype T] [--minutes M] [--out FOLDER]
       python benchmarks/kernels/run.py --check      correctness at N = 3072 and 4096
       python benchmarks/kernels/run.py --tune       writes the fastest configurations into fastfold/kernels/tuned

Times are medians of CUDA events after a warm-up, over rotating inputs that exceed the L2 cache. Memory is the
allocator's peak above the inputs, in U: the pair tensor, N² · 128 elements. TFLOP/s and GB/s count the minimum work,
and are given over the rates of a large matrix product and of a copy in the same run. The most important measurements
run first, and those that do not fit into the time are named. Writes kernels_<gpu>.csv, .md and plots.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fastfold.cli.process import prepare_environment

prepare_environment()  # must precede the import of PyTorch

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.candidates import Builders  # noqa: E402
from benchmarks.kernels.cases import ALIGNMENTS, SIZES, Case, cases  # noqa: E402
from benchmarks.kernels.check import LIMITS, check  # noqa: E402
from benchmarks.kernels.measuring import Meter  # noqa: E402
from benchmarks.kernels.report import write_report  # noqa: E402
from benchmarks.kernels.rivals import OURS, packages  # noqa: E402
from benchmarks.kernels.runs import NO_MEMORY, carry_out, runs  # noqa: E402
from benchmarks.kernels.tuning import trials_table, tune, write_tables  # noqa: E402
from fastfold.utils.atomic_files import write_atomic  # noqa: E402

RESERVE = 20.0
"""Seconds of the time limit reserved for the last measurement and the report."""


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", help="N of the pair tensors")
    parser.add_argument("--operators", nargs="+", help="only these operators")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit of the whole run")
    parser.add_argument("--device", default="cuda", help="cpu runs everything without meaningful times")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--check", action="store_true", help="compare with the definitions instead")
    parser.add_argument("--tune", action="store_true", help="look for launch configurations instead")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda: found no GPU; try the program without measuring by --device cpu --sizes 32"
        )
    if options.tune and options.device == "cpu":
        parser.error("--tune needs a GPU")
    return options


def chosen(options: argparse.Namespace) -> tuple[list[Case], tuple[tuple[int, int], ...]]:
    """Return the cases, and shapes of alignments, that the options ask for."""
    default = (3072, 4096) if options.check else (512,) if options.tune else SIZES
    sizes = options.sizes or default
    alignments: tuple[tuple[int, int], ...] = ALIGNMENTS if options.device == "cuda" else ((4, min(sizes)),)
    if options.sizes and options.device == "cuda":
        alignments = tuple(shape for shape in ALIGNMENTS if shape[1] in sizes)
    if options.tune:
        alignments = ALIGNMENTS[-1:]
    found = cases(sizes, alignments)
    if options.operators:
        found = [case for case in found if case.operator in options.operators]
        alignments = alignments if "evoformer_block" in options.operators else ()
    return found, alignments


def check_all(found: list[Case], device: torch.device, dtype: torch.dtype) -> int:
    """Compare every case with its definition; return 1 if one is wrong."""
    wrong = 0
    for case in found:
        errors = check(case, device, dtype)
        worst = max(errors, key=lambda name: errors[name])
        bad = not all(error < LIMITS[dtype] for error in errors.values())
        wrong += bad
        print(f"{case.name}: {worst} {errors[worst]:.1e} {'WRONG' if bad else 'right'}", flush=True)
    return int(wrong > 0)


def report_name(kind: str, machine: str, dtype: str) -> str:
    """Return the name of a file of results, such as ``kernels_nvidia_h200_bfloat16``."""
    return re.sub(r"[^a-z0-9]+", "_", f"{kind} {machine.split(',')[0]} {dtype}".lower())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, check or tune; return the exit code."""
    start = time.monotonic()
    options = parsed(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    deadline = start + 60 * options.minutes - RESERVE
    found, alignments = chosen(options)
    if options.check:
        return check_all(found, device, dtype)
    meter = Meter(device, seconds=0.25 if device.type == "cuda" else 0.0)
    machine = torch.cuda.get_device_name(device) if meter.cuda else "cpu, a trial that measures nothing"
    if options.tune:
        builders = Builders(dtype)
        try:
            best, trials = tune(found, meter, dtype, deadline, builders)
        finally:
            builders.close()
        write_atomic(
            options.out / f"{report_name('tuning', machine, options.dtype)}.csv", trials_table(trials)
        )
        print(*write_tables(best, device), sep="\n")
        print("now build them ahead of time: python benchmarks/kernels/ahead_of_time.py")
        return 0
    ceilings = meter.ceilings(dtype)
    print(f"{machine}: {ceilings.tflops:.1f} TFLOP/s, {ceilings.gbs:.0f} GB/s", flush=True)
    rows, left_out = carry_out(runs(found, alignments, meter, ceilings, dtype), deadline)
    versions = ", ".join(f"{name} {v}" for name, v in packages().items())
    heading = [
        f"# {machine}, {options.dtype}",
        "",
        f"Matrix product {ceilings.tflops:.1f} TFLOP/s, copy {ceilings.gbs:.0f} GB/s. {versions}.",
    ]
    if left_out:
        heading += ["", "No time was left for: " + ", ".join(run.name for run in left_out) + "."]
    name = report_name("kernels", machine, options.dtype)
    print(*write_report(options.out, name, heading, rows), sep="\n")
    print(f"{len(left_out)} of the planned runs left out, {time.monotonic() - start:.0f} s")
    failed = [row for row in rows if row.implementation == OURS and row.note not in ("", NO_MEMORY)]
    print(*(f"FAILED: {row.operator} {row.shape} {row.direction}: {row.note}" for row in failed), sep="\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
