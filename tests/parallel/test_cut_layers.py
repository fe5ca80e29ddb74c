"""Layers are found by patterns, replaced in place, and stay tied."""

from __future__ import annotations

import pytest
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.cut_layers import cut_layers
from fastfold.parallel.families.tensor_layers import find_cuts
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.utils.module_structure import tied_names


class Half(nn.Linear):
    """A rank's outputs of a layer."""

    def to_plain(self) -> nn.Module:
        return nn.Linear(self.in_features, 2 * self.out_features, bias=False)


def half(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
    """Keep the first half of a linear layer's outputs."""
    assert isinstance(layer, nn.Linear)
    part = Half(layer.in_features, layer.out_features // mesh.group("tp").size, bias=False)
    part.weight.data.copy_(layer.weight[: part.out_features])
    return part


def model() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False))


def test_the_outermost_module_wins_and_wrong_patterns_are_refused() -> None:
    plan = ParallelPlan(tp=2)
    assert list(find_cuts(model(), plan, {"0.0": half, "0": half, "1": half}, [])) == ["0.0", "0", "1"]
    assert list(find_cuts(model(), plan, {"0*": half}, [])) == ["0"]
    assert find_cuts(model(), ParallelPlan(dp=2), None, []) == {}
    with pytest.raises(ConfigError, match=r"tp=2 needs to know which layers of Sequential are cut"):
        find_cuts(model(), plan, None, [])
    with pytest.raises(ConfigError, match=r"no module of Sequential is called 2; did you mean"):
        find_cuts(model(), plan, {"2": half}, [])
    with pytest.raises(ConfigError, match=r"layers= lacks 1\.weight"):
        find_cuts(model(), ParallelPlan(tp=4, tp_mode="2d"), {"0": half}, [])
    every = {"0": half, "1": half}
    assert find_cuts(model(), ParallelPlan(tp=4, tp_mode="2d"), every, []) == every


def test_layers_are_replaced() -> None:
    whole = model()
    weights = [part.detach().clone() for part in whole.parameters()]
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        cut_layers(whole, {"0.0": half}, mesh, tied_names(whole))
    first, second = whole.parameters()
    assert first.equal(weights[0][:2])
    assert second.equal(weights[1])


def test_tied_parameters_stay_tied() -> None:
    whole = model()
    whole[1].weight = whole[0][0].weight  # type: ignore[index,union-attr]
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        cut_layers(whole, {"0.0": half}, mesh, tied_names(whole))
    assert whole[1].weight is whole[0][0].weight  # type: ignore[index,union-attr]
    assert whole[1].weight.shape == (2, 4)  # type: ignore[union-attr]


def test_tied_parameters_that_are_cut_differently_are_refused() -> None:
    def other_half(layer: nn.Module, mesh: ParallelMesh) -> nn.Module:
        part = half(layer, mesh)
        part.weight = nn.Parameter(part.weight.T.contiguous())  # type: ignore[union-attr,operator]
        return part

    whole = model()
    whole[1].weight = whole[0][0].weight  # type: ignore[index,union-attr]
    message = r"0\.0\.weight and 1\.weight are one parameter, .* differently \(shapes \[2, 4\] and \[4, 2\]"
    with fake_mesh(ParallelPlan(tp=2)) as mesh, pytest.raises(ConfigError, match=message):
        cut_layers(whole, {"0.0": half, "1": other_half}, mesh, tied_names(whole))
