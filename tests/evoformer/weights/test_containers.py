"""Networks are found in containers of any program, and never mixed up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.checkpoint import convert, read_weights, weights_info
from fastfold.evoformer.weights.containers import OWN_LAYER, contained_networks
from tests.helpers.openfold_files import openfold_state
from tests.helpers.weights_files import same

State = dict[str, Tensor]


def behind(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def worse(state: State) -> State:
    return {name: value + 1 for name, value in state.items()}


def container(kind: str, state: State) -> tuple[dict[str, Any], str]:
    """Checkpoint of a program, and the network's place in it."""
    loss = {"loss.scale": torch.ones(3)}
    averaged = {"n_averaged": torch.tensor(3), **behind("module.", state)}
    return {
        "state dict": (dict(state), ""),
        "lightning": ({"epoch": 3, "state_dict": behind("model.", state) | loss}, "state_dict.model"),
        "deeper": ({"state_dict": behind("net.trunk.", state)}, "state_dict.net.trunk"),
        "compiled": ({"model": behind("_orig_mod.", state)}, "model._orig_mod"),
        "deepspeed": ({"module": dict(state), "lr_scheduler": {"last_epoch": 3}}, "module"),
        "ema": ({"ema": {"params": dict(state), "decay": 0.999}}, "ema.params"),
        "ema and last": (
            {"state_dict": behind("model.", worse(state)), "ema": {"params": dict(state)}},
            "ema.params",
        ),
        "averaged model": ({"model": worse(state), "ema_model": averaged}, "ema_model.module"),
        "averages in Lightning": (
            {"state_dict": behind("model.", worse(state)) | behind("ema_model.", state)},
            "state_dict.ema_model",
        ),
    }[kind]


KINDS = (
    *("state dict", "lightning", "deeper", "compiled", "deepspeed"),
    *("ema", "ema and last", "averaged model", "averages in Lightning"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_own_names_are_read_from_containers(
    tmp_path: Path, state: State, config: ConfigDict, kind: str
) -> None:
    content, place = container(kind, state)
    torch.save(content, tmp_path / "a.ckpt")
    info, found = read_weights(tmp_path / "a.ckpt", config=config)
    assert info.kind == "state dict"
    assert info.notes == ({"container": place} if place else {})
    assert same(found, state)


@pytest.mark.parametrize("kind", KINDS)
def test_openfolds_names_are_read_from_containers(
    tmp_path: Path, state: State, config: ConfigDict, kind: str
) -> None:
    content, _ = container(kind, openfold_state("synthetic_monomer", "v2"))
    torch.save(content, tmp_path / "a.ckpt")
    info, found = read_weights(tmp_path / "a.ckpt", config=config)
    assert info.kind == "openfold"
    assert same(found, state)


def test_a_container_is_converted_with_its_configuration(tmp_path: Path, state: State) -> None:
    torch.save(container("lightning", state)[0], tmp_path / "a.ckpt")
    info = convert(tmp_path / "a.ckpt", tmp_path / "a.safetensors")
    assert (info.kind, info.notes["container"]) == ("fastfold", "state_dict.model")
    assert info.config == weights_info(tmp_path / "a.ckpt").config
    assert same(read_weights(tmp_path / "a.safetensors")[1], state)


def test_several_networks_are_refused_by_their_places(tmp_path: Path, state: State) -> None:
    torch.save({"student": dict(state), "teacher": dict(state)}, tmp_path / "a.pt")
    with pytest.raises(
        WeightsError, match=r"a\.pt: expected one network, found 2 \(student, teacher\); save"
    ):
        weights_info(tmp_path / "a.pt")


def test_an_incomplete_network_in_a_container_is_refused(tmp_path: Path, state: State) -> None:
    partial = {name: value for name, value in state.items() if name != "single_projection.bias"}
    torch.save({"state_dict": behind("model.", partial)}, tmp_path / "a.ckpt")
    with pytest.raises(WeightsError, match=r"parameter single_projection\.bias is missing"):
        weights_info(tmp_path / "a.ckpt")


def test_cyclic_and_deep_containers_end() -> None:
    content: dict[str, Any] = {}
    content["again"] = content
    assert contained_networks(content) == []
    layer = {OWN_LAYER: 0}
    assert [network.place for network in contained_networks({"a": {"b": layer}})] == ["a.b"]
