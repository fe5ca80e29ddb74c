"""Bias of attention heads from a pair tensor: layer normalisation and projection in one pass."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, projection_flops
from fastfold.kernels.common.layout import MAX_CHANNELS, MAX_HEADS
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.parameters import cast_grads, empty_grads, with_exact_norms
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    block_positions,
    gradient_positions,
    normalize,
    normalize_backward,
    normalize_to,
    position_blocks,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.cpu.block_threads import for_positions, sum_blocks
from fastfold.kernels.cpu.linear import add_product, gradient_dtype
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.pair_bias.params import PairBiasParams

EPS = 1e-5


def pair_bias_definition(z: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    """Compute :func:`pair_bias` by its specification."""
    exact = accumulation_dtype(z)
    normed = layer_norm_definition(z.to(exact), norm_weight, norm_bias)
    return linear(normed, weight.to(exact)).movedim(-1, -3).to(z.dtype)


def _blocks(size: int, bias: Tensor, *pairs: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of ``size`` positions of ``[A, B, c]`` tensors, after their columns of ``bias [H, A, B]``."""
    columns, start = bias.flatten(1), 0
    for parts in position_blocks(size, *pairs):
        yield columns[:, start : start + len(parts[0])], *parts
        start += len(parts[0])


def _forward(z: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    group = PairBiasParams(*parameters)
    if backend == "triton":
        return _by_triton(z, group)
    norm_weight, norm_bias, weight = with_exact_norms(group, z.dtype)
    norm = norm_weight, norm_bias
    if z.dim() == 3 and z.is_contiguous() and 0 < z.numel() <= block_positions(z.shape[-1]) * z.shape[-1]:
        normed = normalize_to(z.dtype, z, norm, EPS).flatten(0, 1)
        return torch.mm(weight, normed.t()).view(weight.shape[0], *z.shape[:2])
    out = _fake(z, parameters, backend)

    for i in itertools.product(*map(range, z.shape[:-3])):
        columns = out[i].flatten(1)

        def block(scratch: Scratch, positions: slice, b_z: Tensor, columns: Tensor = columns) -> None:
            columns[:, positions] = weight @ normalize_to(z.dtype, b_z, norm, EPS).t()

        for_positions(block, z.shape[-1], Scratch().of(z), z[i])
    return out


def _by_triton(z: Tensor, group: PairBiasParams, *, multiple: int = 1) -> Tensor:
    """Compute the bias, with rows that begin at multiples of some elements."""
    from fastfold.kernels.ops.pair_bias.triton_fwd import pair_bias_forward

    return pair_bias_forward(z, group._replace(weight=group.weight.to(z.dtype)), EPS, multiple=multiple)


def _fake(z: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    heads = PairBiasParams(*parameters).weight.shape[0]
    return z.new_empty(*z.shape[:-3], heads, *z.shape[-3:-1])


def _backward(
    grad: Tensor, z: Tensor, parameters: Sequence[Tensor], needs: Sequence[bool], backend: str
) -> list[Tensor]:
    """Return gradients of ``z``, contiguous, and the parameters; empty tensors for those not needed."""
    exact = accumulation_dtype(z)
    if backend == "triton":
        from fastfold.kernels.ops.pair_bias.triton_bwd import pair_bias_backward

        need_z, *need_each = needs
        group = PairBiasParams(*parameters)
        group = group._replace(weight=group.weight.to(z.dtype))
        grads = pair_bias_backward(grad, z, group, EPS, need_z=need_z, need_parameters=any(need_each))
        return cast_grads(grads, (z, *parameters), needs)
    dtype = gradient_dtype(z)
    norm_weight, norm_bias, weight = (
        p.to(to) for p, to in zip(parameters, (exact, exact, dtype), strict=True)
    )
    totals = [torch.zeros_like(p, dtype=exact) for p in parameters]
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)

    def block(
        scratch: Scratch, totals: Sequence[Tensor], b_grad: Tensor, b_z: Tensor, b_grad_z: Tensor
    ) -> None:
        b_grad, b_z = b_grad.to(dtype), b_z.to(dtype)
        b_normed, *statistics = normalize(b_z, norm_weight, norm_bias, EPS)
        add_product(totals[2], b_grad, b_normed, scratch, z)
        b_grad_normed = torch.mm(b_grad.t(), weight, out=scratch("grad_normed", *b_z.shape))
        b_grad_z.copy_(
            normalize_backward(b_grad_normed, b_z, statistics, norm_weight, norm_bias, *totals[:2])
        )

    scratch = Scratch().of(z, dtype)
    size = gradient_positions(z.shape[-1], z.shape[-3:-1].numel(), dtype)
    for i in itertools.product(*map(range, z.shape[:-3])):
        sum_blocks(block, _blocks(size, grad[i], z[i], grad_z[i]), scratch, totals)
    return cast_grads([grad_z, *totals], (z, *parameters), needs)


def _backward_fake(call: Arguments) -> list[Tensor]:
    z = call["z"]
    return empty_grads((z.new_empty(z.shape), *call["parameters"]), call["needs"])


def _cost(call: Arguments) -> OperatorCost:
    return OperatorCost(projection_flops(call["z"], PairBiasParams(*call["parameters"]).weight))


def _backward_cost(call: Arguments) -> OperatorCost:
    return OperatorCost(2 * _cost(call).flops, launches=2)


@functools.lru_cache(maxsize=1024)
def _check(dtype: torch.dtype, z: Shape, norm_weight: Shape, norm_bias: Shape, weight: Shape) -> None:
    channels = axes_of("pair_bias", "z", z, "A, B, c", dtype)[-1:]
    wanted = (
        ("norm_weight", norm_weight, channels),
        ("norm_bias", norm_bias, channels),
        ("weight", weight, (*weight[:1], *channels)),
    )
    check_shapes("pair_bias", "z", z, wanted)


_pair_bias = define_operator(
    "pair_bias",
    _forward,
    BackwardPass(_backward, ("z", "parameters"), fake=_backward_fake, cost=_backward_cost),
    fake=_fake,
    cost=_cost,
)


def pair_bias(
    z: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    *,
    aligned: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``LN(z) Wᵀ`` with the heads first, as attention reads it (supplement algorithms 7, 13 and 14).

    Args:
        z: ``[*, A, B, c]``, any strides.
        norm_weight: ``[c]``, scale of the normalisation.
        norm_bias: ``[c]``, its shift.
        weight: W ``[H, c]``.
        aligned: If no gradients are recorded, let Triton pad rows as :func:`~fastfold.kernels.attention_bias` needs
            them, so that it need not copy them.
        backend: As in :func:`fastfold.kernels.common.backend.choose_backend`; more than 256 channels or 16 heads always
            use PyTorch.

    Returns:
        ``[*, H, A, B]`` in the dtype of ``z``.

    Raises:
        InputError: A shape does not match that of ``z``.
        ConfigError: The backend does not exist or cannot run here.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import pair_bias
        >>> norm, heads, z = nn.LayerNorm(16), nn.Linear(16, 4, bias=False), torch.randn(5, 5, 16)
        >>> bias = pair_bias(z, norm.weight, norm.bias, heads.weight)
        >>> torch.allclose(bias, heads(norm(z)).permute(2, 0, 1), atol=1e-5)
        True
    """
    check = _check if type(z) is Tensor and not is_dynamo_compiling() else _check.__wrapped__
    check(z.dtype, z.shape, norm_weight.shape, norm_bias.shape, weight.shape)
    fits = weight.shape[1] <= MAX_CHANNELS and weight.shape[0] <= MAX_HEADS
    chosen = choose_backend(z, backend, fits=fits)
    parameters = [norm_weight, norm_bias, weight]
    if aligned and chosen == "triton" and not torch.is_grad_enabled():
        # Outside the operator, whose results are always contiguous.
        return without_autocast(_by_triton)(z, PairBiasParams(*parameters), multiple=16)
    return _pair_bias(z, parameters, chosen)
