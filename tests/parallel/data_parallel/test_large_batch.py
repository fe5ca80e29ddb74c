"""LAMB and LARS against their papers' formulas, under warm-up, and with norms that are those of whole layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan
from fastfold.parallel.data_parallel.large_batch import Lamb, Lars, initialize_state
from fastfold.training.optim.optimizers import AlphaFoldSchedule
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import OPTIMIZERS, make_parallel, make_tokens, parallel_loss, three_steps


def _layers() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes: dict[str, Sequence[int]] = {"matrix": (3, 4), "bias": (4,), "number": ()}
    return {
        name: nn.Parameter(torch.randn(list(shape), dtype=torch.float64)) for name, shape in shapes.items()
    }


def _gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in _layers().items()
    }


def _run(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for name, gradient in _gradients(step).items():
            named[name].grad = gradient
        optimizer.step()


RATES = [
    AlphaFoldSchedule(0.1, warmup_steps=3, decay_after=4, decay_factor=0.5).lr(step) for step in range(1, 7)
]


def test_lamb_is_the_papers_algorithm_under_warm_up_and_decay() -> None:
    assert pytest.approx([0.1 / 3, 0.2 / 3, 0.1, 0.1, 0.05, 0.05]) == RATES
    named = _layers()
    _run(named, Lamb(named, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.02, weight_norms=(0.5, 2.0)), RATES)
    for name, expected in _layers().items():
        w = expected.detach()
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for step, rate in enumerate(RATES):
            g = _gradients(step)[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
            r = (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.9 ** (step + 1))) ** 0.5 + 1e-3) + 0.02 * w
            w = w - rate * min(max(float(w.norm()), 0.5), 2.0) / r.norm() * r
        torch.testing.assert_close(named[name].detach(), w, rtol=1e-13, atol=1e-14)


def test_lars_is_the_papers_algorithm_under_warm_up_and_decay() -> None:
    named = _layers()
    _run(named, Lars(named, momentum=0.7, weight_decay=0.02, trust=0.3), RATES)
    for name, expected in _layers().items():
        w = expected.detach()
        v = torch.zeros_like(w)
        for step, rate in enumerate(RATES):
            g = _gradients(step)[name]
            ratio = 0.3 * w.norm() / (g.norm() + 0.02 * w.norm())
            v = 0.7 * v + rate * ratio * (g + 0.02 * w)
            w = w - v
        torch.testing.assert_close(named[name].detach(), w, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_layers_of_zeros_start_and_gradients_of_zeros_do_no_harm(kind: type[Lamb] | type[Lars]) -> None:
    zeros, still = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    optimizer = kind({"zeros": zeros, "still": still}, lr=0.1)
    zeros.grad, still.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert float(zeros.detach().max()) < 0
    assert torch.equal(still.detach(), torch.ones(3))


def test_values_without_meaning_are_refused() -> None:
    for make in (
        lambda named: Lamb(named, betas=(1.0, 0.9)),
        lambda named: Lamb(named, weight_norms=(2.0, 1.0)),
        lambda named: Lamb(named, lr=-1.0),
        lambda named: Lars(named, momentum=1.0),
        lambda named: Lars(named, trust=0.0),
    ):
        with pytest.raises(ConfigError):
            make(_layers())
    named = _layers()
    with pytest.raises(ConfigError, match="RMSprop is not known"):
        initialize_state(torch.optim.RMSprop(named.values()))


PLANS = {
    4: [
        *[ParallelPlan(dp=2, tp=2, zero=zero) for zero in range(4)],
        ParallelPlan(tp=4, tp_mode="2d"),
        ParallelPlan(dp=2, sp=2, zero=1),
    ],
    8: [
        ParallelPlan(tp=8, tp_mode="2.5d", tp_depth=2),
        *[ParallelPlan(dp=2, sp=2, tp=2, zero=zero) for zero in (2, 3)],
    ],
}


def _norms(plan: ParallelPlan) -> tuple[dict[str, float], dict[str, float]]:
    """Norms of all layers as the optimizer adds them up, and those of the whole tensors."""
    parallel = make_parallel(plan, tied=False)
    optimized = parallel.gradients.optimized
    squares = parallel.gradients.norms.squares(optimized)
    found = dict(zip(optimized, squares.sqrt().tolist(), strict=True))
    return found, {name: float(x.norm()) for name, x in parallel.state_dict().items()}


def _everything(plans: Sequence[ParallelPlan]) -> list[tuple[str, float]]:
    worst = []
    for plan in plans:
        found, expected = _norms(plan)
        assert found.keys() == expected.keys()
        assert max(abs(found[name] - expected[name]) for name in found) < 1e-12
        for optimizer in ("lamb", "lars") if plan.zero < 2 else ("lamb",):
            worst.append((f"{plan}, zero {plan.zero}, {optimizer}", three_steps(plan, optimizer)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 8])
def test_norms_are_those_of_whole_layers_under_every_sharding(size: int) -> None:
    """And so are three steps; what ranks hold alike counts once."""
    for plan, worst in launch(_everything, size, PLANS[size], timeout=250)[0]:
        assert worst < 1e-12, f"{plan} differs by {worst}"


def _local_norms() -> float:
    plan = ParallelPlan(dp=2, zero=1)
    parallel = make_parallel(plan)
    optimizer = parallel.optimizer(OPTIMIZERS["lamb"])
    assert isinstance(optimizer.inner, Lamb)
    optimizer.inner.norms = type(optimizer.inner.norms)({})
    expected = make_parallel(ParallelPlan(dp=2))
    right = expected.optimizer(OPTIMIZERS["lamb"])
    for model, step in ((parallel, optimizer), (expected, right)):
        parallel_loss(model, make_tokens()).backward()
        model.reduce_gradients()
        step.step()
    wanted = expected.state_dict()
    return max(float((x - wanted[name]).abs().max()) for name, x in parallel.state_dict().items())


def test_norms_of_shards_alone_would_be_noticed() -> None:
    assert min(launch(_local_norms, 2)) > 1e-4
