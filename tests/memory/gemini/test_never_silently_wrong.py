"""What a manager could get wrong without a word is right, or refused with what to do instead."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import BudgetError, Gemini, SimulatedDevice
from fastfold.memory.devices.tiers import NvmeTier, Tier
from fastfold.memory.gemini.checks import NotCopied, check_model
from fastfold.memory.gemini.state_hooks import StateHooks
from fastfold.parallel.comm.groups import Group
from tests.helpers.thread_ranks import on_one_line

POLICIES = ["auto", "cpu", "nvme", "cuda"]
AWAY = ["auto", "cpu", "nvme"]


class Net(nn.Module):
    """An encoder, a scale of its own and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.encoder(x) * self.scale))  # type: ignore[no-any-return]


def x_of(step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def managed(policy: str = "auto", **options: Any) -> tuple[Net, Gemini]:
    """One chunk for each module."""
    model = Net()
    return model, Gemini(model, adam(model), budget=1 << 14, policy=policy, **options)


def backward(model: nn.Module, step: int = 0) -> None:
    model(x_of(step)).square().sum().backward()


# Gradients


@pytest.mark.parametrize("policy", POLICIES)
def test_clipping_is_that_of_pytorch(policy: str) -> None:
    plain, (model, manager) = Net(), managed(policy)
    optimizer = adam(plain)
    for step in range(3):
        for net in (plain, model):
            backward(net, step)
            backward(net, step + 10)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
        found = manager.clip_grad_norm_(0.3)
        assert norm > 0.3
        assert torch.equal(found, norm)
        for run in (optimizer, manager):
            run.step()
            run.zero_grad()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


def test_clipping_looks_at_the_mean_gradient_of_all_ranks() -> None:
    plain = Net()
    for rank in range(2):
        (plain(x_of(rank)).square().sum() / 2).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
    optimizer = adam(plain)
    optimizer.step()

    for shard in (False, True):
        models = [
            Net(),
            Net(),
        ]  # made one after the other: the ranks are threads, and share the random numbers

        def run(
            group: Group, shard: bool = shard, models: list[Net] = models
        ) -> tuple[Tensor, dict[str, Tensor]]:
            model = models[group.rank]
            manager = Gemini(model, adam(model), budget=1 << 14, group=group.process_group, shard=shard)
            with torch.enable_grad():
                backward(model, group.rank)
            norm = manager.clip_grad_norm_(0.3)
            if group.rank == 1:
                model.state_dict()  # what one rank looks at alone changes nothing
            manager.step()
            return norm, {name: x.clone() for name, x in model.state_dict().items()}

        for norm, state in on_one_line(2, run):
            assert (norm - expected).abs() < 1e-12
            for name, x in plain.state_dict().items():
                assert (state[name] - x).abs().max() < 1e-12, name


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_on_the_host_are_not_taken_for_none(policy: str) -> None:
    model, manager = managed(policy)
    weight = model.head.weight
    assert weight.grad is None
    weight.grad = None
    backward(model)
    wrong: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: weight.grad.mul_(2),  # type: ignore[union-attr]
        lambda: setattr(weight, "grad", torch.ones(2, 6, dtype=torch.float64)),
        lambda: model.zero_grad(),
        lambda: manager.optimizer.zero_grad(),  # type: ignore[union-attr]
        lambda: [p.grad for p in model.parameters() if p.grad is not None],
    ]
    for attempt in wrong:
        with pytest.raises(ConfigError, match=r"clip_grad_norm_\(\).*params_on_host\(\).*zero_grad\(\)"):
            attempt()
    with manager.params_on_host():
        expected = 2 * weight.grad  # type: ignore[operator]
        weight.grad = expected.clone()
    with manager.params_on_host():
        assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]
    manager.zero_grad()
    assert weight.grad is None


def test_gradients_from_before_count() -> None:
    plain, model = Net(), Net()
    for net in (plain, model):
        backward(net, 1)
    manager = Gemini(model, adam(model), budget=1 << 14)
    for net in (plain, model):
        backward(net, 2)
    with manager.params_on_host():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_hooks_that_see_a_part_of_a_gradient_are_refused() -> None:
    model = Net()
    model.scale.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match="scale has a hook that runs after its gradient is added up"):
        Gemini(model, budget=1 << 14)
    model, _ = managed()
    with pytest.raises(ConfigError, match=r"head\.weight"):
        model.head.weight.register_post_accumulate_grad_hook(lambda p: None)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_pass_and_no_step_while_parameters_are_on_the_host(policy: str) -> None:
    model, manager = managed(policy)
    backward(model)
    with manager.params_on_host():
        for attempt in (lambda: model(x_of()), manager.step, lambda: manager.clip_grad_norm_(1.0)):
            with pytest.raises(ConfigError, match=r"leave params_on_host\(\)"):
                attempt()
    manager.step()


# Parameters that are away


def _ema(model: nn.Module) -> None:
    average = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            average[name].mul_(0.9).add_(p, alpha=0.1)


READS: list[Callable[[Net], object]] = [
    lambda model: torch.save(list(model.parameters()), io.BytesIO()),
    lambda model: nn.utils.parameters_to_vector(model.parameters()),
    lambda model: nn.utils.vector_to_parameters(torch.zeros(1000), model.parameters()),
    _ema,
    lambda model: model.head.weight.sum(),
    lambda model: model.head.weight.data,
    lambda model: model.head.weight.detach(),
    lambda model: model.head.weight.tolist(),
    lambda model: model.head.weight.numpy(),
    lambda model: torch.stack([model.scale]),
    lambda model: nn.init.zeros_(model.scale),
    lambda model: model.half(),
]


@pytest.mark.parametrize("policy", AWAY)
@pytest.mark.parametrize("number", range(len(READS)))
def test_what_is_away_raises_when_read(policy: str, number: int) -> None:
    model, manager = managed(policy)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"(head|scale|encoder).*params_on_host\(\).*state_dict\(\)"):
            READS[number](model)
        backward(model)  # the last module's chunk may be on the device now
        manager.step()
        manager.zero_grad()
    for p in model.parameters():
        assert p.shape.numel() == p.numel() and p.dtype == torch.float64 and p.is_leaf  # noqa: PT018
        assert "managed" in repr(p)
    plain = Net()
    optimizer = adam(plain)
    for _ in range(2):
        backward(plain)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_submodule_s_state_dict_is_right(policy: str) -> None:
    plain, (model, _) = Net(), managed(policy)
    for _ in range(2):
        for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
            state = mine.state_dict()
            assert all(torch.equal(x, state[name]) for name, x in theirs.state_dict().items())
        model(x_of())
    twice = {name: 2 * x for name, x in plain.encoder.state_dict().items()}
    model.encoder.load_state_dict(twice)
    assert all(torch.equal(x, twice[name]) for name, x in model.encoder.state_dict().items())
    plain.encoder.load_state_dict(twice)
    assert torch.equal(model(x_of()), plain(x_of()))


@pytest.mark.parametrize("policy", POLICIES)
def test_copying_a_managed_model_says_what_to_do(policy: str) -> None:
    model, manager = managed(policy)
    wrong = (copy.deepcopy, pickle.dumps)
    for attempt in wrong:
        for module in (model, model.encoder, model.head):
            with pytest.raises(ConfigError, match=r"state_dict\(\)|release\(\)"):
                attempt(module)
            with manager.params_on_host(), pytest.raises(ConfigError, match=r"release\(\)"):
                attempt(module)
    with manager.params_on_host():
        assert torch.equal(copy.deepcopy(model.scale), torch.ones(6, dtype=torch.float64))
        assert torch.equal(pickle.loads(pickle.dumps(model.scale)), torch.ones(6, dtype=torch.float64))
    manager.release()
    for attempt in wrong:
        attempt(model)
    assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())


def test_hooks_bring_parameters_once_for_a_module_and_all_within() -> None:
    class Counts:
        inside = most = 0

        def __enter__(self) -> None:
            self.inside += 1
            self.most = max(self.most, self.inside)

        def __exit__(self, *_: object) -> None:
            self.inside -= 1

    model, counts = Net(), Counts()
    optimizer = adam(model)
    loaded: list[int] = []
    hooks = StateHooks(model, optimizer, lambda: counts, lambda: loaded.append(counts.inside))  # type: ignore[arg-type, return-value]
    assert isinstance(hooks, NotCopied)
    model.encoder[0].load_state_dict(model.encoder[0].state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert (counts.inside, counts.most, loaded) == (0, 1, [1])
    hooks.remove()
    model.state_dict()
    assert counts.most == 1


def test_gradients_can_be_asked_for_without_keeping_them() -> None:
    plain, (model, _) = Net(), managed()
    found = [
        torch.autograd.grad(net(x_of()).square().sum(), [net.head.weight, net.scale])
        for net in (plain, model)
    ]
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


# What trains


@pytest.mark.parametrize("policy", POLICIES)
def test_what_would_never_train_is_refused_at_the_step(policy: str) -> None:
    model, manager = managed(policy)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.requires_grad_(False)  # and back: the usual way to evaluate
    model.encoder.requires_grad_(True)
    model.head.requires_grad_(True)
    model.scale.requires_grad_(True)
    backward(model)
    model.frozen.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"frozen\.weight was made to train.*release\(\)"):
        manager.step()
    model.frozen.weight.requires_grad_(False)
    head = model.head
    model.head = nn.Linear(6, 2).double()
    with pytest.raises(ConfigError, match=r"head\.weight was put into the model.*release\(\)"):
        manager.step()
    model.head = head
    assert manager.optimizer is not None
    manager.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ConfigError, match="parameters that the model does not have"):
        manager.step()
    del manager.optimizer.param_groups[-1]
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    manager.step()
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_has_one_manager(policy: str) -> None:
    model, manager = managed(policy)
    for part in (model, model.encoder):
        with pytest.raises(ConfigError, match=r"managed already.*release\(\)"):
            Gemini(part, budget=1 << 14, policy=policy)
    manager.release()
    check_model(model, None)
    Gemini(model, budget=1 << 14, policy=policy)


# Saved tensors


class Overwrites(nn.Module):
    """Changes in place what a backward pass needs, if told to."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.after = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor, overwrite: bool) -> Tensor:
        y = self.layer(x).exp()
        z = self.after(y.sin())
        if overwrite:
            with torch.no_grad():
                y.mul_(2)
        return z


@pytest.mark.parametrize("size", [4, 32])  # small tensors are not moved
@pytest.mark.parametrize("budget", [1 << 14, 1 << 22])
@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_what_is_changed_in_place_is_noticed(policy: str | None, budget: int, size: int) -> None:
    model = Overwrites(size)
    x = torch.randn(8, size, generator=torch.Generator().manual_seed(1))
    manager = None
    if policy is not None:
        manager = Gemini(model, budget=1 << 22 if policy == "cuda" else budget, policy=policy)
    for _ in range(3):  # after the first step more is kept on the device
        model(x, False).sum().backward()
        (manager or model).zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(x, True).sum().backward()
        (manager or model).zero_grad()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_between_forward_and_backward_is_noticed(policy: str) -> None:
    for net, manager in ((Net(), None), managed(policy)):
        optimizer: Any = manager or adam(net)
        backward(net)
        loss = net(x_of()).square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("policy", AWAY)
def test_forwards_without_backward_leave_nothing(policy: str, recompute: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Sigmoid()) for _ in range(3)))
    device = SimulatedDevice(1 << 20)
    manager = Gemini(
        model, adam(model), 1 << 20, policy, device=device, recompute=list(model) if recompute else ()
    )
    with device.running():
        for _ in range(3):
            model(torch.randn(16, 32)).sum().backward()
            manager.step()
            manager.zero_grad()
        gc.collect()
        before = device.other_bytes(), manager.store.host.used
        for _ in range(6):
            out = model(torch.randn(16, 32))
            assert out.requires_grad
            del out
        gc.collect()
        assert (device.other_bytes(), manager.store.host.used) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_second_derivatives_are_right_or_refused(policy: str) -> None:
    def second(net: Net) -> Tensor:
        x = x_of().requires_grad_()
        (first,) = torch.autograd.grad(net.encoder(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    model, _ = managed(policy)
    if policy == "cuda":
        assert torch.equal(second(model), second(Net()))
    else:
        with pytest.raises(ConfigError, match=r"create_graph=True.*policy 'cuda'"):
            second(model)


# The step


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Allocations of optimizer states left before they fail."""
    left = [1 << 30]
    original = Tier.allocate

    def allocate(self: Tier, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        if what == "optimizer states":
            if not left[0]:
                raise MemoryError("no memory")
            left[0] -= 1
        return original(self, numel, dtype, what)

    reserved = NvmeTier.allocate_kept

    def allocate_kept(self: NvmeTier, numel: int, dtype: torch.dtype, what: str = "a chunk") -> Tensor:
        if what == "optimizer states":
            if not left[0]:
                raise MemoryError("no memory")
            left[0] -= 1
        return reserved(self, numel, dtype, what)

    monkeypatch.setattr(Tier, "allocate", allocate)
    monkeypatch.setattr(NvmeTier, "allocate_kept", allocate_kept)
    return left


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_for_which_there_is_no_room_changes_nothing(policy: str, failing: list[int]) -> None:
    plain, (model, manager) = Net(), managed(policy)
    backward(plain)
    backward(model)
    failing[0] = 3
    with pytest.raises(MemoryError):
        manager.step()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())
    assert not manager.optimizer.state  # type: ignore[union-attr]
    failing[0] = 1 << 30
    adam(plain).step()
    manager.step()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


def test_states_that_do_not_fit_on_the_device_change_nothing() -> None:
    model = Net()
    optimizer = adam(model)
    device = SimulatedDevice(1 << 16)
    manager = Gemini(model, optimizer, 1 << 16, "cuda", device=device)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    backward(model)
    device.budget = device.used + 1500
    with pytest.raises(BudgetError, match="optimizer states"):
        manager.step()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_step_that_fails_half_way_is_not_gone_on_from() -> None:
    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    backward(model)
    optimizer = manager.optimizer
    assert optimizer is not None
    calls = []

    def fail(*_: object) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        manager.step()
    handle.remove()
    for attempt in (manager.step, manager.state_dict):
        with pytest.raises(ConfigError, match=r"failed half way.*load_state_dict\(\)"):
            attempt()
    manager.load_state_dict(saved)
    manager.step()


def test_a_checkpoint_is_gone_on_from_after_a_backward_pass_that_raised() -> None:
    """Parameters that were in use when it raised are not in use any more."""

    def fail(_: Tensor) -> None:
        raise MemoryError("no memory")

    model, manager = managed()
    saved = copy.deepcopy(manager.state_dict())
    hidden = model.encoder(x_of())
    hidden.register_hook(fail)
    with pytest.raises(MemoryError):
        model.head(hidden).sum().backward()
    manager.load_state_dict(saved)
    assert all(torch.equal(x, saved["model"][name]) for name, x in model.state_dict().items())


class Counting(torch.optim.SGD):
    """Keeps a number of a whole group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"] / group["k"])


class Global(torch.optim.SGD):
    """Looks at all gradients together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        super().step()


@pytest.mark.parametrize("kind", [Counting, Global, torch.optim.LBFGS])
def test_optimizers_that_do_not_treat_parameters_alone_are_refused(kind: Any) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"{kind.__name__} .*one chunk of parameters after the other"):
        Gemini(model, kind(model.parameters(), lr=0.1), budget=1 << 14)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.RAdam, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.Adagrad, {}),
        (torch.optim.Adadelta, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": False}),
    ],
)
def test_the_optimizers_of_pytorch_step_as_ever(kind: Any, options: dict[str, object]) -> None:
    plain, model = Net(), Net()
    optimizer = kind(plain.parameters(), lr=0.01, **options)
    manager = Gemini(model, kind(model.parameters(), lr=0.01, **options), budget=1 << 14)
    torch.optim.lr_scheduler.StepLR(manager.optimizer, 1)  # replaces the optimizer's step
    for step in range(3):
        for net, run in ((plain, optimizer), (model, manager)):
            backward(net, step)
            run.step()
            run.zero_grad()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in plain.state_dict().items())


# Memory formats


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_formats_are_kept(policy: str) -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)).to(memory_format=torch.channels_last)
        optimizer: Any = adam(model)
        run = Gemini(model, optimizer, budget=1 << 14, policy=policy) if wrapped else optimizer
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert model[0].weight.stride() == (27, 1, 9, 3)
        for _ in range(2):
            out = model(torch.ones(1, 3, 8, 8).to(memory_format=torch.channels_last))
            out.square().sum().backward()
            run.step()
            run.zero_grad()
        states = [model.state_dict(), *optimizer.state_dict()["state"].values()]
        found.append([{n: (x, x.stride()) for n, x in state.items()} for state in states])
    for plain, mine in zip(*found, strict=True):
        for name, (x, stride) in plain.items():
            assert torch.equal(x, mine[name][0])
            assert stride == mine[name][1]
