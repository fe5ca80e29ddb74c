"""Plans on models of many kinds: each trains as one process does, or is refused within seconds."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import parallelize
from fastfold.utils.module_structure import tensors_in
from tests.helpers.spawn_ranks import launch
from tests.parallel.foreign_models import NAMES, ROWS, TRANSFORMERS, build

STEPS = 2
_ALWAYS = ("own running mean", "batch norm", "running instance norm", "largest norm", "sparse")
REFUSED = {name: {0, 1, 2, 3} for name in _ALWAYS} | {name: {3} for name in ("scalar", "channels last")}
"""By model the ZeRO stages that are refused; all others train."""


def _loss(output: object) -> Tensor:
    return torch.stack([x.square().mean() for x in tensors_in(output) if x.requires_grad]).sum()


def _sgd(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.05, momentum=0.9)


def _expected(name: str) -> dict[str, Tensor]:
    model, inputs = build(name)
    optimizer = _sgd(dict(model.named_parameters()))
    for _ in range(STEPS):
        _loss(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def _outcome(name: str, zero: int) -> str | float:
    model, inputs = build(name)
    try:
        parallel = parallelize(copy.deepcopy(model), {"dp": 2, "zero": zero})
        optimizer = parallel.optimizer(_sgd)
        rows = parallel.rows(ROWS)
        for _ in range(STEPS):
            _loss(parallel(**{key: x[rows] for key, x in inputs.items()})).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected, found = _expected(name), parallel.state_dict()
        assert found.keys() == expected.keys()
        # Not relative: a softmax leaves gradients of rounding errors to biases of its keys.
        return max(float((found[key] - x).abs().max()) for key, x in expected.items())
    except ConfigError as error:
        return str(error)


def _outcomes(name: str) -> list[str | float]:
    logging.disable(logging.WARNING)
    return [_outcome(name, zero) for zero in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_as_one_process_does_or_is_refused(name: str) -> None:
    if name in TRANSFORMERS:
        pytest.importorskip("transformers")
    for found in launch(_outcomes, 2, name, timeout=60):
        refused = {zero for zero, outcome in enumerate(found) if isinstance(outcome, str)}
        assert refused == REFUSED.get(name, set()), found
        assert all(outcome < 1e-12 for outcome in found if isinstance(outcome, float)), found


def test_there_are_forty_models() -> None:
    assert len(NAMES) >= 40
