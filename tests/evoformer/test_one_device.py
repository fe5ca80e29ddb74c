"""Network, losses and gradients make every tensor on the device of their inputs: a GPU refuses others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.kernels.recording import launches_replaced
from fastfold.evoformer.embedders import templates
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.losses import alphafold_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.planner import folding_policy
from fastfold.kernels.common.backend import VARIABLE
from tests.parallel.alphafold.axial_networks import monomer_sample, multimer_sample, small_network

SAMPLES: dict[str, Callable[[], Any]] = {
    "synthetic_monomer": lambda: monomer_sample(13, 4, 3),
    "synthetic_multimer": multimer_sample,
}


def _away(tree: Any) -> Any:
    """Return the tree with tensors on a device that holds no numbers and refuses those of the CPU."""

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to("meta", torch.float32 if x.is_floating_point() else x.dtype)

    return tree_map(move, tree)


def _devices(tree: Any) -> set[str]:
    return {x.device.type for x in tree_iter(tree) if isinstance(x, Tensor)}


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choose Triton's kernels without launching them; do not look which templates are shown."""
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setattr(templates, "shown_templates", lambda mask: tuple(range(mask.shape[-1])))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # meta has none
    with launches_replaced(lambda kernel, grid: lambda *arguments, **options: None):
        yield


def _network(name: str) -> AlphaFold:
    network: AlphaFold = small_network(name).float().to("meta")
    return network


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("name", SAMPLES)
def test_a_training_step_stays_on_its_device(name: str) -> None:
    sample, network = SAMPLES[name](), _network(name)
    result = network(_away(sample.features))
    loss, parts = alphafold_loss(result, _away(sample.batch), network.config)
    loss.backward()
    assert _devices([result, loss, parts]) == {"meta"}
    assert {p.grad.device.type for p in network.parameters() if p.grad is not None} == {"meta"}


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("name", SAMPLES)
def test_a_fold_stays_on_its_device(name: str) -> None:
    network = _network(name).eval()
    set_policy(network, folding_policy("cuda"))
    with torch.no_grad():
        result = network(_away(SAMPLES[name]().features))
    assert _devices(result) == {"meta"}


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_tensor_on_the_cpu_is_noticed() -> None:
    network = _network("synthetic_monomer").eval()
    plain = network._first_row
    with (
        torch.no_grad(),
        mock.patch.object(network, "_first_row", lambda msa: plain(msa) + torch.zeros(13, 1)),
        pytest.raises(RuntimeError, match="device"),
    ):
        network(_away(SAMPLES["synthetic_monomer"]().features))
