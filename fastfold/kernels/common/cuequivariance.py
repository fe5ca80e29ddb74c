"""NVIDIA's cuEquivariance as a backend of the two triangle operators, if it is requested by name.

Its kernels take the place of the core only: layer norm and projections of attention are PyTorch's, and results pass
through autograd. Memory plans count FastFold's own kernels, which need less.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from fastfold.errors import ConfigError
from fastfold.kernels.common.backend import VARIABLE
from fastfold.utils.device import current_device

PACKAGE = "cuequivariance_torch"
_EPS = 1e-5


def add_to_residual(
    update: Tensor, residual: Tensor | None, dropout: Tensor | None, *, out: Tensor | None
) -> Tensor:
    """Return the residual plus the update times the dropout's factors, or fill ``out`` with it."""
    if dropout is not None:
        update = update * dropout
    result = update if residual is None else residual + update
    return result if out is None else out.copy_(result)


def check_support(x: Tensor) -> None:
    """Check that cuEquivariance can compute a triangle operator on ``x``.

    Raises:
        ConfigError: The package is not installed, ``x`` is not on an NVIDIA GPU, or its dtype is not supported.
    """
    remedy = f"use the backend auto ({VARIABLE})"
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"cueq: {PACKAGE} is not installed; pip install cuequivariance-torch cuequivariance-ops-torch-cu13, "
            f"or {remedy}"
        )
    if not x.is_cuda or torch.version.hip is not None:
        raise ConfigError(f"cueq: expected a tensor on an NVIDIA GPU, found {x.device.type}; {remedy}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"cueq: expected 32 or 16 bits, found {x.dtype}; {remedy}")


def gated_attention(x: Tensor, bias: Tensor, mask: Tensor | None, parameters: Any, heads: int) -> Tensor:
    """Compute the update of :func:`fastfold.kernels.gated_attention` with a pair bias, for ``x [*, R, N, c]``."""
    w = parameters
    rows, length = x.shape[-3:-1]
    normed = layer_norm(x, x.shape[-1:], w.norm_weight, w.norm_bias, _EPS)

    def project(weight: Tensor) -> Tensor:
        heads_last = linear(normed, weight).reshape(-1, rows, length, heads, len(weight) // heads)
        return heads_last.transpose(-2, -3)

    attended = _on_device("triangle_attention", normed)(
        project(w.query_weight),
        project(w.key_weight),
        project(w.value_weight),
        bias.reshape(-1, 1, heads, length, length),
        None if mask is None else (mask != 0).reshape(-1, rows, 1, 1, length),
    )
    flat = attended.transpose(-2, -3).flatten(-2).reshape(*x.shape[:-1], -1)
    if w.gate_weight is not None:
        flat = flat * linear(normed, w.gate_weight, w.gate_bias).sigmoid()
    return linear(flat, w.output_weight, w.output_bias)


def triangle_multiplication(z: Tensor, mask: Tensor, parameters: Any, outgoing: bool) -> Tensor:
    """Compute the update of :func:`fastfold.kernels.triangle_multiplication` for ``z [*, N, N, c_z]``."""
    w = parameters

    def in_order(weight: Tensor) -> Tensor:
        # Its incoming product has the first factor where AlphaFold has the second.
        return weight if outgoing else weight.roll(len(weight) // 2, 0)

    update: Tensor = _on_device("triangle_multiplicative_update", z)(
        z.reshape(-1, *z.shape[-3:]),
        "outgoing" if outgoing else "incoming",
        mask=mask.to(z.dtype).reshape(-1, *mask.shape[-2:]),
        norm_in_weight=w.norm_in_weight,
        norm_in_bias=w.norm_in_bias,
        p_in_weight=in_order(w.proj_weight),
        p_in_bias=in_order(w.proj_bias),
        g_in_weight=in_order(w.gate_weight),
        g_in_bias=in_order(w.gate_bias),
        norm_out_weight=w.norm_out_weight,
        norm_out_bias=w.norm_out_bias,
        p_out_weight=w.out_weight,
        p_out_bias=w.out_bias,
        g_out_weight=w.out_gate_weight,
        g_out_bias=w.out_gate_bias,
        eps=_EPS,
    )
    return update.reshape(z.shape)


def _on_device(name: str, x: Tensor) -> Callable[..., Tensor]:
    """Return a function of the package that runs while the device of ``x`` is PyTorch's current one."""
    function: Callable[..., Tensor] = getattr(importlib.import_module(PACKAGE), name)

    def run(*arguments: Any, **options: Any) -> Tensor:
        with current_device(x.device):  # its kernels launch there, whatever the device of their tensors
            return function(*arguments, **options)

    return run
