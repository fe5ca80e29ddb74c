"""Gradients of a managed model are those of PyTorch, or refused with what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.memory import Gemini, GeminiConfig
from fastfold.parallel.comm.groups import Group
from tests.helpers.thread_ranks import on_one_line
from tests.memory.gemini.never_silently_wrong.nets import POLICIES, Net, adam, backward, managed, x_of


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
            manager = Gemini(
                model, adam(model), GeminiConfig(budget=1 << 14, group=group.process_group, shard=shard)
            )
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
    manager = Gemini(model, adam(model), GeminiConfig(budget=1 << 14))
    for net in (plain, model):
        backward(net, 2)
    with manager.params_on_host():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_hooks_that_see_a_part_of_a_gradient_are_refused() -> None:
    model = Net()
    model.scale.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ConfigError, match="scale has a hook on its accumulated gradient"):
        Gemini(model, config=GeminiConfig(budget=1 << 14))
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
