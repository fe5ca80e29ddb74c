"""Runs of a network without a plan have the blocks of their device."""

from __future__ import annotations

import pytest

from fastfold.evoformer.execution import PolicyModule
from fastfold.inference.folding.network import NetworkPasses, prepared_network
from fastfold.inference.planning.memory_model import MAX_BLOCK, MAX_BLOCK_CUDA
from fastfold.inference.planning.planner import Planner
from tests.parallel.alphafold.axial_networks import small_network


@pytest.mark.parametrize(("device", "elements"), [("cpu", MAX_BLOCK), ("meta", MAX_BLOCK_CUDA)])
def test_a_run_without_a_plan_has_the_blocks_of_its_device(device: str, elements: int) -> None:
    """Tensors without contents stand for a GPU's, whose plan for ample memory has the same blocks."""
    model = small_network("synthetic_monomer").eval().to(device)
    plan = Planner(model.config, 4, "cpu" if device == "cpu" else "cuda").plan(20, 64 << 30)
    with prepared_network(model, NetworkPasses(0), None, distogram=False):
        blocks = {m.policy.block_elements for m in model.modules() if isinstance(m, PolicyModule)}
    assert blocks == {plan.policy.block_elements} == {elements}
