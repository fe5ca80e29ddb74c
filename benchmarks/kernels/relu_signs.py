"""Units of a transition on the wrong side of their ReLU, and errors of gradients, by the precision of products.

Usage: python benchmarks/kernels/relu_signs.py [--rows N]

All but the products before the ReLU is in float64, so errors are those of the signs alone. Prints rows of the table in
``benchmarks/results/kernel_choices.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

CHANNELS, HIDDEN = 128, 512
EPS = 1e-5


def main() -> None:
    """Print a row for each precision."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=65536)
    for name, cost, wrong, error in errors_of_signs(parser.parse_args().rows):
        print(f"| {name} | {cost} | {1e6 * wrong:.3g} | {error:.1e} |")


def errors_of_signs(rows: int) -> Iterator[tuple[str, str, float, float]]:
    """Yield a precision, its cost, the share of units on the wrong side, and the relative error of ``grad_w1``."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return _round(torch.randn(*shape, generator=generator, dtype=torch.float64) * scale, torch.bfloat16)

    x, grad = randn(rows, CHANNELS), randn(rows, CHANNELS)
    scale, shift = 1 + randn(CHANNELS, scale=0.2), randn(CHANNELS, scale=0.2)
    w1, b1 = randn(HIDDEN, CHANNELS, scale=CHANNELS**-0.5), randn(HIDDEN, scale=0.1)
    grad_hidden = grad @ randn(CHANNELS, HIDDEN, scale=HIDDEN**-0.5)
    norm = torch.nn.functional.layer_norm(x, (CHANNELS,), scale, shift, EPS)
    exact = norm @ w1.T + b1 > 0
    expected = torch.where(exact, grad_hidden, 0.0).T @ norm
    first = _round(norm, torch.bfloat16)
    rest = norm - first
    products = {
        ("bfloat16", "1"): first @ w1.T,
        ("float16", "1"): _round(norm, torch.float16) @ w1.T,
        ("bfloat16, and the rest in scaled float8", "1.5"): first @ w1.T + _float8(rest) @ _float8(w1).T,
        ("bfloat16, and the rest in bfloat16 (split)", "2"): (first + _round(rest, torch.bfloat16)) @ w1.T,
    }
    for (name, cost), product in products.items():
        passes = product + b1 > 0
        grad_w1 = torch.where(passes, grad_hidden, 0.0).T @ norm
        wrong = float((passes != exact).double().mean())
        yield name, cost, wrong, float((grad_w1 - expected).norm() / expected.norm())


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def _float8(x: Tensor) -> Tensor:
    """Round rows, each scaled to the range of float8 (e4m3)."""
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax(1, keepdim=True)
    return _round(x * scale, torch.float8_e4m3fn) / scale


if __name__ == "__main__":
    main()
