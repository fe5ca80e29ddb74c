"""Small weights are replaced for a comparison and come back, and equality allows for rounding alone."""

from __future__ import annotations

import torch
from torch import nn

from fastfold.parallel.checks.rounding import is_close, without_small_weights


def test_small_weights_come_back() -> None:
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.fill_(1e-5)
        layer.bias.zero_()
    with without_small_weights(layer):
        assert layer.weight.abs().max() > 0.1
        assert layer.bias.any()
    assert torch.equal(layer.weight, torch.full((3, 3), 1e-5))
    assert not layer.bias.any()


def test_rounding_of_the_type_is_allowed() -> None:
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 1e-3)):
        x = torch.ones(3, dtype=dtype)
        assert is_close(x, x * (1 + rounding))
        assert not is_close(x, x * 1.1)
    zero, noise = torch.zeros(2), torch.full((2,), 1e-6)
    assert is_close(zero, noise, scale=1.0)
    assert not is_close(zero, noise)
