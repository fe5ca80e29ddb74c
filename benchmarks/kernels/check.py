"""Correctness at sizes whose definition does not fit into memory, on a sample of positions.

The gradient that enters the backward pass is zero outside of the sample. So the operator's gradients equal those of its
definition, in float64, on the part of the inputs that the sample depends on, and are zero outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.kernels.cases import Case
from benchmarks.kernels.measuring import Inputs
from benchmarks.kernels.rivals import OURS, implementations
from fastfold.kernels import reference

LIMITS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 2e-3}
"""Maximum relative error of an output or a gradient."""

SAMPLE = 5
"""Number of rows (or rows and columns) of the output that are checked."""

Index = tuple[Any, ...]


@dataclass(frozen=True)
class _Part:
    """Part of an operator that a sample of its output depends on.

    Attributes:
        definition: Called with the parts of the inputs by name, in float64.
        inputs: Index of the part of each input by name; inputs without an entry are used whole.
        output: Index of the part of the output.
    """

    definition: Callable[..., Tensor]
    inputs: Mapping[str, Index]
    output: Index


def _triangle_rows(z: Tensor, mask: Tensor, *, sample: Tensor, **p: Tensor) -> Tensor:
    """Compute outgoing triangle multiplication ``[s, s, c_z]`` of ``z [s, N, c_z]``, rows ``sample`` of a pair."""
    x = reference.layer_norm(z, p["norm_in_weight"], p["norm_in_bias"])
    sides = mask[..., None] * linear(x, p["proj_weight"], p["proj_bias"])
    left, right = (sides * linear(x, p["gate_weight"], p["gate_bias"]).sigmoid()).chunk(2, -1)
    product = torch.einsum("ikc,jkc->ijc", left, right)
    out = linear(
        reference.layer_norm(product, p["norm_out_weight"], p["norm_out_bias"]),
        p["out_weight"],
        p["out_bias"],
    )
    return out * linear(x[:, sample], p["out_gate_weight"], p["out_gate_bias"]).sigmoid()


def _part(case: Case, sample: Tensor) -> _Part:
    """Return the part that ``sample`` depends on: positions along every cut axis of the output."""
    rows, grid, everything = (sample,), (sample[:, None], sample), slice(None)
    if case.operator == "triangle_multiplication":

        def definition(**inputs: Tensor) -> Tensor:
            return _triangle_rows(**inputs, sample=sample)

        return _Part(definition, {"z": rows, "mask": rows}, grid)
    if case.operator == "outer_product_mean":
        names = ("left", "right", "left_mask", "right_mask")
        return _Part(reference.outer_product_mean, dict.fromkeys(names, (everything, sample)), grid)
    if case.operator == "pair_bias":
        return _Part(reference.pair_bias, {"z": rows}, (everything, sample))
    definitions: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
        "layer_norm": (reference.layer_norm, ("x",)),
        "transition": (reference.transition, ("x",)),
        "row_transition": (reference.transition, ("x",)),
        "residual_update": (reference.residual_update, ("x", "residual")),
        "triangle_attention": (reference.attention, ("q", "k", "v", "mask")),
        "row_attention": (reference.attention, ("q", "k", "v", "mask")),
    }
    definition_of, names = definitions[case.operator]
    return _Part(definition_of, dict.fromkeys(names, rows), rows)


def check(case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return relative errors of output and gradients by name, and of gradients that must be zero."""
    inputs = case.make(device, dtype)
    first = next(iter(inputs.values()))
    extent = first.shape[1] if case.operator == "outer_product_mean" else len(first)
    sample = torch.linspace(0, extent - 1, min(SAMPLE, extent), device=device).long()
    part = _part(case, sample)
    leaves = {k: x.requires_grad_(k not in case.constants) for k, x in inputs.items()}
    ours = next(i for i in implementations(case.operator, device) if i.name == OURS)
    out = ours.function(**leaves)
    weight = torch.randn_like(out[part.output])
    grad = torch.zeros_like(out)
    grad[part.output] = weight
    wanted = [k for k in leaves if k not in case.constants]
    grads = dict(zip(wanted, torch.autograd.grad(out, [leaves[k] for k in wanted], grad), strict=True))
    exact: Inputs = {
        k: x.detach()[part.inputs.get(k, ())].double().requires_grad_(k in wanted) for k, x in leaves.items()
    }
    exact_out = part.definition(**exact)
    exact_grads = torch.autograd.grad(exact_out, [exact[k] for k in wanted], weight.double())
    errors = {"output": _error(out[part.output], exact_out)}
    for name, value in zip(wanted, exact_grads, strict=True):
        index = part.inputs.get(name, ())
        errors[name] = _error(grads[name][index], value)
        grads[name][index] = 0
        errors[f"{name} outside the sample"] = float(grads[name].abs().max() / value.norm())
    return errors


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())
