"""Two projections of one normalised tensor are those of plain layers, and so are their gradients, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear
from torch.utils._python_dispatch import TorchDispatchMode

from fastfold.parallel.axial.projections import ShardedProjections
from tests.helpers.definitions import close


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 3, 5, 8), (8,), (8,), (4, 8), (4,), (6, 8), (6,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_projections_and_gradients_are_those_of_plain_layers(used: str) -> None:
    """Twice through the same graph; with one of the two left out of the loss as well."""
    ours, plain = _inputs(), _inputs()
    x, scale, shift, *rest = ours
    both = ShardedProjections(x, (scale, shift))
    found = both.first(rest[0], rest[1]), both.second(rest[2], rest[3])
    normed = layer_norm(plain[0], (8,), plain[1], plain[2])
    expected = linear(normed, plain[3], plain[4]), linear(normed, plain[5], plain[6])
    chosen = {"both": (0, 1), "first": (0,), "second": (1,)}[used]
    weights = [torch.randn_like(y) for y in expected]
    for values, retained in ((expected, False), (found, True)):
        loss = torch.stack([(values[i] * weights[i]).sum() for i in chosen]).sum()
        loss.backward(retain_graph=retained)
    if used == "both":
        torch.stack([(found[i] * weights[i]).sum() for i in chosen]).sum().backward()
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    for a, b in zip(ours, plain, strict=True):
        if b.grad is None:
            assert a.grad is None or not a.grad.any()
            continue
        assert a.grad is not None
        close(a.grad / (2 if used == "both" else 1), b.grad)


def test_the_tensor_is_normalised_once_in_either_direction() -> None:
    seen: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x, scale, shift, *rest = _inputs()
    both = ShardedProjections(x, (scale, shift))
    with Watching():
        total = both.first(rest[0], rest[1]).sum() + both.second(rest[2], rest[3]).sum()
        forward = seen.count("fastfold::layer_norm")
        total.backward()
    assert (forward, seen.count("fastfold::layer_norm")) == (1, 2)
    assert seen.count("fastfold::layer_norm_backward") == 1
