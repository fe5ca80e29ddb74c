"""Settings of samples that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.config import InferConfig
from fastfold.inference.sampling.settings import Sampling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "rows"}, "method must be one of columns, clusters, depth, dropout, found 'rows'"),
        ({"method": "columns", "number": 0}, "number must be from 1 to 100000, found 0"),
        ({"method": "columns", "fraction": 1.5}, "fraction must be from 0 to 1, found 1.5"),
        ({"method": "depth", "depths": "16"}, "depths must be a list of numbers of rows, found '16'"),
        ({"method": "depth", "depths": (0,)}, "a depth must be from 1 to 1000000, found 0"),
    ],
)
def test_a_mistake_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Sampling(**settings)


def test_a_method_is_enough():
    config = InferConfig(sample="dropout")  # type: ignore[arg-type]
    assert config.sample == Sampling("dropout")
    assert config.dropout
