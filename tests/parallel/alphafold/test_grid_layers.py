"""Layers on a grid of one rank draw the dropout of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.evoformer.primitives import SharedDropout
from fastfold.parallel.alphafold.grid_layers import _factors


@pytest.mark.parametrize("shared_dim", [-3, -2])
def test_dropout_factors_are_the_own_part_of_those_of_the_whole(shared_dim: int) -> None:
    """Rows 2 to 4 and columns 1 to 5 of a whole of 6 rows and 7 columns, with a leading axis."""
    grid: Any = SimpleNamespace(own_rows=lambda n: slice(2, 5), own_columns=lambda n: slice(1, 6))
    dropout, block = SharedDropout(0.5, shared_dim).train(), torch.zeros(3, 3, 5, 2)
    torch.manual_seed(0)
    whole = dropout(torch.zeros(3, 6, 7, 2))
    torch.manual_seed(0)
    factors = _factors(dropout, block, (6, 7), grid)
    assert whole is not None
    assert factors is not None
    assert len(whole[:, 0, 0].unique(dim=0)) > 1
    expected = whole[:, :, 1:6] if shared_dim == -3 else whole[:, 2:5]
    assert torch.equal(factors, expected)
    assert _factors(dropout.eval(), block, (6, 7), grid) is None
