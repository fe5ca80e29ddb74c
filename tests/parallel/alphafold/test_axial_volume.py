"""Bytes that a sharded Evoformer block sends, counted on simulated ranks, against formulas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.block_communication import fastfold_elements
from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock, EvoformerStack
from fastfold.parallel.alphafold import axial_parallel
from fastfold.parallel.alphafold.training_block import SMALL_MESSAGE
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import CommunicationLog
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh

C_M, C_Z = 256, 128


def _block_sends(ranks: int, residues: int, sequences: int) -> tuple[CommunicationLog, CommunicationLog]:
    """What rank 0 sends in the forward and in the backward pass of a block of official widths, in float32."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mesh = ParallelMesh(ParallelPlan(dap=ranks))
        shards = AxialShards(mesh.group("dap"))
        trunk = model_config("model_1").model.embeddings_and_evoformer
        # Shapes alone: nothing is computed and nothing held.
        with torch.device("meta"):
            block = EvoformerBlock(trunk.evoformer, C_M, C_Z)
        block = axial_parallel(block, mesh)
        with FakeTensorMode():
            for module in block.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))

            def shard(*shape: int) -> Tensor:
                return torch.empty(shape, requires_grad=True)

            msa = shard(shards.sizes(sequences)[0], residues, C_M)
            pair = shard(residues, shards.sizes(residues)[0], C_Z)
            masks = torch.empty(sequences, residues), torch.empty(residues, residues)
            with mesh.record() as forward:
                found = block(msa, pair, *masks)
            with mesh.record() as backward:
                (found[0].sum() + found[1].sum()).backward()
        return forward, backward
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "residues", "sequences", "way"),
    [
        (2, 96, 64, "sums"),
        (2, 256, 128, "sums"),
        (4, 256, 128, "sums"),
        (8, 96, 64, "sums"),
        (8, 384, 512, "channels"),
        (16, 96, 64, "channels"),
        pytest.param(64, 2048, 512, "channels", marks=pytest.mark.slow),
        pytest.param(512, 2048, 512, "terms", marks=pytest.mark.slow),
    ],
)
def test_a_block_sends_what_the_formula_says(ranks: int, residues: int, sequences: int, way: str) -> None:
    """Of r² each: 8 + 4 + 4 biases, 32 s r of projections; two products' terms, or two factors and the product.

    The rest are reshards, two of the pair instead of FastFold's four. The same again backward, where the biases
    and the left projection of an alignment that is not deep are gathered once more rather than kept.
    """
    r, s = residues, sequences
    # Products of 128 channels.
    products = 3 * 2 * 128 / ranks if way == "channels" else 2 * 128
    gathered = (16 + products) * r * r + 32 * s * r
    logs = _block_sends(ranks, r, s)
    forward, backward = (log.sent / 4 for log in logs)
    assert forward == pytest.approx((ranks - 1) / ranks * (gathered + (512 * s * r + 256 * r * r) / ranks))
    again = 16 * r * r + (32 * s * r if s <= r else 0) if ranks <= 128 else 0
    assert backward == pytest.approx(forward + (ranks - 1) / ranks * again)
    assert forward < fastfold_elements(ranks, r, s)
    # What is gathered again is kept there.
    assert backward - (ranks - 1) / ranks * again < fastfold_elements(ranks, r, s)
    if r == 2048:
        return  # products are several blocks, each a message
    # Big tensors that need not be there at once leave alone: the MSA, and the pair where products are of channels.
    alone = (256 * s * r * 4 / ranks >= SMALL_MESSAGE) + (
        way == "channels" and 128 * r * r * 4 / ranks >= SMALL_MESSAGE
    )
    messages = (7 if way == "sums" else 9) + alone
    # Backward one more, in which everything is gathered again; and what is gathered of a product leaves alone.
    assert [len(log.entries) for log in logs] == [messages, messages + 1 + (way == "sums")]


def _stack_sends(checkpointing: bool) -> tuple[float, float]:
    """Bytes of a stack of one small block on 4 ranks, forward and backward."""
    trunk = model_config("model_1").model.embeddings_and_evoformer
    with fake_mesh(ParallelPlan(dap=4)) as mesh:
        shards = AxialShards(mesh.group("dap"))
        stack = EvoformerStack([EvoformerBlock(trunk.evoformer, 16, 16)], checkpointing=checkpointing)
        stack = axial_parallel(stack, mesh)
        msa = shards.take(torch.randn(8, 12, 16), 0).requires_grad_()
        pair = shards.take(torch.randn(12, 12, 16), 0).requires_grad_()
        with mesh.record() as forward:
            found = stack(msa, pair, torch.ones(8, 12), torch.ones(12, 12))
        with mesh.record() as backward:
            (found[0].sum() + found[1].sum()).backward()
    return forward.sent, backward.sent


def test_blocks_that_are_recomputed_gather_nothing_a_third_time() -> None:
    forward, backward = _stack_sends(checkpointing=False)
    assert backward > forward
    # The pair is resharded around the blocks, which are recomputed without that.
    around = 2 * 4 * (3 / 4) * 3 * 12 * 16
    again, recomputed = _stack_sends(checkpointing=True)
    assert again == forward
    assert recomputed == pytest.approx(2 * forward - around)
