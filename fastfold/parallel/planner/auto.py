"""Choice of a plan for any module, traced from a batch of its inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.own_stages import Split
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.batch_traces import BatchTraces
from fastfold.parallel.planner.cost_model import Cost, step_cost
from fastfold.parallel.planner.gpu_kernels import gpu_kernels
from fastfold.parallel.planner.hardware import ACCELERATORS, GENERAL, Rates, rates
from fastfold.parallel.planner.recorder import Part, Recorder, Trace, TracedRegion
from fastfold.parallel.planner.search import seconds_text
from fastfold.parallel.planner.workload import Repeat, Workload, divisors
from fastfold.utils.module_structure import fake, fake_copy, tensors_in, without_data
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
    passes: int = 1  #: Backward passes of a rank in a step, whose gradients add up; 1 in a pipeline
    seconds: float = math.nan  #: Time of a step by the cost model


@dataclass(frozen=True)
class _PlanCandidate:
    """Cost of a plan whose ranks run some samples at once."""

    cost: Cost
    rows: int  #: Samples of a pass
    passes: int  #: Passes of a step


@dataclass(frozen=True)
class _PlanSearch:
    """Plans of one step of a module on all ranks, with their costs."""

    model: nn.Module
    samples: int  #: Samples of the step, over all ranks
    ranks: int
    speeds: Rates
    cuts: Sequence[str]  #: Paths of the layers that tensor parallelism may cut
    blocks: Sequence[str]  #: Paths of the blocks that may be recomputed
    tied_bytes: Mapping[int, int]  #: Numbers of pipeline stages to try, with the bytes that stages share
    has_statistics: bool  #: True if samples of a pass depend on each other
    traces: Mapping[bool, BatchTraces]  #: Traces of the module; of True with the cut layers as regions

    def candidates(self) -> list[_PlanCandidate]:
        """Return the costs of all plans by layout, in the order in which they are tried."""
        layouts = [(tp, 1) for tp in (divisors(self.ranks) if self.cuts else [1])]
        layouts += [(1, pp) for pp in self.tied_bytes]
        return [candidate for tp, pp in layouts for candidate in self._of_layout(tp, pp)]

    def _of_layout(self, tp: int, pp: int) -> list[_PlanCandidate]:
        """Return the costs of one layout; empty if its ranks cannot share the samples."""
        dp, layout, within = self.ranks // tp // pp, ParallelPlan(tp=tp), self.speeds.sheet.per_machine
        each = -(-self.samples // dp)
        if layout.crosses_machines(within) or dp > self.samples or each < pp:
            return []
        zeros = (0,) if dp == 1 else range(4 if pp == 1 else 2)
        plans = [replace(layout, dp=dp, pp=pp, zero=zero) for zero in zeros]
        inside = within // tp
        if pp == 1 and 1 < inside < dp and dp % inside == 0:
            plans.append(replace(layout, dp=dp, zero=3, dp_shard=inside))
        candidates: list[_PlanCandidate] = []
        for rows in (1,) if pp > 1 else (each,) if self.has_statistics else _micro_batches(each):
            workload = _workload(self.model, rows, dp * each, self.blocks)
            workload = replace(workload, tied_bytes=self.tied_bytes.get(pp, 0))
            workload._traces[layout] = _cut(self.traces[tp > 1].at(rows), tp, self.cuts)
            costs = [
                step_cost(workload, plan, self.speeds, checkpointing=again)
                for plan in plans
                for again in ((False, True) if self.blocks else (False,))
            ]
            passes = -(-each // rows) if pp == 1 else 1
            candidates += [_PlanCandidate(cost, rows, passes) for cost in costs]
            # Fewer samples at once are slower; they are tried for their memory.
            if any(_fits(cost, self.speeds) and not (cost.checkpointing or cost.plan.zero) for cost in costs):
                break
        return candidates


def choose_plan(
    model: nn.Module,
    example: Any,
    ranks: int,
    *,
    cuts: Sequence[str] = (),
    blocks: Sequence[str] = (),
    stages: Split | None = None,
    gpu: str | Rates | None = None,
    autocast: torch.dtype | None = None,
) -> Choice:
    """Choose the fastest plan that fits into memory.

    Tried are data parallelism, ZeRO and gradient accumulation, activation checkpointing with ``blocks``, tensor
    parallelism with ``cuts``, and pipelines with ``blocks`` and ``stages``. A pipeline's microbatches have one sample.

    Dropout and fused attention count as the kernels of a GPU; see :mod:`fastfold.parallel.planner.gpu_kernels`.

    Args:
        model: Plain module; it is neither changed nor run on data.
        example: Inputs of one step of all ranks together: a tensor, a tuple of arguments, or a dict of named ones. The
            first dimension counts samples.
        ranks: Number of ranks.
        cuts: Paths of the layers that tensor parallelism may cut.
        blocks: Paths of the blocks that may be recomputed, as of
            :func:`fastfold.parallel.data_parallel.units.checkpointable_blocks`.
        stages: Splits the model into pipeline stages, as for :func:`fastfold.parallel.parallelize`.
        gpu: Name or rates of the accelerator; None for the one of this machine.
        autocast: bfloat16 or float16 if the model runs under autocast to it; parameters, gradients and states of the
            optimizer keep their dtypes. None for bfloat16 inside a ``torch.autocast`` block, else no autocast.

    Raises:
        ConfigError: The module cannot be traced, there are fewer samples than ranks can share, or no plan fits.
    """
    named = dict(example) if isinstance(example, Mapping) else {}
    positional = () if named else tuple(example) if isinstance(example, tuple | list) else (example,)
    samples = next((len(x) for x in tree_leaves((positional, named)) if isinstance(x, Tensor) and x.dim()), 0)
    if not samples:
        raise ConfigError(
            "example= has no tensor whose first dimension counts samples; pass a batch of inputs"
        )
    speeds, origin = (gpu, "") if isinstance(gpu, Rates) else _rates(gpu)
    within = speeds.sheet.per_machine
    piped, notes = _pipelines(model, stages, ranks, blocks)
    has_statistics = any(isinstance(module, _BatchNorm) for module in model.modules())
    traces: dict[bool, BatchTraces] = {}
    for is_cut in (False, True):
        regions = tuple(dict.fromkeys((*blocks, *(cuts if is_cut else ()))))
        record = partial(_traced, model, positional, named, samples, regions=regions, autocast=autocast)
        traces[is_cut] = BatchTraces(record)
    costs = _PlanSearch(
        model,
        samples,
        ranks,
        speeds,
        cuts=cuts,
        blocks=blocks,
        tied_bytes=piped,
        has_statistics=has_statistics,
        traces=traces,
    ).candidates()
    if not costs:
        raise ConfigError(
            f"{ranks} ranks cannot share a batch of {samples} samples: take a larger batch or fewer ranks, or give "
            "layers= for tensor parallelism"
        )
    fitting = [candidate for candidate in costs if _fits(candidate.cost, speeds)]
    if not fitting:
        leanest = min(costs, key=lambda candidate: candidate.cost.total_memory)
        raise ConfigError(
            f"{type(model).__name__} fits into no plan of {ranks} {speeds.sheet.name}: {_shown(leanest)} needs "
            f"{leanest.cost.total_memory / GIB:,.1f} GiB of {speeds.usable_memory / GIB:,.1f} GiB a GPU. Take more "
            "GPUs or a smaller batch, or give layers= for tensor parallelism or stages= for a pipeline"
        )
    fastest = min(candidate.cost.seconds for candidate in fitting)
    # If the model cannot tell times apart, the plan with less sharding wins: it supports more modules.
    fitting.sort(
        key=lambda candidate: (
            max(candidate.cost.seconds, _ALIKE * fastest),
            candidate.cost.checkpointing,
            candidate.cost.plan.pp,
            candidate.cost.plan.tp,
            candidate.cost.plan.zero,
            candidate.passes,
            candidate.cost.total_memory,
        )
    )
    notes = [_NO_CUTS if not cuts else f"tp stays within the {within} GPUs of a machine", *notes]
    if has_statistics:
        notes.append("gradient accumulation was not tried: statistics of batch norm are those of a pass")
    if not blocks:
        notes.append(
            "checkpointing was not tried: no nn.ModuleList of blocks, or blocks with running statistics"
        )
    best = fitting[0]
    return Choice(
        best.cost.plan,
        best.cost.checkpointing,
        _explain(fitting, len(costs), speeds, origin, notes),
        passes=best.passes,
        seconds=best.cost.seconds,
    )


def _micro_batches(samples: int) -> Iterator[int]:
    """Yield numbers of samples to run at once, from all of a rank to one, in steps of at most a half."""
    passes, previous = 1, 0
    while previous != 1:
        rows = -(-samples // passes)
        if rows != previous:
            yield rows
        previous = rows
        # 1, 2, 3, 4, 6, 8, 12, ...
        passes = passes + 1 if passes < 3 else passes * 4 // 3 if passes & (passes - 1) else passes * 3 // 2


def _fits(cost: Cost, speeds: Rates) -> bool:
    return cost.total_memory <= speeds.usable_memory


def _pipelines(
    model: nn.Module, stages: Split | None, ranks: int, blocks: Sequence[str]
) -> tuple[dict[int, int], list[str]]:
    """Return the numbers of stages to try, each with the bytes that stages share, and notes on other axes."""
    notes = ["sp was not tried: SequenceParallel.shard() cuts the inputs, so give such a plan by hand"]
    if stages is None:
        return {}, ["pp was not tried: stages= says how the model is split", *notes]
    if not blocks:
        return {}, ["pp was not tried: the model has no nn.ModuleList of blocks", *notes]
    tied_bytes = dict[int, int]()
    for pp in divisors(ranks)[1:]:
        try:
            split = stages(without_data(model), pp)  # a copy, because the function may change the model
            held = [parameter for stage in split for parameter in set(stage.parameters())]
            tied_bytes[pp] = sum(p.nbytes for p in held) - sum(p.nbytes for p in set(held))
        except ConfigError as error:
            notes.append(f"pp {pp} was not tried: {error}")
    return tied_bytes, notes


def _workload(model: nn.Module, rows: int, samples: int, blocks: Sequence[str]) -> Workload:
    """Return a step whose micro-batches have ``rows`` samples."""
    parameters = list(model.parameters())
    size = sum(p.numel() * p.element_size() for p in parameters)
    element = round(size / max(1, sum(p.numel() for p in parameters)))
    return Workload(
        name=type(model).__name__,
        build=lambda _: model,
        loss=lambda _: torch.zeros(()),
        samples=samples,
        stacks={name: Repeat(1) for name in blocks},
        layouts=lambda _: iter(()),
        rows=lambda _: rows,
        parameter_bytes=element,
        sharded_bytes=2 * element,  # Adam's moments have the parameters' dtype
    )


def _explain(
    fitting: Sequence[_PlanCandidate], tried: int, speeds: Rates, origin: str, notes: Sequence[str]
) -> str:
    best = fitting[0].cost
    lines = [
        f"plan: {_shown(fitting[0])}, the simplest of the fastest among {len(fitting)} that fit into memory "
        f"({tried} tried)",
        f"  {seconds_text(best.seconds)} a step by the cost model, {best.communication_share:.0%} of it communication; "
        f"{best.total_memory / GIB:.2f} of {speeds.usable_memory / GIB:.0f} GiB a GPU",
    ]
    if len(fitting) > 1:
        lines.append(f"  next: {_shown(fitting[1])}, {seconds_text(fitting[1].cost.seconds)}")
    return "\n".join([*lines, *(f"  {note}" for note in notes), f"  {speeds.calibration}{origin}"])


def _shown(candidate: _PlanCandidate) -> str:
    plan = candidate.cost.plan
    text = f"{plan}, zero {plan.zero}" if plan.zero else str(plan)
    if candidate.passes > 1:
        text += f", {candidate.passes} passes of {candidate.rows} samples"
    return text + (", activation checkpointing" if candidate.cost.checkpointing else "")


def _rates(gpu: str | None) -> tuple[Rates, str]:
    """Return rates of a named GPU or of this machine's, and a note if the GPU was assumed."""
    if gpu is not None:
        return rates(gpu, GENERAL), ""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower()
        words = set(re.split(r"[\s\-_]+", name))
        known_name = next((known for known in ACCELERATORS if known in words), None)
        if known_name is None:
            raise ConfigError(
                f"the table of rates lacks {name}; give gpu=, one of {', '.join(ACCELERATORS)}, or a plan by hand"
            )
        return rates(known_name, GENERAL), ""
    return rates(_ASSUMED_GPU, GENERAL), f"; this machine has no GPU, and {_ASSUMED_GPU} was assumed (gpu=)"


def _traced(
    model: nn.Module,
    positional: Any,
    named: Any,
    samples: int,
    rows: int,
    *,
    regions: Sequence[str],
    autocast: torch.dtype | None,
) -> Trace:
    """Trace a forward and backward pass of some samples, on tensors without data."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return fake(x[:rows] if x.dim() and len(x) == samples else x)

    is_enabled = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    casting = torch.autocast(
        "cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None or is_enabled
    )
    copied = fake_copy(model, mode).train()
    with mode:
        arguments, keywords = tree_map(part, positional), tree_map(part, named)

        def loss(module: nn.Module) -> Tensor:
            with casting, gpu_kernels():
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
    terms = [own] if isinstance(own, Tensor) else [x for x in tensors_in(output) if x.requires_grad]
    if not terms:
        raise ConfigError(
            "the model returns no tensor with a gradient for the example; pass inputs as in training"
        )
    return torch.stack([x.float().sum() for x in terms]).sum()


def _cut(trace: Trace, tp: int, cuts: Sequence[str]) -> Trace:
    """Return the trace of a rank of a tensor parallel group that cuts some regions."""
    if tp == 1:
        return trace
    regions: dict[str, TracedRegion] = {}
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
    share = Part(sent=[message])
    for o, number in part.operations.items():
        cut = o._replace(flops=o.flops / tp, traffic=o.traffic / tp, exponentials=o.exponentials / tp)
        share.operations[cut] += number
    return share
