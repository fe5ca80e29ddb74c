"""Small weights are replaced for a comparison and come back, and equality allows for rounding alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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


def test_replaced_weights_have_the_size_of_new_ones_and_large_ones_stay() -> None:
    layer, large = nn.Linear(64, 256), nn.Linear(2, 2)
    nn.init.constant_(layer.weight, 1e-3)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        large.weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 0.5]]))
        large.bias.fill_(0.02)
    before = [p.clone() for p in large.parameters()]
    with without_small_weights(nn.Sequential(layer, large)):
        assert float(layer.weight.std()) == pytest.approx(1 / 8, rel=0.05)
        assert float(layer.bias.std()) == pytest.approx(1.0, rel=0.2)
        assert all(torch.equal(p, old) for p, old in zip(large.parameters(), before, strict=True))


def test_rounding_of_the_type_is_allowed() -> None:
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 1e-3)):
        x = torch.ones(3, dtype=dtype)
        assert is_close(x, x * (1 + rounding))
        assert not is_close(x, x * 1.1)
    zero, noise = torch.zeros(2), torch.full((2,), 1e-6)
    assert is_close(zero, noise, scale=1.0)
    assert not is_close(zero, noise)


class _OnGPU(Tensor):
    """Tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "precision", "on_gpu", "autocast", "tolerance"),
    [
        (torch.float64, "high", True, None, 1e-9),
        (torch.float32, "highest", True, None, 1e-4),
        (torch.float32, "high", False, None, 1e-4),
        (torch.float32, "high", True, None, 1e-2),
        (torch.float32, "highest", False, torch.float16, 1e-2),
        (torch.float32, "highest", False, torch.bfloat16, 5e-2),
        (torch.float16, "highest", False, None, 1e-2),
        (torch.bfloat16, "highest", False, None, 5e-2),
    ],
)
def test_less_is_equal_where_products_are_less_precise(
    dtype: torch.dtype,
    precision: str,
    on_gpu: bool,
    autocast: torch.dtype | None,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    kind = _OnGPU if on_gpu else Tensor
    x = torch.tensor([4.0, -8.0], dtype=dtype).as_subclass(kind)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        for share in (0.5, 2.0):
            y = x.double() + torch.tensor([8 * tolerance * share, 0.0])
            assert is_close(x, y) == (share < 1)
        assert is_close(x[:0], x[:0])
