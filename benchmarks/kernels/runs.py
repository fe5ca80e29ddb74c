"""Measurements of a run, their order, and the selection that fits into its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.block import BLOCK, BlockRun
from benchmarks.kernels.cases import Case
from benchmarks.kernels.measuring import Ceilings, Inputs, Meter
from benchmarks.kernels.report import Row
from benchmarks.kernels.rivals import OURS, Implementation, implementations

NO_MEMORY = "out of memory"
FORWARD, BOTH = "forward", "forward+backward"

# Operators with targets come first.
_OPERATORS = (
    "triangle_attention",
    "triangle_multiplication",
    BLOCK,
    "layer_norm",
    "transition",
    "outer_product_mean",
    "row_attention",
    "row_transition",
    "pair_bias",
    "residual_update",
)
_SIZES = (1024, 384, 2048, 256, 4096, 512, 768, 3072)


@dataclass(frozen=True)
class Run:
    """Measurements of one implementation on one size, in both directions.

    Attributes:
        operator: Name of the operator.
        shape: Size in words.
        residues: N.
        implementation: Name of the implementation.
        importance: Importance of the implementation, 0 first.
        measure: Measures one direction after the other.
    """

    operator: str
    shape: str
    residues: int
    implementation: str
    importance: int
    measure: Callable[[], Iterator[Row]]

    @property
    def name(self) -> str:
        """Operator, shape and implementation."""
        return f"{self.operator} {self.shape} {self.implementation}"

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: smaller is more important."""
        size = _SIZES.index(self.residues) if self.residues in _SIZES else len(_SIZES)
        operator = _OPERATORS.index(self.operator)
        # One size of everything first, then the others.
        return self.importance + (size > 0) + (size > 4), operator, size


def runs(
    cases: Iterable[Case],
    alignments: Iterable[tuple[int, int]],
    meter: Meter,
    ceilings: Ceilings,
    dtype: torch.dtype,
) -> list[Run]:
    """Return all possible measurements, the most important first."""
    found = []
    made: dict[str, list[Implementation]] = {}
    for case in cases:
        if case.operator not in made:
            made[case.operator] = implementations(case.operator, meter.device)
        for implementation in made[case.operator]:
            found.append(_of_case(case, implementation, meter, ceilings, dtype))
    for rows, residues in alignments:
        for importance, name in ((0, OURS), (1, "eager"), (2, "compile")):
            found.append(_of_block(BlockRun(rows, residues, name), importance, meter, dtype))
    return sorted(found, key=lambda run: run.order)


def _of_case(
    case: Case, implementation: Implementation, meter: Meter, ceilings: Ceilings, dtype: torch.dtype
) -> Run:
    def measure() -> Iterator[Row]:
        inputs = case.make(meter.device, dtype)
        u = case.residues**2 * 128 * dtype.itemsize
        passes = {
            FORWARD: (forward, case.flops, case.elements),
            BOTH: (both, case.flops + case.backward_flops, case.elements + case.backward_elements),
        }
        for direction, (step, flops, elements) in passes.items():
            needed = _leaves(inputs, case.constants) if direction == BOTH else inputs
            timing = meter.time(step, meter.sets(needed))
            tflops = flops / timing.milliseconds / 1e9
            gbs = elements * dtype.itemsize / timing.milliseconds / 1e6
            yield Row(
                *(case.operator, case.shape, case.residues, direction, implementation.name),
                *(timing.milliseconds, timing.host_milliseconds, timing.spread, timing.peak_bytes / u),
                *(tflops, tflops / ceilings.tflops, gbs, gbs / ceilings.gbs),
            )

    def forward(inputs: Inputs) -> None:
        with torch.no_grad():
            implementation.function(**inputs)

    def both(inputs: Inputs) -> None:
        leaves = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        out = implementation.function(**inputs)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return Run(
        case.operator, case.shape, case.residues, implementation.name, implementation.importance, measure
    )


def _leaves(inputs: Inputs, constants: Iterable[str]) -> Inputs:
    """Return the inputs as leaves that require gradients, except constants."""
    return {k: x.detach().requires_grad_(k not in constants) for k, x in inputs.items()}


def _of_block(run: BlockRun, importance: int, meter: Meter, dtype: torch.dtype) -> Run:
    shape = f"{run.rows} x {run.residues}"

    def measure() -> Iterator[Row]:
        u = run.residues**2 * 128 * dtype.itemsize
        for direction, timing in run.times(meter, dtype):
            yield Row(
                *(BLOCK, shape, run.residues, direction, run.implementation),
                *(timing.milliseconds, timing.host_milliseconds, timing.spread, timing.peak_bytes / u),
            )

    return Run(BLOCK, shape, run.residues, run.implementation, importance, measure)


def carry_out(planned: Iterable[Run], deadline: float) -> tuple[list[Row], list[Run]]:
    """Measure until the time is up.

    Args:
        planned: Runs, the most important first.
        deadline: Value of ``time.monotonic()`` after which no run starts.

    Returns:
        Rows in the order of operators and sizes, and the runs that were left out.
    """
    rows: list[Row] = []
    left_out = []
    took: dict[tuple[str, str], float] = {}
    for run in planned:
        key = (run.operator, run.implementation)
        start = time.monotonic()
        # An earlier run of this implementation, with its compilation, bounds the time of this one.
        if start + took.get(key, 0.0) > deadline:
            left_out.append(run)
            continue
        found: list[Row] = []
        try:
            for row in run.measure():
                found.append(row)
        except torch.OutOfMemoryError:
            found.append(_failed(run, found, NO_MEMORY))
        except Exception as error:  # the other measurements continue, because GPU time is scarce
            found.append(_failed(run, found, f"{type(error).__name__}: {error}"))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        took[key] = time.monotonic() - start
        rows += found
        for row in found:
            print(row.operator, row.shape, row.direction, row.implementation, _describe(row), flush=True)
    rows.sort(key=lambda r: (_OPERATORS.index(r.operator), r.residues, r.shape, r.direction))
    return rows, left_out


def _failed(run: Run, done: list[Row], note: str) -> Row:
    direction = BOTH if done else FORWARD
    note = note[:80].replace("\n", " ").replace("|", "/")
    return Row(run.operator, run.shape, run.residues, direction, run.implementation, note=note)


def _describe(row: Row) -> str:
    return row.note or f"{row.milliseconds:.3f} ms, host {row.host_milliseconds:.3f} ms, {row.peak_u:.2f} U"
