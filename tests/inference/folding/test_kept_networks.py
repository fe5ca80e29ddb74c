"""Networks stay on a GPU while there is room for all of them, and leave it for a fold that needs their memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.data.targets import target_from_sequence
from fastfold.inference.config import InferConfig
from fastfold.inference.folding import predictor as predictor_module
from fastfold.inference.folding.kept_networks import KeptNetworks
from fastfold.inference.folding.predictor import TargetPredictor
from fastfold.inference.planning import planner
from fastfold.inference.planning.fit import Fit, FoldMemory
from tests.helpers.command_line import small_model

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class _Network:
    """A network of 10 bytes, as far as its place is concerned."""

    multimer, name = False, "one"

    def __init__(self, place: torch.device = CPU, size: int = 10) -> None:
        self.place, self.size, self.moves = place, size, 0
        self.config = small_model().config

    def parameters(self) -> Iterator[Any]:
        yield SimpleNamespace(device=self.place, numel=lambda: self.size, element_size=lambda: 1)

    def buffers(self) -> Iterator[Any]:
        return iter(())

    def to(self, place: torch.device) -> None:
        self.moves += place != self.place
        self.place = place


def test_networks_go_home_where_they_came_from() -> None:
    kept, first, second, third = KeptNetworks(), _Network(), _Network(size=7), _Network(GPU)
    for network in (first, second, third, first):
        kept.bring(network, GPU)  # type: ignore[arg-type]
    assert [network.place for network in (first, second, third)] == [GPU] * 3
    assert (kept.bytes_besides(), kept.bytes_besides(first), kept.bytes_besides(first, second)) == (17, 7, 0)  # type: ignore[arg-type]
    kept.send_home(but=second)  # type: ignore[arg-type]
    assert [network.place for network in (first, second, third)] == [CPU, GPU, GPU]
    kept.send_home()
    assert [network.place for network in (first, second, third)] == [CPU, CPU, GPU]
    assert kept.bytes_besides() == 0


def test_a_network_that_is_gone_is_forgotten() -> None:
    kept, network = KeptNetworks(), _Network()
    kept.bring(network, GPU)  # type: ignore[arg-type]
    gone = weakref.ref(network)
    del network
    assert gone() is None
    assert kept.bytes_besides() == 0


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sizes of a machine whose GPU is a name: free bytes, and the peak of any fold without other networks."""
    sizes: dict[str, Any] = {"free": 100, "peak": 30, "seen": []}

    def fit(model: Any, device: Any, residues: int, budget: Any, *, memory: FoldMemory, **more: Any) -> Fit:
        own = planner.parameter_bytes(model) if model.place == GPU else 0
        sizes["seen"].append(memory.free)
        plan = SimpleNamespace(peak=sizes["peak"], blocks={})
        return Fit(SimpleNamespace(), plan, budget or memory.free + own, residues, "a")  # type: ignore[arg-type]

    def here(device: torch.device, **_: Any) -> FoldMemory:
        return FoldMemory(sizes["free"] - sum(one.size for one in sizes["networks"] if one.place == GPU))

    monkeypatch.setattr(predictor_module, "fit_target", fit)
    monkeypatch.setattr(predictor_module.FoldMemory, "here", here)
    monkeypatch.setattr(predictor_module, "own_settings", lambda device: contextlib.nullcontext())
    sizes["networks"] = [_Network(), _Network(), _Network()]
    return sizes


def _predictor(
    planned: dict[str, Any], kept: KeptNetworks | None, device: torch.device = GPU
) -> TargetPredictor:
    target, models = target_from_sequence("MKTAYIAK"), planned["networks"]
    config = InferConfig(cuda_graphs=False)
    return TargetPredictor(target, models, [([], [])], config, device=device, say=print, kept=kept)


def _fold(predictor: TargetPredictor, planned: dict[str, Any]) -> None:
    for network in planned["networks"]:
        with predictor.moved(network):
            assert network.place == GPU


def test_networks_stay_while_they_and_a_fold_take_half_of_the_memory(planned: dict[str, Any]) -> None:
    kept = KeptNetworks()
    for _ in range(2):  # the second target finds them there
        predictor = _predictor(planned, kept)
        _fold(predictor, planned)
        assert [network.moves for network in planned["networks"]] == [1, 1, 1]
        # The memory of the other networks is no part of a fold's budget.
        assert {predictor.fit(network).budget for network in planned["networks"]} == {80}
    assert set(planned["seen"]) == {100, 90}  # what is free, without this network itself


def test_a_fold_that_needs_their_memory_gets_it(planned: dict[str, Any]) -> None:
    kept = KeptNetworks()
    _fold(_predictor(planned, kept), planned)
    planned["peak"] = 31
    predictor = _predictor(planned, kept)
    first, *others = planned["networks"]
    with predictor.moved(first):
        assert [network.place for network in (first, *others)] == [GPU, CPU, CPU]
        assert predictor.fit(first).budget == 100
    _fold(predictor, planned)
    assert sum(network.place == GPU for network in planned["networks"]) == 1


@pytest.mark.parametrize("device", ["cpu", "mps:0"])
def test_where_devices_share_the_hosts_memory_networks_take_nothing_from_it(
    planned: dict[str, Any], device: str
) -> None:
    planned["peak"] = 90
    predictor = _predictor(planned, KeptNetworks(), torch.device(device))
    for network in (*planned["networks"], planned["networks"][0]):
        with predictor.moved(network):
            assert str(network.place) == device
        assert predictor.fit(network).budget == 100
    assert {network.moves for network in planned["networks"]} == {int(device != "cpu")}


def test_without_kept_networks_each_goes_home_after_its_prediction(planned: dict[str, Any]) -> None:
    _fold(_predictor(planned, None), planned)
    assert [(one.place, one.moves) for one in planned["networks"]] == [(CPU, 2)] * 3
    with pytest.raises(KeyError), _predictor(planned, None).moved(planned["networks"][0]):
        raise KeyError
    assert planned["networks"][0].place == CPU
