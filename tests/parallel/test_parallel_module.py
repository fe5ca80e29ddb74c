"""A model under a plan is an ``nn.Module``: a plain loop over it trains as one process does."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, parallelize
from fastfold.parallel.data_parallel.kept_gradients import BackwardReduction
from fastfold.parallel.tensor_parallel import ParallelMLP
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import largest_differences

ROWS, WIDTH = 4, 6
LAYERS = {"mlp": ParallelMLP.from_plain}


class Net(nn.Module):
    """A perceptron, a buffer that is no parameter, and an attribute of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.tensor([2.0], dtype=torch.float64))
        self.config = {"width": WIDTH}

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the prediction, and the mean loss where there are labels."""
        found = {"prediction": self.norm(inputs + self.mlp(inputs)) * self.scale}
        if labels is not None:
            found["loss"] = (found["prediction"] - labels).square().mean()
        return found


def _plain() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _batches(count: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 2, ROWS, WIDTH, dtype=torch.float64, generator=generator)


def _adam(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-6)


def _expected(batches: Tensor, every: int) -> dict[str, Tensor]:
    model = _plain()
    optimizer = _adam(dict(model.named_parameters()))
    for number, (x, y) in enumerate(batches):
        model(x, y)["loss"].backward()
        if (number + 1) % every == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def _train(plan: dict[str, int], every: int, *, pause: bool) -> float:
    """Largest difference of weights from one process's, with ``every`` backward passes for a step."""
    layers: Any = LAYERS if "tp" in plan else None
    parallel = parallelize(copy.deepcopy(_plain()), plan, layers=layers)
    optimizer = parallel.optimizer(_adam)
    for number, (x, y) in enumerate(_batches()):
        is_last = (number + 1) % every == 0
        rows = parallel.rows(ROWS)
        with parallel.no_sync() if pause and not is_last else nullcontext():
            parallel(x[rows], labels=y[rows])["loss"].backward()
        if is_last:
            parallel.clip_grad_norm_(0.5)
            optimizer.step()
            parallel.zero_grad()
    return largest_differences(parallel.state_dict(), _expected(_batches(), every))


PLANS = [*({"dp": 2, "zero": zero} for zero in range(4)), {"tp": 2}]


def _train_all() -> list[tuple[str, float]]:
    return [
        (f"{plan} {every} {pause}", _train(plan, every, pause=pause))
        for plan in PLANS
        for every, pause in ((2, False), (2, True))
    ]


def test_a_plain_loop_trains_as_one_process_does() -> None:
    """Gradients are means over the ranks, of one backward pass or of several, with and without ``no_sync()``."""
    for found in launch(_train_all, 2):
        assert len(found) == 10
        for name, worst in found:
            assert worst < 1e-12, name


def _foreign() -> list[str]:
    parallel = parallelize(_plain(), {"dp": 2, "zero": 1})
    x = _batches()[0, 0][parallel.rows(ROWS)]
    own = parallel.optimizer(_adam)

    def backward() -> None:
        parallel(x)["prediction"].square().sum().backward()

    def step_unreduced() -> None:
        with parallel.no_sync():
            backward()
        own.step()

    def reduce_twice() -> None:
        backward()
        parallel.reduce_gradients()

    def step_foreign() -> None:
        foreign = torch.optim.SGD(parallel.parameters(), lr=0.1)
        foreign.step()

    def clip() -> None:
        backward()
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)

    tried = [
        step_unreduced,
        reduce_twice,
        step_foreign,
        clip,
        parallel.half,
        lambda: parallel.to("meta"),
        lambda: copy.deepcopy(parallel),
        lambda: DistributedDataParallel(parallel),
        lambda: parallel.load_state_dict(parallel.state_dict(), assign=True),
    ]
    found = []
    for each in tried:
        parallel.zero_grad()
        with pytest.raises(ConfigError) as caught:
            each()
        found.append(str(caught.value))
    parallel.to("cpu", torch.float64)  # nothing changes
    return found


def test_what_a_plan_cannot_follow_is_refused() -> None:
    messages = [
        "outside of no_sync()",
        "leave out reduce_gradients()",
        "SGD has parameters of a model under a plan (dp 2): create it by a call such as parallel.optimizer(",
        "clip with clip_grad_norm_()",
        "cannot become torch.float16 on cpu under a plan: convert or move the model before parallelize()",
        "on meta",
        "copy the plain model before parallelize()",
        "leave DistributedDataParallel out",
        "leave assign out",
    ]
    for found in launch(_foreign, 2):
        for message, text in zip(messages, found, strict=True):
            assert message in text


class Around(nn.Module):
    """A module of somebody else's with a parallel model in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _inside_of_another(plan: dict[str, int]) -> None:
    plain = _plain()
    around = Around(parallelize(copy.deepcopy(plain), plan, layers=LAYERS if "tp" in plan else None))
    state = around.state_dict()
    assert state.keys() == {f"model.{name}" for name in plain.state_dict()}
    around.load_state_dict({name: 2 * x for name, x in state.items()})
    doubled = {f"model.{name}": 2 * x for name, x in plain.state_dict().items()}
    assert largest_differences(around.state_dict(), doubled) == 0
    with pytest.raises(RuntimeError, match=r"Missing key.*model.scale"):
        around.load_state_dict({name: x for name, x in doubled.items() if name != "model.scale"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*model.other"):
        around.load_state_dict(doubled | {"model.other": torch.zeros(1)})


def _inside_of_another_all() -> None:
    for plan in PLANS:
        _inside_of_another(plan)


def test_states_within_another_module_are_plain() -> None:
    launch(_inside_of_another_all, 2)


def test_a_module_on_one_process() -> None:
    plain = _plain()
    parallel = parallelize(plain, {})
    assert isinstance(parallel, nn.Module)
    assert [name for name, _ in parallel.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert next(iter(parallel.buffers())) is plain.scale
    assert parallel.config is plain.config
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'absent'"):
        _ = parallel.absent
    assert not parallel.eval().module.training
    assert parallel.train().module.training
    missing, unknown = parallel.load_state_dict({"scale": plain.scale, "other": plain.scale}, strict=False)
    assert len(missing) == 6
    assert unknown == ["other"]


def _left_backward(parallel: Parallel, x: Tensor) -> None:
    found = parallel(x)["prediction"]

    def fail(_: Tensor) -> None:
        raise ValueError("within backward()")

    plain: Any = parallel.module
    handle = plain.mlp[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="within backward"):
        found.sum().backward()
    handle.remove()
    parallel.zero_grad()


def test_a_backward_pass_that_failed_leaves_nothing_behind() -> None:
    parallel = parallelize(_plain(), {})
    x, y = _batches()[0]
    _left_backward(parallel, x)
    parallel(x, y)["loss"].backward()
    expected = _plain()
    expected(x, y)["loss"].backward()
    for (name, p), other in zip(parallel.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, other.grad), name


def test_gradients_are_scaled_once_a_backward_pass_and_kept_while_paused() -> None:
    parallel = parallelize(nn.Linear(2, 1, bias=False).double(), {})
    reduction, x = BackwardReduction(parallel.gradients, 0.25), torch.ones(1, 2, dtype=torch.float64)

    def backward() -> Tensor:
        output = parallel.module(x)
        reduction.watch({"two": [output, output]})
        output.sum().backward()
        return parallel.module.weight.grad.clone()

    with reduction.paused():
        assert backward().tolist() == [[1, 1]]
    assert not reduction.has_reduced
    assert backward().tolist() == [[0.5, 0.5]]
    assert backward().tolist() == [[0.75, 0.75]]
    assert reduction.has_reduced
