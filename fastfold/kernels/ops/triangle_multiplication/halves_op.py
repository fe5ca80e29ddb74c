"""Both halves of a triangle multiplication as operators, for any rows and columns of the pair.

A caller that splits the pair over several devices contracts the factors itself. ``triangle_factors``, the contraction
and ``triangle_update`` are the whole operator ``triangle_multiplication``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, projection_flops, size_in_bytes
from fastfold.kernels.common.layout import MAX_CHANNELS
from fastfold.kernels.common.operator import BackwardPass, define_operator
from fastfold.kernels.common.parameters import cast_grads, needed_names
from fastfold.kernels.common.scratch import accumulation_dtype, refuse_gradients
from fastfold.kernels.common.shapes import axes_of, check_shapes
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import passes
from fastfold.kernels.ops.triangle_multiplication.params import (
    FactorParams,
    UpdateParams,
    factor_shapes,
    update_shapes,
)


def triangle_factors_definition(z: Tensor, mask: Tensor, **parameters: Tensor) -> Tensor:
    """Compute :func:`triangle_factors` by its specification, from its :class:`~.params.FactorParams`."""
    exact = accumulation_dtype(z)
    w = FactorParams(**{name: x.to(exact) for name, x in parameters.items()})
    x = layer_norm_definition(z.to(exact), w.norm_weight, w.norm_bias)
    p = mask.to(exact)[..., None] * linear(x, w.proj_weight, w.proj_bias)
    p = p * linear(x, w.gate_weight, w.gate_bias).sigmoid()
    return p.movedim(-1, -3).to(z.dtype)


def _factors(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    factors = _fake_factors(z, mask, parameters, backend)
    passes.factors(factors, z, mask, FactorParams(*parameters), backend=backend)
    return factors


def _fake_factors(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    channels = FactorParams(*parameters).proj_weight.shape[0]
    return z.new_empty(*z.shape[:-3], channels, *z.shape[-3:-1])


def _factors_backward(
    grad: Tensor,
    z: Tensor,
    mask: Tensor,
    parameters: Sequence[Tensor],
    others: Sequence[Tensor],
    needs: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    """Return gradients of ``z`` and the parameters; empty tensors for those not needed.

    ``others`` are gradients to add: none, one of ``z``, or one of ``z`` and one of the normalised ``z``.
    """
    add, grad_normed = [*others, None, None][:2]
    group = FactorParams(*parameters)
    needed = needed_names(("z", *group._fields), needs)
    grads = passes.factors_backward(
        *(grad, z, mask, group), grad_normed=grad_normed, add=add, needed=needed, backend=backend
    )
    return cast_grads(grads, (z, *parameters), needs)


def _factors_cost(call: Arguments) -> OperatorCost:
    w = FactorParams(*call["parameters"])
    return OperatorCost(projection_flops(call["z"], w.proj_weight, w.gate_weight))


def _factors_backward_cost(call: Arguments) -> OperatorCost:
    return OperatorCost(3 * _factors_cost(call).flops, launches=2)


_triangle_factors = define_operator(
    "triangle_factors",
    _factors,
    BackwardPass(
        _factors_backward, ("z", "parameters"), cost=_factors_backward_cost, constants={"others": []}
    ),
    fake=_fake_factors,
    cost=_factors_cost,
)


def triangle_factors(
    z: Tensor, mask: Tensor, parameters: FactorParams, *, backend: str | None = None
) -> Tensor:
    """Compute factors of a triangle multiplication: ``mask · (LN(z) Pᵀ + b) · sigmoid(LN(z) Gᵀ + g)``, channels first.

    These are the first lines of AlphaFold's supplement, algorithms 11 and 12, for any rows and columns of the pair.

    Args:
        z: Part of the pair representation, ``[*, R, N, c_z]``.
        mask: ``[*, R, N]``, 1 for pairs to use and 0 otherwise. Gets no gradient.
        parameters: P, b, G, g and those of the normalisation.
        backend: ``auto``, ``triton`` (up to 256 channels; more use PyTorch) or ``torch``.

    Returns:
        ``[*, 2 c, R, N]`` in the dtype of ``z``: the channels of the left factor before those of the right one.

    Raises:
        InputError: A shape does not match that of ``z``.
        ConfigError: The backend does not exist or cannot run here.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import FactorParams, triangle_factors
        >>> layers = nn.ModuleList([nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(16, 8)])
        >>> norm, project, gate = layers
        >>> z, mask = torch.randn(5, 6, 16), torch.ones(5, 6)
        >>> found = triangle_factors(z, mask, FactorParams(*layers.parameters()))
        >>> plain = mask[..., None] * project(norm(z)) * gate(norm(z)).sigmoid()
        >>> torch.allclose(found, plain.permute(2, 0, 1), atol=1e-5)
        True
    """
    c_z = axes_of("triangle_factors", "z", z.shape, "R, N, c_z", z.dtype)[-1]
    factors = axes_of("triangle_factors", "proj_bias", parameters.proj_bias.shape, "2 c")[-1]
    of_parameters = zip(
        parameters._fields, (p.shape for p in parameters), factor_shapes(c_z, factors), strict=True
    )
    check_shapes("triangle_factors", "z", z.shape, (("mask", mask.shape, z.shape[:-1]), *of_parameters))
    return _triangle_factors(
        z, mask, parameters, choose_backend(z, backend, fits=z.shape[-1] <= MAX_CHANNELS)
    )


def triangle_update_definition(product: Tensor, z: Tensor, **parameters: Tensor) -> Tensor:
    """Compute :func:`triangle_update` by its specification, from its :class:`~.params.UpdateParams`."""
    exact = accumulation_dtype(z)
    w = UpdateParams(**{name: x.to(exact) for name, x in parameters.items()})
    x = layer_norm_definition(z.to(exact), w.norm_weight, w.norm_bias)
    out = layer_norm_definition(product.to(exact).movedim(-3, -1), w.norm_out_weight, w.norm_out_bias)
    out = linear(out, w.out_weight, w.out_bias)
    return (out * linear(x, w.out_gate_weight, w.out_gate_bias).sigmoid()).to(z.dtype)


def _update(
    product: Tensor,
    z: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    add_z: bool,
    backend: str,
) -> Tensor:
    group = UpdateParams(*parameters)
    return passes.update(
        torch.empty_like(z), product, z, group, dropout=dropout, add_z=add_z, backend=backend
    )


def _fake_update(product: Tensor, z: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(z)


def _update_backward(
    grad: Tensor,
    product: Tensor,
    z: Tensor,
    dropout: Tensor | None,
    parameters: Sequence[Tensor],
    *,
    add_z: bool,
    needs: Sequence[bool],
    backend: str,
    normed: bool = False,
) -> list[Tensor]:
    """Return gradients of ``product``, ``z`` and the parameters; empty tensors for those not needed.

    With ``normed``, the gradient of the normalised ``z`` replaces that of ``z``, for callers that continue with it. It
    then includes nothing of the norm or of ``add_z``.
    """
    group = UpdateParams(*parameters)
    needed = needed_names(("product", "z", *group._fields), needs)
    grads = passes.update_backward(
        *(grad, product, z, group), dropout=dropout, normed=normed, needed=needed, backend=backend
    )
    if add_z and not normed:
        assert grads[1] is not None
        grads[1] += grad
    return cast_grads(grads, (product, z, *parameters), needs)


def _update_cost(call: Arguments) -> OperatorCost:
    w = UpdateParams(*call["parameters"])
    return OperatorCost(projection_flops(call["z"], w.out_weight, w.out_gate_weight))


def _update_backward_cost(call: Arguments) -> OperatorCost:
    size = size_in_bytes(call["z"])  # a copy of the product's gradient, and the gradient of the normalised z
    launches = 3 if call.get("normed") else 4
    return OperatorCost(3 * _update_cost(call).flops, 2 * size, size, launches)


_triangle_update = define_operator(
    "triangle_update",
    _update,
    BackwardPass(
        _update_backward,
        ("product", "z", "parameters"),
        cost=_update_backward_cost,
        constants={"normed": False},
    ),
    fake=_fake_update,
    cost=_update_cost,
)


def triangle_update(
    product: Tensor,
    z: Tensor,
    parameters: UpdateParams,
    *,
    add_z: bool = False,
    dropout: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the pair's update by contracted edges: ``(LN(product) Oᵀ + o) · sigmoid(LN(z) Ogᵀ + og)``.

    These are the last lines of AlphaFold's supplement, algorithms 11 and 12, for any rows and columns of the pair.

    Args:
        product: Contracted edges ``[*, c, R, N]``.
        z: Part of the pair representation, ``[*, R, N, c_z]``.
        parameters: O, o, Og, og and those of both normalisations.
        add_z: True to add ``z`` to the update.
        dropout: Factors of the update that broadcast against ``z`` (zero or 1 / keep rate). Gets no gradient.
        out: Tensor for the result, without recording gradients; may be ``z``.
        backend: ``auto``, ``triton`` (up to 256 channels; more use PyTorch) or ``torch``.

    Returns:
        The update ``[*, R, N, c_z]``, plus ``z`` if asked for, in the dtype of ``z``.

    Raises:
        InputError: A shape does not match that of ``z``.
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.kernels import UpdateParams, triangle_update
        >>> layers = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 16)])
        >>> norm, norm_out, output, gate = layers
        >>> z, product = torch.randn(5, 6, 16), torch.randn(8, 5, 6)
        >>> found = triangle_update(product, z, UpdateParams(*layers.parameters()), add_z=True)
        >>> plain = output(norm_out(product.permute(1, 2, 0))) * gate(norm(z)).sigmoid()
        >>> torch.allclose(found, z + plain, atol=1e-5)
        True
    """
    *lead, rows, columns, c_z = axes_of("triangle_update", "z", z.shape, "R, N, c_z", z.dtype)
    c = axes_of("triangle_update", "out_weight", parameters.out_weight.shape, "c_z, c")[-1]
    wanted = (
        ("product", product.shape, (*lead, c, rows, columns)),
        ("out", None if out is None else out.shape, z.shape),
        *zip(parameters._fields, (p.shape for p in parameters), update_shapes(c_z, c), strict=True),
    )
    check_shapes("triangle_update", "z", z.shape, wanted)
    backend = choose_backend(z, backend, fits=max(parameters.out_weight.shape) <= MAX_CHANNELS)
    if out is None:
        return _triangle_update(product, z, dropout, parameters, add_z, backend)
    refuse_gradients(product, z, *parameters)
    return passes.update(out, product, z, parameters, dropout=dropout, add_z=add_z, backend=backend)
