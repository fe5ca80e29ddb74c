"""Between this rank's part of a model and the plain, whole model's names and shapes, there and back."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.parallel.comm.collectives import gather
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.full_state import FullStateDict
from tests.helpers.thread_ranks import on_a_grid, on_one_line


class _Rows(nn.Module):
    """This rank's outputs of a linear layer, under a name of its own."""

    def __init__(self, plain: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.rows = nn.Parameter(plain.weight[group.shard(len(plain.weight))].detach().clone())

    def to_plain(self) -> nn.Module:
        weight = gather(self.rows.detach(), 0, self.group, [2, 1])
        plain = nn.Linear(weight.shape[1], len(weight), bias=False, dtype=weight.dtype)
        plain.weight = nn.Parameter(weight)
        return plain


def _shard(plain: nn.Module, mesh: Any) -> nn.Module:
    assert isinstance(plain, nn.Linear)
    return _Rows(plain, mesh.group("tp"))


def _plain() -> nn.Sequential:
    """Two stages of a layer that is cut and a norm that is not."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(4, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 4)) for _ in range(2)]
    return nn.Sequential(*stages).double()


PLAIN = _plain()
WHOLE = {name: value.detach() for name, value in PLAIN.named_parameters()}
SHAPES = {name: (value.shape, value.dtype) for name, value in WHOLE.items()}


def _stage(number: int, tp: Group) -> nn.Module:
    """One stage's module, whose names are those of the stage: ``blocks.0`` for ``0`` or ``1`` of the plain model."""
    module = nn.Module()
    module.blocks = nn.ModuleList([copy.deepcopy(PLAIN[number])])
    module.blocks[0][0] = _Rows(module.blocks[0][0], tp)
    return module


def _full_state(stage: Group, tp: Group) -> tuple[nn.Module, FullStateDict]:
    module = _stage(stage.rank, tp)
    mesh = SimpleNamespace(group={"pp": stage, "tp": tp}.__getitem__)
    made = FullStateDict(
        module,
        mesh,  # type: ignore[arg-type]
        {"blocks.0.0": _shard},
        SHAPES,
        {"blocks.0": str(stage.rank)},
    )
    return module, made


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_two_stages_of_two_ranks_are_one_plain_model_and_come_back() -> None:
    def run(stage: Group, tp: Group) -> tuple[bool, bool, bool]:
        module, made = _full_state(stage, tp)
        own = {name: value.detach() for name, value in module.named_parameters()}
        of_stage = {name: value for name, value in WHOLE.items() if name.startswith(f"{stage.rank}.")}
        twice = {name: 2 * value for name, value in WHOLE.items()}
        back = made.shard(twice)
        assert all(
            torch.equal(value, own[name]) for name, value in module.named_parameters()
        )  # nothing is written
        return (
            _same(made.plain(own), WHOLE),
            _same(made.plain(own, everywhere=False), of_stage),
            _same(back, {name: 2 * value for name, value in own.items()}),
        )

    assert on_a_grid((2, 2), run) == [(True, True, True)] * 4


def test_what_is_not_cut_shares_its_memory_and_parts_may_be_left_out() -> None:
    def run(tp: Group) -> bool:
        _, made = _full_state(Group(None), tp)
        norm = torch.ones(3, dtype=torch.float64)
        found = made.plain({"blocks.0.1.weight": norm})
        assert list(found) == ["0.1.weight"]
        assert list(made.shard({"0.1.weight": norm, "unknown": norm})) == ["blocks.0.1.weight"]
        return found["0.1.weight"].data_ptr() == norm.data_ptr()

    assert on_one_line(2, run) == [True, True]


def test_one_number_for_each_parameter_follows_its_layer() -> None:
    """Counts of steps: a layer's parameters have other names here, and all of them the same count."""

    def run(stage: Group, tp: Group) -> tuple[dict[str, float], dict[str, float]]:
        module, made = _full_state(stage, tp)
        names = [name for name, _ in module.named_parameters()]
        steps = {name: torch.tensor(1.0 + stage.rank) for name in names}
        plain = made.plain_scalars(steps)
        back = made.shard_scalars({name: 10 * value for name, value in plain.items()}, names)
        return {name: x.item() for name, x in plain.items()}, {name: x.item() for name, x in back.items()}

    for rank, (plain, back) in enumerate(on_a_grid((2, 2), run)):
        assert plain == {name: 1.0 + int(name[0]) for name in WHOLE}
        assert back.keys() == {
            f"blocks.0.{rest}" for rest in ("0.rows", "1.weight", "1.bias", "2.weight", "2.bias")
        }
        assert set(back.values()) == {10.0 * (1 + rank // 2)}


class _Renamed(nn.Module):
    """This rank's rows of a layer's weight, and its bias, under names of its own."""

    def __init__(self, plain: nn.Linear, group: Group) -> None:
        super().__init__()
        self.rows, self.shift = _Rows(plain, group), nn.Parameter(plain.bias.detach().clone())

    def to_plain(self) -> nn.Module:
        weight = self.rows.to_plain().weight
        plain = nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
        plain.weight, plain.bias = nn.Parameter(weight), nn.Parameter(self.shift.detach().clone())
        return plain


def test_parameters_of_a_cut_layer_keep_numbers_of_their_own() -> None:
    """Such as those of their groups: the weights decay, the biases do not."""

    def run(tp: Group) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        plain = nn.Linear(4, 3)
        shapes = {name: (p.shape, p.dtype) for name, p in plain.named_parameters()}
        mesh: Any = SimpleNamespace(group=lambda name: tp if name == "tp" else Group(None))
        module, cut = nn.Sequential(_Renamed(plain, tp)), lambda layer, mesh: _Renamed(layer, tp)
        made = FullStateDict(
            module, mesh, {"0": cut}, {f"0.{name}": shape for name, shape in shapes.items()}, {}
        )
        numbers = {"0.rows.rows": torch.tensor(7.0), "0.shift": torch.tensor(300.0)}
        plain_numbers = made.plain_scalars(numbers)
        return plain_numbers, made.shard_scalars(plain_numbers, list(numbers))

    for plain, own in on_one_line(2, run):
        assert plain == {"0.weight": 7.0, "0.bias": 300.0}
        assert own == {"0.rows.rows": 7.0, "0.shift": 300.0}


@pytest.mark.parametrize("path", ["", "0"])
def test_a_layer_may_be_the_whole_module_or_lie_in_it(path: str) -> None:
    """Without stages names stay as they are."""

    def run(tp: Group) -> bool:
        plain = nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            plain.weight.copy_(torch.arange(12.0).view(3, 4))
        module: nn.Module = _Rows(plain, tp)
        module = nn.Sequential(module) if path else module
        mesh = SimpleNamespace(group=lambda name: tp if name == "tp" else Group(None))
        name = "0.weight" if path else "weight"
        shapes = {name: (plain.weight.shape, plain.weight.dtype)}
        made = FullStateDict(module, mesh, {path: _shard}, shapes, {})  # type: ignore[arg-type]
        own = {key: value.detach() for key, value in module.named_parameters()}
        found = made.plain(own)
        return _same(found, {name: plain.weight.detach()}) and _same(made.shard(found), own)

    assert on_one_line(2, run) == [True, True]
