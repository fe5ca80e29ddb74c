"""Factors of a triangle multiplication, for any rows and columns of the pair.

A caller that splits the pair over several devices contracts the factors itself. With ``triangle_update`` after the
contraction, this is the whole operator ``triangle_multiplication``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.common.backend import products_backend
from fastfold.kernels.common.cost import Arguments, OperatorCost, projection_flops
from fastfold.kernels.common.operator import Backward, define_operator
from fastfold.kernels.common.parameters import cast_grads
from fastfold.kernels.common.scratch import accumulation_dtype
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition
from fastfold.kernels.ops.triangle_multiplication import passes
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams


def triangle_factors_definition(z: Tensor, mask: Tensor, **parameters: Tensor) -> Tensor:
    """Compute :func:`triangle_factors` by its specification, from its :class:`~.params.FactorParams`."""
    exact = accumulation_dtype(z)
    w = FactorParams(**{name: x.to(exact) for name, x in parameters.items()})
    x = layer_norm_definition(z.to(exact), w.norm_weight, w.norm_bias)
    p = mask.to(exact)[..., None] * linear(x, w.proj_weight, w.proj_bias)
    p = p * linear(x, w.gate_weight, w.gate_bias).sigmoid()
    return p.movedim(-1, -3).to(z.dtype)


def _forward(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    factors = _fake(z, mask, parameters, backend)
    passes.factors(factors, z, mask, FactorParams(*parameters), backend=backend)
    return factors


def _fake(z: Tensor, mask: Tensor, parameters: Sequence[Tensor], backend: str) -> Tensor:
    channels = FactorParams(*parameters).proj_weight.shape[0]
    return z.new_empty(*z.shape[:-3], channels, *z.shape[-3:-1])


def _backward(
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
    grads = passes.factors_backward(grad, z, mask, group, grad_normed=grad_normed, add=add, backend=backend)
    return cast_grads(grads, (z, *parameters), needs)


def _cost(call: Arguments) -> OperatorCost:
    w = FactorParams(*call["parameters"])
    return OperatorCost(projection_flops(call["z"], w.proj_weight, w.gate_weight))


def _backward_cost(call: Arguments) -> OperatorCost:
    return OperatorCost(3 * _cost(call).flops, launches=2)


_triangle_factors = define_operator(
    "triangle_factors",
    _forward,
    Backward(_backward, ("z", "parameters"), cost=_backward_cost, constants={"others": []}),
    fake=_fake,
    cost=_cost,
)


def triangle_factors(
    z: Tensor,
    mask: Tensor,
    parameters: FactorParams,
    *,
    backend: str | None = None,
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
        ConfigError: The backend does not exist or cannot run here.
    """
    return _triangle_factors(z, mask, parameters, products_backend(z, z.shape[-1], backend))
