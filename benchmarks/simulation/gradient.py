"""Simulate a gradient of a design with tensor sizes only, to check its plan without the device.

As ``benchmarks/simulation/fold.py`` does for folds: the code for a GPU runs on tensors without memory, under the model
of PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.recording import without_launches
from benchmarks.simulation.caching_allocator import CachingAllocator
from fastfold.evoformer.inputs import Relaxation
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import set_precision
from fastfold.inference.folding.gradients import GradientRun, SavedInputs
from fastfold.inference.planning.gradient_plan import GradientPlan
from fastfold.inference.planning.memory_model import CONTEXT_CUDA, WORKSPACE_CUDA, nccl_bytes
from fastfold.memory import SimulatedDevice
from fastfold.memory.devices.tiers import Tier
from fastfold.parallel import ParallelPlan, alphafold
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.products.design.evaluate import Evaluator
from fastfold.products.design.tasks.task import DesignTask


class SimulatedTier(Tier):
    """Host memory of a simulated device, which counts offloaded tensors.

    Args:
        device: Simulated device.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def allocate_waiting(self, numel: int, dtype: torch.dtype, what: str = "a tensor") -> Tensor:
        """Return a buffer without memory."""
        return self._counted(
            lambda: self._device.on_host(torch.empty(numel, dtype=dtype, device=self._device.device)),
            numel * dtype.itemsize,
            what,
        )


@dataclass(frozen=True)
class SimulatedGradient:
    """Memory of a simulated gradient.

    Attributes:
        peak: Peak of tensors on the device in bytes, including parameters.
        reserved: Peak of the allocator in bytes, including memory outside of it.
        host: Peak of offloaded tensors in bytes.
    """

    peak: int
    reserved: int
    host: int


def simulate_gradient(
    config: Any,
    task: DesignTask,
    weights: Mapping[str, float],
    plan: GradientPlan,
    *,
    precision: str = "bf16",
    ranks: int = 1,
    recycles: int = 0,
    budget: int = 1 << 60,
) -> SimulatedGradient:
    """Simulate the gradient of a design by one network under a plan.

    Args:
        config: Official configuration tree.
        task: Task of the design.
        weights: Weight of each loss.
        plan: Plan of the gradient.
        precision: ``bf16`` or ``fp32``.
        ranks: Processes that share the target; the first one is simulated, because it has the largest shards.
        recycles: Passes without gradients before.
        budget: Bytes of the device.

    Raises:
        DeviceFull: The gradient exceeds the budget.
    """
    outside = CONTEXT_CUDA + nccl_bytes(ranks)
    caching = CachingAllocator(budget - outside, expandable=True)
    for _ in range(2):
        caching.allocate(WORKSPACE_CUDA)
    device = SimulatedDevice(budget - outside, "meta", allocator=caching)
    tier = SimulatedTier(device)
    with without_launches(), fake_mesh(ParallelPlan(dap=ranks)) as mesh, device.running():
        with torch.device(device.device):
            model = set_precision(AlphaFold(config), precision)
        model = alphafold.shard(model, mesh)
        saved = None
        if plan.policy.host:
            saved = SavedInputs(plan.host_room, plan.offload_from // 2, device, tier)
        run = GradientRun(plan.policy, saved, mesh.group("dap") if ranks > 1 else None)
        evaluator = Evaluator(task, [model], weights, gradients=run)
        parameters = torch.zeros(task.num_parameters, 20)
        evaluator(parameters, Relaxation(soft=0.5), recycles=recycles, dropout=True)
        peak = device.mark()
    return SimulatedGradient(peak, caching.peak + outside, tier.peak)
