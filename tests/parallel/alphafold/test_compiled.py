"""Compiled blocks on shards, with recycling: training and folding are those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastfold.evoformer.evoformer import BlockStack
from fastfold.parallel.alphafold import shard
from fastfold.parallel.alphafold.convert import silent_parts
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.mean_gradients import mean_gradients
from tests.helpers.spawn_ranks import launch
from tests.parallel.alphafold.axial_cases import difference
from tests.parallel.alphafold.axial_networks import (
    gradient_differences,
    monomer_sample,
    small_network,
    train_step,
    worst_of,
)


def _compiled_parts(model: nn.Module) -> set[str]:
    """Compile what can be; its classes."""
    kinds = set()
    for stack in (module for module in model.modules() if isinstance(module, BlockStack)):
        for part in (part for block in stack.blocks for part in silent_parts(block)):
            part.compile()
            kinds.add(type(part).__name__)
    return kinds


def _run(plan: ParallelPlan, checkpointing: bool) -> tuple[set[str], dict[str, float]]:
    mesh, sample = ParallelMesh(plan), monomer_sample(15, 5, 3)
    model = small_network("synthetic_monomer")  # recycles once
    parallel = shard(copy.deepcopy(model), mesh)
    parallel.set_checkpointing(checkpointing)
    kinds = _compiled_parts(parallel)
    expected, ours = train_step(model, sample), train_step(parallel, sample)
    mean_gradients(parallel.parameters(), mesh.group("replicas"))
    worst = {"loss": difference(ours["loss"], expected["loss"])}
    worst["gradient"], _ = worst_of(gradient_differences(parallel, model))
    positions = []
    with torch.no_grad():
        for network in (parallel.eval(), model.eval()):
            positions.append(network(sample.features)["structure_module"]["final_atom_positions"])
    return kinds, worst | {"folded": difference(*positions)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "checkpointing"),
    [
        (ParallelPlan(dap=2), False),
        (ParallelPlan(dap=2), True),
        (ParallelPlan(dap=4, dap_mode="grid"), False),
    ],
)
def test_compiled_blocks_train_and_fold_as_on_one_process(plan: ParallelPlan, checkpointing: bool) -> None:
    for kinds, found in launch(_run, plan.ranks, plan, checkpointing, timeout=900.0):
        assert {"MSAColumnAttention", "Transition"} <= kinds
        assert max(found.values()) < 1e-10, found
