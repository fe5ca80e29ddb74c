"""Cost of every kernel at each class of lengths, read from its machine code: compiled, not run.

Usage: python -m benchmarks.kernels.length_classes [--match TEXT ...] [--trifast FOLDER] [--out FOLDER]

For A100 (sm_80), H100 and H200 (sm_90) and B200 (sm_100), in three dtypes, at lengths of residues and sequences that
are multiples of 16, of 8 only, and odd: registers, spills, shared memory, programs per processor, tensor cores, bytes
of a load, and instructions of the innermost loop per score of attention or per multiply-add. Writes length_classes.csv,
and a summary as length_classes.md, to benchmarks/results; with --match the rows of other kernels are kept. --trifast is
the folder of `pip install --no-deps --target FOLDER trifast==0.1.13`, whose kernels are compiled in the same way. The
rows are the floors of tests/kernels/test_length_classes.py.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.compilation import needs_of, no_gpu
from benchmarks.kernels.launches import DEPTHS, LENGTHS, Launch, recorded
from benchmarks.kernels.machine_code import Region, listing, product_loops
from benchmarks.kernels.repeats import repeats_of
from benchmarks.kernels.trifast_kernels import TRIFAST, trifast_launches
from benchmarks.kernels.variants import BLOCKS
from fastfold.kernels.common.tuning import TF32X3
from fastfold.utils.atomic_files import write_atomic

ARCHITECTURES = (80, 90, 100)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLE = Path(__file__).parents[1] / "results" / "length_classes.csv"
COVERED = tuple(itertools.product(DTYPES, ARCHITECTURES))
"""Dtypes and compute capabilities of all kernels in the committed table."""

RIVAL = COVERED
"""Dtypes and compute capabilities of the rival in the committed table."""

SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
"""Bytes of shared memory of a processor (CUDA programming guide, table of compute capabilities)."""

PRODUCTS_PER_SCORE = {
    "attention_forward": 2,
    "attention_grad_q": 3,
    "attention_grad_kv": 4,
    "attention_grad_bias": 2,
}
PRODUCTS_PER_SCORE |= {"_fwd": 2, "_bwd_q": 3, "_bwd_kv": 4, "_bwd_b": 2}
"""Multiply-adds of each channel for a score in attention's kernels, ours and the rival's."""


WITHOUT_PRODUCTS = ("attention_ungate", "layer_norm", "residual_update")
"""Kernels that multiply no matrices."""


@dataclass(frozen=True)
class Row:
    """Kernel of a step in one class; numbers are text, as in the file.

    Attributes:
        step: Layer or operator, or the rival.
        kernel: Name of the kernel, numbered if a step launches it more than once.
        lengths: Classes of residues and sequences that share the machine code: ``16``, ``8``, ``odd``.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        chip: ``sm_80``, ``sm_90`` or ``sm_100``.
        blocks: Block sizes.
        how: Warps and stages.
        unit: Unit that makes the products: ``mma``, ``wgmma``, ``tcgen05``, or ``fma``.
        registers: Registers per thread.
        spill_bytes: Spilled bytes per thread.
        shared_bytes: Shared memory per program.
        programs: Programs that a processor holds at once.
        load_bytes: Mean bytes of a thread's loads from global memory in the innermost loop.
        repeats: Mean number of times that warps make each product, in the innermost loop with the most products.
        per_score: Instructions of a thread per score in the loop over whole blocks; attention only.
        per_product: Instructions of a thread for 1,000 necessary multiply-adds, each counted once however often it is
            made; empty if the machine code does not show their number.
        outside: All other instructions, such as those for remaining keys or queries that fill no block.
    """

    step: str
    kernel: str
    lengths: str
    dtype: str
    chip: str
    blocks: str
    how: str
    unit: str
    registers: str
    spill_bytes: str
    shared_bytes: str
    programs: str
    load_bytes: str
    repeats: str
    per_score: str
    per_product: str
    outside: str

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """Step, kernel, class of lengths, dtype and chip of everything that the row covers."""
        return [(self.step, self.kernel, x, self.dtype, self.chip) for x in self.lengths.split()]


HEADER = [field.name for field in fields(Row)]


def programs_of(architecture: int, registers: int, shared: int, warps: int) -> int:
    """Return the programs that a processor holds at once.

    It has 64 warps, 65,536 registers, 32 programs and :data:`SHARED`.
    """
    by_registers = 65536 // (-(-registers // 8) * 8 * 32) // warps
    return min(32, 64 // warps, by_registers, SHARED[architecture] // (shared + 1024))


def _kernel(launch: Launch) -> str:
    return launch.name if launch.number == 1 else f"{launch.name} {launch.number}"


def measure(launch: Launch, dtype: str, architecture: int, lengths: str, compiled: Any) -> Row:
    """Measure a launch's machine code."""
    needs = needs_of(compiled)
    warps, stages = launch.options["num_warps"], launch.options["num_stages"]
    code = listing(compiled)
    loops = product_loops(code)
    sizes = [x for name, x in launch.options.items() if name in ("BQ", "BK", "BLOCK_J", "BLOCK_K")]
    size = math.prod(sizes) if launch.name in PRODUCTS_PER_SCORE else 0
    repeats = repeats_of(compiled.asm["ttgir"])
    made = 3 if launch.options.get("PRECISION") == TF32X3 else 1  # products that replace one

    def per_score(region: Region) -> str:
        channels = launch.options.get("BD", launch.options.get("DIM"))
        products = size * channels * PRODUCTS_PER_SCORE[launch.name] * made
        blocks = max(
            1, round(region.products * warps / products / repeats)
        )  # the assembler may have unrolled the loop
        return f"{region.instructions * warps * 32 / size / blocks:.1f}"

    main = loops[0] if size else max(loops, key=lambda x: x.products)
    blocks = {n: x for n, x in launch.options.items() if n in BLOCKS or n.startswith("BLOCK_")}
    # An instruction of tcgen05 does not show the size of its blocks.
    multiplies = not launch.name.startswith(WITHOUT_PRODUCTS)
    countable = multiplies and main.products > 0 and "tcgen05" not in main.unit and not size
    return Row(
        step=launch.step,
        kernel=_kernel(launch),
        lengths=lengths,
        dtype=dtype,
        chip=f"sm_{architecture}",
        blocks=" ".join(f"{n}={x}" for n, x in blocks.items()),
        how=f"{warps}/{stages}",
        unit=main.unit if multiplies else "",
        registers=str(needs.registers),
        spill_bytes=str(needs.spills),
        shared_bytes=str(needs.shared),
        programs=str(programs_of(architecture, needs.registers, needs.shared, warps)),
        load_bytes=f"{main.load_bytes:.1f}",
        repeats=f"{repeats:.2f}" if multiplies else "",
        per_score=per_score(main) if size else "",
        per_product=f"{main.instructions * 32000 * made * repeats / main.products:.1f}" if countable else "",
        outside=str(sum(not x.name.startswith("NOP") for x in code) - main.instructions),
    )


def rows(
    dtypes: Iterable[str] = tuple(DTYPES),
    architectures: Iterable[int] = ARCHITECTURES,
    match: Iterable[str] = ("",),
    lengths: Iterable[str] = tuple(LENGTHS),
    steps: Iterable[str] = (),
) -> Iterator[Row]:
    """Compile the chosen kernels; classes that share machine code share a row.

    Args:
        dtypes: Keys of :data:`DTYPES`.
        architectures: Compute capabilities.
        match: Texts; only kernels whose name contains one of them are compiled.
        lengths: Keys of :data:`~benchmarks.kernels.launches.LENGTHS`, the class of both residues and sequences.
        steps: Names of steps; all if empty.
    """
    for dtype, architecture in itertools.product(dtypes, architectures):
        found: dict[tuple[str, str, int], tuple[Launch, Any, list[str]]] = {}
        with no_gpu(architecture):
            for length in lengths:
                sizes = LENGTHS[length], DEPTHS[length]
                for launch in recorded(DTYPES[dtype], f"sm_{architecture}", *sizes, steps):
                    if not any(text in launch.name for text in match):
                        continue
                    compiled = launch.compile()
                    name = launch.kernel.__name__ + str(launch.number)
                    entry = found.setdefault((launch.step, name, id(compiled)), (launch, compiled, []))
                    entry[2].append(length)
        known: dict[int, Row] = {}
        for launch, compiled, classes in found.values():
            row = known.get(id(compiled)) or measure(launch, dtype, architecture, "", compiled)
            known[id(compiled)] = row
            yield replace(row, step=launch.step, kernel=_kernel(launch), lengths=" ".join(classes))


def rival_rows(folder: Path, dtypes: Iterable[str], architectures: Iterable[int]) -> Iterator[Row]:
    """Compile the rival's kernels in each class, each with its configuration of fewest instructions per score.

    The rival's tuner chooses among its configurations by time, on a GPU. Those that spill are used only if all do.
    """
    for dtype, architecture in itertools.product(dtypes, architectures):
        found: dict[tuple[str, int], tuple[Launch, Any, list[str]]] = {}
        with no_gpu(architecture):
            for length, n in LENGTHS.items():
                for launch in trifast_launches(folder, DTYPES[dtype], n):
                    compiled = launch.compile()
                    entry = found.setdefault((launch.name, id(compiled)), (launch, compiled, []))
                    entry[2].append(length)
        best: dict[tuple[str, str], Row] = {}
        for launch, compiled, classes in found.values():
            row = measure(launch, dtype, architecture, " ".join(classes), compiled)
            before = best.get((row.kernel, row.lengths))
            if before is None or _sort_key(row) < _sort_key(before):
                best[row.kernel, row.lengths] = row
        yield from best.values()


def _sort_key(row: Row) -> tuple[int, float]:
    return int(row.spill_bytes), float(row.per_score)


def worse(row: Row, floor: Row) -> list[str]:
    """List values more than 5% worse than a kernel's row in the table, and further spills."""
    spilled = int(row.spill_bytes) > int(floor.spill_bytes)
    found = [f"{row.spill_bytes} bytes per thread do not fit into registers"] if spilled else []
    for name in ("per_score", "per_product", "outside"):
        now, then = getattr(row, name), getattr(floor, name)
        if now and (not then or float(now) > 1.05 * float(then)):
            found.append(f"{name}: expected at most {then or 'nothing'}, found {now}")
    if row.unit != floor.unit:
        found.append(f"unit of products: expected {floor.unit}, found {row.unit}")
    for name in ("programs", "load_bytes"):
        now, then = getattr(row, name), getattr(floor, name)
        if float(now) < 0.95 * float(then):
            found.append(f"{name}: expected at least {then}, found {now}")
    return found


def read(path: Path) -> list[Row]:
    """Read the rows of a table; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def beside_rival(table: list[Row]) -> dict[tuple[str, ...], tuple[Row, Row]]:
    """Pair rows of triangle attention with the rival's, by kernel, class of lengths, dtype and chip."""
    kernels = {"attention_forward": "_fwd", "attention_grad_q": "_bwd_q"}
    kernels |= {"attention_grad_kv": "_bwd_kv", "attention_grad_bias": "_bwd_b"}
    by_key = {key: row for row in table for key in row.keys}
    found = {}
    for kernel, dtype, architecture, n in itertools.product(kernels, DTYPES, ARCHITECTURES, LENGTHS):
        rest = (n, dtype, f"sm_{architecture}")
        ours = by_key.get(("triangle_attention_starting", kernel, *rest))
        theirs = by_key.get((TRIFAST, kernels[kernel], *rest))
        if ours is not None and theirs is not None:
            found[(kernel, *rest)] = (ours, theirs)
    return found


def _summary(table: list[Row]) -> str:
    """Summarise attention against the rival, and spills, in Markdown."""
    lines = [
        f"Compiled with Triton {version('triton')}, not run: instructions of a thread for each score in the innermost",
        "loop of triangle attention around the starting node, 4 heads of 32 channels, with bias and mask. Units make",
        "the products. In fp32 they differ, so the aim does not count there: FastFold makes three products of TF32",
        "(`tf32x3`), with up to 2.2 times the error of the fused multiply-adds of float32 (`ieee`) that trifast makes.",
        "trifast's figures are lower bounds: repeated products of warps count as work in them.",
        "",
        "| kernel | dtype | chip | residues | fastfold | unit | trifast 0.1.13 | unit | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (kernel, n, dtype, chip), (ours, theirs) in beside_rival(table).items():
        ratio = float(ours.per_score) / float(theirs.per_score)
        cells = [
            kernel,
            dtype,
            chip,
            n,
            ours.per_score,
            ours.unit,
            theirs.per_score,
            theirs.unit,
            f"{ratio:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    own = [row for row in table if row.step != TRIFAST]
    spilling = [row for row in own if row.spill_bytes != "0"]
    lines += ["", f"{len(spilling)} of {len(own)} rows of FastFold's kernels spill registers.", ""]
    lines += [
        f"- {x.step} {x.kernel} {x.dtype} {x.chip} {x.lengths}: {x.spill_bytes} bytes" for x in spilling
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Compile, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--match", nargs="+", default=[""], help="only kernels whose name contains one of these texts"
    )
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument(
        "--architectures", nargs="+", type=int, default=list(ARCHITECTURES), choices=ARCHITECTURES
    )
    parser.add_argument("--trifast", type=Path, help="compile only trifast, installed in this folder")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    made: list[Row] = []
    source = (
        rival_rows(options.trifast, options.dtypes, options.architectures)
        if options.trifast
        else rows(options.dtypes, options.architectures, options.match)
    )
    for row in source:
        print(*(getattr(row, name) for name in HEADER), sep="  ", flush=True)
        made.append(row)
    path = options.out / "length_classes.csv"
    kernels = {(row.step, row.kernel, row.dtype, row.chip) for row in made}
    kept = [x for x in read(path) if (x.step, x.kernel, x.dtype, x.chip) not in kernels]
    table = sorted(
        kept + made, key=lambda x: (x.step == TRIFAST, x.step, x.kernel, x.dtype, int(x.chip[3:]), x.lengths)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: getattr(row, name) for name in HEADER} for row in table)
    write_atomic(path, text.getvalue())
    write_atomic(options.out / "length_classes.md", _summary(table))
    return int(any(row.spill_bytes != "0" for row in made if row.step != TRIFAST))


if __name__ == "__main__":
    sys.exit(main())
