"""An optimizer of any plan reads and writes its state as that of the plain model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import Lamb, ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.kept_gradients import BackwardReduction
from fastfold.parallel.data_parallel.optimizer import ParallelOptimizer
from fastfold.parallel.data_parallel.zero import Replicated
from tests.helpers.spawn_ranks import launch


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False)).double()


def _adam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named.values(), lr=0.1)


def _sgd(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)


def _amsgrad(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(named.values(), lr=0.1, amsgrad=True)


def _nadam(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(named.values(), lr=0.1)


def _rmsprop(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(named.values(), lr=0.1, momentum=0.5, centered=True)


def _lamb(named: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    return Lamb(named, lr=0.1)


def _made(model: nn.Module, make: object = _adam, stage: int = 0) -> ParallelOptimizer:
    mesh = ParallelMesh(ParallelPlan())
    held = Replicated(dict(model.named_parameters()), mesh, {}, stage)
    shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
    full_state = FullStateDict(model, mesh, {}, shapes, {})
    inner = make(held.optimized)  # type: ignore[operator]
    return ParallelOptimizer(inner, model, held, full_state, BackwardReduction(held, 1.0))


def _train(model: nn.Module, optimizer: ParallelOptimizer | torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x).square().sum().backward()
        if isinstance(optimizer, ParallelOptimizer):
            held = optimizer._stage
            held.finish(held.take_sample())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("make", [_adam, _sgd, _lamb])
def test_steps_and_states_are_those_of_the_plain_optimizer(make: object, stage: int) -> None:
    model, plain = _model(), _model()
    optimizer, expected = _made(model, make, stage), make(dict(plain.named_parameters()))  # type: ignore[operator]
    _train(model, optimizer)
    _train(plain, expected)
    for found, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, right)
        assert found.grad is None
    state = optimizer.state_dict()["state"]
    assert state.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        wanted = {key: x for key, x in expected.state[parameter].items() if x is not None}
        assert state[name].keys() == wanted.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(state[name][key], torch.as_tensor(value))
            assert state[name][key].shape == torch.as_tensor(value).shape


@pytest.mark.parametrize("make", [_adam, _lamb, _sgd, _amsgrad, _nadam, _rmsprop])
def test_a_state_goes_on_under_another_plan(make: object) -> None:
    """Written by shards, read by a rank that has all; then both train alike."""
    model = _model()
    optimizer = _made(model, make, 1)
    _train(model, optimizer)
    other = _model()
    other.load_state_dict(model.state_dict())
    again = _made(other, make)
    again.load_state_dict(optimizer.state_dict())
    for one, its in ((model, optimizer), (other, again)):
        _train(one, its, 1)
    for found, right in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, right)


def test_an_empty_state_is_that_of_a_start() -> None:
    optimizer = _made(_model())
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict({})
    optimizer.load_state_dict(optimizer.state_dict())
    assert not any(optimizer.inner.state.values())
    optimizer.initialize()
    assert {key for state in optimizer.state_dict()["state"].values() for key in state} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert optimizer.param_groups is optimizer.inner.param_groups


def _without(key: str, state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {name: {k: x for k, x in of_one.items() if k != key} for name, of_one in state.items()}


def _broken() -> Iterator[tuple[dict[str, dict[str, Tensor]], str]]:
    model = _model()
    optimizer = _made(model)
    _train(model, optimizer)
    state = optimizer.state_dict()["state"]
    yield (
        _without("exp_avg", state),
        r"lacks exp_avg of 0\.weight; load the state of the same kind of optimizer",
    )
    yield state | {"2.weight": state["1.weight"]}, r"has 2\.weight, which is not a parameter of the model"
    wrong = {**state["0.bias"], "exp_avg": torch.ones(5)}
    yield state | {"0.bias": wrong}, r"exp_avg of 0\.bias: expected shape \(4,\), found \(5,\)"


@pytest.mark.parametrize(("state", "message"), list(_broken()), ids=["key", "parameter", "shape"])
def test_a_state_of_another_optimizer_or_model_is_refused(
    state: dict[str, dict[str, Tensor]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _made(_model()).load_state_dict({"state": state, "param_groups": []})


def test_a_parameter_that_had_no_gradient_yet_starts_anew() -> None:
    model = _model()
    optimizer = _made(model)
    _train(model, optimizer)
    other = _made(_model())
    state = optimizer.state_dict()["state"]
    without = {name: of_one for name, of_one in state.items() if name != "1.weight"}
    other.load_state_dict({"state": without, "param_groups": []})
    found = other.state_dict()["state"]
    assert torch.equal(found["0.bias"]["exp_avg"], state["0.bias"]["exp_avg"])
    assert not found["1.weight"]["exp_avg"].any()
    assert found["1.weight"]["step"] == 0


def test_an_optimizer_whose_first_state_is_not_known_begins_in_its_first_step() -> None:
    model = _model()
    optimizer = _made(model, _sgd)
    with pytest.raises(ConfigError, match="the first state of SGD is not known"):
        optimizer.initialize()
    model[1].weight.requires_grad_(False)
    _train(model, optimizer)
    other = _made(_model(), _sgd)
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"].keys() == {"0.weight", "0.bias"}


def test_after_a_step_every_rank_gets_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = _made(_model())
    events: list[str] = []
    monkeypatch.setattr(optimizer.inner, "step", lambda: events.append("step"))
    monkeypatch.setattr(optimizer._stage, "check_step", lambda: events.append("check"))
    monkeypatch.setattr(optimizer._stage, "all_gather_params", lambda: events.append("gather"))
    optimizer.step()
    assert events == ["check", "step", "gather"]


class _OfTwo(torch.optim.Optimizer):
    """An optimizer made of two, as Muon with AdamW."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        matrices = [p for p in named.values() if p.dim() == 2]
        rest = [p for p in named.values() if p.dim() != 2]
        self.parts = [torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(rest, lr=0.1)]
        super().__init__([{"params": list(named.values())}], {})
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def _step_by_two() -> tuple[float, str]:
    parallel = parallelize(_model(), {"dp": 2})
    optimizer = parallel.optimizer(_OfTwo)
    x = torch.ones(2, 3, dtype=torch.float64)
    parallel(x).sum().backward()
    optimizer.step()
    plain = _model()
    by_two = _OfTwo(dict(plain.named_parameters()))
    plain(x).sum().backward()
    by_two.step()
    apart = max(
        float((found - right).detach().abs().max())
        for found, right in zip(parallel.module.parameters(), plain.parameters(), strict=True)
    )
    with pytest.raises(ConfigError, match="SGD has parameters of a model under a plan") as refused:
        optimizer.inner.parts[0].step()  # type: ignore[attr-defined]
    return apart, str(refused.value)


def test_optimizers_that_an_optimizer_is_made_of_step_within_it_alone() -> None:
    for apart, message in launch(_step_by_two, 2):
        assert apart == 0
        assert "parallel.optimizer(" in message


def test_an_optimizer_that_steps_by_a_closure_alone_is_refused() -> None:
    parallel = parallelize(_model(), {"dp": 1})
    with pytest.raises(ConfigError, match="LBFGS decides by the loss of a closure"):
        parallel.optimizer(lambda named: torch.optim.LBFGS(named.values()))


def test_a_model_without_data_is_named_before_it_trains() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    parallel = parallelize(model, {"dp": 1})
    optimizer = parallel.optimizer(_adam)
    parallel.module.to_empty(device="cpu")
    for parameter in parallel.module.parameters():
        nn.init.ones_(parameter)
    parallel(torch.ones(1, 3)).sum().backward()
    with pytest.raises(
        ConfigError, match=r"had no data \(device meta\).*to_empty\(\) and initialise the model first"
    ):
        optimizer.step()
