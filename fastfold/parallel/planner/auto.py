"""Choice of a plan for any module, traced from a batch of its inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.comparison import Split, fake, fake_copy, without_data
from fastfold.parallel.data_parallel.units import checkpointable_blocks
from fastfold.parallel.paths import tied_names
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import Cost, step_cost
from fastfold.parallel.planner.fake_run import Part, Recorder, Region, Trace
from fastfold.parallel.planner.hardware import ACCELERATORS, GENERAL, Rates, rates
from fastfold.parallel.planner.search import seconds_text
from fastfold.parallel.planner.workload import Repeat, Workload, divisors
from fastfold.utils.module_structure import tensors_in
from fastfold.utils.units import GIB

_ASSUMED_GPU = "h100"

_NO_CUTS = "tp was not tried: layers= says which layers may be cut"

_ALIKE = 1.03  #: Times of a step within this factor count as equal


@dataclass(frozen=True)
class Choice:
    """Plan chosen for a module."""

    plan: ParallelPlan
    checkpointing: bool
    explanation: str


def choose_plan(
    model: nn.Module,
    example: Any,
    ranks: int,
    *,
    cuts: Sequence[str] = (),
    stages: Split | None = None,
    gpu: str | Rates | None = None,
) -> Choice:
    """Choose the fastest plan that fits into memory.

    Tried are data parallelism, ZeRO and activation checkpointing, tensor parallelism with ``cuts``, and pipelines with
    ``stages``. A pipeline's microbatches have one sample.

    Args:
        model: Plain module; it is neither changed nor run on data.
        example: Inputs of one step of all ranks together: a tensor, a tuple of arguments, or a dict of named ones. The
            first dimension counts samples.
        ranks: Number of ranks.
        cuts: Paths of the layers that tensor parallelism may cut.
        stages: Splits the model into pipeline stages, as for :func:`fastfold.parallel.parallelize`.
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
    blocks = tuple(checkpointable_blocks(model))
    piped, notes = _pipelines(model, stages, ranks, blocks)
    layouts = [(tp, 1) for tp in (divisors(ranks) if cuts else [1])] + [(1, pp) for pp in piped]
    traces: dict[tuple[int, bool], Trace] = {}
    costs: list[Cost] = []
    for tp, pp in layouts:
        dp = ranks // tp // pp
        each = -(-samples // dp)
        if ParallelPlan(tp=tp).crosses_machines(within) or dp > samples or each < pp:
            continue
        rows = each if pp == 1 else 1
        if (rows, tp > 1) not in traces:
            regions = dict.fromkeys((*blocks, *(cuts if tp > 1 else ())))
            traces[rows, tp > 1] = _traced(model, given, named, samples, rows, tuple(regions))
        layout = ParallelPlan(tp=tp)
        workload = _workload(model, rows, dp * each, blocks)
        workload._traces[layout] = _cut(traces[rows, tp > 1], tp, cuts)
        zeros = (0,) if dp == 1 else range(4 if pp == 1 else 2)
        plans = [replace(layout, dp=dp, pp=pp, zero=zero) for zero in zeros]
        inside = within // tp
        if pp == 1 and 1 < inside < dp and dp % inside == 0:
            plans.append(replace(layout, dp=dp, zero=3, dp_shard=inside))
        costs += [
            step_cost(workload, plan, speeds, checkpointing=again)
            for plan in plans
            for again in ((False, True) if blocks else (False,))
        ]
    if not costs:
        raise ConfigError(
            f"{ranks} ranks cannot share a batch of {samples} samples: take a larger batch or fewer ranks, or give "
            "layers= for tensor parallelism"
        )
    fitting = [cost for cost in costs if cost.total_memory <= speeds.usable_memory]
    if not fitting:
        least = min(costs, key=lambda cost: cost.total_memory)
        raise ConfigError(
            f"{type(model).__name__} fits into no plan of {ranks} {speeds.sheet.name}: {_shown(least)} needs "
            f"{least.total_memory / GIB:,.1f} GiB of {speeds.usable_memory / GIB:,.1f} GiB a GPU. Take more GPUs or a "
            "smaller batch, or give layers= for tensor parallelism or stages= for a pipeline"
        )
    fastest = min(cost.seconds for cost in fitting)
    # If the model cannot tell times apart, the plan with less sharding wins: it supports more modules.
    fitting.sort(
        key=lambda cost: (
            max(cost.seconds, _ALIKE * fastest),
            cost.checkpointing,
            cost.plan.pp,
            cost.plan.tp,
            cost.plan.zero,
            cost.total_memory,
        )
    )
    notes = [_NO_CUTS if not cuts else f"tp stays within the {within} GPUs of a machine", *notes]
    if not blocks:
        notes.append(
            "checkpointing was not tried: no nn.ModuleList of blocks, or blocks with running statistics"
        )
    return Choice(
        fitting[0].plan, fitting[0].checkpointing, _explain(fitting, len(costs), speeds, origin, notes)
    )


def _pipelines(
    model: nn.Module, stages: Split | None, ranks: int, blocks: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Return the numbers of stages to try, and notes on axes that are left out."""
    notes = ["sp was not tried: SequenceParallel.shard() cuts the inputs, so give such a plan by hand"]
    if stages is None:
        return [], ["pp was not tried: stages= says how the model is split", *notes]
    tied = next(iter(tied_names(model)), None)
    if tied or not blocks:
        reason = (
            f"{' and '.join(tied)} are one parameter" if tied else "the model has no nn.ModuleList of blocks"
        )
        return [], [f"pp was not tried: {reason}", *notes]
    plain, found = without_data(model), []
    for pp in divisors(ranks)[1:]:
        try:
            stages(plain, pp)
            found.append(pp)
        except ConfigError as error:
            notes.append(f"pp {pp} was not tried: {error}")
    return found, notes


def _workload(model: nn.Module, rows: int, samples: int, blocks: Sequence[str]) -> Workload:
    """Return a step whose micro-batches have ``rows`` samples, with its traces."""
    return Workload(
        name=type(model).__name__,
        build=lambda _: model,
        loss=lambda _: torch.zeros(()),
        samples=samples,
        stacks={name: Repeat(1) for name in blocks},
        layouts=lambda _: iter(()),
        rows=lambda _: rows,
    )


def _explain(fitting: Sequence[Cost], tried: int, speeds: Rates, origin: str, notes: Sequence[str]) -> str:
    best = fitting[0]
    lines = [
        f"plan: {_shown(best)}, the simplest of the fastest among {len(fitting)} that fit into memory "
        f"({tried} tried)",
        f"  {seconds_text(best.seconds)} a step by the cost model, {best.communication_share:.0%} of it communication; "
        f"{best.total_memory / GIB:.2f} of {speeds.usable_memory / GIB:.0f} GiB a GPU",
    ]
    if len(fitting) > 1:
        second = fitting[1]
        lines.append(f"  next: {_shown(second)}, {seconds_text(second.seconds)}")
    return "\n".join([*lines, *(f"  {note}" for note in notes), f"  {speeds.calibration}{origin}"])


def _shown(cost: Cost) -> str:
    plan = cost.plan
    text = f"{plan}, zero {plan.zero}" if plan.zero else str(plan)
    return text + (", activation checkpointing" if cost.checkpointing else "")


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

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return fake(x[:rows] if x.dim() and len(x) == samples else x)

    autocast = torch.autocast(
        "cpu",
        dtype=torch.bfloat16,
        enabled=torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
    )
    copied = fake_copy(model, mode).train()
    with mode:
        arguments, keywords = tree_map(part, given), tree_map(part, named)

        def loss(module: nn.Module) -> Tensor:
            with autocast:
                output = module(*arguments, **keywords)
            return _loss(output)

        try:
            return Recorder(copied).record(loss, regions)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(model).__name__} cannot be traced on tensors without data ({first_line(error)}): give a plan "
                'in place of "auto", such as {"dp": 8, "zero": 1}'
            ) from error


def _loss(output: Any) -> Tensor:
    """Return a model's own loss, or the sum of all its results."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [own] if isinstance(own, Tensor) else [x for x in tensors_in(output) if x.requires_grad]
    if not found:
        raise ConfigError(
            "the model returns no tensor with a gradient for the example; pass inputs as in training"
        )
    return torch.stack([x.float().sum() for x in found]).sum()


def _cut(trace: Trace, tp: int, cuts: Sequence[str]) -> Trace:
    """Return the trace of a rank of a tensor parallel group that cuts some regions."""
    if tp == 1:
        return trace
    regions: dict[str, Region] = {}
    saved = 0.0
    for name, region in trace.regions.items():
        if name not in cuts:
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
