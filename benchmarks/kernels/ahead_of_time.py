r"""Resources of every Triton kernel and shipped configuration: registers, shared memory, spills.

Usage: python benchmarks/kernels/ahead_of_time.py [--match TEXT ...] [--out FOLDER] [--known FILE]

Compiles for A100 (sm_80), H100 and H200 (sm_90) and B200 (sm_100), and for RTX cards (sm_86, sm_89, sm_120), with the
assembler in Triton's wheel; no GPU is needed. Writes ahead_of_time.csv and ahead_of_time.md to benchmarks/results;
with --match the rows of other kernels are kept. Exits with 1 if a compiled kernel spills registers or
needs more shared memory than the chip has.

Another Triton, which allocates registers differently, comes first on PYTHONPATH; --known is the table of its known
spills, and any other spill is a defect:

    pip install --no-deps --target FOLDER triton==3.6.0
    PYTHONPATH=FOLDER:. python benchmarks/kernels/ahead_of_time.py --out OUT \
        --known benchmarks/results/spills_triton_3.6.csv
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.compilation import build
from benchmarks.kernels.variants import KernelVariant, Needs, all_variants
from fastfold.utils.atomic_files import write_atomic

HEADER = ["kernel", "architecture", "blocks", "warps", "stages", "registers", "shared_bytes", "spill_bytes"]


Table = Mapping[tuple[str, str], list[str]]
"""Rows by name and architecture."""


def measure(match: list[str], before: Table, known: Table) -> tuple[list[list[str]], list[str]]:
    """Return a row for each variant and architecture, and the defects.

    Args:
        match: Texts; variants whose name contains one of them are built.
        before: Rows of an earlier table, for all other variants.
        known: Rows that may spill as many bytes as they state.
    """
    rows: list[list[str]] = []
    defects: list[str] = []
    for variant in all_variants():
        wanted = any(text in variant.name for text in match)
        for number in variant.architectures:
            architecture = f"sm_{number}"
            if wanted:
                needs = build(variant, number)
                row = _row(variant, architecture, needs)
                rows.append(row)
                defect = unknown_defect(variant, needs, row, known.get((variant.name, architecture)))
                defects += [f"{variant.name} {architecture}: {defect}"] if defect else []
                print(*rows[-1], sep="  ", flush=True)
            elif (variant.name, architecture) in before:
                rows.append(before[variant.name, architecture])
    return rows, defects


def _row(variant: KernelVariant, architecture: str, needs: Needs) -> list[str]:
    blocks = " ".join(f"{n}={x}" for n, x in variant.blocks.items())
    numbers = (*variant.schedule, needs.registers, needs.shared, needs.spills)
    return [variant.name, architecture, blocks, *map(str, numbers)]


def unknown_defect(
    variant: KernelVariant, needs: Needs, row: list[str], known: list[str] | None
) -> str | None:
    """Return the reason why a variant must not ship; None for known spills or no defect.

    Args:
        variant: Variant that was built.
        needs: Resources of its machine code.
        row: Its row.
        known: Row of the same name and architecture in the table of known spills, if any.
    """
    if known is not None and known[2:5] == row[2:5] and needs.spills <= int(known[-1]):
        needs = replace(needs, spills=0)
    return variant.defect(needs, int(row[1].removeprefix("sm_")))


def former_rows(path: Path) -> dict[tuple[str, str], list[str]]:
    """Read the rows of a table by name and architecture; none if the file does not exist."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {(row[0], row[1]): row for row in list(csv.reader(file))[1:]}


def main() -> int:
    """Compile, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--match", nargs="+", default=[""], help="only kernels whose name contains one of these texts"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    results = Path(__file__).parents[1] / "results"
    parser.add_argument(
        "--known",
        type=Path,
        default=results / "known_spills.csv",
        help="table of known spills (default: those of RTX cards, and of entries that were timed)",
    )
    options = parser.parse_args()
    known = former_rows(options.known) if options.known else {}
    rows, defects = measure(options.match, former_rows(options.out / "ahead_of_time.csv"), known)
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
    for defect in defects:
        print(f"DEFECT: {defect}")
    return int(bool(defects))


if __name__ == "__main__":
    sys.exit(main())
