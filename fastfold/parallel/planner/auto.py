"""Choice of a plan for any module, traced from a batch of its inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.comparison import detached_copy
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.calibration import GENERAL
from fastfold.parallel.planner.cost_model import Cost, step_cost
from fastfold.parallel.planner.hardware import ACCELERATORS, Rates, rates
from fastfold.parallel.planner.report import seconds_text
from fastfold.parallel.planner.trace import Part, Recorder, Region, Trace
from fastfold.parallel.planner.workload import Workload, divisors
from fastfold.utils.module_structure import tensors_in
from fastfold.utils.units import GIB

_ASSUMED_GPU = "h100"

_ALIKE = 1.03
"""Times of a step within this factor count as equal."""


@dataclass(frozen=True)
class Choice:
    """Plan chosen for a module.

    Attributes:
        plan: The fastest plan that fits.
        explanation: Reasons, in a few lines.
    """

    plan: ParallelPlan
    explanation: str


def choose_plan(
    model: nn.Module, example: Any, ranks: int, *, cuts: Sequence[str] = (), gpu: str | Rates | None = None
) -> Choice:
    """Choose the fastest plan of data parallelism, ZeRO and tensor parallelism that fits into memory.

    Args:
        model: Plain module; it is neither changed nor run on data.
        example: Inputs of one step of all ranks together: a tensor, a tuple of arguments, or a dict of named ones. The
            first dimension counts samples.
        ranks: Number of ranks.
        cuts: Paths of the layers that tensor parallelism may cut.
        gpu: Name or rates of the accelerator; None for the one of this machine.

    Raises:
        ConfigError: The module cannot be traced, there are fewer samples than ranks can share, or no plan fits.
    """
    named = dict(example) if isinstance(example, Mapping) else {}
    given = () if named else tuple(example) if isinstance(example, tuple | list) else (example,)
    samples = next((len(x) for x in tree_leaves((given, named)) if isinstance(x, Tensor) and x.dim()), 0)
    if not samples:
        raise ConfigError(
            "example= has no tensor whose first dimension counts samples; pass a batch of inputs"
        )
    speeds, origin = (gpu, "") if isinstance(gpu, Rates) else _rates(gpu)
    within = speeds.sheet.per_machine
    costs: list[Cost] = []
    for tp in divisors(ranks) if cuts else [1]:
        if ParallelPlan(tp=tp).crosses_machines(within) or ranks // tp > samples:
            continue
        dp = ranks // tp
        rows = -(-samples // dp)
        traced = _traced(model, given, named, samples, rows, cuts if tp > 1 else ())
        layout = ParallelPlan(tp=tp)
        workload = _workload(model, rows, dp)
        workload._traces[layout] = _cut(traced, tp)
        plans = [replace(layout, dp=dp, zero=zero) for zero in (range(4) if dp > 1 else (0,))]
        inside = within // tp
        if 1 < inside < dp and dp % inside == 0:
            plans.append(replace(layout, dp=dp, zero=3, dp_shard=inside))
        costs += [step_cost(workload, plan, speeds, checkpointing=False) for plan in plans]
    if not costs:
        raise ConfigError(
            f"{ranks} ranks cannot share a batch of {samples} samples: take a larger batch or fewer ranks, or give "
            "layers= for tensor parallelism"
        )
    fitting = [cost for cost in costs if cost.total_memory <= speeds.usable_memory]
    if not fitting:
        least = min(costs, key=lambda cost: cost.total_memory)
        raise ConfigError(
            f"{type(model).__name__} fits into no plan of {ranks} {speeds.sheet.name}: {_shown(least.plan)} needs "
            f"{least.total_memory / GIB:,.1f} GiB of {speeds.usable_memory / GIB:,.1f} GiB a GPU. Take more GPUs or a "
            "smaller batch, give layers= for tensor parallelism, or use activation checkpointing in the model"
        )
    fastest = min(cost.seconds for cost in fitting)
    # If the model cannot tell times apart, the plan with less sharding wins: it supports more modules.
    fitting.sort(
        key=lambda cost: (
            max(cost.seconds, _ALIKE * fastest),
            cost.plan.tp,
            cost.plan.zero,
            cost.total_memory,
        )
    )
    return Choice(fitting[0].plan, _explain(fitting, len(costs), speeds, origin, bool(cuts)))


def _workload(model: nn.Module, rows: int, dp: int) -> Workload:
    """Return a step of one micro-batch, with its traces."""

    def layouts(_: int) -> Iterator[ParallelPlan]:
        return iter(())

    return Workload(
        name=type(model).__name__,
        build=lambda _: model,
        loss=lambda _: torch.zeros(()),
        samples=rows * dp,
        stacks={},
        layouts=layouts,
        rows=lambda _: rows,
    )


def _explain(fitting: Sequence[Cost], tried: int, speeds: Rates, origin: str, has_cuts: bool) -> str:
    best = fitting[0]
    lines = [
        f"plan: {_shown(best.plan)}, the simplest of the fastest among {len(fitting)} that fit into memory "
        f"({tried} tried)",
        f"  {seconds_text(best.seconds)} a step by the cost model, {best.communication_share:.0%} of it communication; "
        f"{best.total_memory / GIB:.2f} of {speeds.usable_memory / GIB:.0f} GiB a GPU",
    ]
    if len(fitting) > 1:
        second = fitting[1]
        lines.append(f"  next: {_shown(second.plan)}, {seconds_text(second.seconds)}")
    lines.append(
        f"  tp stays within the {speeds.sheet.per_machine} GPUs of a machine"
        if has_cuts
        else "  tp was not tried: layers= says which layers may be cut; pp and sp need stages= and sequence="
    )
    lines.append(f"  {speeds.calibration}{origin}")
    return "\n".join(lines)


def _shown(plan: ParallelPlan) -> str:
    return f"{plan}, zero {plan.zero}" if plan.zero else str(plan)


def _rates(gpu: str | None) -> tuple[Rates, str]:
    """Return rates of a named GPU or of this machine's, and a note if the GPU was assumed."""
    if gpu is not None:
        return rates(gpu, GENERAL), ""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        words = set(re.split(r"[\s\-_]+", name))
        found = next((known for known in ACCELERATORS if known in words), None)
        if found is None:
            raise ConfigError(
                f"the table of rates lacks {name}; give gpu=, one of {', '.join(ACCELERATORS)}, or a plan by hand"
            )
        return rates(found, GENERAL), ""
    return rates(_ASSUMED_GPU, GENERAL), f"; this machine has no GPU, and {_ASSUMED_GPU} was assumed (gpu=)"


def _traced(
    model: nn.Module, given: Any, named: Any, samples: int, rows: int, regions: Sequence[str]
) -> Trace:
    """Trace a forward and backward pass of some samples, on tensors without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}

    def bare(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return bare(x[:rows] if x.dim() and len(x) == samples else x)

    autocast = torch.autocast(
        "cpu",
        dtype=torch.bfloat16,
        enabled=torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
    )
    with mode:
        for p in model.parameters():
            memo.setdefault(id(p), nn.Parameter(bare(p.detach()), p.requires_grad))
        for x in model.buffers():
            memo.setdefault(id(x), bare(x))
    copied = detached_copy(model, memo).train()
    with mode:
        arguments, keywords = tree_map(part, given), tree_map(part, named)
        recorder = Recorder(copied)
        for name in regions:
            recorder.watch(name, copied.get_submodule(name))
        try:
            with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.keep, lambda x: x):
                with autocast:
                    output = copied(*arguments, **keywords)
                _loss(output).backward()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be traced on tensors without data ({first_line(error)}): give a plan "
                'in place of "auto", such as {"dp": 8, "zero": 1}'
            ) from error
    return recorder.result()


def _loss(output: Any) -> Tensor:
    """Return a model's own loss, or the sum of all its results."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [own] if isinstance(own, Tensor) else [x for x in tensors_in(output) if x.requires_grad]
    if not found:
        raise ConfigError(
            "the model returns no tensor with a gradient for the example; pass inputs as in training"
        )
    return torch.stack([x.float().sum() for x in found]).sum()


def _cut(trace: Trace, tp: int) -> Trace:
    """Return the trace of a rank of a tensor parallel group that cuts all named regions."""
    if tp == 1:
        return trace
    regions: dict[str, Region] = {}
    saved = 0.0
    for name, region in trace.regions.items():
        if not name:
            regions[name] = region
            continue
        saved += region.kept * (1 - 1 / tp)
        # Layers in one dimension sum their results forward and the gradients of their inputs back.
        message = Communication("all_reduce", "tp", tp, 2 * (tp - 1) / tp * region.entering)
        regions[name] = replace(
            region,
            forward=_share(region.forward, tp, message),
            backward=_share(region.backward, tp, message),
            kept=region.kept // tp,
            parameters=-(-region.parameters // tp),
        )
    return Trace(regions, trace.peak - saved)


def _share(part: Part, tp: int, message: Communication) -> Part:
    found = Part(sent=[message])
    for o, number in part.operations.items():
        cut = o._replace(flops=o.flops / tp, traffic=o.traffic / tp, exponentials=o.exponentials / tp)
        found.operations[cut] += number
    return found
