"""A rank's stages of a pipeline, the parameters that it shares with others, and stages that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel import Group, ParallelPlan
from fastfold.parallel.own_stages import OwnStages, SharedParameter, take_own_stages
from fastfold.parallel.planner.fake_run import fake_mesh
from tests.helpers.spawn_ranks import launch


class _Tied(nn.Module):
    """Layers of which the last one has the first one's weight, the third one's bias, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(3, 3) for _ in range(4))
        self.last.weight, self.last.bias = self.first.weight, self.third.bias
        self.last.scale = nn.Parameter(torch.ones(3))


def _stages(model: nn.Module, number: int) -> list[nn.Module]:
    """Return stages of one of the model's layers each."""
    return [nn.Sequential(layer) for layer in model.children()]


def _own(rank: int, size: int = 2, model: nn.Module | None = None, stages: object = _stages) -> OwnStages:
    with fake_mesh(ParallelPlan(pp=size), rank) as mesh:
        own = take_own_stages(model or _Tied(), stages, mesh)  # type: ignore[arg-type]
        assert (mesh.group("pp").rank, mesh.group("pp").size) == (rank, size)  # kept by the group
        return own


@pytest.mark.parametrize(("rank", "layers"), [(0, ["first", "third"]), (1, ["second", "last"])])
def test_ranks_have_every_second_stage_under_its_number(rank: int, layers: list[str]) -> None:
    """The others' memory is released."""
    model = _Tied()
    own = _own(rank, model=model)
    numbers = [str(rank), str(rank + 2)]
    assert [name for name, _ in own.called] == numbers
    assert own.renamed == {f"{number}.0": layer for number, layer in zip(numbers, layers, strict=True)}
    assert own.moved({f"{layers[0]}.weight": 1, f"{layers[1]}": 2, "absent": 3}) == {
        f"{numbers[0]}.0.weight": 1,
        f"{numbers[1]}.0": 2,
    }
    assert model.first.weight.numel() == model.third.bias.numel() * 3 == 9  # of both ranks
    assert (model.second.weight.numel(), model.third.weight.numel()) == ((0, 9) if rank == 0 else (9, 0))


@pytest.mark.parametrize("size", [2, 4])
def test_shared_parameters_belong_to_the_stage_with_their_first_name(size: int) -> None:
    """``first.weight`` is that of the stages 0 and 3, ``third.bias`` of 2 and 3."""
    for rank in range(size):
        model = _Tied()
        own = _own(rank, size, model)
        found = {
            name: one.holders
            for one in own.shared
            for name in ("first.weight", "third.bias")
            if one.parameter is model.get_parameter(name)
        }
        both = {"first.weight": (0, 3 % size), "third.bias": (2 % size, 3 % size)}
        assert found == {name: holders for name, holders in both.items() if rank in holders}
        owned = {name for name, one in zip(found, own.shared, strict=True) if one.is_owner}
        assert owned == {name for name, holders in both.items() if holders[0] == rank}
        stepped = {id(p) for p in own.trained().values()}
        followed = {id(one.parameter) for one in own.shared if not one.is_owner}
        assert stepped == {id(p) for p in own.module.parameters()} - followed


def test_the_owner_has_the_parameters_first_name_where_a_later_rank_comes_first() -> None:
    """A model that defines the last layer first: its name counts, and not the order of the stages."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.neck, self.body = (nn.Linear(3, 3) for _ in range(3))
            self.body.weight = self.head.weight

    def turned(model: nn.Module, number: int) -> Sequence[nn.Module]:
        return [nn.Sequential(model.body), nn.Sequential(model.neck, model.head)]

    (shared,) = _own(0, model=Turned(), stages=turned).shared
    assert (shared.holders, shared.is_owner) == ((1, 0), False)


def test_frozen_parameters_and_those_of_one_rank_are_not_shared() -> None:
    model = _Tied()
    model.first.weight.requires_grad_(False)
    assert [one.parameter is model.third.bias for one in _own(1, model=model).shared] == [True]

    def within_one(model: _Tied, number: int) -> list[nn.Module]:
        return [nn.Sequential(model.first, model.third, model.last), model.second]

    assert _own(0, stages=within_one).shared == []


def test_stages_that_a_pipeline_cannot_have_are_refused() -> None:
    def refuse(message: str, stages: object, model: nn.Module | None = None) -> None:
        with pytest.raises(ConfigError, match=message):
            _own(0, model=model, stages=stages)

    refuse("3 stages cannot be spread over pp=2 ranks", lambda model, _: _stages(model, 2)[:3])
    refuse("0 stages cannot be spread", lambda model, _: [])
    refuse("no stage of the pipeline has third.weight", lambda model, _: _stages(model, 2)[:2])
    idle = _Tied()
    idle.second.requires_grad_(False)
    refuse("stage 1 of 4 of the pipeline has no parameter to train", _stages, idle)
    normed = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    refuse(
        "0.running_mean is a buffer of the pipeline's stages 0 and 1",
        lambda model, _: [nn.Sequential(model[0]), model],
        normed,
    )
    assert _own(0, 1).renamed == {}
    assert _own(0, stages=None).called[0][0] == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_with_only_tied_parameters_is_refused_on_every_rank(rank: int) -> None:
    """An output layer that is a stage has an embedding's weight alone, so its optimizer would have none."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"rank 1 .* nothing of its own to train: rank 0 trains 0\.weight"):
        _own(rank, model=model, stages=lambda m, _: [m[:2], m[2]])
    assert _own(rank, model=model, stages=lambda m, _: [m[0], m[1:]]).trained()


def _summed_and_followed() -> tuple[Any, Any]:
    """Return the gradient and the values of a parameter of ranks 2, 0 and 1, whose owner is rank 2."""
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.full((2, 3), float(rank)))
    if rank != 1:
        parameter.grad = torch.full((3, 2), 10.0**rank).T
    with_rank_1 = SharedParameter(parameter, Group(dist.group.WORLD), (2, 0, 1))
    with_rank_1.sum_gradients()
    gradient = None if parameter.grad is None else parameter.grad.tolist()
    with_rank_1.follow_owner()
    lone = nn.Parameter(torch.zeros(1))
    if rank:
        lone.grad = torch.ones(1) if rank == 1 else None
        SharedParameter(lone, Group(dist.group.WORLD), (2, 1)).sum_gradients()
    return gradient, (parameter.tolist(), None if lone.grad is None else lone.grad.tolist())


def test_an_owner_has_the_sum_of_all_gradients_and_others_its_values() -> None:
    """A rank without a gradient adds none, and an owner without one has the others' sum."""
    found = launch(_summed_and_followed, 3)
    assert [gradient for gradient, _ in found] == [None, None, [[101.0] * 3] * 2]
    values = [[2.0] * 3] * 2
    assert [one for _, one in found] == [(values, None), (values, None), (values, [1.0])]
