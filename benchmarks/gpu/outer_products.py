"""Part of ``whole_folds.py`` that compares the outer product mean in chunks with Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu.comparing import Comparison
from benchmarks.gpu.rivals import environment
from benchmarks.gpu.timing import Line, Sizes

DEPTHS = (128, 516)  #: Sequences of training, and of a fold with templates
VARIANTS = {"kernels": "0", "chunks": "1"}
"""Values of the environment variable that chooses; the variant that a GPU has shown right comes first."""


def outer_products(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield what :func:`compare_chunks` yields, on a GPU."""
    if device == "cuda":
        yield from compare_chunks(device, sizes, DEPTHS)
    else:
        yield {"skipped": "needs a GPU"}


def compare_chunks(device: str, sizes: Sizes, depths: Sequence[int]) -> Iterator[Line]:
    """Yield errors and times of both passes in bf16, by Triton's kernels and in chunks, and the choice by default.

    Lengths are those of blocks. A line with an ``error`` is a wrong result, which is not timed.
    """
    import torch

    from benchmarks.kernels.measuring import Meter
    from fastfold.kernels.ops.outer_product_mean.chunk_choice import VARIABLE

    meter = Meter(torch.device(device), 0.1 if device == "cuda" else 0.0)
    for residues in sizes.block_lengths:
        for rows in depths:
            for name, call in _passes(meter.device, rows, residues).items():
                comparison = Comparison(meter)
                for variant, value in VARIANTS.items():
                    line: Line = {"pass": name, "rows": rows, "residues": residues, "variant": variant}
                    with torch.no_grad(), environment(VARIABLE, value):
                        line |= comparison.measure(call)
                    yield line


def _passes(device: Any, rows: int, residues: int) -> dict[str, Callable[[], Sequence[Any]]]:
    """Return calls of the forward pass with a residual, and of the backward pass with all gradients."""
    import torch

    from benchmarks.kernels.cases import C_Z, OUTER
    from fastfold import kernels
    from fastfold.kernels.ops.outer_product_mean.op import EPS

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(scale)

    sides = [new(rows, residues, OUTER) for _ in range(2)]
    mask = torch.ones(rows, residues, device=device, dtype=torch.bfloat16)
    parameters = [new(C_Z, OUTER**2, scale=1 / OUTER), new(C_Z)]
    pair, out = new(residues, residues, C_Z), new(residues, residues, C_Z)
    inputs, others = (*sides, mask, mask, *parameters), (EPS, [True] * 4, "triton")
    gradients = torch.ops.fastfold.outer_product_mean_backward
    return {
        "forward": lambda: [kernels.outer_product_mean(*inputs, residual=pair, out=out, backend="triton")],
        "backward": lambda: gradients(pair, sides, [mask, mask], parameters, *others),
    }
