"""Triangle multiplication in Gluon for Hopper, for a trial: one warp copies tiles while two warpgroups compute.

No GPU has run these kernels. They stay here until one has shown that they are right, and faster than those of
``triton_tiles``, which wait for each product before they gate and store. Here one warpgroup gates and stores while the
other multiplies. Gluon is the part of Triton that has partitions of warps; its interface is experimental.

A program takes every n-th tile of positions and keeps all weights in shared memory. The loading warp fills ``STAGES``
tiles in turn. ``ready`` of a stage is signalled when a tile has arrived, and ``free`` when a warpgroup has read it.
Tiles are normalised in registers; scale and shift of the norm are multiplied into the weights before. A tile that
reaches past the tensor is filled with zeros, and its store leaves them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fastfold.kernels.common.launch import launch
from fastfold.kernels.ops.triangle_multiplication.params import EPS, FactorParams, UpdateParams
from fastfold.kernels.ops.triangle_multiplication.triton_tiles import CHANNELS

BM, BH, STAGES = 64, 64, 4
WARPGROUPS = gl.constexpr(2)
_REGISTERS = gl.constexpr(232)  #: Registers of a thread of the second warpgroup
_LOADING_REGISTERS = gl.constexpr(24)  #: Registers of a thread of the loading warp

# Triton 3.9 renamed both functions.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


def _layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


_MATRIX, _TILE = gl.constexpr(_layout(2)), gl.constexpr(_layout(3))


@gluon.jit
def logistic(x):
    """Compute the logistic function in float32."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
        " rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def standardized(b_x, EPS):
    """Return rows ``[BM, C]`` without their mean, over their deviation, in their dtype."""
    C: gl.constexpr = b_x.shape[1]
    b_exact = b_x.to(gl.float32)
    b_exact = b_exact - gl.expand_dims(gl.sum(b_exact, 1) / C, 1)
    b_rstd = gl.rsqrt(gl.sum(b_exact * b_exact, 1) / C + EPS)
    return (b_exact * gl.expand_dims(b_rstd, 1)).to(b_x.dtype)


@gluon.jit
def own_tiles(total):
    """Return the number of tiles of this program, of a total."""
    return gl.cdiv(total - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def init_barriers(ready, free, weights_ready, STAGES: gl.constexpr):
    """Prepare barriers that one arrival completes."""
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    mbarrier.init(weights_ready, count=1)
    fence_async_shared()


@gluon.jit
def load_weights(weights, shared, barrier, COUNT: gl.constexpr, ROWS: gl.constexpr, CZ: gl.constexpr):
    """Start copies of all weights ``[COUNT ROWS, CZ]`` to ``shared [COUNT, ROWS, CZ]``."""
    mbarrier.expect(barrier, COUNT * ROWS * CZ * 2)
    for i_w in gl.static_range(COUNT):
        load_tile(weights, [i_w * ROWS, 0], barrier, shared.index(i_w))


@gluon.jit
def load_pairs(
    z, weights, tiles, shared, ready, free, weights_ready, width, factor_rows,
    CZ: gl.constexpr, BM: gl.constexpr, BH: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load weights and tiles of the pair, by one warp."""
    load_weights(weights, shared, weights_ready, CHUNKS, 2 * BH, CZ)
    across = gl.cdiv(width, BM)
    for i_k in range(0, own_tiles(across * factor_rows)):
        i_t = gl.program_id(0) + i_k * gl.num_programs(0)
        stage = i_k % STAGES
        mbarrier.wait(free.index(stage), (i_k // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), BM * CZ * 2)
        load_tile(z, [i_t // across, i_t % across * BM, 0], ready.index(stage), tiles.index(stage))


@gluon.jit
def project_tiles(
    ME: gl.constexpr, tiles, shared, results, ready, free, weights_ready, factors, mask, bias,
    rows, n, width, factor_rows, stride_i, stride_j, EPS,
    CZ: gl.constexpr, BM: gl.constexpr, BH: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store the factors of every second tile, by one warpgroup; ``ME`` is its number."""
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BH, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    o_h = gl.arange(0, 2 * BH, gl.SliceLayout(0, sums))
    b_zero = gl.zeros([BM, 2 * BH], gl.float32, sums)
    across = gl.cdiv(width, BM)
    mbarrier.wait(weights_ready, 0)
    for i_k in range(ME, own_tiles(across * factor_rows), WARPGROUPS):
        i_t = gl.program_id(0) + i_k * gl.num_programs(0)
        i, j = i_t // across, i_t % across * BM
        stage = i_k % STAGES
        mbarrier.wait(ready.index(stage), i_k // STAGES & 1)
        b_x = standardized(tiles.index(stage).reshape([BM, CZ]).load(operand), EPS)
        fence_async_shared()  # a copy overwrites the tile next
        mbarrier.arrive(free.index(stage), count=1)
        b_next = warpgroup_mma(b_x, shared.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        for i_h in gl.static_range(CHUNKS):
            b_next, b_x = warpgroup_mma_wait(0, deps=[b_next, b_x])
            b_sums = b_next + gl.expand_dims(gl.load(bias + (i_h * 2 * BH + o_h)), 0)
            if i_h + 1 < CHUNKS:  # multiplied while this chunk is gated and stored
                b_w = shared.index(i_h + 1).permute((1, 0))
                b_next = warpgroup_mma(b_x, b_w, b_zero, use_acc=False, is_async=True)
            b_factors, b_gate = gl.split(b_sums.reshape([BM, 2, BH]).permute((0, 2, 1)))
            o_j = j + gl.arange(0, BM, gl.SliceLayout(1, b_factors.type.layout))
            p_mask = mask + i.to(gl.int64) * stride_i + o_j * stride_j
            b_mask = gl.load(p_mask, mask=(o_j < n) & (i < rows), other=0.0).to(gl.float32)
            b_factors = (b_factors * logistic(b_gate) * gl.expand_dims(b_mask, 1)).to(gl.bfloat16)
            result = results.index(2 * ME + i_h % 2)
            tma.store_wait(1)
            result.store(b_factors.permute((1, 0)).reshape([BH, 1, BM]))
            fence_async_shared()
            store_tile(factors, [i_h * BH, i, j], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "n", "width", "factor_rows"])
def triangle_project_gluon_kernel(
    z, weights, factors, mask, bias, rows, n, width, factor_rows, stride_i, stride_j, EPS,
    CZ: gl.constexpr, BM: gl.constexpr, BH: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill ``factors [CHUNKS BH, R', W]`` from ``z [R, N, CZ]`` and weights of :func:`_by_chunks`."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, BM, CZ], _TILE)
    shared = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, 2 * BH, CZ], _MATRIX)
    results = gl.allocate_shared_memory(gl.bfloat16, [2 * WARPGROUPS, BH, 1, BM], _TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    init_barriers(ready, free, weights_ready, STAGES)
    gl.warp_specialize(
        [
            (project_tiles, (
                0, tiles, shared, results, ready, free, weights_ready, factors, mask, bias,
                rows, n, width, factor_rows, stride_i, stride_j, EPS, CZ, BM, BH, CHUNKS, STAGES,
            )),
            (project_tiles, (
                1, tiles, shared, results, ready, free, weights_ready, factors, mask, bias,
                rows, n, width, factor_rows, stride_i, stride_j, EPS, CZ, BM, BH, CHUNKS, STAGES,
            )),
            (load_pairs, (
                z, weights, tiles, shared, ready, free, weights_ready, width, factor_rows,
                CZ, BM, BH, CHUNKS, STAGES,
            )),
        ],
        [4, 1], [_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def load_products(
    product, z, weights, products, tiles, shared, ready, free, weights_ready, rows, n,
    C: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load weights, and tiles of product and pair, by one warp."""
    load_weights(weights, shared, weights_ready, 2, C, C)
    across = gl.cdiv(n, BM)
    for i_k in range(0, own_tiles(across * rows)):
        i_t = gl.program_id(0) + i_k * gl.num_programs(0)
        i, j = i_t // across, i_t % across * BM
        stage = i_k % STAGES
        mbarrier.wait(free.index(stage), (i_k // STAGES & 1) ^ 1)
        mbarrier.expect(ready.index(stage), 2 * BM * C * 2)
        load_tile(product, [0, i, j], ready.index(stage), products.index(stage))
        load_tile(z, [i, j, 0], ready.index(stage), tiles.index(stage))


@gluon.jit
def update_tiles(
    ME: gl.constexpr, products, tiles, shared, results, ready, free, weights_ready, out, bias, rows, n, EPS,
    C: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute and store the result of every second tile, by one warpgroup; ``ME`` is its number."""
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2)
    o_c = gl.arange(0, C, gl.SliceLayout(0, sums))
    b_zero = gl.zeros([BM, C], gl.float32, sums)
    across = gl.cdiv(n, BM)
    result = results.index(ME)
    mbarrier.wait(weights_ready, 0)
    for i_k in range(ME, own_tiles(across * rows), WARPGROUPS):
        i_t = gl.program_id(0) + i_k * gl.num_programs(0)
        stage = i_k % STAGES
        tile = tiles.index(stage).reshape([BM, C])
        mbarrier.wait(ready.index(stage), i_k // STAGES & 1)
        b_p = standardized(products.index(stage).reshape([C, BM]).permute((1, 0)).load(operand), EPS)
        b_x = standardized(tile.load(operand), EPS)
        b_out = warpgroup_mma(b_p, shared.index(0).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_gate = warpgroup_mma(b_x, shared.index(1).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        b_out, b_gate, b_p, b_x = warpgroup_mma_wait(0, deps=[b_out, b_gate, b_p, b_x])
        b_out = b_out + gl.expand_dims(gl.load(bias + o_c), 0)
        b_gate = b_gate + gl.expand_dims(gl.load(bias + (C + o_c)), 0)
        b_out = b_out * logistic(b_gate) + tile.load(sums).to(gl.float32)
        fence_async_shared()  # copies overwrite the tiles next
        mbarrier.arrive(free.index(stage), count=1)
        tma.store_wait(0)
        result.reshape([BM, C]).store(b_out.to(gl.bfloat16))
        fence_async_shared()
        store_tile(out, [i_t // across, i_t % across * BM, 0], result)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "n"])
def triangle_output_gluon_kernel(
    product, z, weights, out, bias, rows, n, EPS,
    C: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill ``out [R, N, C]`` with ``z`` plus its update by ``product [C, R', W]``, from weights of output and gate."""
    products = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, 1, BM], _TILE)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, BM, C], _TILE)
    shared = gl.allocate_shared_memory(gl.bfloat16, [2, C, C], _MATRIX)
    results = gl.allocate_shared_memory(gl.bfloat16, [WARPGROUPS, 1, BM, C], _TILE)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    weights_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    init_barriers(ready, free, weights_ready, STAGES)
    gl.warp_specialize(
        [
            (update_tiles, (
                0, products, tiles, shared, results, ready, free, weights_ready, out, bias, rows, n, EPS,
                C, BM, STAGES,
            )),
            (update_tiles, (
                1, products, tiles, shared, results, ready, free, weights_ready, out, bias, rows, n, EPS,
                C, BM, STAGES,
            )),
            (load_products, (
                product, z, weights, products, tiles, shared, ready, free, weights_ready, rows, n, C, BM, STAGES,
            )),
        ],
        [4, 1], [_REGISTERS, _LOADING_REGISTERS],
    )  # fmt: skip


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, list(block), _layout(len(block)))


def _programs(z: Tensor) -> int:
    return torch.cuda.get_device_properties(z.device).multi_processor_count if z.is_cuda else 3


def _folded(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights ``[O, C]`` with a norm's scale, and in float32 the bias with its shift ``[O]``."""
    exact = weight.float()
    return (exact * scale.float()).to(weight.dtype), torch.addmv(bias.float(), exact, shift.float())


def _by_chunks(projection: Tensor, gate: Tensor) -> Tensor:
    """Join rows of projections and gates ``[c, *]``, BH of one and BH of the other in turn."""
    return torch.stack([x.unflatten(0, (-1, BH)) for x in (projection, gate)], 1).flatten(0, 2)


def project(factors: Tensor, z: Tensor, mask: Tensor, weights: FactorParams) -> None:
    """Fill ``factors [256, R', W]`` from contiguous ``z [R, N, 128]``, both in bfloat16, and ``mask [R, N]``.

    ``W`` is a multiple of 8. Factors are zero past the pair.
    """
    norm = (weights.norm_weight, weights.norm_bias)
    projection, bias = _folded(weights.proj_weight, weights.proj_bias, *norm)
    gate, gate_bias = _folded(weights.gate_weight, weights.gate_bias, *norm)
    channels, rows, width = factors.shape
    launch(triangle_project_gluon_kernel, (_programs(z),))(
        _descriptor(z, 1, BM, CHANNELS),
        _descriptor(_by_chunks(projection, gate), 2 * BH, CHANNELS),
        _descriptor(factors, BH, 1, BM),
        *(mask, _by_chunks(bias, gate_bias), *z.shape[:2], width, rows, *mask.stride(), EPS),
        CZ=CHANNELS,
        BM=BM,
        BH=BH,
        CHUNKS=channels // BH,
        STAGES=STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )


def write_update(out: Tensor, product: Tensor, z: Tensor, weights: UpdateParams) -> None:
    """Fill ``out [R, N, 128]``, which may be ``z``, with ``z`` plus its update by ``product [128, R', W]``.

    All are contiguous, in bfloat16.
    """
    update, bias = _folded(
        weights.out_weight, weights.out_bias, weights.norm_out_weight, weights.norm_out_bias
    )
    gate, gate_bias = _folded(
        weights.out_gate_weight, weights.out_gate_bias, weights.norm_weight, weights.norm_bias
    )
    launch(triangle_output_gluon_kernel, (_programs(z),))(
        _descriptor(product, CHANNELS, 1, BM),
        _descriptor(z, 1, BM, CHANNELS),
        _descriptor(torch.cat((update, gate)), CHANNELS, CHANNELS),
        _descriptor(out, 1, BM, CHANNELS),
        *(torch.cat((bias, gate_bias)), *z.shape[:2], EPS),
        C=CHANNELS,
        BM=BM,
        STAGES=STAGES,
        num_warps=4,
        enable_fp_fusion=True,
    )
