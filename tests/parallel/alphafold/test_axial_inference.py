"""Folding on shards as ``fastfold infer`` does: in place, in blocks, logits computed when they are asked for."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastfold.errors import ConfigError
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding import network
from fastfold.inference.folding.network import NetworkPasses, run_network
from fastfold.inference.planning.planner import Planner
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory import HostBuffers, disk_buffers
from fastfold.parallel.alphafold import axial_parallel
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from tests.helpers.spawn_ranks import launch
from tests.parallel.alphafold.axial_cases import difference
from tests.parallel.alphafold.axial_networks import monomer_sample, multimer_sample, small_network


def _by_a_plan(model: AlphaFold, features: Any, passes: NetworkPasses, ranks: int) -> tuple[Any, Any]:
    """In the smallest pieces, with parts of the pair and of products here, on the host, and on a disk."""
    residues, host = features(0, 0)["aatype"].shape[-1], HostBuffers(limit=4000, overflow=disk_buffers())
    planner = Planner(model.config, 8, host_memory=4000, disk=10**9, host=host, ranks=ranks, rows=2)
    plan = planner.plan(residues, planner.smallest(residues))
    policy = replace(
        plan.policy,
        block_elements=1500,
        contraction=ContractionPlan(1, host, 0.4),
        offload=host,
        offload_kept=0.3,
        reshard_blocks=8,
    )
    plan = replace(plan, policy=policy, blocks={}, templates=ContractionPlan(1, host, 0.2))
    found = run_network(model, features, passes, None, plan=plan)
    assert host.overflow is not None
    assert min(host.sent, host.returned, host.overflow.sent, host.overflow.returned) > 0
    return found


def _fold(ranks: int) -> dict[str, float]:
    mesh = ParallelMesh(ParallelPlan(dap=ranks))
    network.FOLDING_POLICY = ExecutionPolicy(block_elements=2000, inplace=True, lazy_logits=True)
    found = {}
    for name, sample in (
        ("synthetic_monomer", monomer_sample(11, 1, 2)),
        ("synthetic_multimer", multimer_sample()),
    ):
        plain = small_network(name)
        parallel = axial_parallel(copy.deepcopy(plain), mesh)
        for model in (plain, parallel):
            model.config.model.num_ensemble_eval = 1

        def features(cycle: int, member: int, sample: object = sample) -> dict:
            return {key: value[cycle] for key, value in sample.features.items()}

        passes = NetworkPasses(1, is_complex=name == "synthetic_multimer")
        arguments = (features, passes, None)
        expected, scores = run_network(plain, *arguments)
        ours, our_scores = run_network(parallel, *arguments)
        # Contacts of interfaces come from the distogram, whose columns are on other ranks.
        assert scores.keys() - our_scores.keys() <= {"actifptm", "chain_pair_actifptm"}
        positions = "final_atom_positions"
        for kind, (result, numbers) in {
            name: (ours, our_scores),
            f"{name} by a plan": _by_a_plan(parallel, features, passes, ranks),
        }.items():
            assert scores.keys() - numbers.keys() <= {"actifptm", "chain_pair_actifptm"}
            for key in numbers:
                found[f"{kind} {key}"] = difference(numbers[key].double(), scores[key].double())
            found[f"{kind} {positions}"] = difference(
                result["structure_module"][positions], expected["structure_module"][positions]
            )

    # One number of one rank's features is another: nobody computes anything from it.
    def others(cycle: int, member: int) -> dict:
        changed = features(cycle, member)
        changed["msa_feat"] = changed["msa_feat"].clone()
        changed["msa_feat"][..., 0, 0, 0] += mesh.group("dap").rank
        return changed

    with pytest.raises(ConfigError, match=r"their features \(checksum\) differs"):
        run_network(parallel, others, passes, None)

    # Every rank would drop something else of the same tensor.
    parallel.train()
    torch.manual_seed(mesh.group("dap").rank)
    with pytest.raises(ConfigError, match="their random number generator's state differs"):
        parallel(multimer_sample().features)
    return found


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_fold_equals_that_of_one_process(ranks: int) -> None:
    """A sequence alone (a rank without a row of its alignment) and a complex, with recycling."""
    for found in launch(_fold, ranks, ranks, timeout=500.0):
        assert {"synthetic_monomer pae", "synthetic_monomer ptm", "synthetic_multimer iptm"} <= set(found)
        assert {"synthetic_monomer by a plan pae", "synthetic_multimer by a plan iptm"} <= set(found)
        for name, error in found.items():
            # The confidences are computed in float32, whatever the network runs in.
            assert error < (1e-12 if "positions" in name else 1e-6), name
