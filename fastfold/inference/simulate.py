"""A fold of sizes alone: what a device would have to hold, counted without having one.

The inference code that a GPU would run is run on tensors without memory (:class:`~fastfold.memory.SimulatedDevice` on
the device ``meta``), with Triton's path up to the launches of its kernels. What operators allocate is counted, as far
as PyTorch knows of it: neither the driver's context, nor workspaces of matrix products, nor what the allocator's
rounding and gaps cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fastfold.evoformer.config import ensemble_size
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, set_precision
from fastfold.inference.folding.network import NetworkPasses, run_network
from fastfold.inference.planning.memory_model import (
    CONTEXT_CUDA,
    FIXED_CUDA,
    WORKSPACE_CUDA,
    nccl_bytes,
)
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes
from fastfold.inference.planning.time_model import Costs
from fastfold.kernels.common.backend import without_launches
from fastfold.memory import CachingAllocator, DeviceFull, HostBuffers, SimulatedDevice
from fastfold.parallel import ParallelPlan, alphafold
from fastfold.parallel.planner.fake_run import fake_mesh

AllocatorKind = Literal["segments", "expandable"]


class SimulatedHost(HostBuffers):
    """The host's memory of a simulated device, or a disk, which learns what waits here and what it gets back.

    Args:
        device: The device.
        limit: As of :class:`~fastfold.memory.HostBuffers`, and never to be passed.
        overflow: As of :class:`~fastfold.memory.HostBuffers`.

    Attributes:
        peak: Most bytes that were held at a time.
    """

    def __init__(
        self, device: SimulatedDevice, *, limit: int | None = None, overflow: HostBuffers | None = None
    ) -> None:
        def allocate(elements: int, dtype: torch.dtype) -> Tensor:
            with device.host_work():
                return device.on_host(torch.empty(elements, dtype=dtype, device=device.device))

        super().__init__(allocate, limit=limit, overflow=overflow)
        self._device = device
        self.peak = 0

    def buffer(self, elements: int, like: Tensor) -> Tensor:
        """See :meth:`~fastfold.memory.offload.HostBuffers.buffer`."""
        before = self.nbytes
        found = super().buffer(elements, like)
        if self._limit is not None and self.nbytes > self._limit:
            raise DeviceFull(self.nbytes - before, before, self._limit, "what waits on the host")
        self.peak = max(self.peak, self.nbytes)
        return found

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """See :meth:`~fastfold.memory.offload.HostBuffers.resize`."""
        super().resize(tensor, nbytes)
        self._device.resized(tensor)


@dataclass(frozen=True)
class _FewBlocks(ExecutionPolicy):
    """A policy whose blocks between the third and the last, which are like the third, are left out."""

    def slices(self, x: Tensor, dim: int, channels: int = 1) -> Iterator[slice]:
        """See :meth:`~fastfold.evoformer.execution.ExecutionPolicy.slices`."""
        found = list(super().slices(x, dim, channels))
        yield from found if len(found) <= 4 else (*found[:3], found[-1])


@dataclass(frozen=True)
class Simulated:
    """What a fold of sizes alone took.

    Attributes:
        plan: How it was run.
        planned: Bytes that the plan has for tensors; an allocation beyond them would have raised.
        peak: Most bytes of tensors on the device, parameters included.
        host: Most bytes of the host's memory for what had left the device.
        disk: Most bytes of the disk for what had left the device.
        copied: Bytes that have left the device, to the host and to the disk, and come back.
        sent: Bytes that the rank has sent to others.
        reserved: Most bytes that the allocator held, with what is outside of it; 0 without one.
    """

    plan: FoldPlan
    planned: int
    peak: int
    host: int
    disk: int = 0
    copied: int = 0
    sent: float = 0.0
    reserved: int = 0


def simulate(
    config: Any,
    features: Callable[[int, int], Mapping[str, Tensor]],
    residues: int,
    budget: int,
    *,
    rows: int,
    templates: int | None = None,
    precision: Precision = "bf16",
    host_memory: int = 0,
    disk: int = 0,
    ranks: int = 1,
    num_recycles: int = 1,
    pae: bool = False,
    every_block: bool = False,
    allocator: AllocatorKind | None = None,
    costs: Costs | None = None,
) -> Simulated:
    """Fold on a device without contents, which has the memory that the plan says and no more.

    Args:
        config: Official configuration tree.
        features: Gives those of a cycle and an ensemble member.
        residues: Length of the target, all chains together.
        budget: Bytes of the device, for the plan.
        rows: Rows of all alignments, for the plan.
        templates: Shown to the network; None for as many as it takes.
        precision: Precision of the trunk.
        host_memory: Bytes of the host's memory for what leaves the device; 0 for none.
        disk: Bytes of a disk for what finds no room in the host's memory.
        ranks: How many processes share the target, each on such a device with this much of the host. The first of
            them is simulated, which has the largest shards; nobody answers its messages.
        num_recycles: Passes after the first one.
        pae: Whether aligned errors of all pairs are kept.
        every_block: Whether all blocks of rows are run. Few of them find the same peak: blocks have one size but for
            the last one, and the third is the first that finds two before it.
        allocator: Have a model of PyTorch's allocator hold the tensors: ``segments`` or ``expandable`` ones. It has the
            budget, but for the driver's context and what NCCL holds; the workspaces of cuBLAS are there from the start.
        costs: What the plan reckons with, of a GPU for example; by default those of nothing in particular.

    Raises:
        BudgetError: There is no plan for the budget.
        DeviceFull: The fold takes more than was planned.
    """
    outside = CONTEXT_CUDA + nccl_bytes(ranks)
    caching = None
    if allocator is not None:
        caching = CachingAllocator(budget - outside, expandable=allocator == "expandable")
        for _ in range(2):
            caching.allocate(WORKSPACE_CUDA)
    device = SimulatedDevice(budget, "meta", allocator=caching)
    slower = SimulatedHost(device)
    host = SimulatedHost(device, limit=host_memory, overflow=slower if disk else None)
    with without_launches(), fake_mesh(ParallelPlan(dap=ranks)) as mesh, device.running():
        with torch.device(device.device):
            model = set_precision(AlphaFold(config), precision)
        planner = Planner(
            config,
            2 if precision == "bf16" else 4,
            "cuda",
            costs=costs or Costs(),
            host_memory=host_memory,
            parameters=parameter_bytes(model),
            host=host,
            disk=disk,
            ranks=ranks,
        )
        plan = planner.plan(residues, budget, rows=rows, templates=templates)
        if not every_block:
            policy = _FewBlocks(**{f.name: getattr(plan.policy, f.name) for f in fields(plan.policy)})
            plan = replace(plan, policy=policy)
        device.budget = plan.peak - FIXED_CUDA - nccl_bytes(ranks)
        alphafold.shard(model, mesh)
        with mesh.record() as log:
            run_network(
                model,
                features,
                NetworkPasses(num_recycles, ensemble_size(model.config), pae=pae),
                None,
                plan=plan,
            )
    copied = sum(buffers.sent + buffers.returned for buffers in (host, slower))
    reserved = 0 if caching is None else caching.peak + outside
    return Simulated(plan, device.budget, device.peak, host.peak, slower.peak, copied, log.sent, reserved)
