"""Update of the pair by contracted edges, for any rows and columns: the end of a triangle multiplication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_backend
from fastfold.kernels.common.cost import (
    Arguments,
    OperatorCost,
    projection_flops,
    size_in_bytes,
)
from fastfold.kernels.common.operator import Backward, define_operator
from fastfold.kernels.common.parameters import cast_grads
from fastfold.kernels.common.scratch import accumulation_dtype, refuse_gradients
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import passes
from fastfold.kernels.ops.triangle_multiplication.params import UpdateParams


def triangle_update_definition(product: Tensor, z: Tensor, **parameters: Tensor) -> Tensor:
    """Compute :func:`triangle_update` by its specification, from its :class:`~.params.UpdateParams`."""
    exact = accumulation_dtype(z)
    w = UpdateParams(**{name: x.to(exact) for name, x in parameters.items()})
    x = layer_norm_definition(z.to(exact), w.norm_weight, w.norm_bias)
    out = layer_norm_definition(product.to(exact).movedim(-3, -1), w.norm_out_weight, w.norm_out_bias)
    out = linear(out, w.out_weight, w.out_bias)
    return (out * linear(x, w.out_gate_weight, w.out_gate_bias).sigmoid()).to(z.dtype)


def _forward(
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


def _fake(product: Tensor, z: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(z)


def _backward(
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
    how: dict[str, Any] = {"dropout": dropout, "normed": normed, "backend": backend}
    grads = passes.update_backward(grad, product, z, group, **how)
    if add_z and not normed:
        grads[1] += grad
    return cast_grads(grads, (product, z, *parameters), needs)


def _cost(call: Arguments) -> OperatorCost:
    w = UpdateParams(*call["parameters"])
    return OperatorCost(projection_flops(call["z"], w.out_weight, w.out_gate_weight))


def _backward_cost(call: Arguments) -> OperatorCost:
    size = size_in_bytes(call["z"])  # a copy of the product's gradient, and the gradient of the normalised z
    launches = 3 if call.get("normed") else 4
    return OperatorCost(3 * _cost(call).flops, 2 * size, size, launches)


_triangle_update = define_operator(
    "triangle_update",
    _forward,
    Backward(_backward, ("product", "z", "parameters"), cost=_backward_cost, constants={"normed": False}),
    fake=_fake,
    cost=_cost,
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
        ConfigError: The backend does not exist or cannot run here.
        RuntimeError: Gradients would have to be recorded through ``out``.
    """
    backend = products_backend(z, max(parameters.out_weight.shape), backend)
    if out is None:
        return _triangle_update(product, z, dropout, parameters, add_z, backend)
    refuse_gradients(product, z, *parameters)
    return passes.update(out, product, z, parameters, dropout=dropout, add_z=add_z, backend=backend)
