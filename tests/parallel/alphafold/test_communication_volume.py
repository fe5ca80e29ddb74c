"""What an Evoformer block sends, next to FastFold's formula: DAP never more, and from 4 ranks on far less."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.block_communication import block_communication, fastfold_elements
from benchmarks.kernels.recording import without_launches
from benchmarks.parallel import mean_over_ranks
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.execution import ExecutionPolicy, set_policy
from fastfold.inference.planning.report import inference_elements
from fastfold.memory import SimulatedDevice
from fastfold.parallel.alphafold.dap import shard
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh

GRIDS = {4: 2, 8: 2, 64: 8, 512: 16}


@cache
def _sent(plan: ParallelPlan, residues: int, sequences: int) -> tuple[float, float]:
    """Elements, forward and backward."""
    forward, backward = block_communication(plan, residues=residues, sequences=sequences)
    return forward.sent / 4, backward.sent / 4


@pytest.mark.parametrize(
    ("ranks", "residues", "sequences"),
    [
        (4, 256, 128),
        (4, 256, 512),
        (64, 2048, 512),
        pytest.param(8, 384, 512, marks=pytest.mark.slow),
        pytest.param(512, 2048, 512, marks=pytest.mark.slow),
    ],
)
def test_axial_never_sends_more_than_fastfold_and_the_better_of_it_and_the_grid_clearly_less(
    ranks: int, residues: int, sequences: int
) -> None:
    theirs = fastfold_elements(ranks, residues, sequences)
    axial = _sent(ParallelPlan(dap=ranks), residues, sequences)
    grid = _sent(ParallelPlan(dap=ranks, dap_mode="grid", dap_rows=GRIDS[ranks]), residues, sequences)
    assert all(0.1 * theirs < sent <= theirs for sent in axial)
    # The better of the two, forward and backward together.
    assert min(sum(axial), sum(grid)) < 0.85 * 2 * theirs


def test_products_send_ever_less_with_more_ranks_and_on_the_grid_far_less_with_more_than_channels() -> None:
    residues, sequences, every = 2048, 512, (4, 64, 256)
    axial = [sum(_sent(ParallelPlan(dap=ranks), residues, sequences)) for ranks in every]
    grid = [sum(_sent(ParallelPlan(dap=ranks, dap_mode="grid"), residues, sequences)) for ranks in every]
    assert axial[1] < axial[0] / 4
    assert grid[1] < grid[0] / 4
    # With 128 channels not every rank can have whole matrices: all terms of the sums are sent, or panels of blocks.
    assert axial[2] > axial[0]
    assert grid[2] < axial[2] / 4


def test_uneven_shards_send_no_more_in_the_mean() -> None:
    ranks, residues, sequences = 4, 6, 3
    sent = [
        block_communication(
            ParallelPlan(dap=ranks), residues=residues, sequences=sequences, rank=rank, backward=False
        )[0].sent
        for rank in range(ranks)
    ]
    assert max(sent) > min(sent)
    assert sum(sent) / ranks / 4 <= fastfold_elements(ranks, residues, sequences)


@pytest.mark.slow
@pytest.mark.parametrize(("residues", "sequences"), [(256, 128), (384, 512)])
def test_more_ranks_than_residues_send_no_more_in_the_mean(residues: int, sequences: int) -> None:
    """512 ranks: the first sends up to a third more than the formula, the mean of all does not."""
    plan, theirs = ParallelPlan(dap=512), 4 * fastfold_elements(512, residues, sequences)
    forward, _ = block_communication(plan, residues=residues, sequences=sequences, backward=False)
    assert forward.sent > theirs
    assert mean_over_ranks(512, residues, sequences, forward.sent) <= theirs


def test_one_rank_sends_nothing() -> None:
    assert _sent(ParallelPlan(), 256, 128) == (0, 0)


@pytest.mark.parametrize(
    ("ranks", "residues", "sequences"), [(2, 512, 64), (3, 512, 100), (8, 512, 64), (16, 640, 5)]
)
def test_a_block_without_gradients_sends_what_is_said(ranks: int, residues: int, sequences: int) -> None:
    """On average: of rank 0, whose shards are the longest, never less and not much more."""
    trunk = model_config("model_1").model.embeddings_and_evoformer
    device = SimulatedDevice(1 << 50, "meta")
    with (
        fake_mesh(ParallelPlan(dap=ranks)) as mesh,
        without_launches(),
        device.running(),
        torch.device("meta"),
        torch.inference_mode(),
    ):
        block = shard(EvoformerBlock(trunk.evoformer, 256, 128).eval(), mesh)
        set_policy(block, ExecutionPolicy(inplace=True))
        own = AxialShards(mesh.group("dap")).own
        s, n = own(sequences), own(residues)
        msa, pair = torch.empty(s.stop, residues, 256), torch.empty(residues, n.stop, 128)
        with mesh.record() as log:
            block(msa, pair, torch.ones(sequences, residues), torch.ones(residues, residues))
    said = 4 * inference_elements(ranks, residues, sequences)
    assert 0.999 * said <= log.sent <= 1.05 * said
