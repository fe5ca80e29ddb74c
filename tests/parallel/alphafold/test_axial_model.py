"""Dynamic axial parallelism of whole networks: loss, results, gradients and training are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.parallel.plan import ParallelPlan
from tests.conftest import require_shared
from tests.helpers.spawn_ranks import launch
from tests.parallel.alphafold.axial_networks import (
    compare_training,
    monomer_sample,
    multimer_sample,
    recorded_run,
    small_network,
)

BOUND = 1e-12


def _monomer(plan: ParallelPlan, steps: int, checkpointing: bool) -> list[tuple[float, str]]:
    """15 residues, 5 + 4 rows and 3 extra ones: nothing divides by 2."""
    return compare_training(
        small_network("synthetic_monomer"),
        [monomer_sample(15, 5, 3)],
        plan,
        steps=steps,
        checkpointing=checkpointing,
    )


def _multimer(plan: ParallelPlan) -> list[tuple[float, str]]:
    return compare_training(small_network("synthetic_multimer"), [multimer_sample()], plan)


def _two_proteins(plan: ParallelPlan) -> list[tuple[float, str]]:
    """Of different lengths, with one sequence in all and with several."""
    samples = [monomer_sample(9, 1, 1), monomer_sample(7, 4, 3, first=8)]
    return compare_training(small_network("synthetic_monomer", recycles=0), samples, plan)


def _check(found: list[list[tuple[float, str]]]) -> None:
    for rank, steps in enumerate(found):
        for step, (error, name) in enumerate(steps):
            print(f"rank {rank}, step {step}: {error:.1e} ({name})")
            assert error < BOUND, f"rank {rank}, step {step}: {name} differs by {error}"


@pytest.mark.parametrize(
    ("ranks", "steps", "checkpointing"),
    [
        (2, 3, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(4, 3, True, marks=pytest.mark.slow),
        pytest.param(8, 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_monomer_trains_as_on_one_process(ranks: int, steps: int, checkpointing: bool) -> None:
    """Recycling, templates, all heads, the whole loss, dropout; with and without recomputed blocks."""
    _check(launch(_monomer, ranks, ParallelPlan(dap=ranks), steps, checkpointing, timeout=500.0))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_complex_trains_as_on_one_process(ranks: int) -> None:
    _check(launch(_multimer, ranks, ParallelPlan(dap=ranks), timeout=500.0))


def test_two_groups_fold_two_proteins() -> None:
    """DAP together with data parallelism: the mean gradient over all ranks is that of the mean loss of both proteins.

    The proteins differ in length and depth; of one alignment's single sequence one rank has nothing.
    """
    _check(launch(_two_proteins, 4, ParallelPlan(dp=2, dap=2), timeout=500.0))


def _oracle(plan: ParallelPlan, folder: str) -> list[tuple[float, str]]:
    model, sample = recorded_run(Path(folder))
    return compare_training(model, [sample], plan)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_the_loss_of_a_recorded_run(ranks: int) -> None:
    """The whole loss of a real protein under official widths' ratios, with dropout, and every gradient of it."""
    folder = require_shared("oracles", "monomer_ptm")
    _check(launch(_oracle, ranks, ParallelPlan(dap=ranks), str(folder), timeout=900.0))
