"""What every Triton kernel and shipped configuration needs of a GPU: registers, shared memory, spills.

Usage: python benchmarks/ahead_of_time.py [--match TEXT ...] [--out FOLDER]

Compiles for A100 (sm_80), H100 and H200 (sm_90) and B200 (sm_100) with the assembler in Triton's wheel; no GPU is
needed. Writes ahead_of_time.csv, and ahead_of_time.md, to benchmarks/results. Exits with 1 if a kernel spills.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from importlib.metadata import version
from pathlib import Path

from fastfold.atomic_files import write_atomic
from fastfold.kernels.ahead_of_time import ARCHITECTURES, all_specimens, build

HEADER = ["kernel", "architecture", "warps", "stages", "registers", "shared_bytes", "spill_bytes"]


def measure(match: list[str]) -> list[list[str | int]]:
    """A row of the table for each specimen whose name contains one of ``match``, and each architecture."""
    rows: list[list[str | int]] = []
    for specimen in all_specimens():
        if any(text in specimen.name for text in match):
            for architecture in ARCHITECTURES:
                needs = build(specimen, architecture)
                how = [specimen.num_warps, specimen.num_stages]
                rows.append(
                    [specimen.name, f"sm_{architecture}", *how, needs.registers, needs.shared, needs.spills]
                )
                print(*rows[-1], sep="  ", flush=True)
    return rows


def main() -> int:
    """Compile, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--match", nargs="+", default=[""], help="only kernels whose name contains one of these texts"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = measure(options.match)
    options.out.mkdir(parents=True, exist_ok=True)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([HEADER, *rows])
    write_atomic(options.out / "ahead_of_time.csv", table.getvalue())
    lines = [
        f"Compiled with Triton {version('triton')}; registers and spills per thread, memory per program.",
        "",
    ]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in [HEADER, ["---"] * len(HEADER), *rows]]
    write_atomic(options.out / "ahead_of_time.md", "\n".join(lines) + "\n")
    return int(any(row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
