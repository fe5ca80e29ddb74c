"""Arguments of parallelize for one model: what a plan does not need is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel import Parallel, ParallelPlan, parallelize
from fastfold.parallel.planner.auto import Choice
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.tensor_parallel import ParallelMLP


def _model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.Linear(4, 4))


def _parallelize(plan: dict[str, int], **options: Any) -> Parallel:
    with fake_mesh(ParallelPlan.from_dict(plan)) as mesh:
        return parallelize(_model(), mesh, **options)


def test_layers_are_cut_and_attention_spread_if_the_plan_has_ranks_for_them() -> None:
    layers = {"0": ParallelMLP.from_plain}
    assert isinstance(_parallelize({"tp": 2}, layers=layers).module[0], ParallelMLP)
    assert isinstance(_parallelize({"dp": 2}, layers=layers).module[0], nn.Sequential)
    assert isinstance(_parallelize({"sp": 2}, sequence=nn.Identity).sequence, nn.Identity)
    assert _parallelize({"dp": 2}, sequence=nn.Identity).sequence is None
    # A model without attention or blocks is refused only where the plan asks for them.
    undivided = _parallelize({"dp": 2}, sequence="auto", stages="auto")
    assert undivided.sequence is undivided.stage_comparison is None
    with pytest.raises(ConfigError, match='sequence="auto"'):
        _parallelize({"sp": 2}, sequence="auto")
    with pytest.raises(ConfigError, match='stages="auto"'):
        _parallelize({"pp": 2}, stages="auto")
    with pytest.raises(ConfigError, match='stages="auto"'):
        parallelize(_model(), "auto", stages="auto")


def test_the_cost_model_s_choice_takes_the_place_of_auto() -> None:
    model, layers = _model(), {"0": ParallelMLP.from_plain}
    parallel = parallelize(model, "auto", example=torch.zeros(8, 4), gpu="h100", layers=layers)
    assert parallel.plan == ParallelPlan()
    assert isinstance(parallel.module[0], nn.Sequential)
    assert "plan: dp 1" in parallel.explanation
    with pytest.raises(ConfigError, match="needs example="):
        parallelize(_model(), "auto")
    with pytest.raises(ConfigError, match="found 'fast'"):
        parallelize(_model(), "fast")


def test_blocks_that_are_recomputed_are_those_of_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_recomputed in (False, True):
        model = nn.Sequential()
        model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def choose(*_: Any, blocks: list[str], **__: Any) -> Choice:
            assert blocks == ["blocks.0", "blocks.1"]
            return Choice(ParallelPlan(), is_recomputed, "", passes=3)  # noqa: B023

        monkeypatch.setattr("fastfold.parallel.planner.auto.choose_plan", choose)
        parallel = parallelize(model, "auto", example=torch.zeros(2, 4))
        # A block that is recomputed has a forward pass of its own instance.
        assert ["forward" in vars(block) for block in model.blocks] == [is_recomputed] * 2
        assert parallel.passes == 3
