"""Leaving out any one reduction of dynamic axial parallelism changes a number that the other tests compare."""

from __future__ import annotations

import copy

import pytest
import torch

from fastfold.parallel.alphafold import shard
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.drop_reductions import undetected_reductions
from tests.helpers.mean_gradients import mean_gradients
from tests.helpers.spawn_ranks import launch
from tests.parallel.alphafold.axial_cases import CASES, compared_step, difference
from tests.parallel.alphafold.axial_networks import (
    Sample,
    gradient_differences,
    monomer_sample,
    small_network,
    train_step,
)

# Of a block two products forward; biases, the left projection and the parameters' gradients backward.
REDUCTIONS = {"monomer block": 7, "multimer block": 7, "monomer template stack": 9, "point attention": 5}


def _blocks() -> dict[str, tuple[int, list[str]]]:
    mesh = ParallelMesh(ParallelPlan(dap=2))
    steps = {name: compared_step(CASES[name], mesh) for name in REDUCTIONS}
    return {
        name: undetected_reductions(lambda step=step: max(step().values())) for name, step in steps.items()
    }


@pytest.mark.long
def test_every_reduction_of_a_block_is_needed() -> None:
    for found in launch(_blocks, 2, timeout=500.0):
        for name, (count, undetected) in found.items():
            assert count == REDUCTIONS[name], name
            assert undetected == [], name


def _sample() -> Sample:
    """7 residues; templates of which every atom is there: what is computed of a masked one changes nothing."""
    sample = monomer_sample(7, 3, 2)
    generator = torch.Generator().manual_seed(4)
    for key, x in sample.features.items():
        if key.startswith("template_") and "mask" in key:
            sample.features[key] = torch.ones_like(x)
        elif key in ("template_all_atom_positions", "template_pseudo_beta"):
            sample.features[key] = 5 * torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return sample


def _network(plan: ParallelPlan) -> tuple[int, list[str]]:
    mesh = ParallelMesh(plan)
    plain = small_network("synthetic_monomer", recycles=0)
    sample = _sample()
    expected = train_step(plain, sample)
    parallel = shard(copy.deepcopy(plain), mesh)

    def worst() -> float:
        parallel.zero_grad()
        found = train_step(parallel, sample)
        mean_gradients(parallel.parameters(), mesh.group("dap"))
        results = [difference(value, expected[name], least=1e-9) for name, value in found.items()]
        return max(*results, *dict(gradient_differences(parallel, plain)).values())

    return undetected_reductions(worst)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "reductions"), [(ParallelPlan(dap=2), 51), (ParallelPlan(dap=4, dap_mode="grid"), 55)], ids=str
)
def test_every_reduction_of_a_network_is_needed(plan: ParallelPlan, reductions: int) -> None:
    """Embedding, both stacks, templates, recycled first row, structure module, heads, gradients."""
    for count, undetected in launch(_network, plan.ranks, plan, timeout=900.0):
        assert count == reductions
        assert undetected == []
