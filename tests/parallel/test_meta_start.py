"""A model without data starts as the same model with data: no rank holds the whole, and all draw the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.gpt import GPT, GPTConfig
from examples.gpt.parallel import split_stages, tensor_layers
from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, parallelize
from fastfold.parallel.meta_start import MetaStart, give_memory, is_without_data
from tests.helpers.spawn_ranks import launch

CONFIG = GPTConfig(13, 8, 3, 3, 12)
TOKENS = torch.arange(12).view(3, 4)


class Positions(nn.Module):
    """A table that is not saved and not trained, as of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def _make() -> GPT:
    model = GPT(CONFIG)
    model.norm.extra = Positions()  # type: ignore[assignment]
    return model.double()


def initialize(module: nn.Module) -> None:
    """Draw weights; the order of calls decides their values."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight)
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight)
    if getattr(module, "bias", None) is not None:
        nn.init.uniform_(module.bias)  # type: ignore[arg-type]
    if isinstance(module, Positions):
        module.angles.copy_(torch.arange(3.0))  # type: ignore[operator]


def _with_data() -> GPT:
    model = _make()
    torch.manual_seed(5)
    with torch.no_grad():
        model.apply(initialize)
    return model


def _differences(plans: list[dict[str, Any]]) -> list[float]:
    expected = _with_data()
    _step(expected, torch.optim.SGD(expected.parameters(), 0.1))
    found = []
    for plan in plans:
        with torch.device("meta"):
            model = _make()
        torch.manual_seed(5)
        parallel = parallelize(
            model,
            plan,
            layers=tensor_layers(ParallelPlan.from_dict(plan)),
            stages=split_stages,
            initialize=initialize,
        )
        assert torch.equal(_angles(parallel.module), torch.arange(3.0, dtype=torch.float64))
        optimizer = parallel.optimizer(lambda named: torch.optim.SGD(named.values(), 0.1))
        _step(parallel, optimizer, parallel.rows(len(TOKENS)), share=parallel.loss_share)
        state = parallel.state_dict()
        found.append(max(float((state[n] - x).abs().max()) for n, x in expected.state_dict().items()))
    return found


def _angles(module: nn.Module) -> Tensor:
    return next(x for name, x in module.named_buffers() if name.endswith("angles"))


def _step(model: Any, optimizer: Any, rows: slice = slice(None), share: Any = None) -> None:
    own = TOKENS[rows]
    call = model if share is None else model.module
    loss = call(own).square().mean() * (1 if share is None else share(len(own)))
    loss.backward()
    if share is not None:
        model.reduce_gradients()
    optimizer.step()


@pytest.mark.long
def test_every_plan_starts_from_the_weights_of_one_process() -> None:
    plans = [{"dp": 2, "zero": stage} for stage in range(4)] + [{"tp": 2}]
    for found in launch(_differences, 2, plans):
        assert len(found) == len(plans)
        assert max(found) < 1e-12, found


def test_parts_come_in_the_order_of_apply() -> None:
    with torch.device("meta"):
        model = _make()
    assert is_without_data(model)
    torch.manual_seed(5)
    found: dict[str, Tensor] = {}
    for values in MetaStart(model, initialize, torch.device("cpu")).values():
        assert len(values) < 20
        found |= values
    expected = _with_data().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    give_memory(model, torch.device("cpu"))
    assert model.head.weight is model.tokens.weight
    assert not is_without_data(model)


def test_a_tensor_without_values_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"initialize= leaves 0\.weight of Linear without values"):
        parallelize(copy.deepcopy(model), {}, initialize=lambda module: None)
    half = nn.Sequential(nn.Linear(2, 2), *model)
    with pytest.raises(ConfigError, match=r"1\.bias has no data \(device meta\) and 0\.bias has"):
        parallelize(half, {}, initialize=initialize)
