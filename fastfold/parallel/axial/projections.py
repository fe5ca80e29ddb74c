"""Two projections of one normalised tensor; the second is computed while the first is sent to other ranks.

Only the tensor itself is kept for the backward pass; it is normalised once in either direction. The backward pass of
the second is computed while the gradient of the first is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.layout import MAX_ROW_LENGTH
from fastfold.kernels.common.scratch import without_autocast
from fastfold.parallel.comm.collectives import first_order

_EPS = 1e-5


@dataclass
class _Shared:
    """Tensors that one projection computes for the other.

    ``grad`` is the gradient of the normalised tensor from the second projection.
    """

    backend: str
    normed: Tensor | None = None
    grad: Tensor | None = None

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        tensors, self.normed, self.grad = (self.normed, self.grad), None, None
        return tensors


def _normalize(x: Tensor, norm: tuple[Tensor, Tensor], shared: _Shared) -> Tensor:
    normed: Tensor = torch.ops.fastfold.layer_norm(x, *norm, _EPS, shared.backend)
    return normed


def _project(normed: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(normed, weight.to(normed.dtype), bias.to(normed.dtype))


def _of_parameters(grad: Tensor, normed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = grad.flatten(0, -2)
    return (flat.t() @ normed.flatten(0, -2)).to(weight.dtype), flat.sum(0).to(weight.dtype)


class _First(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, x: Tensor, shared: _Shared, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        *norm, weight, bias = parameters
        shared.normed = _normalize(x, (norm[0], norm[1]), shared)
        ctx.shared = shared
        ctx.save_for_backward(x, *parameters)
        # The link orders both: the second projection is computed after this one, and its gradient before this one's.
        return _project(shared.normed, weight, bias), x.new_empty(0)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, link: Tensor) -> tuple[Tensor | None, ...]:
        x, *norm, weight, _ = ctx.saved_tensors
        normed, total = ctx.shared.take()
        if normed is None:
            normed = _normalize(x, (norm[0], norm[1]), ctx.shared)
        of_weight, of_bias = _of_parameters(grad, normed, weight)
        flat, factor = grad.flatten(0, -2), weight.to(grad.dtype)
        of_normed = flat @ factor if total is None else total.addmm_(flat, factor)
        of_x, *of_norm = torch.ops.fastfold.layer_norm_backward(
            of_normed.view(x.shape), x, norm[0], _EPS, [True] * 3, ctx.shared.backend
        )
        of_norm = [g.to(p.dtype) for g, p in zip(of_norm, norm, strict=True)]
        return of_x, None, *of_norm, of_weight, of_bias


class _Second(Function):
    @staticmethod
    @without_autocast
    def forward(ctx: Any, link: Tensor, x: Tensor, shared: _Shared, *parameters: Tensor) -> Tensor:
        *_, weight, bias = parameters
        normed, _ = shared.take()
        assert normed is not None
        ctx.shared = shared
        ctx.save_for_backward(x, *parameters)
        return _project(normed, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *norm, weight, _ = ctx.saved_tensors
        normed = ctx.shared.normed = _normalize(x, (norm[0], norm[1]), ctx.shared)
        ctx.shared.grad = grad.flatten(0, -2) @ weight.to(grad.dtype)
        of_parameters = _of_parameters(grad, normed, weight)
        # The first projection computes the other gradients of tensor and norm, for both.
        return grad.new_empty(0), None, None, None, None, *of_parameters


class ShardedProjections:
    """Both projections, with gradients, computed one after the other.

    The tensor is ``[*, c]``; ``norm`` has scale and shift ``[c]`` of the normalisation.
    """

    def __init__(self, x: Tensor, norm: tuple[Tensor, Tensor]) -> None:
        self._x, self._norm = x, norm
        self._shared = _Shared(choose_backend(x, fits=x.shape[-1] <= MAX_ROW_LENGTH))
        self._link: Tensor | None = None

    def first(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the first projection ``[*, n]``, with a weight ``[n, c]`` and a bias ``[n]``."""
        projected, self._link = _First.apply(self._x, self._shared, *self._norm, weight, bias)
        return projected

    def second(self, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the second projection, after :meth:`first`."""
        projected: Tensor = _Second.apply(self._link, self._x, self._shared, *self._norm, weight, bias)
        return projected
