"""Learning rate: the supplement's numbers, in any order of asking."""

from __future__ import annotations

import math

import pytest

from fastfold.errors import ConfigError
from fastfold.training.config import OptimConfig
from fastfold.training.optim.optimizers import AlphaFoldSchedule, make_schedule


def test_defaults_are_those_of_the_supplement():
    """At a batch of 128: warm-up over 0.128 million samples, 0.95 after 6.4 million."""
    schedule = AlphaFoldSchedule()
    assert schedule.lr(0) == 0
    assert schedule.lr(1) == pytest.approx(1e-6)
    assert schedule.lr(128_000 // 128 // 2) == pytest.approx(5e-4)
    assert schedule.lr(1000) == schedule.lr(6_400_000 // 128) == 1e-3
    assert schedule.lr(6_400_000 // 128 + 1) == schedule.lr(10**7) == pytest.approx(0.95e-3)


def test_fine_tuning_has_no_warm_up():
    schedule = AlphaFoldSchedule(5e-4, warmup_steps=0, decay_after=None)
    assert {schedule.lr(step) for step in (0, 1, 60_000)} == {5e-4}


def test_cosine_starts_where_warm_up_ends_and_stays_at_its_end():
    schedule = AlphaFoldSchedule(2.0, warmup_steps=10, decay_after=None, total_steps=110, final_fraction=0.1)
    assert schedule.lr(5) == 1.0
    assert schedule.lr(10) == 2.0
    assert schedule.lr(60) == pytest.approx(2 * 0.55)
    assert schedule.lr(110) == schedule.lr(1000) == pytest.approx(0.2)
    rates = [schedule.lr(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)


def test_decay_also_scales_the_cosine():
    without = AlphaFoldSchedule(total_steps=100, warmup_steps=0, decay_after=None)
    with_decay = AlphaFoldSchedule(total_steps=100, warmup_steps=0, decay_after=50, decay_factor=0.5)
    assert with_decay.lr(50) == without.lr(50)
    assert with_decay.lr(51) == without.lr(51) / 2


def test_the_rate_depends_on_the_step_alone():
    """A run resumed at any step has the rates of the uninterrupted one."""
    first = AlphaFoldSchedule(total_steps=3000)
    rates = {step: first.lr(step) for step in range(0, 3000, 7)}
    second = AlphaFoldSchedule(total_steps=3000)
    assert all(second.lr(step) == rates[step] for step in sorted(rates, reverse=True))


@pytest.mark.parametrize(
    "values",
    [
        {"base_lr": 0.0},
        {"base_lr": math.nan},
        {"base_lr": math.inf},
        {"warmup_steps": -1},
        {"decay_factor": 0.0},
        {"decay_factor": 1.5},
        {"final_fraction": -0.1},
        {"total_steps": 1000},
    ],
)
def test_values_without_meaning_are_refused(values):
    with pytest.raises(ConfigError):
        AlphaFoldSchedule(**values)


def test_the_schedule_of_a_run_has_the_settings_of_group_optim() -> None:
    optim = OptimConfig(
        lr=2e-3, warmup_steps=3, decay_after=40, decay_factor=0.7, cosine_steps=50, final_fraction=0.2
    )
    schedule = make_schedule(optim)
    assert [schedule.lr(step) for step in (1, 3, 50)] == pytest.approx([2e-3 / 3, 2e-3, 2e-3 * 0.2 * 0.7])
    assert schedule.lr(41) == pytest.approx(
        0.7 * 2e-3 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 38 / 47))), rel=1e-12
    )
