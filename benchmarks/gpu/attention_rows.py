"""Part of ``whole_folds.py`` that compares one kernel for rows of gated attention with the separate kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.comparing import Comparison
from benchmarks.gpu.rivals import environment
from benchmarks.gpu.timing import Line, Sizes

TEMPLATES = 4  #: Rows of an alignment that are templates, which official networks add
VARIANTS = {"separate": "0", "rows": "1"}
"""Values of the environment variable that chooses the kernel; the variant that is right comes first."""


def attention(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield what :func:`compare_rows` yields, on a GPU that the kernel serves."""
    import torch

    from fastfold.kernels.ops.gated_attention.triton_rows import CAPABILITIES

    if device == "cuda" and torch.cuda.get_device_capability() in CAPABILITIES:
        yield from compare_rows(device, sizes)
    else:
        yield {"skipped": "needs an A100 or a Hopper GPU (compute capability 8.0 or 9.0)"}


def compare_rows(device: str, sizes: Sizes) -> Iterator[Line]:
    """Yield errors and times of three attentions of a block in bf16, by the separate kernels and by the one.

    Lengths are those that the kernel serves. A line with an ``error`` is a wrong result, which is not timed.
    """
    import torch

    from benchmarks.kernels.measuring import Meter
    from fastfold.kernels.ops.gated_attention.triton_rows import MAX_LENGTH, VARIABLE

    meter = Meter(torch.device(device), 0.1 if device == "cuda" else 0.0)
    rows = sizes.block_rows[0] + TEMPLATES
    for residues in (length for length in sizes.block_lengths if length <= MAX_LENGTH):
        for name, call in _attentions(meter.device, rows, residues).items():
            comparison = Comparison(meter)
            for variant, value in VARIANTS.items():
                line: Line = {"attention": name, "rows": rows, "residues": residues, "variant": variant}
                with torch.no_grad(), environment(VARIABLE, value):
                    line |= comparison.measure(lambda call=call: [call()])
                yield line


def _attentions(device: Any, rows: int, residues: int) -> dict[str, Callable[[], Any]]:
    """Return calls that compute the update of each attention, without its residual."""
    import torch

    from benchmarks.kernels.cases import C_M, C_Z, D
    from fastfold import kernels

    def new(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(scale)

    def call(x: torch.Tensor, bias: torch.Tensor | None) -> Callable[[], Any]:
        channels = x.shape[-1]
        width = channels  # of all heads
        weights = [new(width, channels, scale=channels**-0.5) for _ in range(4)]
        parameters = kernels.GatedAttentionParams(
            *(1 + new(channels, scale=0.1).float(), new(channels, scale=0.1).float()),
            *(*weights, new(width)),
            *(new(channels, width, scale=width**-0.5), new(channels)),
        )
        mask, out = torch.ones(x.shape[:2], device=device, dtype=x.dtype), torch.empty_like(x)
        return lambda: kernels.gated_attention(
            x, bias, mask, parameters, heads=width // D, out=out, backend="triton"
        )

    msa, pair = new(rows, residues, C_M), new(residues, residues, C_Z)
    return {
        "rows of the alignment": call(msa, new(C_M // D, residues, residues)),
        "columns of the alignment": call(msa.transpose(0, 1), None),
        "triangle": call(pair, new(C_Z // D, residues, residues)),
    }
