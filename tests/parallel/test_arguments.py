"""Arguments of parallelize for one model: what a plan does not need is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.arguments import Arguments, resolve
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.auto import Choice
from fastfold.parallel.tensor_parallel import ParallelMLP


def _model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 4))


def _resolve(plan: Any, **given: Any) -> Arguments:
    arguments = dict.fromkeys(("example", "gpu", "layers", "stages", "sequence"))
    return resolve(_model(), plan, [], **(arguments | given))


def test_layers_are_cut_and_attention_spread_if_the_plan_has_ranks_for_them() -> None:
    layers = {"0": ParallelMLP.from_plain}
    assert list(_resolve({"tp": 2}, layers=layers).cuts) == ["0"]
    assert _resolve({"dp": 2}, layers=layers).cuts == {}
    assert _resolve({"sp": 2}, sequence=nn.Identity).spread is nn.Identity
    assert _resolve({"dp": 2}, sequence=nn.Identity).spread is None
    # A model without attention or blocks is refused only where the plan asks for them.
    undivided = _resolve(ParallelPlan(dp=2), sequence="auto", stages="auto")
    assert undivided.spread is undivided.split is None
    with pytest.raises(ConfigError, match='sequence="auto"'):
        _resolve({"sp": 2}, sequence="auto")
    for plan in ({"pp": 2}, "auto"):
        with pytest.raises(ConfigError, match='stages="auto"'):
            _resolve(plan, stages="auto")


def test_the_cost_model_s_choice_takes_the_place_of_auto() -> None:
    asked = _resolve("auto", example=torch.zeros(8, 4), gpu="h100", layers={"0": ParallelMLP.from_plain})
    assert asked.plan == ParallelPlan()
    assert asked.cuts == {}
    assert "plan: dp 1" in asked.explanation
    assert not asked.recomputed
    with pytest.raises(ConfigError, match="needs example="):
        _resolve("auto")
    with pytest.raises(ConfigError, match="found 'fast'"):
        _resolve("fast")


def test_blocks_that_are_recomputed_are_those_of_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential()
    model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for is_recomputed in (False, True):

        def choose(*_: Any, blocks: list[str], **__: Any) -> Choice:
            assert blocks == ["blocks.0", "blocks.1"]
            return Choice(ParallelPlan(), is_recomputed, "", passes=3)  # noqa: B023

        monkeypatch.setattr("fastfold.parallel.planner.auto.choose_plan", choose)
        arguments = dict.fromkeys(("gpu", "layers", "stages", "sequence"))
        asked = resolve(model, "auto", [], example=torch.zeros(2, 4), **arguments)
        assert asked.recomputed == (["blocks.0", "blocks.1"] if is_recomputed else ())
        assert asked.passes == 3
