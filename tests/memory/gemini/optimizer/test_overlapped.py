"""Steps beside the backward pass come to the bits of steps after it, or are refused."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini
from fastfold.memory.gemini.optimizer import overlapped
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars
from tests.helpers.thread_ranks import on_one_line
from tests.memory.gemini.gpt_runs import Managed, Plain, adam, build
from tests.memory.gemini.test_manager import Odd, equal_trees


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gemini-optimizer")]


class Net(nn.Module):
    """Three layers, each of which is a chunk of its own in :func:`managed`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def managed(kind: Any = torch.optim.AdamW, policy: str = "auto", **options: Any) -> tuple[Net, Gemini]:
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    return model, Gemini(model, optimizer, 1 << 12, policy, overlap_optimizer=True, **options)


def backward(model: nn.Module, step: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    model(x).square().sum().backward()


@pytest.mark.parametrize("policy", ["auto", "cpu", "nvme"])
@pytest.mark.parametrize("recompute", [False, True])
def test_parameters_and_states_are_those_without_overlap(policy: str, recompute: bool) -> None:
    runs = [build(checkpointing="none") for _ in range(2)]
    plain = Plain(runs[0], adam(runs[0]))
    blocks = list(runs[1].blocks) if recompute else ()
    run = Managed(
        *(runs[1], adam(runs[1])), budget=100_000, policy=policy, recompute=blocks, overlap_optimizer=True
    )
    assert [run.loss_step(i, 1 + i % 2) for i in range(4)] == [
        plain.loss_step(i, 1 + i % 2) for i in range(4)
    ]
    assert equal_trees(plain.model.state_dict(), run.model.state_dict())
    assert equal_trees(plain.optimizer.state_dict(), run.optimizer.state_dict())
    overlap = run.manager.overlap
    assert overlap is not None
    assert overlap.overlapped > 2 * overlap.after, "most of the step begins while the backward pass goes on"
    assert run.manager.device.peak <= 100_000
    assert threads() == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    ],
)
def test_the_optimizers_of_pytorch_with_groups_and_a_schedule(kind: Any, options: dict[str, object]) -> None:
    """Rates differ between groups and steps; the schedule is told of the steps."""
    found = []
    for overlap in (False, True):
        model = Net()
        groups = [{"params": list(x.parameters()), "lr": 0.1 / (i + 1)} for i, x in enumerate(model.layers)]
        optimizer = kind(groups, **options)
        manager = Gemini(model, optimizer, 1 << 12, overlap_optimizer=overlap)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                backward(model, step)
                manager.step()
                schedule.step()
                manager.zero_grad()
        found.append(copy.deepcopy(manager.state_dict()))
        assert manager.overlap is None or manager.overlap.overlapped > 0
    assert equal_trees(found[0], found[1])


def test_frozen_shared_and_unused_parameters() -> None:
    """Chunks that are never complete are left to the step."""
    found = []
    for overlap in (False, True):
        model = Odd()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        manager = Gemini(model, optimizer, 5000, overlap_optimizer=overlap)
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        for step in range(3):
            model(x, twice=step == 1)["out"][0].pow(2).mean().backward()
            manager.step()
            manager.zero_grad()
        found.append(copy.deepcopy(manager.state_dict()))
    assert equal_trees(found[0], found[1])


def test_a_step_runs_while_the_backward_pass_does() -> None:
    """The backward pass of the first layer waits for the step of the last one."""
    stepped = threading.Event()

    class Told(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            if threading.current_thread() is not threading.main_thread():
                stepped.set()

    model, manager = managed(Told)
    assert not stepped.is_set()
    x = torch.ones(4, 8, requires_grad=True)
    waited = []
    hidden = model.layers[0](x)
    hidden.register_hook(lambda _: waited.append(stepped.wait(60)))
    model.layers[2](model.layers[1](hidden).tanh()).sum().backward()
    assert waited == [True]
    manager.step()


def test_gradients_that_wait_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped, "_WAITING", 0)
    found = []
    for overlap in (False, True):
        model = Net()
        manager = Gemini(model, adam(model), 1 << 12, overlap_optimizer=overlap)
        for step in range(2):
            backward(model, step)
            manager.step()
            manager.zero_grad()
        found.append(copy.deepcopy(manager.state_dict()))
    assert equal_trees(found[0], found[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_accumulated_gradients_inside_no_sync(overlap: bool) -> None:
    plain, model = Net(), Net()
    optimizer = adam(plain)
    manager = Gemini(model, adam(model), 1 << 12, overlap_optimizer=overlap)
    for step in range(3):
        with manager.no_sync():
            backward(model, 2 * step)
        backward(model, 2 * step + 1)
        backward(plain, 2 * step)
        backward(plain, 2 * step + 1)
        for run in (manager, optimizer):
            run.step()
            run.zero_grad()
    assert equal_trees(plain.state_dict(), model.state_dict())
    assert manager.overlap is None or manager.overlap.overlapped > 0


def _eval(model: nn.Module, manager: Gemini) -> None:
    with torch.no_grad():
        model.eval()(torch.ones(1, 8))


def _look(model: nn.Module, manager: Gemini) -> None:
    with manager.params_on_host():
        pass


TOO_EARLY: dict[str, Callable[[nn.Module, Gemini], Any]] = {
    "a second backward pass": lambda model, manager: backward(model),
    "an evaluation": _eval,
    "a look at gradients": _look,
    "a step that is left out": lambda model, manager: manager.zero_grad(),
    "a checkpoint": lambda model, manager: model.state_dict(),
    "the end": lambda model, manager: manager.release(),
}


@pytest.mark.parametrize("what", TOO_EARLY)
def test_nothing_sees_a_part_of_a_step(what: str) -> None:
    """It is refused, and the step goes on as if nobody had asked."""
    model, manager = managed()
    plain = Net()
    for net in (model, plain):
        backward(net)
    with pytest.raises(ConfigError, match=r"between backward\(\) and step\(\).*overlap_optimizer=False"):
        TOO_EARLY[what](model, manager)
    manager.step()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    assert equal_trees(plain.state_dict(), model.state_dict())


def test_a_further_gradient_of_the_same_pass_is_refused() -> None:
    """Both losses have one forward pass; the second one's gradients would come too late."""
    model, _ = managed()
    out = model(torch.ones(2, 8))
    out.sum().backward(retain_graph=True)
    with pytest.raises(
        (ConfigError, RuntimeError), match=r"gets a further gradient|used again|inplace operation"
    ):
        out.square().sum().backward()


def test_rates_that_are_set_after_the_backward_pass_are_noticed() -> None:
    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    assert manager.optimizer is not None
    backward(model)
    manager.optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ConfigError, match=r"set learning rates before backward\(\)"):
        manager.step()
    with pytest.raises(ConfigError, match="failed half way"):
        manager.step()
    manager.load_state_dict(saved)
    backward(model)
    manager.step()


class Broken(torch.optim.SGD):
    """Its second step in a thread raises."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if threading.current_thread() is not threading.main_thread():
            Broken.calls += 1
            if Broken.calls == 2:
                raise FloatingPointError("no such number")
        super().step(closure)


def test_what_a_thread_raises_reaches_the_caller() -> None:
    model, manager = managed(Broken)
    saved = copy.deepcopy(manager.state_dict())
    Broken.calls = 0
    backward(model)
    with pytest.raises(FloatingPointError, match="no such number"):
        manager.step()
    assert Broken.calls == 2, "what was to follow does not run"
    assert threads() == []
    with pytest.raises(ConfigError, match="failed half way"):
        manager.step()
    manager.load_state_dict(saved)
    manager.zero_grad()
    plain = Net()
    for net in (plain, model):
        backward(net, 1)
    manager.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert equal_trees(plain.state_dict(), model.state_dict())
    assert threads() == []


def test_a_backward_pass_that_fails_is_recovered_from() -> None:
    """Some chunks have been stepped; a checkpoint undoes that, and the thread ends."""

    def fail(_: Tensor) -> None:
        raise MemoryError("no memory")

    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    hidden = model.layers[0](torch.ones(4, 8))
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        model.layers[2](model.layers[1](hidden).tanh()).sum().backward()
    with pytest.raises(ConfigError, match="After a failed backward pass, continue from a checkpoint"):
        manager.zero_grad()
    manager.load_state_dict(saved)
    assert threads() == []
    manager.zero_grad()
    plain = Net()
    for net in (plain, model):
        backward(net, 1)
    manager.step()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    assert equal_trees(plain.state_dict(), model.state_dict())


# What cannot be overlapped at all


def test_clipping_is_refused_before_anything_runs() -> None:
    _, manager = managed()
    with pytest.raises(ConfigError, match=r"needs all gradients.*overlap_optimizer=False"):
        manager.clip_grad_norm_(1.0)


def test_a_policy_without_a_host_and_a_manager_without_an_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"policy 'cuda' steps parameters on the device.*policy 'auto'"):
        managed(policy="cuda")
    with pytest.raises(ConfigError, match="overlap_optimizer needs an optimizer"):
        Gemini(Net(), budget=1 << 12, overlap_optimizer=True)


def test_several_processes_are_refused() -> None:
    def rank(group: Group) -> str:
        with pytest.raises(ConfigError, match="before gradients of other processes arrive") as caught:
            managed(group=group.process_group)
        return str(caught.value)

    assert len(set(on_one_line(2, rank))) == 1


def test_hooks_of_the_step_are_refused() -> None:
    model = Net()
    optimizer = adam(model)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=r"hooks of the optimizer's step.*remove the hooks"):
        Gemini(model, optimizer, 1 << 12, overlap_optimizer=True)
    handle.remove()
    manager = Gemini(model, optimizer, 1 << 12, overlap_optimizer=True)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="remove the hooks"):
        backward(model)
    assert manager.overlap is not None
    assert manager.overlap.overlapped == 0


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_optimizers_of_this_package_that_look_at_each_layer(kind: Any) -> None:
    found = []
    for overlap in (False, True):
        model = Net()
        manager = Gemini(
            *(model, kind(dict(model.named_parameters()), lr=0.1), 1 << 12), overlap_optimizer=overlap
        )
        for step in range(3):
            backward(model, step)
            manager.step()
            manager.zero_grad()
        found.append(copy.deepcopy(manager.state_dict()))
        assert manager.overlap is None or manager.overlap.overlapped > 0
    assert equal_trees(found[0], found[1])


def test_an_optimizer_that_remembers_elsewhere_than_in_its_states_is_refused() -> None:
    class Remembers(torch.optim.SGD):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, lr)
            self.last: dict[Tensor, Tensor] = {}

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    last, self.last[p] = self.last.get(p, p.grad), p.grad
                    p.data.sub_(last, alpha=group["lr"])

    model = Net()
    with pytest.raises(ConfigError, match="Remembers cannot be stepped during the backward pass"):
        Gemini(model, Remembers(model.parameters(), lr=0.1), 1 << 12, overlap_optimizer=True)
    Gemini(model, Remembers(model.parameters(), lr=0.1), 1 << 12)
