"""Plan passes with gradients of a network's inputs: recomputation, host memory and ranks within a budget.

Memory and time are those of a training step's cost model (:mod:`fastfold.parallel.planner.cost_model`), traced without
parameters' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import InputError
from fastfold.evoformer.losses.design import ContactOptions, Outputs, contact_loss, pae_loss, plddt_loss
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import element_size
from fastfold.inference.folding.background import Background, BackgroundWork
from fastfold.inference.folding.gradients import CHECKPOINTED, GradientPolicy, GradientRun, SavedInputs
from fastfold.inference.planning.fit import available_bytes
from fastfold.inference.planning.memory_model import FIXED_CUDA, nccl_bytes
from fastfold.kernels.common.layout import GPU_POSITIONS
from fastfold.memory import BudgetError
from fastfold.parallel.alphafold.workload import input_gradient_workload
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import Cost, step_cost
from fastfold.parallel.planner.hardware import TRAINING, Rates, rates
from fastfold.parallel.planner.workload import Workload
from fastfold.utils.units import GIB

FIXED_CPU, GAPS_CPU = 520 << 20, 1.85
"""Bytes of a process on a CPU in addition to a gradient's tensors: fixed ones, and a multiple of the working tensors.

They are PyTorch's libraries, and pages that its allocator keeps, as measured by ``benchmarks/design.py``."""

_BYTES_OF_POSITION = {2: 6 << 10, 4: 8 << 10}
"""Bytes of a position of a block of attention in its backward pass on a GPU, by those of an element.

The cost of the operator counts bytes that go through memory, not those in use at a time."""

_GAPS, _GAPS_OF_HOST = 0.025, 0.15
"""Gaps between blocks of PyTorch's allocator as a share of the tensors, in addition to those of a fold.

Block inputs that leave and return make more of them. ``benchmarks/simulation/gradient.py`` counts them."""

_KEPT_BYTES, _KEPT_SHARE = 48 * (2 * 4 + 4 + 2 * 4) * 128 * 4, 4
"""Bytes per pair of residues that attention, transitions and triangles of 48 blocks keep in float32, and their share of
memory, inverted.

Without a plan, they are kept if they take no more than this share of the free memory."""

_SHORTEST = 20
_FEW_ROWS = (128, 256)  #: Rows of the MSA and of the extra MSA that are proposed where more do not fit
_ASSUMED_GPU = "h100"
_BYTES_OF_PAIR = 9 << 10
"""Bytes per pair of residues of a block of rows in the structure module's backward pass on a GPU.

The trace runs the path of a CPU, which sums the distances of points in one operator."""


@dataclass(frozen=True)
class GradientPlan:
    """Plan of a pass with gradients: bytes of each device, also by use, seconds on a GPU, and operations of all ranks.

    ``forward_`` is a pass without gradients. Saved tensors are offloaded from ``offload_from`` bytes on.
    """

    policy: GradientPolicy
    peak: int
    parts: dict[str, float]
    seconds: float
    forward_seconds: float
    offload_from: int
    flops: float = 0.0
    forward_flops: float = 0.0

    @property
    def host_room(self) -> int:
        """Bytes of the host for offloaded tensors, with room for a whole one more, because they leave whole."""
        return self.policy.host + self.offload_from if self.policy.host else 0


def gradient_run(
    plan: GradientPlan | None,
    residues: int,
    device: torch.device,
    group: Group | None = None,
    templates: tuple[int, ...] | None = None,
    *,
    has_alignment: bool = False,
) -> GradientRun:
    """Return the passes by a plan, with the host's memory that they need, or by a target's length without one.

    Without a plan, projections of the trunk's blocks are kept if they take a small part of the free memory.
    Those of a target that ``has_alignment`` are not, because its rows are not known here.
    """
    if plan is None:
        ranks = 1 if group is None else group.size
        keep = device.type == "cpu" and not has_alignment
        keep = keep and _KEPT_BYTES * residues**2 < available_bytes(device) // _KEPT_SHARE
        policy = GradientPolicy.of_length(residues, templates, keep_projections=keep, ranks=ranks)
        return GradientRun(policy, None, group)
    is_saved = plan.policy.host > 0
    saved = SavedInputs(plan.host_room, plan.offload_from // 2, device) if is_saved else None
    return GradientRun(plan.policy, saved, group)


@dataclass(frozen=True)
class GradientPlanner:
    """Planner of passes with gradients of one network."""

    config: ConfigDict  #: Official configuration tree
    residues: int  #: Residues of the target, of all chains
    precision: str = "fp32"  #: ``bf16`` or ``fp32``
    device: str = "cuda"  #: ``cuda`` or ``cpu``
    ranks: int = 1  #: Processes that share the target
    host_memory: int = 0  #: Bytes of the host's memory for each of them
    msa: int = 1  #: Rows of the alignment
    extra_msa: int = 1  #: Rows of the extra alignment
    #: Indices of the templates that a monomer network reads; None for all
    templates: tuple[int, ...] | None = ()
    speeds: Rates | None = None  #: Rates of the GPUs; None for those of the data sheet of an H100
    held: int = 0  #: Bytes of each device for tensors that the caller keeps between passes

    def plan(self, budget: int) -> GradientPlan:
        """Return the fastest plan within a budget, bytes of each device, or raise BudgetError with the smallest."""
        tried = self.smallest()
        for plan in self._candidates(budget):
            if plan.peak <= budget:
                return plan
            if plan.peak < tried.peak:
                tried = plan
        raise BudgetError(
            f"a gradient of {self.residues:,} residues needs {tried.peak / GIB:,.2f} GiB"
            f"{f' in each of {self.ranks} processes' if self.ranks > 1 else ''}, found {budget / GIB:,.2f} GiB",
            tried.peak,
        )

    def smallest(self) -> GradientPlan:
        """Return the plan with the lowest peak."""
        plans = [self._plan(recompute=True, host=host) for host in {0, self.host_memory}]
        return min(plans, key=lambda plan: plan.peak)

    def without_host_limit(self) -> GradientPlan:
        """Return the plan with every block input on the host."""
        return self._plan(recompute=True, host=1 << 60)

    def longest(self, budget: int) -> int:
        """Return about how many residues fit in bytes of each device, if memory grows as at this length."""
        plan, whole = self.without_host_limit(), self._plan(recompute=True)
        fixed = self.fixed + plan.parts["parameters"] + self.held
        room = max(0.0, budget - fixed)
        # Block inputs may fill the host and the rest of the device.
        times = min(room / (plan.peak - fixed), (room + self.host_memory) / (whole.peak - fixed))
        return int(self.residues * math.sqrt(times))

    @property
    def fixed(self) -> int:
        """Bytes of a device that do not grow with the target."""
        return FIXED_CUDA + nccl_bytes(self.ranks) if self.device == "cuda" else FIXED_CPU

    def _candidates(self, budget: int) -> Iterator[GradientPlan]:
        """Yield plans from the fastest to that with the lowest peak."""
        # Triton's kernels keep no projections.
        may_keep = (True, False) if self.device == "cpu" else (False,)
        if self.residues < CHECKPOINTED:
            for keep in may_keep:
                yield self._plan(recompute=False, keep=keep)
        for keep in may_keep:
            device = self._plan(recompute=True, keep=keep)
            yield device
        if self.host_memory and device.peak > budget:
            # Of block inputs only as many leave as have to.
            needed = min(self.host_memory, device.peak - budget + device.offload_from)
            yield self._plan(recompute=True, host=needed)
            yield self.smallest()

    def _plan(self, *, recompute: bool, keep: bool = False, host: int = 0) -> GradientPlan:
        cost, forward = self._costs(recompute, keep, host)
        pairs = -(-self.residues // self.ranks) * self.residues
        policy = replace(self._policy(recompute, keep), host=math.ceil(cost.host))
        size = element_size(self.precision)
        parts = dict(cost.memory) | ({"held": float(self.held)} if self.held else {})
        if self.device == "cuda":
            parts["working"] += min(pairs, GPU_POSITIONS) * _BYTES_OF_POSITION[size]
            if recompute:
                parts["working"] = max(parts["working"], min(pairs, policy.pairs) * _BYTES_OF_PAIR)
            parts["gaps"] = (_GAPS_OF_HOST if policy.host else _GAPS) * sum(parts.values())
        else:
            parts["gaps"] = GAPS_CPU * parts["working"]
        return GradientPlan(
            policy=policy,
            peak=math.ceil(sum(parts.values())) + self.fixed,
            parts=parts,
            seconds=cost.seconds,
            forward_seconds=forward.seconds - cost.seconds,
            offload_from=pairs * self.config.model.embeddings_and_evoformer.pair_channel * size,
            flops=cost.flops,
            forward_flops=forward.flops - cost.flops,
        )

    def _policy(self, recompute: bool, keep: bool) -> GradientPolicy:
        return GradientPolicy.of_length(
            self.residues, self.templates, recompute=recompute, keep_projections=keep, ranks=self.ranks
        )

    def _costs(self, recompute: bool, keep: bool, host: int) -> tuple[Cost, Cost]:
        if (recompute, keep) not in self._workloads:
            self._workloads[recompute, keep] = input_gradient_workload(
                self.config,
                residues=self.residues,
                score=_score,
                settings=partial(_set_policies, self._policy(recompute, keep)),
                recompute=recompute,
                msa=self.msa,
                extra_msa=self.extra_msa,
                precision=self.precision,
            )
        workload = self._workloads[recompute, keep]
        plan, speeds = ParallelPlan(dap=self.ranks), self.speeds or rates(_ASSUMED_GPU, TRAINING)
        cost = partial(step_cost, plan=plan, rates=speeds, checkpointing=recompute, host=host)
        return cost(workload), cost(replace(workload, passes=1))

    @cached_property
    def _workloads(self) -> dict[tuple[bool, bool], Workload]:
        return {}


def _set_policies(policy: GradientPolicy, model: AlphaFold) -> None:
    """Set the policies of a network that is only measured."""
    model.structure_module.stop_rotation_gradient = False
    for module, own in policy.policies(model).items():
        module.policy = own


def _score(result: dict[str, Any]) -> Tensor:
    """Return a loss that reads what losses of designs read."""
    outputs = Outputs.from_result(result)
    everyone = torch.ones_like(outputs.positions[:, 0, 0])
    pairs, places = everyone[:, None] * everyone, torch.arange(len(everyone))
    offset = places[:, None] - places
    contacts = contact_loss(outputs, offset, ContactOptions(seqsep=9), everyone, pairs)
    total = plddt_loss(outputs, everyone) + contacts
    return total if outputs.errors is None else total + pae_loss(outputs, pairs)


def plan_gradients(planner: GradientPlanner, budget: int, *, name: str | None = None) -> GradientPlan:
    """Return the plan of a target's gradients within a budget, bytes of each device, or raise InputError."""
    if planner.ranks > 1 and dist.is_initialized():
        # Ranks are traced with a fake group, which excludes the real one of this process.
        with closing(Background()) as apart:
            work = BackgroundWork(plan_gradients, (planner, budget), {"name": name})
            plan: GradientPlan = apart.submit(work).result()
            return plan
    try:
        return planner.plan(budget)
    except BudgetError as error:
        raise InputError(f"{error}; {_remedy(planner, budget)}", record=name) from error


def _remedy(planner: GradientPlanner, budget: int) -> str:
    """Return what to do where no plan fits; sizes of other plans are estimates."""
    smallest, enough, ways = planner.smallest(), planner.without_host_limit(), []
    if planner.precision == "fp32" and smallest.peak - (smallest.peak - planner.fixed) / 2 <= budget:
        ways.append("use `precision=bf16`")
    if planner.device == "cuda" and enough.peak <= budget:
        ways.append(f"give `host_memory={math.ceil(enough.policy.host * planner.ranks / GIB)}GiB`")
    few = zip((planner.msa, planner.extra_msa), _FEW_ROWS, strict=True)
    clusters, extra = (min(rows, most) for rows, most in few)
    if (clusters, extra) != (planner.msa, planner.extra_msa):
        fewer = replace(planner, msa=clusters, extra_msa=extra, held=planner.held * clusters // planner.msa)
        if fewer.smallest().peak <= budget:
            ways.append(f"use `max_msa={clusters}:{extra}`")
    fits = planner.longest(budget)
    ways.append(f"take about {fits:,} residues" if fits >= _SHORTEST else "use a device with more memory")
    return ", or ".join(ways)
