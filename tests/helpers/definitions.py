"""Plain definitions in float64 of what layers share, written from the supplement, for comparison."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def randomized(module: M, seed: int = 0) -> M:
    """The module in float64 with random parameters, none of them zero, without dropout."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64, always the same for a shape and a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """``x W^T + b``."""
    product = torch.einsum("...i,oi->...o", x, layer.weight)
    return product if layer.bias is None else product + layer.bias


def norm(layer: nn.Module, x: Tensor) -> Tensor:
    """Layer norm over the last axis."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def attention(layer: nn.Module, x: Tensor, bias: Tensor | None, mask: Tensor) -> Tensor:
    """Gated attention within each row of ``x [R, N, c]`` (Algorithm 7, lines 2 and 4-7).

    Args:
        layer: A :class:`fastfold.evoformer.attention.Attention`.
        x: Normalised rows.
        bias: ``[H, N, N]`` or None.
        mask: ``[R, N]``; keys where it is 0 are not seen.
    """
    split = (layer.heads, -1)
    q, k, v = (linear(part, x).unflatten(-1, split) for part in (layer.query, layer.key, layer.value))
    logits = torch.einsum("rihc,rjhc->rhij", q, k) / q.shape[-1] ** 0.5
    if bias is not None:
        logits = logits + bias
    weights = torch.softmax(logits.masked_fill(mask[:, None, None, :] == 0, -torch.inf), -1)
    mixed = torch.einsum("rhij,rjhc->rihc", weights, v)
    gate = torch.sigmoid(linear(layer.gate, x)).unflatten(-1, split)
    return linear(layer.output, (gate * mixed).flatten(-2))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that two tensors are the same but for rounding."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
