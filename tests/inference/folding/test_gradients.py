"""Networks are frozen while gradients with respect to inputs are taken, also by several callers."""

from __future__ import annotations

import fastfold
from fastfold.inference.folding.gradients import _frozen


def test_a_network_is_frozen_until_the_last_of_nested_calls_ends() -> None:
    model = fastfold.load_model("mini")
    first, second = list(model.parameters())[:2]
    second.requires_grad_(False)
    with _frozen(model):
        with _frozen(model):
            with _frozen(model):
                assert not any(p.requires_grad for p in model.parameters())
            assert not first.requires_grad
        assert not first.requires_grad
    assert first.requires_grad
    assert not second.requires_grad
