"""The pair on a grid of ranks: stacks and whole networks compute and train as one process does."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.parallel.alphafold import grid_parallel
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.conftest import require_shared
from tests.helpers.drop_reductions import MOVES, REDUCTIONS, SHIFTS, undetected_reductions
from tests.helpers.spawn_ranks import BACKENDS, launch
from tests.parallel.alphafold.axial_cases import (
    CASES,
    compared_step,
    difference,
    differences,
    inputs_of,
    plain_module,
)
from tests.parallel.alphafold.axial_networks import (
    compare_training,
    monomer_sample,
    multimer_sample,
    recorded_run,
    small_network,
)

STACKS = [name for name in CASES if name.endswith("stack")]
BOUND = 1e-12


def _worst(plan: ParallelPlan, ways: dict[str, str], batch: tuple[int, ...]) -> dict[str, tuple[str, float]]:
    mesh = ParallelMesh(plan)
    found = {}
    for name in STACKS:
        each = differences(CASES[name], mesh, batch, partial(grid_parallel, **ways))
        worst = max(each, key=lambda key: each[key])
        found[name] = (worst, each[worst])
    return found


def _grid(ranks: int, rows: int = 0) -> ParallelPlan:
    return ParallelPlan(dap=ranks, dap_mode="grid", dap_rows=rows)


RING = {"contraction": "summa", "attention": "ring"}
RESHARD = {"contraction": "channels", "attention": "reshard"}


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("plan", "ways", "batch"),
    [
        (_grid(2, 1), RING, ()),
        (_grid(4), RING, (2,)),
        pytest.param(_grid(4), RESHARD, (), marks=pytest.mark.slow),
        pytest.param(_grid(2, 2), RESHARD, (2,), marks=pytest.mark.slow),
        pytest.param(_grid(6, 2), RING, (), marks=pytest.mark.slow),
        pytest.param(_grid(9), {}, (), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_stack_equals_one_process(
    plan: ParallelPlan, ways: dict[str, str], batch: tuple[int, ...], backend: str
) -> None:
    """With dropout, masks, lengths that do not divide, a batch, and (9 ranks) blocks that are empty."""
    for rank, found in enumerate(
        launch(_worst, plan.ranks, plan, ways, batch, timeout=300.0, backend=backend)
    ):
        for name, (worst, error) in found.items():
            print(name, error)
            assert error < BOUND, f"{name}, rank {rank}: {worst} differs by {error}"


def _without_each_reduction(ways: dict[str, str]) -> tuple[int, list[str]]:
    """Steps of a stack of one block without each of its reductions, shifts and moves.

    Those from and to the rows around the stack are among them.

    Returns:
        How many there are, and those whose absence changes nothing anywhere.
    """
    case = replace(CASES["monomer stack"], blocks=1)
    step = compared_step(case, ParallelMesh(_grid(4)), (), partial(grid_parallel, **ways))
    return undetected_reductions(lambda: max(step().values()), names=(*REDUCTIONS, *SHIFTS, *MOVES))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ways", "reductions"), [(RING, 35), pytest.param(RESHARD, 27, marks=pytest.mark.slow)], ids=str
)
def test_a_block_needs_every_reduction(ways: dict[str, str], reductions: int) -> None:
    for count, undetected in launch(_without_each_reduction, 4, ways, timeout=500.0):
        assert count == reductions
        assert undetected == []


def _folds_in_place(ways: dict[str, str]) -> float:
    """Without gradients, in place and in blocks of rows: largest difference from the plain stack."""
    mesh, case = ParallelMesh(_grid(4)), CASES["monomer stack"]
    shards = AxialShards(mesh.group("dap"))
    plain, inputs = plain_module(case).eval(), inputs_of(case, ())
    parallel = grid_parallel(copy.deepcopy(plain), mesh, **ways)
    set_policy(parallel, ExecutionPolicy(block_elements=40, inplace=True))
    with torch.no_grad():
        expected = plain(*inputs)
        own = [shards.take(x, cut).clone() if cut else x for x, cut in zip(inputs, case.cuts, strict=True)]
        found = parallel(*own)
    return max(difference(a, shards.take(b, -3), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("ways", [RING, pytest.param(RESHARD, marks=pytest.mark.slow)], ids=str)
def test_a_stack_folds_in_place_and_in_blocks(ways: dict[str, str]) -> None:
    assert max(launch(_folds_in_place, 4, ways, timeout=300.0)) < BOUND


def _monomer(plan: ParallelPlan, ways: dict[str, str], steps: int) -> list[tuple[float, str]]:
    """13 residues, 5 + 4 rows and 3 extra ones: nothing divides by 2."""
    return compare_training(
        small_network("synthetic_monomer"),
        [monomer_sample(13, 5, 3)],
        plan,
        steps=steps,
        checkpointing=True,
        make_parallel=partial(grid_parallel, **ways),
    )


def _two_proteins(plan: ParallelPlan) -> list[tuple[float, str]]:
    """Of different lengths, with one sequence in all and with several."""
    samples = [monomer_sample(13, 1, 1), monomer_sample(9, 5, 3, first=8)]
    model = small_network("synthetic_monomer", recycles=0)
    return compare_training(model, samples, plan, make_parallel=grid_parallel)


def _multimer(plan: ParallelPlan) -> list[tuple[float, str]]:
    return compare_training(
        small_network("synthetic_multimer"), [multimer_sample()], plan, make_parallel=grid_parallel
    )


def _oracle(plan: ParallelPlan, folder: str) -> list[tuple[float, str]]:
    model, sample = recorded_run(Path(folder))
    return compare_training(model, [sample], plan, make_parallel=grid_parallel)


def _check(found: list[list[tuple[float, str]]]) -> None:
    for rank, steps in enumerate(found):
        for step, (error, name) in enumerate(steps):
            print(f"rank {rank}, step {step}: {error:.1e} ({name})")
            assert error < BOUND, f"rank {rank}, step {step}: {name} differs by {error}"


@pytest.mark.parametrize(
    ("ways", "steps"),
    [pytest.param(RING, 3, marks=pytest.mark.slow), pytest.param(RESHARD, 3, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_monomer_trains_as_on_one_process(ways: dict[str, str], steps: int) -> None:
    """Recycling, templates, all heads, the whole loss, dropout, recomputed blocks; parameters after every step."""
    _check(launch(_monomer, 4, _grid(4), ways, steps, timeout=500.0))


@pytest.mark.slow
def test_a_complex_trains_as_on_one_process() -> None:
    _check(launch(_multimer, 4, _grid(4), timeout=900.0))


@pytest.mark.slow
def test_two_grids_fold_two_proteins() -> None:
    """A grid and data parallelism: the mean gradient over all ranks is that of the mean loss of both proteins."""
    plan = ParallelPlan(dp=2, dap=4, dap_mode="grid")
    _check(launch(_two_proteins, 8, plan, timeout=900.0))


@pytest.mark.slow
@pytest.mark.parametrize("plan", [_grid(4), _grid(8, 2)], ids=str)
def test_the_loss_of_a_recorded_run(plan: ParallelPlan) -> None:
    """The whole loss of a real protein under official widths' ratios, with dropout, and every gradient of it."""
    folder = require_shared("oracles", "monomer_ptm")
    _check(launch(_oracle, plan.ranks, plan, str(folder), timeout=900.0))
