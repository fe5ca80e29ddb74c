"""Dynamic axial parallelism, layer by layer: outputs and all gradients are those of one process."""

from __future__ import annotations

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.model import AlphaFold
from fastfold.parallel.alphafold import axial_parallel, grid_parallel
from fastfold.parallel.alphafold.axial_layers import (
    AxialMSARowAttention,
    AxialOuterProductMean,
    AxialTriangleAttention,
    AxialTriangleMultiplication,
)
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.alphafold.dap import shard
from fastfold.parallel.alphafold.regather import RegatheringLayer
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from tests.helpers.spawn_ranks import BACKENDS, launch
from tests.helpers.thread_ranks import on_one_line
from tests.parallel.alphafold.axial_cases import (
    CASES,
    difference,
    differences,
    inputs_of,
    plain_module,
    rounding,
)


def _worst(ranks: int, batch: tuple[int, ...]) -> dict[str, tuple[str, float]]:
    mesh = ParallelMesh(ParallelPlan(dap=ranks))
    found = {}
    for name, case in CASES.items():
        each = differences(case, mesh, batch)
        worst = max(each, key=lambda key: each[key])
        found[name] = (worst, each[worst])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("ranks", "batch"),
    [(2, (2,)), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((4, ()), (8, ())))],
)
def test_every_layer_equals_one_process(ranks: int, batch: tuple[int, ...], backend: str) -> None:
    """With dropout, masks, lengths that do not divide, a batch, and (8 ranks) shards that are empty."""
    for rank, found in enumerate(launch(_worst, ranks, ranks, batch, backend=backend)):
        for name, (worst, error) in found.items():
            assert error < 1e-12, f"{name}, rank {rank}: {worst} differs by {error}"


def _root_mean_square(differences: dict[str, float]) -> float:
    return float(torch.tensor(list(differences.values())).square().mean().sqrt())


def _rounding(plan: ParallelPlan, names: tuple[str, ...]) -> list[tuple[str, float, float]]:
    mesh, found = ParallelMesh(plan), []
    make_parallel = grid_parallel if plan.dap_mode == "grid" else axial_parallel
    for name in names:
        for dtype in (torch.float32, torch.bfloat16):
            shards, alone = rounding(CASES[name], mesh, dtype, make_parallel)
            found.append((f"{name} in {dtype}", _root_mean_square(shards), _root_mean_square(alone)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("plan", "names"),
    [
        (ParallelPlan(dap=2), ("monomer block", "multimer block")),
        (ParallelPlan(dap=4, dap_mode="grid"), ("monomer stack",)),
    ],
    ids=["axial", "grid"],
)
def test_blocks_in_lower_precision_are_rounded_as_on_one_process(
    plan: ParallelPlan, names: tuple[str, ...], backend: str
) -> None:
    """Over outputs and gradients together, they are about as far from float64 as one process is.

    The largest difference alone is that of a gradient that nearly vanishes, and differs by processor.
    """
    for found in launch(_rounding, plan.ranks, plan, names, backend=backend):
        for name, shards, alone in found:
            assert 0 < shards < 1.5 * alone, f"{name}: {shards} on shards, {alone} on one process"


def _keeping() -> float:
    RegatheringLayer.keeps_gathered = True
    mesh = ParallelMesh(ParallelPlan(dap=2))
    cases = ("row attention", "outer product", "starting", "ending")
    return max(max(differences(CASES[name], mesh).values()) for name in cases)


def test_steps_that_keep_what_they_gather_equal_one_process() -> None:
    """As in blocks that are recomputed; in the other cases the backward pass gathers again."""
    assert max(launch(_keeping, 2)) < 1e-12


@pytest.mark.parametrize("plan", [ParallelPlan(dap=2), ParallelPlan(dap=4, dap_mode="grid")], ids=str)
def test_blocks_that_lack_steps_are_refused(plan: ParallelPlan) -> None:
    network = AlphaFold(model_config("mini"))
    with fake_mesh(plan) as mesh, pytest.raises(ConfigError, match="lack attention along an axis"):
        shard(network, mesh)


LAYERS = {
    "row attention": AxialMSARowAttention,
    "outer product": AxialOuterProductMean,
    "outgoing": AxialTriangleMultiplication,
    "incoming": AxialTriangleMultiplication,
    "starting": AxialTriangleAttention,
    "ending": AxialTriangleAttention,
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_without_gradients_equal_one_process(name: str, inplace: bool) -> None:
    """As they run in a fold: nothing is kept for a backward pass, outer products pass by, blocks are of two rows."""
    case = CASES[name]
    inputs = inputs_of(case, ())
    with torch.no_grad():
        plain = case.call(plain_module(case).eval(), *(x.clone() for x in inputs))

    def run(group: Group) -> float:
        shards, layer = AxialShards(group), plain_module(case).eval()
        layer = convert_modules(layer, {type(layer): LAYERS[name]}, shards=shards)
        layer.policy = ExecutionPolicy(inplace=inplace, block_elements=2 * plain.shape[-2] * plain.shape[-1])
        own = [shards.take(x, cut).clone() if cut else x for x, cut in zip(inputs, case.cuts, strict=True)]
        with torch.no_grad():
            found = case.call(layer, *own)
        assert not inplace or found.data_ptr() in {x.data_ptr() for x in own}
        return difference(found, shards.take(plain, case.results[0]), plain)

    assert max(on_one_line(3, run)) < 1e-12
