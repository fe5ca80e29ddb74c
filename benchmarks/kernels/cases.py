"""Operators that the kernels' benchmark runs, with their inputs and minimum work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.kernels.measuring import Inputs

SIZES = (256, 384, 512, 768, 1024, 2048, 3072, 4096)
"""Residues of the pair tensors."""

ALIGNMENTS = ((128, 256), (128, 384), (512, 384))
"""Rows and residues of the shapes of FastFold's own benchmark."""

C_M, C_Z, HEADS, D, OUTER = 256, 128, 4, 32, 32


@dataclass(frozen=True)
class Case:
    """Operator on inputs of one size.

    Attributes:
        operator: Name of the operator.
        shape: Size in words.
        residues: N; the unit of memory U is N² · 128 elements.
        make: Makes the inputs on a device, in a dtype.
        constants: Names of inputs that receive no gradients.
        flops: Floating-point operations of the forward pass' matrix products, two per multiply-add.
        elements: Elements that must be read and written forward.
        backward_flops: Operations of the backward pass, without recomputation.
        backward_elements: Elements that must be read and written backward.
    """

    operator: str
    shape: str
    residues: int
    make: Callable[[torch.device, torch.dtype], Inputs]
    constants: frozenset[str]
    flops: float
    elements: float
    backward_flops: float
    backward_elements: float

    @property
    def name(self) -> str:
        """Operator and shape."""
        return f"{self.operator} {self.shape}"


class _Maker:
    """Random inputs of one device and dtype, equal in every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def randn(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=self._generator, device=self.device, dtype=self.dtype)
        return x.mul_(scale)

    def mask(self, *shape: int) -> torch.Tensor:
        """Return a mask with nine of ten elements 1."""
        kept = torch.rand(*shape, generator=self._generator, device=self.device) < 0.9
        return kept.to(self.dtype)

    def norm(self, c: int, prefix: str = "norm") -> Inputs:
        return {f"{prefix}_weight": 1 + self.randn(c, scale=0.1), f"{prefix}_bias": self.randn(c, scale=0.1)}

    def linear(self, name: str, out: int, c: int, bias: str | None = None) -> Inputs:
        return {name: self.randn(out, c, scale=c**-0.5)} | ({bias: self.randn(out)} if bias else {})


def _layer_norm(n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        return {"x": m.randn(n, n, C_Z), "weight": 1 + m.randn(C_Z, scale=0.1), "bias": m.randn(C_Z)}

    u = n * n * C_Z
    return Case("layer_norm", f"N={n}", n, make, frozenset(), 0, 2 * u, 0, 3 * u)


def _residual_update(n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        inputs: Inputs = {"x": m.randn(n, n, C_Z), "residual": m.randn(n, n, C_Z), "bias": m.randn(C_Z)}
        return inputs | {"dropout": m.mask(1, n, C_Z)}

    u = n * n * C_Z
    return Case("residual_update", f"N={n}", n, make, frozenset({"dropout"}), 0, 3 * u, 0, 2 * u)


def _attention(rows: int, n: int, heads: int, shape: str, operator: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        inputs: Inputs = {name: m.randn(rows, n, heads, D) for name in "qkv"}
        return inputs | {"bias": m.randn(heads, n, n), "mask": m.mask(rows, n)}

    x, bias = rows * n * heads * D, heads * n * n
    products = 2 * x * n
    masks = frozenset({"mask"})
    return Case(operator, shape, n, make, masks, 2 * products, 4 * x + bias, 5 * products, 8 * x + 2 * bias)


def _triangle_multiplication(n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        inputs: Inputs = {"z": m.randn(n, n, C_Z), "mask": m.mask(n, n)} | m.norm(C_Z, "norm_in")
        inputs |= m.linear("proj_weight", 2 * C_Z, C_Z, "proj_bias")
        inputs |= m.linear("gate_weight", 2 * C_Z, C_Z, "gate_bias")
        inputs |= m.norm(C_Z, "norm_out") | m.linear("out_weight", C_Z, C_Z, "out_bias")
        return inputs | m.linear("out_gate_weight", C_Z, C_Z, "out_gate_bias")

    u = n * n * C_Z
    flops = 2 * u * n + 6 * 2 * u * C_Z
    # Factors and product are written to memory and read once each.
    return Case(
        "triangle_multiplication", f"N={n}", n, make, frozenset({"mask"}), flops, 9 * u, 2 * flops, 18 * u
    )


def _outer_product_mean(rows: int, n: int, shape: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        inputs: Inputs = {"left": m.randn(rows, n, OUTER), "right": m.randn(rows, n, OUTER)}
        mask = m.mask(rows, n)
        inputs |= {"left_mask": mask, "right_mask": mask}
        return inputs | m.linear("weight", C_Z, OUTER * OUTER, "bias")

    u = n * n * C_Z
    flops = 2 * rows * (n * OUTER) ** 2 + 2 * u * OUTER**2
    masks = frozenset({"left_mask", "right_mask"})
    sides = 2 * rows * n * OUTER
    return Case("outer_product_mean", shape, n, make, masks, flops, u + sides, 2 * flops, u + 2 * sides)


def _transition(rows: int, n: int, c: int, shape: str, operator: str) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        inputs = {"x": m.randn(rows, n, c)} | m.norm(c)
        return inputs | m.linear("w1", 4 * c, c, "b1") | m.linear("w2", c, 4 * c, "b2")

    x = rows * n * c
    flops = 2 * 2 * 4 * x * c
    return Case(operator, shape, n, make, frozenset(), flops, 2 * x, 2 * flops, 3 * x)


def _pair_bias(n: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        m = _Maker(device, dtype)
        return {"z": m.randn(n, n, C_Z)} | m.norm(C_Z) | m.linear("weight", HEADS, C_Z)

    u, out = n * n * C_Z, n * n * HEADS
    flops = 2 * out * C_Z
    return Case("pair_bias", f"N={n}", n, make, frozenset(), flops, u + out, 2 * flops, 2 * u + out)


def cases(sizes: Iterable[int] = SIZES, alignments: Iterable[tuple[int, int]] = ALIGNMENTS) -> list[Case]:
    """Return every operator on every size.

    Args:
        sizes: N of the operators on pairs.
        alignments: Rows and residues of those on alignments.
    """
    found = []
    for n in sizes:
        found += [
            _attention(n, n, HEADS, f"N={n}", "triangle_attention"),
            _triangle_multiplication(n),
            _layer_norm(n),
            _transition(n, n, C_Z, f"N={n}", "transition"),
            _outer_product_mean(128, n, f"128 x {n}"),
            _pair_bias(n),
            _residual_update(n),
        ]
    for rows, n in alignments:
        shape = f"{rows} x {n}"
        found.append(_attention(rows, n, C_M // D, shape, "row_attention"))
        found.append(_transition(rows, n, C_M, shape, "row_transition"))
        if (rows, n) != (128, n) or n not in sizes:
            found.append(_outer_product_mean(rows, n, shape))
    return found
