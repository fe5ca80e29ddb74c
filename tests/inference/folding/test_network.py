"""Runs of a network: blocks of their device without a plan, and no float64 where a device has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fastfold.evoformer.compat import xla_rounding
from fastfold.evoformer.execution import PolicyModule
from fastfold.inference.folding.network import NetworkPasses, prepared_network, run_network
from fastfold.inference.planning.memory_model import MAX_BLOCK, MAX_BLOCK_CUDA
from fastfold.inference.planning.planner import Planner
from fastfold.protein import rigid
from tests.parallel.alphafold.axial_networks import monomer_sample, multimer_sample, small_network


@pytest.mark.parametrize(("device", "elements"), [("cpu", MAX_BLOCK), ("meta", MAX_BLOCK_CUDA)])
def test_a_run_without_a_plan_has_the_blocks_of_its_device(device: str, elements: int) -> None:
    """Tensors without contents stand for a GPU's, whose plan for ample memory has the same blocks."""
    model = small_network("synthetic_monomer").eval().to(device)
    plan = Planner(model.config, 4, "cpu" if device == "cpu" else "cuda").plan(20, 64 << 30)
    with prepared_network(model, NetworkPasses(0), None, distogram=False):
        blocks = {m.policy.block_elements for m in model.modules() if isinstance(m, PolicyModule)}
    assert blocks == {plan.policy.block_elements} == {elements}


class _NoFloat64(TorchDispatchMode):
    """Refuses results in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wrong = (torch.float64, torch.complex128)
        assert not any(isinstance(x, torch.Tensor) and x.dtype in wrong for x in tree_iter(result)), func
        return result


@pytest.mark.long
@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_a_run_needs_no_float64_of_its_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed in float64 on the CPU for such a device is left out here."""
    monkeypatch.setattr(xla_rounding, "to_float64", lambda x: x.float())
    monkeypatch.setattr(rigid, "has_float64", lambda device: False)
    monkeypatch.setattr(rigid, "_CONSTANTS", {})
    model = small_network(name).float().eval()
    sample = multimer_sample() if model.multimer else monomer_sample(11, 5, 4)
    features = {k: (x.float() if x.is_floating_point() else x)[0] for k, x in sample.features.items()}
    with _NoFloat64():
        run_network(
            model, lambda cycle, member: dict(features), NetworkPasses(1, is_complex=model.multimer), None
        )
