"""Simulate a fold with tensor sizes only, to count the memory of a device that is not available.

The inference code for a GPU runs on tensors without memory (:class:`~fastfold.memory.SimulatedDevice` on the device
``meta``), with Triton's path up to the kernel launches. Allocations by operators are counted as far as PyTorch knows
them. Not counted are the driver's context, workspaces of matrix products, and the allocator's rounding and gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels.recording import without_launches
from benchmarks.simulation.caching_allocator import CachingAllocator
from fastfold.evoformer.config import ensemble_size
from fastfold.evoformer.execution import ExecutionPolicy, LazyRows
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, element_size, set_precision
from fastfold.inference.folding.network import NetworkPasses, run_network
from fastfold.inference.planning.memory_model import CONTEXT_CUDA, FIXED_CUDA, WORKSPACE_CUDA, nccl_bytes
from fastfold.inference.planning.planner import FoldPlan, Planner, parameter_bytes
from fastfold.inference.planning.time_model import Costs
from fastfold.memory import DeviceFull, HostBuffers, SimulatedDevice
from fastfold.parallel import ParallelPlan, alphafold
from fastfold.parallel.planner.fake_run import fake_mesh

AllocatorKind = Literal["segments", "expandable"]


class SimulatedHost(HostBuffers):
    """Simulated host memory or disk, which counts offloaded tensors.

    Args:
        device: Simulated device.
        limit: Limit of :class:`~fastfold.memory.HostBuffers`, never exceeded.
        overflow: See :class:`~fastfold.memory.HostBuffers`.

    Attributes:
        peak: Peak in bytes.
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
        """Return a buffer, see :meth:`~fastfold.memory.offload.HostBuffers.buffer`."""
        before = self.nbytes
        found = super().buffer(elements, like)
        if self._limit is not None and self.nbytes > self._limit:
            raise DeviceFull(self.nbytes - before, before, self._limit, "offloaded tensors on the host")
        self.peak = max(self.peak, self.nbytes)
        return found

    def resize(self, tensor: Tensor, nbytes: int) -> None:
        """Resize a tensor, see :meth:`~fastfold.memory.offload.HostBuffers.resize`."""
        super().resize(tensor, nbytes)
        self._device.resized(tensor)


def _few(blocks: Iterator[slice]) -> list[slice]:
    """Return blocks without those between the third and the last, which equal the third."""
    found = list(blocks)
    return found if len(found) <= 4 else [*found[:3], found[-1]]


@dataclass(frozen=True)
class _FewBlocks(ExecutionPolicy):
    """Policy that skips most blocks."""

    def slices(self, x: Tensor, dim: int, channels: int = 1) -> Iterator[slice]:
        """Yield slices, see :meth:`~fastfold.evoformer.execution.ExecutionPolicy.slices`."""
        yield from _few(super().slices(x, dim, channels))


_every_row = LazyRows.slices


def _few_rows(tensor: LazyRows) -> Iterator[slice]:
    yield from _few(_every_row(tensor))


@dataclass(frozen=True)
class Simulated:
    """Memory and traffic of a simulated fold.

    Attributes:
        plan: Plan of the fold.
        planned: Bytes that the plan has for tensors; an allocation beyond them would have raised an error.
        peak: Peak of tensors on the device in bytes, including parameters.
        host: Peak of offloaded tensors in the host's memory, in bytes.
        disk: Peak of offloaded tensors on the disk, in bytes.
        copied: Bytes copied between the device and host or disk.
        sent: Bytes that the rank has sent to others.
        reserved: Peak of the allocator in bytes, including memory outside of it; 0 without allocator.
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
    """Simulate a fold on a device with exactly the planned memory.

    Args:
        config: Official configuration tree.
        features: Returns the features of a cycle and an ensemble member.
        residues: Length of the target, all chains together.
        budget: Bytes of the device, for the plan.
        rows: Rows of all alignments, for the plan.
        templates: Number of templates; None for the network's maximum.
        precision: Precision of the trunk.
        host_memory: Bytes of host memory for offloaded tensors; 0 for none.
        disk: Bytes of a disk for offloaded tensors that exceed the host memory.
        ranks: Number of processes that share the target, each with such a device and host memory. Only the first one is
            simulated, because it has the largest shards; its messages get no reply.
        num_recycles: Passes after the first one.
        pae: True to keep the aligned errors of all pairs.
        every_block: True to run all blocks of rows. A few of them reach the same peak, because all blocks but the last
            have one size, and the third is the first with two predecessors.
        allocator: Model of PyTorch's allocator for the tensors, with ``segments`` or ``expandable`` ones. It has the
            budget without the driver's context and NCCL's memory, and includes the workspaces of cuBLAS. None for no
            allocator.
        costs: Costs for the plan, for example of a GPU; None for arbitrary ones.

    Raises:
        BudgetError: No plan fits the budget.
        DeviceFull: The fold exceeds the planned memory.
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
    rows_read = mock.patch.object(LazyRows, "slices", _every_row if every_block else _few_rows)
    with without_launches(), rows_read, fake_mesh(ParallelPlan(dap=ranks)) as mesh, device.running():
        with torch.device(device.device):
            model = set_precision(AlphaFold(config), precision)
        planner = Planner(
            config,
            element_size(precision),
            "cuda",
            costs=costs or Costs(),
            host_memory=host_memory,
            parameters=parameter_bytes(model),
            host=host,
            disk=disk,
            ranks=ranks,
            rows=rows,
            templates=templates,
        )
        plan = planner.plan(residues, budget)
        if not every_block:
            policy = _FewBlocks(**{f.name: getattr(plan.policy, f.name) for f in fields(plan.policy)})
            plan = replace(plan, policy=policy)
        device.budget = plan.peak - FIXED_CUDA - nccl_bytes(ranks)
        model = alphafold.shard(model, mesh)
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
