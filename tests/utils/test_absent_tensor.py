"""Tensors whose numbers are elsewhere: shapes can be asked for, numbers cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.utils.device import AbsentTensor


def test_it_has_the_shape_and_no_numbers() -> None:
    like = torch.zeros(3, 4, dtype=torch.float64)
    absent = AbsentTensor(like, "it is on the moon")
    assert absent.shape == (3, 4)
    assert absent.dtype == torch.float64
    assert absent.device == like.device
    assert "on the moon" in repr(absent)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 * x,
        lambda x: x.mul_(2),
        lambda x: x.norm(),
        lambda x: x.detach(),
        lambda x: x.clone(),
        lambda x: x.sum().item(),
        lambda x: x[0],
        lambda x: copy.deepcopy(x),
        lambda x: torch.ones(3, 4).add_(x),
        lambda x: torch._foreach_norm([torch.ones(2), x]),
    ],
)
def test_whoever_uses_it_is_told_where_the_numbers_are(use: Callable[[Tensor], object]) -> None:
    with pytest.raises(ConfigError, match="it is on the moon"):
        use(AbsentTensor(torch.zeros(3, 4), "it is on the moon"))


def test_as_a_gradient_it_is_neither_clipped_nor_stepped_nor_added_to() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = AbsentTensor(parameter, "it is on the moon")
    with pytest.raises(ConfigError, match="it is on the moon"):
        nn.utils.clip_grad_norm_([parameter], 1.0)
    with pytest.raises(ConfigError, match="it is on the moon"):
        torch.optim.SGD([parameter], 0.1).step()
    with pytest.raises(ConfigError, match="it is on the moon"):
        parameter.sum().backward()
    torch.optim.SGD([parameter], 0.1).zero_grad()
    assert parameter.grad is None
    assert torch.equal(parameter, torch.ones(3))
