"""Implementations of the operators that are compared: ours, PyTorch's, and other projects' packages."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels import plain_operators as plain
from fastfold import kernels

Operator = Callable[..., Tensor]

OURS = "fastfold"


@dataclass(frozen=True)
class Implementation:
    """Implementation of an operator.

    Attributes:
        name: Name in the table, such as ``sdpa``.
        function: Called with the inputs of the case by name.
        importance: Order of measurement: 0 ours, 1 rivals to beat, 2 the rest.
    """

    name: str
    function: Operator
    importance: int


def _compiled(function: Operator, device: torch.device) -> Operator:
    """Apply ``torch.compile`` once for all sizes; on the CPU without generating code, which would take minutes."""
    backend = "inductor" if device.type == "cuda" else "eager"
    return torch.compile(function, dynamic=True, backend=backend)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    scores = plain.additive_mask(bias, mask)
    return scaled_dot_product_attention(q, k, v, attn_mask=scores).transpose(-3, -2)


def _flex(device: torch.device) -> Operator:
    from torch.nn.attention.flex_attention import flex_attention

    run: Any = torch.compile(flex_attention, dynamic=True) if device.type == "cuda" else flex_attention

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        def score(x: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.where(mask[row, key] != 0, x + bias[head, query, key], -1e9)

        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        return run(q, k, v, score_mod=score).transpose(-3, -2)

    return function


def _fused_softmax() -> Operator:
    """Return attention around the softmax of FastFold's first release, for PyTorch with Triton."""
    function: Operator = importlib.import_module("benchmarks.kernels.fused_softmax").attention
    return function


def _trifast() -> Operator:
    triangle_attention = importlib.import_module("trifast").triangle_attention

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        # [b, h, n, n, d], and a mask that is true for keys to leave out.
        q, k, v = (x.movedim(-2, 0)[None] for x in (q, k, v))
        return triangle_attention(q, k, v, bias[None], (mask == 0)[None])[0].movedim(0, -2)

    return function


def _cuequivariance_attention() -> Operator:
    triangle_attention = importlib.import_module("cuequivariance_torch").triangle_attention

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        # [B, N, H, Q, D], bias [B, 1, H, Q, K], and a mask [B, N, 1, 1, K] that is true for keys to use.
        q, k, v = (x.transpose(-3, -2)[None] for x in (q, k, v))
        keys = (mask != 0)[None, :, None, None]
        return triangle_attention(q, k, v, bias[None, None], mask=keys)[0].transpose(-3, -2)

    return function


def _cuequivariance_multiplication() -> Operator:
    update = importlib.import_module("cuequivariance_torch").triangle_multiplicative_update
    names = {"proj": "p_in", "gate": "g_in", "out": "p_out", "out_gate": "g_out"}

    def function(z: Tensor, mask: Tensor, **parameters: Tensor) -> Tensor:
        theirs = {}
        for name, x in parameters.items():
            layer, kind = name.rsplit("_", 1)
            theirs[f"{names.get(layer, layer)}_{kind}"] = x
        return update(z[None], direction="outgoing", mask=mask[None], **theirs)[0]

    return function


def _multiplication(function: Operator) -> Operator:
    """Return triangle multiplication with outgoing edges that takes its parameters by name."""

    def call(z: Tensor, mask: Tensor, **parameters: Tensor) -> Tensor:
        return function(z, mask, kernels.TriangleParams(**parameters), outgoing=True)

    return call


def _transition(x: Tensor, **layers: Tensor) -> Tensor:
    return kernels.transition(x, kernels.TransitionParams(**layers))


_OURS: dict[str, Operator] = {
    "layer_norm": kernels.layer_norm,
    "triangle_attention": kernels.attention,
    "row_attention": kernels.attention,
    "triangle_multiplication": _multiplication(kernels.triangle_multiplication),
    "outer_product_mean": kernels.outer_product_mean,
    "transition": _transition,
    "row_transition": _transition,
    "pair_bias": kernels.pair_bias,
    "residual_update": kernels.residual_update,
}
_PLAIN: dict[str, Operator] = {
    name: getattr(plain, name.removeprefix("row_").removeprefix("triangle_"))
    for name in _OURS
    if name != "triangle_multiplication"
} | {"triangle_multiplication": _multiplication(plain.triangle_multiplication)}

_PACKAGES: dict[str, tuple[tuple[str, str, Callable[[], Operator]], ...]] = {
    "row_attention": (("fused_softmax", "triton", _fused_softmax),),
    "triangle_attention": (
        ("fused_softmax", "triton", _fused_softmax),
        ("trifast", "trifast", _trifast),
        ("cuequivariance", "cuequivariance_torch", _cuequivariance_attention),
    ),
    "triangle_multiplication": (("cuequivariance", "cuequivariance_torch", _cuequivariance_multiplication),),
}


def implementations(operator: str, device: torch.device) -> list[Implementation]:
    """Return our implementation, and all installed others of an operator on a device.

    Args:
        operator: Operator of :class:`benchmarks.kernels.cases.Case`.
        device: Packages of other projects run on CUDA only.
    """
    found = [
        Implementation(OURS, _OURS[operator], 0),
        Implementation("eager", _PLAIN[operator], 1),
        Implementation("compile", _compiled(_PLAIN[operator], device), 2),
    ]
    if operator.endswith("attention"):
        found.append(Implementation("sdpa", _sdpa, 2))
        found.append(Implementation("flex", _flex(device), 2))
    if device.type == "cuda":
        for name, module, make in _PACKAGES.get(operator, ()):
            # `packages` reports an installed package that does not load.
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
                found.append(Implementation(name, make(), 1))
    return found


def packages() -> dict[str, str]:
    """Return the versions of the compared packages, or the reason why one is missing."""
    found = {}
    for name in ("torch", "triton", "trifast", "cuequivariance-torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
            continue
        try:
            importlib.import_module(name.replace("-", "_"))
        except ImportError as error:
            found[name] += f", does not load: {error}"
    for name in ("cuequivariance-ops-torch-cu13", "cuequivariance-ops-torch-cu12"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
