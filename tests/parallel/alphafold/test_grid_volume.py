"""The bytes that an Evoformer block on a grid sends: what the formulas say, O(1/√P) of the tensors or less."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.parallel.alphafold import grid_parallel
from fastfold.parallel.alphafold.grid_layers import GridLayout, attention_elements
from fastfold.parallel.axial.grid import Grid, choose_contraction, elements_sent
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan

N, S = 64, 32
C_M, C_Z, C_OUTER, C_HIDDEN = 256, 128, 32, 128
MSA_HEADS, PAIR_HEADS = 8, 4


def _expected(grid: Grid, ways: dict[str, str]) -> float:
    """Elements that a rank sends in both passes of a block."""
    layout = GridLayout(grid, **ways)
    ranks, shape = grid.whole.size, (N, N, C_Z)
    # The MSA is resharded twice, its attention's bias is gathered.
    total = 2 * (ranks - 1) / ranks * (2 * S * N * C_M / ranks + MSA_HEADS * N**2)
    for turned in (False, True):
        sent = attention_elements(shape, PAIR_HEADS, grid.transposed if turned else grid)
        total += sent["ring" if layout.rings(shape, PAIR_HEADS, turned=turned) else "reshard"]
    for view in (grid, grid.transposed):
        way = choose_contraction(layout.contraction, N, C_HIDDEN, view)
        total += elements_sent(N, C_HIDDEN, view)[way]
    # Both of the outer product's sides are gathered; all of the right one is on other ranks before.
    side = S * N * C_OUTER / ranks
    return total + 2 * side * (1 + grid.columns - 1 + grid.rows - 1)


def _measured(mesh: ParallelMesh, ways: dict[str, str]) -> float:
    grid = Grid.of(mesh)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer

    with torch.device("meta"):
        block = grid_parallel(EvoformerBlock(config, C_M, C_Z), mesh, **ways)
        with mesh.record() as log:
            own = grid.whole.shard(S)
            msa = torch.zeros(own.stop - own.start, N, C_M, requires_grad=True)
            pair = grid.take(torch.zeros(N, N, C_Z)).clone().requires_grad_()
            msa, pair = block(msa, pair, torch.ones(S, N), torch.ones(N, N))
            (msa.sum() + pair.sum()).backward()
    return log.sent / 4


@pytest.mark.parametrize("ways", [{"contraction": "summa", "attention": "ring"}, {}], ids=str)
@pytest.mark.parametrize(("ranks", "rows"), [(4, 2), (16, 4), (8, 2)])
def test_a_block_sends_what_the_formulas_say(ranks: int, rows: int, ways: dict[str, str]) -> None:
    # A rank that keeps nothing of its block when a tensor is turned, as those on the diagonal do.
    rank = ranks // rows // 2
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        mesh = ParallelMesh(ParallelPlan(dap=ranks, dap_mode="grid", dap_rows=rows))
        sent, expected = _measured(mesh, ways), _expected(Grid.of(mesh), ways)
    finally:
        dist.destroy_process_group()
    print(f"{ranks} ranks, {ways}: {sent / N**2:.1f} r² elements")
    assert sent == pytest.approx(expected)
    # Five panels of each product's operands and keys and values six times around each ring; biases of the pair and the
    # outer product's sides are what is left of the bound. The MSA's bias is whole everywhere.
    tensors = (2 * 5 * C_HIDDEN + 2 * 6 * C_Z) * N**2 + 2 * 6 * S * N * C_M
    assert sent < tensors / min(rows, ranks // rows) + 2 * MSA_HEADS * N**2


def test_unknown_ways_and_missing_grids_are_refused() -> None:
    alone = ParallelMesh(ParallelPlan(dap_mode="grid"))
    block = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match="grid: attention: expected one of auto, ring, reshard, found 'star'"
    ):
        grid_parallel(block, alone, attention="star")
    with pytest.raises(
        ConfigError, match="grid: contraction: expected one of auto, summa, channels, found 'cannon'"
    ):
        grid_parallel(block, alone, contraction="cannon")
    with pytest.raises(ConfigError, match="lacks group 'dap_row'"):
        grid_parallel(block, ParallelMesh(ParallelPlan()))
