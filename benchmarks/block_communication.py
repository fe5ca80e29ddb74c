"""Count what one Evoformer block sends on any number of ranks, by running it on shapes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.parallel.alphafold.dap import shard
from fastfold.parallel.axial.grid import Grid
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.groups import CommunicationLog
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh


def fastfold_elements(ranks: int, residues: int, sequences: int) -> float:
    """Return the elements that a rank sends in the forward pass of a block of FastFold's dynamic axial parallelism.

    Gathers of a factor of each triangle multiplication (128 channels), of three biases and of the projection for the
    outer product mean, and six reshards (all-to-all); Cheng et al. 2022, "FastFold", counted for the official widths.
    """
    r, s = residues, sequences
    gathered = 272 * r * r + 32 * s * r
    return (ranks - 1) / ranks * (gathered + 512 * (s * r + r * r) / ranks)


def block_communication(
    plan: ParallelPlan, *, residues: int, sequences: int, rank: int = 0, backward: bool = True
) -> tuple[CommunicationLog, CommunicationLog]:
    """Return the collectives of one Evoformer block of the official widths, float32, batch size 1.

    Args:
        plan: Only ``dap`` is used: axial or a grid.
        residues: N.
        sequences: Rows of the MSA.
        rank: Rank that sends; rank 0 has the longest shards.
        backward: Whether to run the backward pass.

    Returns:
        Collectives of the forward pass and of the backward pass.
    """
    trunk = model_config("model_1").model.embeddings_and_evoformer
    # Not fake tensors: a product that is sent in blocks of channels to 512 ranks is a quarter of a million shards.
    with fake_mesh(plan, rank) as mesh, torch.device("meta"):
        block = shard(EvoformerBlock(trunk.evoformer, trunk.msa_channel, trunk.pair_channel), mesh)
        lengths = (sequences, residues), (residues, residues)
        channels = (trunk.msa_channel, trunk.pair_channel)
        msa, pair = (
            torch.empty(*shape, c, requires_grad=True)
            for shape, c in zip(_shards(mesh, *lengths), channels, strict=True)
        )
        with mesh.record() as forward:
            found: tuple[Tensor, Tensor] = block(msa, pair, *(torch.empty(shape) for shape in lengths))
        with mesh.record() as log:
            if backward:
                (found[0].sum() + found[1].sum()).backward()
    return forward, log


def _shards(
    mesh: ParallelMesh, msa: tuple[int, int], pair: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return this rank's part of both representations between blocks."""
    shards = AxialShards(mesh.group("dap"))
    sequences = _length(shards.own(msa[0])), msa[1]
    if mesh.plan.dap_mode == "grid":
        grid = Grid.of(mesh)
        rows, columns = (_length(part) for part in grid.boxes(pair)[grid.whole.rank])
        return sequences, (rows, columns)
    return sequences, (pair[0], _length(shards.own(pair[1])))


def _length(part: slice) -> int:
    return int(part.stop - part.start)
