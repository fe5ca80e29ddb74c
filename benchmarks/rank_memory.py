"""Memory of one rank's part of a network, counted on simulated ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning.planner import FOLDING_POLICY
from fastfold.parallel import ParallelPlan, alphafold
from fastfold.parallel.alphafold.workload import alphafold_workload, dummy_features, one_block_config
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.planner.recorder import Recorder

_C_Z, _BYTES = 128, 4
# Number of blocks that a fold's policy cuts the pair of 2,000 residues into; it would not cut short ones at all.
_BLOCKS = 128


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in U: the bytes of the whole pair tensor, N² · 128 · 4.

    Attributes:
        folding: Peak while a structure is predicted, without parameters and features.
        block: Memory that an Evoformer block of training keeps for its backward pass.
        checkpoint: Memory that it keeps if its activations are computed again.
    """

    folding: float
    block: float
    checkpoint: float


def rank_memory(plan: ParallelPlan, *, residues: int, msa: int, extra_msa: int) -> RankMemory:
    """Count the memory of rank 0, which has the longest shards, of the network of ``model_1_ptm`` in float32.

    Args:
        plan: Only ``dap`` is used: axial or a grid.
        residues: N.
        msa: Rows of the MSA.
        extra_msa: Rows of the extra MSA.
    """
    sizes = {"residues": residues, "msa": msa, "extra_msa": extra_msa}
    unit = residues**2 * _C_Z * _BYTES
    regions = alphafold_workload(model_config("model_1_ptm"), **sizes, precision="fp32").trace(plan).regions
    block = regions["evoformer.blocks.0"]
    folding = _folding_peak(plan, **sizes)
    return RankMemory(folding / unit, (block.entering + block.kept) / unit, block.entering / unit)


def _folding_peak(plan: ParallelPlan, *, residues: int, msa: int, extra_msa: int) -> float:
    """Return the peak in bytes with one block in each stack; later blocks need no more.

    Tensors are real, because their values decide where an operator's blocks begin. Messages of other ranks are noise.
    """
    config = one_block_config(model_config("model_1_ptm"))
    features = dummy_features(config, residues, msa, extra_msa)
    with fake_mesh(plan) as mesh, torch.no_grad():
        network = alphafold.shard(AlphaFold(config).eval(), mesh)
        set_policy(network, replace(FOLDING_POLICY, block_elements=residues**2 * _C_Z // _BLOCKS))
        recorder = Recorder(network)
        recorder.leave_out(features.values())
        with recorder:
            network(features, 0)
    return recorder.result().peak
