"""Reduction of gradients by the ZeRO stage of a plan."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastfold.parallel.checks.agreement import StepAgreement
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.kept_gradients import ReducedGradients
from fastfold.parallel.data_parallel.precision import compute_in
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.meta_start import give_memory
from fastfold.parallel.own_stages import OwnStages
from fastfold.parallel.tensor_parallel.layout import parameter_shard_specs


def make_gradients(
    own: OwnStages, mesh: ParallelMesh, policy: MixedPrecisionPolicy, *, is_filled_later: bool = False
) -> ReducedGradients:
    """Return the gradients of this rank's module by ZeRO stage; the module computes by the policy.

    With ``is_filled_later``, values follow for parameters without data: they get memory here, or as shards by stage 3.
    """
    plan, module = mesh.plan, own.module
    if plan.zero < 3 or mesh.group("replicas").is_alone:
        if is_filled_later:
            give_memory(module, torch.device(mesh.device_type))
        for _, part in own.called:
            compute_in(part, policy)
    specs = parameter_shard_specs(module)
    shard_groups = {name: [spec.group for spec in of_one] for name, of_one in specs.items()}
    gradients: ReducedGradients
    if plan.zero == 3:
        gradients = FullySharded(module, mesh, shard_groups, policy)
    else:
        gradients = Replicated(own.trained(), mesh, shard_groups, stage=plan.zero, shared=own.shared)
    cut = frozenset(name for name, of_one in shard_groups.items() if of_one)
    shares = [mesh.group(name) for name in ("dap", "sp", "dp")] if plan.zero else []
    gradients.agreement = StepAgreement(module, mesh, cut, shares)
    gradients.agreement.note_equal_parts()
    return gradients
