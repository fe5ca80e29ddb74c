"""Operators taken apart give what they give whole."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels.decompositions import decompositions

_N, _C = 5, 4


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _pair_params() -> list[Tensor]:
    """Of a triangle multiplication."""
    return [
        *(_random(_C), _random(_C), _random(2 * _C, _C), _random(2 * _C), _random(2 * _C, _C)),
        *(_random(2 * _C), _random(_C), _random(_C), _random(_C, _C), _random(_C), _random(_C, _C)),
        _random(_C),
    ]


_PAIR, _MASK = _random(_N, _N, _C), (_random(_N, _N) > -1).double()
_DROPOUT, _SQUARE = _random(1, _N, _C), _random(_C, _C)
_HEADS = [_random(3, _N, 2, 2) for _ in range(4)]
_TRIANGLE = _pair_params()
_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "attention": ((_HEADS[:3], _random(2, _N, _N), _MASK[:3], _HEADS[3]), {"scale": 0.5}),
    "gated_attention": (
        (
            *(_PAIR, _random(2, _N, _N), _MASK, None, _DROPOUT),
            [
                *(_random(_C), _random(_C), _SQUARE, _SQUARE, _SQUARE),
                *(_SQUARE, _random(_C), _SQUARE, _random(_C)),
            ],
        ),
        {"heads": 2, "add_x": True, "keep": False},
    ),
    "layer_norm": ((_PAIR, _random(_C), None, 1e-5), {}),
    "outer_product_mean": (
        (
            [_random(3, _N, 2), _random(3, _N, 2)],
            [_MASK[:3], _MASK[:3]],
            [_random(_C, 4), _random(_C)],
            _PAIR,
            1e-3,
        ),
        {},
    ),
    "pair_bias": ((_PAIR, [_random(_C), _random(_C), _random(2, _C)]), {}),
    "residual_update": ((_PAIR, _PAIR + 1, _random(_C), _PAIR * 2, _DROPOUT), {}),
    "transition": (
        (
            *(_PAIR, _PAIR + 1, False),
            [_random(_C), _random(_C), _random(7, _C), _random(7), _random(_C, 7), _random(_C)],
            False,
        ),
        {},
    ),
    "triangle_factors": ((_PAIR, _MASK, _TRIANGLE[:6]), {}),
    "triangle_multiplication": (
        (_PAIR, _MASK, None, _DROPOUT, _TRIANGLE),
        {"outgoing": False, "add_z": True, "keep": False},
    ),
    "triangle_update": (
        (_random(_C, _N, _N), _PAIR, _DROPOUT, [*_TRIANGLE[:2], *_TRIANGLE[6:]], True),
        {},
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_definition_takes_and_gives_what_the_operator_does(name: str) -> None:
    operator = getattr(torch.ops.fastfold, name).default
    args, kwargs = _CASES[name]
    given = {**kwargs, "backend": "torch"}
    found, expected = decompositions()[operator](*args, **given), operator(*args, **given)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


_IN_TWO_PARTS = {"gated_attention_begin", "gated_attention_begun"}
"""Of a training block that is sharded over ranks, which no exported graph is."""


def test_every_operator_of_the_forward_pass_is_there() -> None:
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.endswith("op"):
            importlib.import_module(module.name)  # which registers its operators
    ours = {
        name.removeprefix("fastfold::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fastfold::")
    }
    assert {name for name in ours if not name.endswith("_backward")} == set(_CASES) | _IN_TWO_PARTS
    assert {operator._schema.name.split("::")[1] for operator in decompositions()} == set(_CASES)
