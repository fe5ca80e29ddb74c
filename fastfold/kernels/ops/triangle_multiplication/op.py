"""Triangle multiplication: every edge is updated from the other two edges of all triangles that it is part of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from fastfold.kernels.common import cuequivariance
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, size_in_bytes
from fastfold.kernels.common.layout import MAX_CHANNELS, SMALL_PRODUCT
from fastfold.kernels.common.operator import BackwardPass, define_operator, kept_memory
from fastfold.kernels.common.parameters import needed_names
from fastfold.kernels.common.scratch import (
    Scratch,
    accumulation_dtype,
    autocast_is_enabled,
    refuse_gradients,
    without_autocast,
)
from fastfold.kernels.common.shapes import Shape, axes_of, check_shapes
from fastfold.kernels.cpu.linear import can_keep
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import passes
from fastfold.kernels.ops.triangle_multiplication.eager import keeps_projections
from fastfold.kernels.ops.triangle_multiplication.params import (
    FACTOR_LAYERS,
    UPDATE_LAYERS,
    TriangleParams,
    factor_shapes,
    update_shapes,
)
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan


def triangle_multiplication_definition(
    z: Tensor, mask: Tensor, *, outgoing: bool, **parameters: Tensor
) -> Tensor:
    """Compute :func:`triangle_multiplication` by its specification, from its :class:`~.params.TriangleParams`."""
    exact = accumulation_dtype(z)
    w = TriangleParams(**{name: x.to(exact) for name, x in parameters.items()})
    x = layer_norm_definition(z.to(exact), w.norm_in_weight, w.norm_in_bias)
    p = mask.to(exact)[..., None] * linear(x, w.proj_weight, w.proj_bias)
    p = p * linear(x, w.gate_weight, w.gate_bias).sigmoid()
    left, right = p.chunk(2, dim=-1)
    if outgoing:
        out = torch.einsum("...ikc,...jkc->...ijc", left, right)
    else:
        out = torch.einsum("...kjc,...kic->...ijc", left, right)
    out = linear(layer_norm_definition(out, w.norm_out_weight, w.norm_out_bias), w.out_weight, w.out_bias)
    return (out * linear(x, w.out_gate_weight, w.out_gate_bias).sigmoid()).to(z.dtype)


def _forward(
    z: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    outgoing: bool,
    add_z: bool,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the result, and with ``keep`` the projections for the backward pass."""
    memory = _empty_kept(z, parameters, keep)
    out = passes.forward(
        torch.empty_like(z),
        z,
        mask,
        TriangleParams(*parameters),
        residual=z if add_z else residual,
        dropout=dropout,
        outgoing=outgoing,
        backend=backend,
        kept=memory if keep else None,
    )
    return out, memory


def _empty_kept(z: Tensor, parameters: Sequence[Tensor], keep: bool) -> Tensor:
    count = 4 * TriangleParams(*parameters).channels * z.shape[:-1].numel()
    return z.new_empty(count if keep else 0)


def _fake(
    z: Tensor,
    mask: Tensor,
    residual: Tensor | None,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    keep: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), _empty_kept(z, parameters, keep)


def triangle_flops(positions: int, length: int, c_z: int, c: int) -> tuple[float, float]:
    """Return operations of :func:`triangle_multiplication`: up to the product, and after it.

    Pairs of all batch elements are ``positions``, residues ``length``.
    """
    return 2.0 * positions * c * (4 * c_z + length), 2.0 * positions * c_z * (c + c_z)


def _flops(call: Arguments) -> tuple[float, float]:
    *positions, length, c_z = call["z"].shape
    return triangle_flops(
        math.prod(positions) * length, length, c_z, TriangleParams(*call["parameters"]).channels
    )


def _cost(call: Arguments) -> OperatorCost:
    # As in the docstring of the operator.
    workspace = 2.0 * size_in_bytes(call["z"])
    return OperatorCost(sum(_flops(call)), 2 * workspace, workspace, 3)


def _backward_cost(call: Arguments) -> OperatorCost:
    group = TriangleParams(*call["parameters"])
    needed = needed_names(("z", *group._fields), call["needs"])
    up_to_product, rest = _flops(call)
    n, c = call["z"].shape[-2], group.channels
    flops = 3 * up_to_product + 2 * rest
    if needed.isdisjoint(FACTOR_LAYERS):
        flops -= 8.0 * math.prod(call["z"].shape) * c
    if needed.isdisjoint(UPDATE_LAYERS):
        flops -= rest
    tensors = 4.0 if c * n * n < SMALL_PRODUCT else 3.125
    if call["out"]:
        flops -= 8.0 * math.prod(call["z"].shape) * c
    elif call["backend"] == "torch" and keeps_projections(c, n * n):
        tensors = 7.0
    workspace = tensors * size_in_bytes(call["z"])
    return OperatorCost(flops, 2 * workspace, workspace, 8)


@functools.lru_cache(maxsize=1024)
def _check(
    dtype: torch.dtype,
    z: Shape,
    mask: Shape,
    residual: Shape | None,
    out: Shape | None,
    *parameters: Shape,
) -> None:
    name = "triangle_multiplication"
    *lead, length, _, c_z = axes_of(name, "z", z, "N, N, c_z", dtype)
    c = axes_of(name, "out_weight", parameters[TriangleParams._fields.index("out_weight")], "c_z, c")[-1]
    shapes = *factor_shapes(c_z, 2 * c), *update_shapes(c_z, c)[2:]
    wanted = (
        ("z", z, (*lead, length, length, c_z)),
        ("mask", mask, z[:-1]),
        ("residual", residual, z),
        ("out", out, z),
        *zip(TriangleParams._fields, parameters, shapes, strict=True),
    )
    check_shapes(name, "z", z, wanted)


_triangle_multiplication = define_operator(
    "triangle_multiplication",
    _forward,
    BackwardPass(
        passes.backward,
        ("z", "parameters"),
        cost=_backward_cost,
        residual="residual",
        saved_result=kept_memory,
    ),
    fake=_fake,
    cost=_cost,
)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    parameters: TriangleParams,
    *,
    outgoing: bool,
    residual: Tensor | None = None,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
    plan: ContractionPlan | None = None,
    keep: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Update the pair representation by triangle multiplication (AlphaFold supplement, algorithms 11 and 12).

    With ``x = LN(z)`` and ``left, right = chunk(mask · (x Pᵀ + b) · sigmoid(x Gᵀ + g))``, the contraction is
    ``out[i, j] = Σ_k left[i, k] · right[j, k]`` (outgoing) or ``Σ_k left[k, j] · right[k, i]`` (incoming, in
    the order of AlphaFold's own program), and the update ``(LN(out) Oᵀ + o) · sigmoid(x Ogᵀ + og)``.

    Memory in addition to inputs and result, in pair tensors ``[N, N, c]`` of one batch element:

    - Forward, Triton: 2 (the product, and the factors of half its channels), or 1.5 from N² c = 2²⁷ on (of a quarter).
    - Forward, PyTorch: 1.5, or as given by a plan
      (:func:`~fastfold.kernels.ops.triangle_multiplication.passes.contraction_bytes`).
    - Backward, Triton: 3 and an eighth, in the dtype of ``z``.
    - Backward, PyTorch: 3, or 7 up to N² c = 2²³, in float32 or in the dtype of the CPU's units, as is the gradient
      of ``z``.

    Args:
        z: Pair representation ``[*, N, N, c_z]``.
        mask: ``[*, N, N]``, 1 for pairs to use and 0 otherwise. Gets no gradient.
        parameters: P, b, G, g, O, o, Og, og and those of both normalisations.
        outgoing: True for the outgoing contraction, False for the incoming one.
        residual: ``[*, N, N, c_z]`` to add to the update, usually ``z`` itself.
        dropout: Factors of the update that broadcast against ``z`` (zero or 1 / keep rate). Gets no gradient.
        out: Tensor for the result, without recording gradients; may be ``z`` or ``residual``.
        scratch: With ``out``: buffers to use, which the next operator can reuse.
        plan: With ``out``: number of factors at a time, and place of the product.
        keep: While gradients of a single pair representation are recorded, let PyTorch's path keep projections for the
            backward pass, which has less to compute then: 4 c numbers for each pair.
        backend: ``auto``, ``triton`` (up to 256 channels; more use PyTorch), ``torch`` or ``cueq`` (NVIDIA's
            cuEquivariance).

    Returns:
        The update ``[*, N, N, c_z]``, plus the residual, in the dtype of ``z``.

    Raises:
        InputError: A shape does not match that of ``z``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold import kernels
        >>> factors = [nn.LayerNorm(16), nn.Linear(16, 2 * 8), nn.Linear(16, 2 * 8)]
        >>> update = [nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 16)]
        >>> parameters = kernels.TriangleParams(*nn.ModuleList(factors + update).parameters())
        >>> z, mask = torch.randn(5, 5, 16), torch.ones(5, 5)
        >>> left, right = kernels.triangle_factors(z, mask, parameters.factors).chunk(2)
        >>> plain = kernels.triangle_update(left @ right.mT, z, parameters.update)
        >>> found = kernels.triangle_multiplication(z, mask, parameters, outgoing=True)
        >>> torch.allclose(found, plain, atol=1e-5)
        True
    """
    check = _check if type(z) is Tensor and not is_dynamo_compiling() else _check.__wrapped__
    of_residual = None if residual is None else residual.shape
    of_out = None if out is None else out.shape
    check(z.dtype, z.shape, mask.shape, of_residual, of_out, *map(getattr, parameters, repeat("shape")))
    if out is not None and torch.is_grad_enabled():
        refuse_gradients(z, residual, *parameters)
    backend = choose_backend(z, backend, fits=max(parameters.out_weight.shape) <= MAX_CHANNELS, cueq=True)
    if backend == "cueq":
        cuequivariance.check_support(z)
        update = cuequivariance.triangle_multiplication(z, mask, parameters, outgoing)
        return cuequivariance.add_to_residual(update, residual, dropout, out=out)
    if out is None:
        added = (None if residual is z else residual, dropout)
        keep = keep and z.dim() == 3 and backend == "torch" and can_keep(z)
        options: dict[str, Any] = {
            "outgoing": outgoing,
            "add_z": residual is z,
            "keep": keep,
            "backend": backend,
        }
        return _triangle_multiplication(z, mask, *added, parameters, **options)[0]
    compute = without_autocast(passes.forward) if autocast_is_enabled() else passes.forward
    return compute(
        out,
        z,
        mask,
        parameters,
        residual=residual,
        dropout=dropout,
        outgoing=outgoing,
        backend=backend,
        scratch=scratch,
        plan=plan,
    )
