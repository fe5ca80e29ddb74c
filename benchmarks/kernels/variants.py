"""Shipped launches of every kernel, recorded without a GPU."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.recording import as_chip, launches_replaced
from fastfold.kernels.common.float32_setting import float32_setting
from fastfold.kernels.common.layout import MAX_HEADS
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.common.tuning import FALLBACK, FLOAT32_VARIABLE, TF32X3, configurations
from fastfold.kernels.ops.attention import triton_bwd as attention_bwd
from fastfold.kernels.ops.attention import triton_fwd as attention_fwd
from fastfold.kernels.ops.gated_attention import triton_rows
from fastfold.kernels.ops.gated_attention.eager import RowBlock, Weights
from fastfold.kernels.ops.layer_norm.triton_bwd import layer_norm_backward
from fastfold.kernels.ops.layer_norm.triton_fwd import layer_norm_forward
from fastfold.kernels.ops.outer_product_mean import triton_bwd as outer_product_bwd
from fastfold.kernels.ops.outer_product_mean import triton_fwd as outer_product_fwd
from fastfold.kernels.ops.outer_product_mean.eager import OuterProductParams
from fastfold.kernels.ops.pair_bias.params import PairBiasParams
from fastfold.kernels.ops.pair_bias.triton_bwd import pair_bias_backward
from fastfold.kernels.ops.pair_bias.triton_fwd import pair_bias_forward
from fastfold.kernels.ops.residual_update.operands import UpdateOperands
from fastfold.kernels.ops.residual_update.triton_bwd import update_backward
from fastfold.kernels.ops.residual_update.triton_fwd import write_update
from fastfold.kernels.ops.transition import triton_bwd as transition_bwd
from fastfold.kernels.ops.transition import triton_fwd as transition_fwd
from fastfold.kernels.ops.transition.params import TransitionParams
from fastfold.kernels.ops.triangle_multiplication import triton_factors, triton_tiles, triton_update
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, UpdateParams


@dataclass(frozen=True)
class ChipClass:
    """GPUs that share their entries in the table."""

    architectures: tuple[int, ...]  #: Compute capabilities that the entries are built for
    #: Bytes of shared memory that a program may use (CUDA programming guide, table of compute capabilities)
    shared: int


CHIPS = {
    "sm_80": ChipClass((80,), 163 * 1024),
    "sm_90": ChipClass((90,), 227 * 1024),
    "sm_100": ChipClass((100,), 227 * 1024),
    "rtx": ChipClass((86, 89, 120), 99 * 1024),
    FALLBACK: ChipClass((80, 86, 89, 90, 100, 120), 99 * 1024),
}
"""Classes of chips by name; entries of the last serve all others too, so they fit into the smallest shared memory."""


ROW_WIDTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Padded rows that configurations of kernels whose programs hold whole rows ship for."""

WIDTHS = (16, 32, 64, 128, 256)
"""Padded channels that configurations of kernels with products ship for; a program holds whole rows in registers."""

ARITHMETICS = (
    ("fp32", torch.float32, "highest", "ieee"),
    (TF32X3, torch.float32, "highest", TF32X3),
    ("tf32", torch.float32, "high", "tf32"),
    ("bf16", torch.bfloat16, "highest", "ieee"),
    ("fp16", torch.float16, "highest", "ieee"),
)
"""Name, dtype, PyTorch's float32 setting, and ``input_precision`` of every arithmetic that kernels ship for."""

BLOCKS = frozenset(("BT", "BQ", "BK", "BM", "BH", "BO", "BI", "BJ", "BA", "BE", "BS"))
"""Names of the kernels' block sizes."""

NewTensor = Callable[..., Tensor]
"""Function that makes a tensor of a shape, without memory, in the dtype of the recorded launches."""


@dataclass(frozen=True)
class KernelVariant:
    """Kernel with the arguments of a launch, which decide its machine code."""

    #: Name in the table of results, with the variant's properties: ``attention_forward bf16 D=32 any``
    name: str
    kernel: Any  #: The ``triton.jit`` function
    arguments: tuple[Any, ...] = ()  #: Positional arguments of the launch; its tensors are without memory
    #: Keyword arguments: ``tl.constexpr`` ones, block sizes, ``num_warps``, ``num_stages``
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Class of chips of the configuration, a key of :data:`CHIPS`
    chip: str = FALLBACK

    @property
    def architectures(self) -> tuple[int, ...]:
        """Compute capabilities that the variant ships for."""
        return CHIPS[self.chip].architectures

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes by their names in the table of configurations."""
        return {name: x for name, x in self.options.items() if name in BLOCKS}

    @property
    def schedule(self) -> tuple[int, int]:
        """Number of warps of a program, and number of stages of its software pipelining."""
        return self.options["num_warps"], self.options["num_stages"]

    def defect(self, needs: Needs, architecture: int) -> str | None:
        """Return the reason why a configuration with these needs must not ship; None if it may.

        The needs are those of machine code for a compute capability, whose chips have a limit of shared memory.
        """
        if needs.spills:
            return f"{needs.spills} bytes per thread do not fit into registers"
        limit = max(one.shared for one in CHIPS.values() if architecture in one.architectures)
        return f"{needs.shared} of {limit} bytes of shared memory" if needs.shared > limit else None


def timed_entries(kernel: str, chip: str) -> set[tuple[str, int, int]]:
    """Return the configurations that a GPU has timed: blocks as in the tables of results, warps and stages."""
    return {
        (" ".join(f"{name}={size}" for name, size in entry.blocks.items()), entry.num_warps, entry.num_stages)
        for entry in configurations().get(kernel, {}).get(chip, {}).values()
        if entry.timed_on is not None
    }


@dataclass(frozen=True)
class Needs:
    """GPU resources that a compiled kernel needs.

    They are registers per thread, bytes of shared memory per program, and bytes per thread that do not fit into
    registers.
    """

    registers: int
    shared: int
    spills: int


def recorded_variants(
    launch: Callable[[NewTensor, int], object], size_name: str, sizes: Iterable[int], suffix: str = ""
) -> list[KernelVariant]:
    """Record the launches of a function in every arithmetic and size, for each class of chips.

    ``launch`` gets a function that makes tensors, and a size. A kernel that it launches twice counts once. The sizes
    are all that configurations ship for, and ``size_name`` and ``suffix`` stand around them in the names of the
    variants.
    """
    found: dict[str, KernelVariant] = {}
    for arithmetic, dtype, setting, precision in ARITHMETICS:
        new = functools.partial(torch.empty, dtype=dtype, device="meta")
        with _float32_products(setting, precision):
            for size, chip in itertools.product(sizes, CHIPS):
                with as_chip(chip) as entries, _recorded_launches() as launches:
                    launch(new, size)
                for kernel, arguments, options in launches:
                    name = kernel.__name__.removesuffix("_kernel")
                    if entries[name].used == chip and options.get("PRECISION", "ieee") == precision:
                        title = f"{name} {arithmetic} {size_name}={size} {suffix}{chip}"
                        found.setdefault(title, KernelVariant(title, kernel, arguments, options, chip))
    return list(found.values())


@contextmanager
def _recorded_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Record launches instead of running them: kernel, positional and keyword arguments."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def keep(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *arguments, **options: launches.append((kernel, arguments, options))

    with launches_replaced(keep):
        yield launches


@contextmanager
def _float32_products(setting: str, kernels: str) -> Iterator[None]:
    """Use PyTorch's setting for float32 products, and an arithmetic for those of our kernels."""
    before = float32_setting()
    torch.set_float32_matmul_precision(setting)
    try:
        with mock.patch.dict(os.environ, {FLOAT32_VARIABLE: kernels}):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


# Kernels of rows are recorded for rows along two axes that do not merge.


def _layer_norm_backward(new: NewTensor, c: int) -> None:
    x = new(16, 32, c)[:, :16]
    layer_norm_backward(x, x, new(c, dtype=torch.float32), 1e-5)


def _layer_norm_forward(new: NewTensor, c: int) -> None:
    parameter = new(c, dtype=torch.float32)
    layer_norm_forward(new(16, 32, c)[:, :16], parameter, parameter, 1e-5)


def _residual_update_backward(new: NewTensor, c: int) -> None:
    x = new(16, 32, c)[:, :16]
    update_backward(x, x, new(c), x, x, need_bias=True)


def _residual_update_forward(new: NewTensor, c: int) -> None:
    x = new(16, 32, c)[:, :16]
    write_update(x, UpdateOperands(x, x, new(c), x, x))


def _pair_bias_parameters(new: NewTensor, c: int) -> PairBiasParams:
    """Return parameters with heads that fill their block."""
    norm = new(c, dtype=torch.float32)
    return PairBiasParams(norm, norm, new(MAX_HEADS - 1, c))


def _pair_bias_backward(new: NewTensor, c: int) -> None:
    grad, z = new(MAX_HEADS - 1, 16, 17), new(16, 32, c)[:, :17]
    parameters = _pair_bias_parameters(new, c)
    pair_bias_backward(grad, z, parameters, 1e-5, need_z=True, need_parameters=True)


def _pair_bias_forward(new: NewTensor, c: int) -> None:
    pair_bias_forward(new(16, 32, c)[:, :17], _pair_bias_parameters(new, c), 1e-5)


def _transition_parameters(new: NewTensor, c: int) -> TransitionParams:
    w1, b1, norm = new(4 * c, c), new(4 * c), new(c, dtype=torch.float32)
    return TransitionParams(norm, norm, w1, b1, w1.t(), new(c))


def _transition_backward(new: NewTensor, c: int) -> None:
    x = new(16, c)
    transition_bwd.backward(x, x, _transition_parameters(new, c), True, ("x", "w1"))


def _transition_forward(new: NewTensor, c: int) -> None:
    x = new(16, c)
    transition_fwd.forward(x, x, _transition_parameters(new, c), x)


OUTER_CHANNELS = 32  #: Channels of a column in the networks that configurations ship for


def _outer_product(new: NewTensor, c_z: int, sequences: int = 32) -> tuple[OuterProductParams, Tensor]:
    """Return inputs and a result; a mask's rows are not aligned."""
    x, mask = new(sequences, 20, OUTER_CHANNELS), new(sequences, 20)
    weight = new(c_z, OUTER_CHANNELS**2)
    return OuterProductParams(x, x, mask, mask, weight, new(c_z)), new(20, 20, c_z)


def _outer_product_backward(new: NewTensor, c_z: int) -> None:
    x, pair = _outer_product(new, c_z)
    outer_product_bwd.backward(pair, x, 1e-3, ("left", "weight"))


def _outer_product_backward_deep(new: NewTensor, c_z: int) -> None:
    x, pair = _outer_product(new, c_z, outer_product_bwd.SHALLOW + 16)
    if x.left.dtype.itemsize == 2:
        outer_product_bwd.backward(pair, x, 1e-3, ("left",))


def _outer_product_forward(new: NewTensor, c_z: int) -> None:
    x, pair = _outer_product(new, c_z)
    shared = outer_product_fwd.RightSide(outer_product_fwd.masked(x.right, x.right_mask), *x[3:])
    outer_product_fwd.forward(shared, 1e-3, pair, x.left, x.left_mask, pair)


def _factor_parameters(new: NewTensor, c: int) -> FactorParams:
    norm, weight, bias = new(c, dtype=torch.float32), new(2 * c, c), new(2 * c)
    return FactorParams(norm, norm, weight, bias, weight, bias)


def _factors_backward(new: NewTensor, c: int) -> None:
    grad, z, mask, weights = new(2 * c, 16, 16), new(16, 16, c), new(16, 16), _factor_parameters(new, c)
    triton_factors.projection_backward(grad, z, mask, z, z, weights)
    triton_factors.projection_weights_backward(grad, z, mask, weights)


def _factors_forward(new: NewTensor, c: int) -> None:
    """Launch the kernel as the backward pass does."""
    projections, z, mask = new(2 * c, 16, 16), new(16, 16, c), new(16, 16)
    weights, split = _factor_parameters(new, c), z.dtype == torch.bfloat16
    triton_factors.project(projections, z, mask, weights, first=0, group=c, split=split)


def _update_parameters(new: NewTensor, c: int) -> UpdateParams:
    norm, weight, bias = new(c, dtype=torch.float32), new(c, c), new(c)
    return UpdateParams(norm, norm, norm, norm, weight, bias, weight, bias)


def _update_backward(new: NewTensor, c: int) -> None:
    product, z, weights = new(c, 16, 16), new(16, 16, c), _update_parameters(new, c)
    triton_update.output_backward(product, z, z, z, z, weights)
    triton_update.output_weights_backward(product, z, z, z, weights)


def _update_forward(new: NewTensor, c: int) -> None:
    z = new(16, 16, c)
    triton_update.write_update(z, new(c, 16, 16), z, _update_parameters(new, c), z, z)


def _tiles() -> list[KernelVariant]:
    """Record the kernels with tiles by descriptors, which serve one width in bfloat16 on Hopper."""
    new, c = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta"), triton_tiles.CHANNELS
    z, mask = new(16, 16, c), new(16, 16)
    with _recorded_launches() as launches:
        triton_tiles.project_tiles(new(2 * c, 16, 16), z, mask, _factor_parameters(new, c), 0, c)
        for dropout in (None, new(1, 16, c).expand_as(z)):
            weights = _update_parameters(new, c)
            triton_tiles.write_update_tiles(z, new(c, 16, 16), z, weights, z, dropout)
    # Both halves fold their weights by the same kernel.
    named = {}
    for kernel, arguments, options in launches:
        switch = "dropout " if options.get("HAS_DROPOUT") else ""
        name = f"{kernel.__name__.removesuffix('_kernel')} bf16 C={c} {switch}sm_90"
        named[name] = kernel, arguments, options
    return [KernelVariant(name, *one, "sm_90") for name, one in named.items()]


def _attention_rows() -> list[KernelVariant]:
    """Record the kernel for rows of gated attention, which serves two widths in bfloat16 on two classes of chips."""
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    heads = 4
    variants: list[KernelVariant] = []
    for (major, _), c in itertools.product(triton_rows.CAPABILITIES, triton_rows.WIDTHS):
        width, norm = heads * triton_rows.HEAD_CHANNELS, new(c, dtype=torch.float32)
        weights = Weights((norm, norm), new(4 * width, c), new(width), new(c, width), new(c))
        block = RowBlock(new(2, 32, c), new(heads, 32, 32), new(2, 32))
        with _recorded_launches() as launches:
            triton_rows.attend_rows(block, weights, heads, Scratch("meta", torch.bfloat16))
        chip = f"sm_{major}0"
        variants += [KernelVariant(f"gated_attention_rows bf16 C={c} {chip}", *one, chip) for one in launches]
    return variants


ATTENTION_CHANNELS = (8, 16, 32, 64, 128)  #: Channels of a head that configurations ship for


def _attention_backward(x: attention_fwd.TritonOperands) -> None:
    lse = x.q.new_empty(1, 4, 2, x.q.shape[2], dtype=torch.float32)
    grads = attention_bwd.Gradients(x.q, x.k, x.v, x.gate)
    attention_bwd.attend_backward_triton(x.q, x, x.q, lse, grads, 1.0, need_bias=True)


def _attention_forward(x: attention_fwd.TritonOperands) -> None:
    attention_fwd.attend_triton(torch.empty_like(x.q), x, 1.0)


def _attention(launch: Callable[[attention_fwd.TritonOperands], None]) -> list[KernelVariant]:
    """Record a launch for many queries, and for few if they have their own configuration."""

    def of(queries: int, suffix: str) -> list[KernelVariant]:
        def launch_one(new: NewTensor, channels: int) -> None:
            x, gate = new(1, 2, 32, 4, channels), new(1, 2, queries, 4, channels)
            bias, hidden = new(1, 4, queries, 32), new(1, 2, 32)
            launch(attention_fwd.TritonOperands(gate, x, x, bias, hidden, gate))

        return recorded_variants(launch_one, "D", ATTENTION_CHANNELS, suffix)

    plain = of(2 * attention_fwd.SHORT, "")
    known = {(x.name, str(x.options)) for x in plain}
    short = of(attention_fwd.SHORT, "short ")
    return plain + [x for x in short if (x.name.replace("short ", ""), str(x.options)) not in known]


@functools.cache
def all_variants() -> tuple[KernelVariant, ...]:
    """Return the shipped variants of the kernels of all operators."""
    return (
        *_attention(_attention_backward),
        *_attention(_attention_forward),
        *recorded_variants(_layer_norm_backward, "c", ROW_WIDTHS),
        *recorded_variants(_layer_norm_forward, "c", ROW_WIDTHS),
        *recorded_variants(_outer_product_backward, "C", WIDTHS),
        *recorded_variants(_outer_product_backward_deep, "C", WIDTHS, "deep "),
        *recorded_variants(_outer_product_forward, "C", WIDTHS),
        *recorded_variants(_pair_bias_backward, "c", WIDTHS),
        *recorded_variants(_pair_bias_forward, "c", WIDTHS),
        *recorded_variants(_residual_update_backward, "c", ROW_WIDTHS),
        *recorded_variants(_residual_update_forward, "c", ROW_WIDTHS),
        *recorded_variants(_transition_backward, "C", WIDTHS),
        *recorded_variants(_transition_forward, "C", WIDTHS),
        *recorded_variants(_factors_backward, "C", WIDTHS),
        *recorded_variants(_factors_forward, "C", WIDTHS),
        *recorded_variants(_update_backward, "C", WIDTHS),
        *recorded_variants(_update_forward, "C", WIDTHS),
        *_tiles(),
        *_attention_rows(),
    )
