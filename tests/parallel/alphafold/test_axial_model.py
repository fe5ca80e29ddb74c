"""Dynamic axial parallelism of whole networks: loss, results, gradients and training are those of one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastfold.evoformer.execution import ExecutionPolicy, LazyRows
from fastfold.parallel.alphafold.axial_model import (
    AxialAlphaFold,
    AxialDistogramHead,
    AxialInvariantPointAttention,
)
from fastfold.parallel.alphafold.convert import convert_modules
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.plan import ParallelPlan
from tests.conftest import require_shared
from tests.helpers.spawn_ranks import launch
from tests.helpers.thread_ranks import on_one_line
from tests.parallel.alphafold.axial_cases import CASES, difference, inputs_of, plain_module
from tests.parallel.alphafold.axial_networks import (
    compare_training,
    monomer_sample,
    multimer_sample,
    recorded_run,
    small_network,
)

BOUND = 1e-12


def _monomer(plan: ParallelPlan, steps: int, checkpointing: bool) -> list[tuple[float, str]]:
    """13 residues, 5 + 4 rows and 3 extra ones: nothing divides by 2."""
    return compare_training(
        small_network("synthetic_monomer"),
        [monomer_sample(13, 5, 3)],
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "steps", "checkpointing"),
    [
        (2, 2, False),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(4, 3, True, marks=pytest.mark.slow),
        pytest.param(8, 1, False, marks=pytest.mark.slow),
    ],
)
def test_a_monomer_trains_as_on_one_process(ranks: int, steps: int, checkpointing: bool) -> None:
    """Recycling, templates, all heads, the whole loss, dropout; with and without recomputed blocks."""
    _check(launch(_monomer, ranks, ParallelPlan(dap=ranks), steps, checkpointing, timeout=500.0))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_complex_trains_as_on_one_process(ranks: int) -> None:
    _check(launch(_multimer, ranks, ParallelPlan(dap=ranks), timeout=500.0))


@pytest.mark.long
def test_two_groups_fold_two_proteins() -> None:
    """DAP together with data parallelism: the mean gradient over all ranks is that of the mean loss of both proteins.

    The proteins differ in length and depth; of one alignment's single sequence one rank has nothing.
    """
    _check(launch(_two_proteins, 4, ParallelPlan(dp=2, dap=2), timeout=500.0))


def _oracle(plan: ParallelPlan, folder: str) -> list[tuple[float, str]]:
    model, sample = recorded_run(Path(folder))
    return compare_training(model, [sample], plan)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_loss_of_a_recorded_run(ranks: int) -> None:
    """The whole loss of a real protein under official widths' ratios, with dropout, and every gradient of it."""
    folder = require_shared("oracles", "monomer_ptm")
    _check(launch(_oracle, ranks, ParallelPlan(dap=ranks), str(folder), timeout=900.0))


@pytest.mark.parametrize("name", ["distogram", "point attention"])
def test_what_surrounds_the_blocks_equals_one_process(name: str) -> None:
    """Without gradients: mirrored logits come from other ranks, updates of residues are gathered."""
    case = CASES[name]
    inputs = inputs_of(case, ())
    variant = {"distogram": AxialDistogramHead, "point attention": AxialInvariantPointAttention}[name]
    with torch.no_grad():
        plain = case.call(plain_module(case).eval(), *inputs)

    def run(group: Group) -> float:
        shards, module = AxialShards(group), plain_module(case).eval()
        module = convert_modules(module, {type(module): variant}, shards=shards)
        module.policy = ExecutionPolicy(lazy_logits=True)
        own = [shards.take(x, cut) if cut else x for x, cut in zip(inputs, case.cuts, strict=True)]
        with torch.no_grad():
            found = case.call(module, *own)
        cut = case.results[0]
        return difference(found, shards.take(plain, cut) if cut else plain, plain)

    assert max(on_one_line(3, run)) < 1e-12


def test_lazy_logits_are_joined_in_blocks_that_cross_the_shards() -> None:
    """Seven rows on three ranks, two at a time: every rank gets all of them."""
    whole = torch.randn(7, 7, 4)

    def run(group: Group) -> bool:
        shards = AxialShards(group)
        own = shards.take(whole, 0)
        # The blocks are those of the head that makes the logits, not those of the network around it.
        head, network = ExecutionPolicy(block_elements=2 * 7 * 4), ExecutionPolicy()
        part = LazyRows(lambda index: own[index], (*own.shape[:1], 7, 4), head)
        model = SimpleNamespace(shards=shards, policy=network)
        joined = AxialAlphaFold._whole_rows(model, part)  # type: ignore[arg-type]
        assert tuple(joined.shape) == (7, 7, 4)
        assert [rows.stop - rows.start for rows, _ in joined.blocks()] == [2, 2, 2, 1]
        return torch.equal(joined.whole(), whole) and torch.equal(joined.rows(slice(1, 6)), whole[1:6])

    assert on_one_line(3, run) == [True] * 3


def test_templates_are_the_last_rows_of_the_msa_and_the_first_row_is_everybody_s() -> None:
    msa = torch.randn(2, 4, 3)

    def run(group: Group) -> tuple[list[int], list[int], bool]:
        model = SimpleNamespace(shards=AxialShards(group))
        rows, templates = AxialAlphaFold._own_sequences(model, 5, 2)  # type: ignore[arg-type]
        own = AxialShards(group).take(msa, 0)
        first = AxialAlphaFold._first_row(model, own)  # type: ignore[arg-type]
        return list(range(5))[rows], list(range(2))[templates], torch.equal(first, msa[0])

    # Shards of 3, 2 and 2 of all seven rows; of two sequences the third rank has none.
    assert on_one_line(3, run) == [([0, 1, 2], [], True), ([3, 4], [], True), ([], [0, 1], True)]
