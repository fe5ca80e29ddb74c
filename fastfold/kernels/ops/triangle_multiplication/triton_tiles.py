"""Forward kernels of triangle multiplication for Hopper, with tiles that are loaded and stored by tensor descriptors.

Both kernels are persistent: a program keeps its weights in shared memory and takes every n-th tile of positions, which
the tensor memory accelerator copies in the background. The scale of a normalisation is multiplied into the weights
before, and its shift and mean are added to the products after, so that products read the pair as it is:

    LN(x) Wᵀ + b = rstd · (x W'ᵀ − mean · Σ W') + (W · shift + b), with W' = W · scale.

A tile that reaches past the tensor is filled with zeros, and its store leaves them out.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.launch import launch
from fastfold.kernels.common.triton_math import cast, dot, sigmoid
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams, UpdateParams

VARIABLE = "FASTFOLD_TRIANGLE_TILES"
"""Environment variable: ``1`` to use these kernels where they serve; no GPU has timed them."""

CHANNELS = 128  #: Channels of pair and product
BM, BH, STAGES = 64, 64, 3
BO = 16  #: Rows of weights of a program that folds them
_PROJECT_CHANNELS = 2 * BH  #: Channels of factors that a program of the projection owns
_INTERPRETED_PROGRAMS = 3

Pair = tuple[Tensor, Tensor]


def serves(z: Tensor, channels: int, width: int) -> bool:
    """Return True if tiles are requested and serve ``z [R, N, c_z]`` with factors or products ``[channels, *, width]``.

    They serve contiguous bfloat16 of 128 channels, with widths of a multiple of 8 as descriptors need them, on GPUs of
    compute capability 9.0 and in Triton's interpreter.
    """
    if os.environ.get(VARIABLE) != "1" or z.dtype != torch.bfloat16 or not z.is_contiguous():
        return False
    if z.shape[-1] != CHANNELS or channels % CHANNELS or width % 8 or 0 in z.shape:
        return False
    return interpreted() or (z.is_cuda and torch.cuda.get_device_capability(z.device) == (9, 0))


def serves_update(out: Tensor, product: Tensor, z: Tensor, residual: Tensor | None) -> bool:
    """Return True if tiles are requested and serve the arguments of :func:`~.triton_update.write_update`.

    All but the dropout are contiguous.
    """
    if len(product) != CHANNELS or not serves(z, *product.shape[::2]):
        return False
    if residual is not None and (residual.dtype != z.dtype or not residual.is_contiguous()):
        return False
    return out.is_contiguous() and product.is_contiguous()


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


@triton.jit
def weights_row(o_c, row_groups):
    """Return the weights' rows of channels ``o_c``: a number of channels from one row on, and the rest from another."""
    return o_c + tl.where(o_c < row_groups[0], row_groups[1], row_groups[2])


@triton.jit(do_not_specialize=["rows"])
def fold_weights_kernel(
    weights, biases, norms, folded, sums, rows, row_groups, C: tl.constexpr, BO: tl.constexpr
):  # fmt: skip
    """Fill ``folded [2 O, C]`` with two weights times the scales of their norms, and ``sums [2, 2, O]``.

    These are for each weight the sums of its folded rows, and its biases plus its products with the norm's shift.
    """
    o_o, o_c = tl.program_id(0) * BO + tl.arange(0, BO), tl.arange(0, C)
    o_row = weights_row(o_o, row_groups)
    m_o = o_o < rows
    for i_w in tl.static_range(2):
        p_w = weights[i_w] + o_row[:, None] * C + o_c[None, :]
        # [BO, C]
        b_exact = tl.load(p_w, mask=m_o[:, None], other=0.0).to(tl.float32)
        b_w = cast(b_exact * tl.load(norms[i_w][0] + o_c)[None, :], folded.dtype.element_ty)
        tl.store(folded + (i_w * rows + o_o)[:, None] * C + o_c[None, :], b_w, mask=m_o[:, None])
        p_sums = sums + 2 * i_w * rows + o_o
        tl.store(p_sums, tl.sum(b_w.to(tl.float32), 1), mask=m_o)
        b_shift = tl.sum(b_exact * tl.load(norms[i_w][1] + o_c)[None, :], 1)
        tl.store(
            p_sums + rows,
            tl.load(biases[i_w] + o_row, mask=m_o, other=0.0).to(tl.float32) + b_shift,
            mask=m_o,
        )


def folded(
    weights: Pair, biases: Pair, norms: tuple[Pair, Pair], rows: int, row_groups: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Return two weights ``[2 O, C]`` with the scales of their norms, and in float32 sums and biases ``[2, 2, O]``.

    ``rows`` is O, and ``row_groups`` is that of :func:`weights_row`.
    """
    channels = weights[0].shape[1]
    result = weights[0].new_empty(2 * rows, channels)
    sums = result.new_empty(2, 2, rows, dtype=torch.float32)
    launch(fold_weights_kernel, (triton.cdiv(rows, BO),))(
        *(weights, biases, norms, result, sums, rows, row_groups),
        C=channels,
        BO=BO,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
    )
    return result, sums


def _programs(z: Tensor) -> int:
    if not z.is_cuda:
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(z.device).multi_processor_count


@triton.jit
def row_statistics(b_x, C: tl.constexpr, EPS, AXIS: tl.constexpr):
    """Return the inverse deviation of each row of ``C`` values along an axis, and minus the mean times it."""
    b_x = b_x.to(tl.float32)
    b_mean = tl.sum(b_x, AXIS) / C
    b_x -= tl.expand_dims(b_mean, AXIS)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, AXIS) / C + EPS)
    return b_rstd, -b_mean * b_rstd


@triton.jit
def load_weights(weights, sums, i_w, first, rows, BH: tl.constexpr):
    """Load BH of ``rows`` of a folded weight ``[BH, CZ]`` by their descriptor, with sums and biases ``[BH]``."""
    p_sums = sums + 2 * i_w * rows + first + tl.arange(0, BH)
    return weights.load([i_w * rows + first, 0]), tl.load(p_sums), tl.load(p_sums + rows)


@triton.jit
def normalized_product(b_w, b_xt, b_rstd, b_shift, b_sums, b_bias):
    """Compute ``W LN(x)ᵀ + b [BH, BM]`` from folded weights ``[BH, CZ]`` and ``xᵀ [CZ, BM]``."""
    return dot(b_w, b_xt, "ieee") * b_rstd[None, :] + (b_shift[None, :] * b_sums[:, None] + b_bias[:, None])


@triton.jit
def gated_factors(b_xt, b_rstd, b_shift, b_mask, projection, gate):
    """Compute factors ``[BH, BM]`` in bfloat16; projection and gate are results of :func:`load_weights`."""
    b_factors = normalized_product(projection[0], b_xt, b_rstd, b_shift, projection[1], projection[2])
    b_gate = normalized_product(gate[0], b_xt, b_rstd, b_shift, gate[1], gate[2])
    return cast(b_factors * sigmoid(b_gate) * b_mask[None, :], tl.bfloat16)


@triton.jit(do_not_specialize=["rows", "n", "width", "factor_rows"])
def triangle_project_tiles_kernel(
    z, mask, factors, weights, sums,
    channels, rows, n, width, factor_rows, mask_strides, EPS,
    CZ: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Fill ``factors [*, R', W]`` from ``z [R, N, CZ]``: a program owns 2 BH channels and every n-th tile."""
    first = tl.program_id(1) * 2 * BH
    low_p, low_g = (
        load_weights(weights, sums, 0, first, channels, BH),
        load_weights(weights, sums, 1, first, channels, BH),
    )
    high_p, high_g = (
        load_weights(weights, sums, 0, first + BH, channels, BH),
        load_weights(weights, sums, 1, first + BH, channels, BH),
    )
    across = tl.cdiv(width, BM)
    for i_t in range(tl.program_id(0), across * factor_rows, tl.num_programs(0)):
        i, j = i_t // across, i_t % across * BM
        b_x = z.load([i, j, 0]).reshape(BM, CZ)
        o_j = j + tl.arange(0, BM)
        p_mask = mask + i.to(tl.int64) * mask_strides[0] + o_j * mask_strides[1]
        b_mask = tl.load(p_mask, mask=o_j < tl.where(i < rows, n, 0), other=0.0).to(tl.float32)
        b_rstd, b_shift = row_statistics(b_x, CZ, EPS, 1)
        b_xt = tl.trans(b_x)
        b_low = gated_factors(b_xt, b_rstd, b_shift, b_mask, low_p, low_g)
        factors.store([first, i, j], b_low.reshape(BH, 1, BM))
        b_high = gated_factors(b_xt, b_rstd, b_shift, b_mask, high_p, high_g)
        factors.store([first + BH, i, j], b_high.reshape(BH, 1, BM))


@triton.jit
def load_tile(p_x, strides, i, j, n, BM: tl.constexpr, CZ: tl.constexpr):
    """Load a tile ``[BM, CZ]`` of row ``i`` of ``x [R, N, CZ]`` with any strides, in float32."""
    # Offsets within a tile fit into 32 bits, which need fewer registers.
    o_m, o_c = tl.arange(0, BM), tl.arange(0, CZ)
    p_tile = p_x + tl.cast(i, tl.int64) * strides[0] + tl.cast(j, tl.int64) * strides[1]
    p_tile += o_m[:, None] * tl.cast(strides[1], tl.int32) + o_c[None, :] * tl.cast(strides[2], tl.int32)
    return tl.load(p_tile, mask=(o_m < n - j)[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "n"])
def triangle_output_tiles_kernel(
    product, z, dropout, residual, out, weights, sums, rows, n, dropout_strides, EPS,
    C: tl.constexpr, CZ: tl.constexpr, BM: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ADD_Z: tl.constexpr,
):  # fmt: skip
    """Fill ``out [R, N, CZ]`` with the update of ``z`` by ``product [C, R', W]``, plus a residual or ``z`` itself."""
    b_w, b_sums, b_bias = load_weights(weights, sums, 0, 0, CZ, CZ)
    b_wg, b_gate_sums, b_gate_bias = load_weights(weights, sums, 1, 0, CZ, CZ)
    across = tl.cdiv(n, BM)
    for i_t in range(tl.program_id(0), across * rows, tl.num_programs(0)):
        i, j = i_t // across, i_t % across * BM
        b_p = product.load([0, i, j]).reshape(C, BM)
        b_x = z.load([i, j, 0]).reshape(BM, CZ)
        b_rstd_p, b_shift_p = row_statistics(b_p, C, EPS, 0)
        b_rstd, b_shift = row_statistics(b_x, CZ, EPS, 1)
        # [BM, CZ]: positions first, as they are stored
        b_gate = dot(b_x, tl.trans(b_wg), "ieee") * b_rstd[:, None]
        b_gate += b_shift[:, None] * b_gate_sums[None, :] + b_gate_bias[None, :]
        b_out = dot(tl.trans(b_p), tl.trans(b_w), "ieee") * b_rstd_p[:, None]
        b_out += b_shift_p[:, None] * b_sums[None, :] + b_bias[None, :]
        b_out *= sigmoid(b_gate)
        if HAS_DROPOUT:
            b_out *= load_tile(dropout, dropout_strides, i, j, n, BM, CZ)
        if HAS_RESIDUAL:
            b_out += residual.load([i, j, 0]).reshape(BM, CZ).to(tl.float32)
        if ADD_Z:
            b_out += b_x.to(tl.float32)
        out.store([i, j, 0], cast(b_out, tl.bfloat16).reshape(1, BM, CZ))


def project_tiles(
    projections: Tensor, z: Tensor, mask: Tensor, weights: FactorParams, first: int, group: int
) -> None:
    """Fill factors; arguments are those of :func:`~.triton_factors.project`, where :func:`serves` is true."""
    half, norm = len(weights.proj_weight) // 2, (weights.norm_weight, weights.norm_bias)
    channels, rows, width = projections.shape
    matrices, sums = folded(
        (weights.proj_weight, weights.gate_weight),
        (weights.proj_bias, weights.gate_bias),
        (norm, norm),
        channels,
        (group, first, first + half - group),
    )
    launch(triangle_project_tiles_kernel, (_programs(z), channels // _PROJECT_CHANNELS))(
        _descriptor(z, 1, BM, CHANNELS),
        mask,
        _descriptor(projections, BH, 1, BM),
        *(_descriptor(matrices, BH, CHANNELS), sums),
        *(channels, *z.shape[:2], width, rows, mask.stride(), EPS),
        CZ=CHANNELS,
        BM=BM,
        BH=BH,
        num_warps=4,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )


def write_update_tiles(
    out: Tensor,
    product: Tensor,
    z: Tensor,
    weights: UpdateParams,
    residual: Tensor | None,
    dropout: Tensor | None,
) -> None:
    """Fill ``out`` as :func:`~.triton_update.write_update` does, where :func:`serves_update` is true."""
    is_z = residual is not None and residual.data_ptr() == z.data_ptr() and residual.stride() == z.stride()
    # With dropout the pair is loaded again as residual, because its registers are needed meanwhile.
    add_z = is_z and dropout is None
    b_dropout, b_residual = (z if x is None else x for x in (dropout, residual))
    matrices, sums = folded(
        (weights.out_weight, weights.out_gate_weight),
        (weights.out_bias, weights.out_gate_bias),
        ((weights.norm_out_weight, weights.norm_out_bias), (weights.norm_weight, weights.norm_bias)),
        CHANNELS,
        (CHANNELS, 0, 0),
    )
    launch(triangle_output_tiles_kernel, (_programs(z),))(
        _descriptor(product, CHANNELS, 1, BM),
        _descriptor(z, 1, BM, CHANNELS),
        *(b_dropout, _descriptor(b_residual, 1, BM, CHANNELS)),
        _descriptor(out, 1, BM, CHANNELS),
        *(_descriptor(matrices, CHANNELS, CHANNELS), sums),
        *(*z.shape[:2], b_dropout.stride(), EPS),
        C=CHANNELS,
        CZ=CHANNELS,
        BM=BM,
        HAS_DROPOUT=dropout is not None,
        HAS_RESIDUAL=residual is not None and not add_z,
        ADD_Z=add_z,
        num_warps=8,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )
