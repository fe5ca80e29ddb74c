"""Transition in Triton: the hidden channels exist for one block of rows and of channels at a time, in registers."""

# Arguments of kernels have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastfold.kernels.common.kernel_variant import Specimen
from fastfold.kernels.common.layout import padded
from fastfold.kernels.common.normalised_rows import (
    Kernel,
    configuration,
    normalised,
    row_statistics,
    rows_product,
    specimens_of,
)
from fastfold.kernels.common.scratch import position_blocks
from fastfold.kernels.common.triton_math import cast, dot, precision

EPS = 1e-5
WHOLE = 2**62
"""More positions than there are: what the strides allow is one launch."""


@triton.jit(do_not_specialize=["rows"])
def transition_forward_kernel(
    x,
    residual,
    out,
    norm_weight,
    norm_bias,
    w1,
    b1,
    w2,
    b2,
    rows,
    hidden,
    x_n,
    x_c,
    residual_n,
    residual_c,
    out_n,
    out_c,
    EPS,
    C: tl.constexpr,
    BC: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program owns BM rows, and walks over the hidden channels."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_m = o_m < rows
    o_c = tl.arange(0, BC)
    m_c = o_c < C
    m_x = m_m[:, None] & m_c[None, :]
    p_x = x + o_m * x_n
    # [BM, BC]
    b_x = tl.load(p_x[:, None] + o_c[None, :] * x_c, mask=m_x, other=0.0).to(tl.float32)
    b_mean, b_rstd = row_statistics(b_x, m_c, C, EPS)
    b_norm = normalised(b_x, b_mean, b_rstd, norm_weight, norm_bias, o_c, m_c)
    b_out = tl.zeros([BM, BC], tl.float32)
    for i_h in range(0, hidden, BH):
        o_h = i_h + tl.arange(0, BH)
        m_h = o_h < hidden
        b_hidden = rows_product(
            b_norm, p_x, x_c, b_mean, b_rstd, norm_weight, norm_bias, w1 + o_h * C, 1, m_m, m_h,
            C, BM, BC, BH, BK, True, False, PRECISION,
        )  # fmt: skip
        b_hidden += tl.load(b1 + o_h, mask=m_h, other=0.0).to(tl.float32)[None, :]
        b_hidden = cast(tl.maximum(b_hidden, 0.0), w2.dtype.element_ty)
        # [BH, BC]
        b_w2 = tl.load(w2 + o_c[None, :] * hidden + o_h[:, None], mask=m_h[:, None] & m_c[None, :], other=0.0)
        b_out += dot(b_hidden, b_w2, PRECISION)
    b_out += tl.load(b2 + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        p_residual = residual + o_m[:, None] * residual_n + o_c[None, :] * residual_c
        b_out += tl.load(p_residual, mask=m_x, other=0.0).to(tl.float32)
    p_out = out + o_m[:, None] * out_n + o_c[None, :] * out_c
    tl.store(p_out, cast(b_out, out.dtype.element_ty), mask=m_x)


def typed_parameters(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Contiguous parameters: those of the norm in float32, the others in ``dtype``."""
    return [p.to(torch.float32 if i < 2 else dtype).contiguous() for i, p in enumerate(parameters)]


def forward(out: Tensor, x: Tensor, parameters: Sequence[Tensor], residual: Tensor | None) -> None:
    """Fill ``out``, which may be ``x`` or ``residual``; arguments as of ``transition``."""
    c = x.shape[-1]
    parameters = typed_parameters(parameters, x.dtype)
    config = configuration("transition_forward", x, c)
    residuals = () if residual is None else (residual,)
    for b_x, b_out, *b_residual in position_blocks(WHOLE, x, out, *residuals):
        rows = len(b_x)
        if rows == 0:
            continue
        b_add = b_residual[0] if b_residual else b_x
        transition_forward_kernel[(triton.cdiv(rows, config.blocks["BM"]),)](
            b_x,
            b_add,
            b_out,
            *parameters,
            rows,
            len(parameters[2]),
            *b_x.stride(),
            *b_add.stride(),
            *b_out.stride(),
            EPS,
            C=c,
            BC=padded(c),
            HAS_RESIDUAL=bool(b_residual),
            PRECISION=precision(x),
            **config.launch,
        )


def specimens() -> list[Specimen]:
    """The kernel in every dtype and configuration that ships."""
    return specimens_of(
        {
            "transition_forward": Kernel(
                transition_forward_kernel,
                lambda c, dtype: {"C": c, "BC": padded(c), "HAS_RESIDUAL": True},
                ("hidden", "x_n", "residual_n", "out_n"),
                ("rows",),
                ("x_c", "residual_c", "out_c"),
                {"norm_weight", "norm_bias"},
            )
        }
    )
