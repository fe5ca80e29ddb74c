"""Time and memory of one training step under a plan, from a trace and the rates of the hardware.

- An operator takes the longer time of its matrix products and its memory traffic, plus a share of the shorter one. So
  a product's efficiency grows with its arithmetic intensity. Each of its kernels adds a constant time. The minimum is
  the time of the instructions of its softmax, and the time in which the host launches its kernels (one at a time, or a
  block's as one CUDA graph).
- A collective takes as long as its bytes on its slowest link, plus its latency for each doubling of the group. A ring
  leaves a machine on as many network ports as the group has GPUs in that machine.
- A pipeline of p stages and m micro-batches (of one sample) takes (m + p - 1) times its slowest stage.
- The exchanges of gradients and of ZeRO's shards overlap with the share ``Assumptions.hidden_synchronization`` of the
  computation: those of each pass with that pass, those of a step with its last pass. Collectives inside the model
  overlap by ``Assumptions.hidden_share``.
- Several ranks wait for the slowest of them (``Assumptions.imbalance``).

The constants, and the published steps that check them, are in :mod:`fastfold.parallel.planner.hardware`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from fastfold.parallel.comm import collectives
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.planner.hardware import Rates
from fastfold.parallel.planner.recorder import Operation, Part, Trace
from fastfold.parallel.planner.workload import Workload


@dataclass(frozen=True)
class Cost:
    """Cost of one step under one plan."""

    plan: ParallelPlan  #: The plan
    checkpointing: bool  #: True if the blocks' activations are recomputed in the backward pass
    compute: float  #: Seconds of computation in the slowest stage
    communication: float  #: Seconds of waiting for collectives inside the model
    waiting: float  #: Seconds in which a pipeline stage is idle, or waits for copies from the host
    imbalance: float  #: Seconds in which ranks wait for the slowest one
    synchronization: float  #: Seconds for gradients and ZeRO's shards
    memory: Mapping[str, float]  #: Bytes per GPU by their use
    flops: float  #: Floating-point operations of this step on all GPUs together, recomputation included
    #: Operations without recomputation: those of the forward passes, and twice those of the one with gradients
    model_flops: float
    calibrated: bool  #: True if all rates were measured on this GPU
    host: float = 0.0  #: Bytes per GPU of block inputs that wait in the host's memory for the backward pass

    @property
    def seconds(self) -> float:
        """Time of the step in seconds."""
        return self.compute + self.communication + self.waiting + self.imbalance + self.synchronization

    @property
    def total_memory(self) -> float:
        """Bytes per GPU."""
        return sum(self.memory.values())

    @property
    def communication_share(self) -> float:
        """Share of the time in which a GPU waits for messages."""
        return (self.communication + self.synchronization) / self.seconds


def compute_seconds(part: Part, rates: Rates) -> float:
    """Sum the seconds of a part's operators."""
    assumed = rates.assumptions
    total = sum(
        number * _operation_seconds(operation, rates, 1) for operation, number in part.operations.items()
    )
    return max(total, assumed.launch_seconds) if assumed.graphed and part.operations else total


def _operation_seconds(operation: Operation, rates: Rates, ranks: int) -> float:
    """Compute the seconds of a call that is split evenly over ranks; each launches all of its kernels."""
    assumed = rates.assumptions
    products, traffic = operation.flops / rates.matrix[operation.dtype], operation.traffic / rates.bandwidth
    if operation.exponentials:
        products *= assumed.matrix_share / assumed.attention_share
    work = max(products, traffic) + assumed.additive * min(products, traffic)
    work = max(work, operation.exponentials / rates.scores)
    launches = 0.0 if assumed.graphed else operation.launches * assumed.launch_seconds
    return max(work / ranks + operation.launches * assumed.kernel_seconds, launches)


def least_seconds(workload: Workload, plan: ParallelPlan, rates: Rates) -> float:
    """Return a lower bound of the seconds of a step under a plan, without tracing its layout.

    It assumes that every operator's work is split evenly over the ranks of a sample, pipeline stages included. Its
    kernels still have to be launched. A pipeline divides launches by its stages, which no layout does.
    """
    ranks, seconds = plan.ranks // plan.dp, 0.0
    for name, region in workload.trace(ParallelPlan()).regions.items():
        for part, times in ((region.forward, workload.passes + 1), (region.backward, 1)):
            for operation, number in part.operations.items():
                each = _operation_seconds(operation, rates, ranks)
                seconds += workload.repeat(name).count * times * number * each
    return workload.samples / plan.dp * seconds / plan.pp * imbalance(plan.ranks, rates)


def _slowest_stage(parts: Mapping[str, float], workload: Workload, stages: int) -> float:
    """Return the parameters or seconds of the slowest stage, with blocks dealt out evenly."""
    whole = sum(parts.values())
    if stages == 1:
        return whole
    rest = sum(seconds for name, seconds in parts.items() if not workload.repeat(name).layers)
    largest = max(parts[name] / repeat.count for name, repeat in workload.stacks.items() if repeat.layers)
    return max(rest, whole / stages, largest)


def step_cost(
    workload: Workload, plan: ParallelPlan, rates: Rates, *, checkpointing: bool = True, host: float = 0.0
) -> Cost:
    """Compute the time and memory of one step.

    With ``checkpointing``, the backward pass recomputes the blocks' activations. Inputs of recomputed blocks are in up
    to ``host`` bytes per GPU of the host's memory; their copies overlap with the computation as far as it lasts.
    """
    layout = plan.of_sample
    trace = workload.trace(layout)
    shown = 1 - rates.assumptions.hidden_share
    seconds, messages, flops, model_flops = dict[str, float](), dict[str, float](), 0.0, 0.0
    for name, region in trace.regions.items():
        repeat = workload.repeat(name)
        again = 1 if checkpointing and repeat.layers and not workload.recomputed else 0
        forwards = workload.passes + 1 + again
        forward, backward = region.forward, region.backward
        seconds[name] = repeat.count * (
            forwards * compute_seconds(forward, rates) + compute_seconds(backward, rates)
        )
        sent, sent_back = (exchanges_seconds(part.sent, plan, rates) for part in (forward, backward))
        messages[name] = repeat.count * shown * (forwards * sent + sent_back)
        flops += repeat.count * (forwards * forward.flops + backward.flops)
        model_flops += repeat.count * (workload.passes + 3) * forward.flops
    count = -(-workload.samples // (plan.dp * workload.rows(layout)))
    turns = count + plan.pp - 1
    compute = _slowest_stage(seconds, workload, plan.pp)
    communication = _slowest_stage(messages, workload, plan.pp)
    if plan.pp > 1:
        handed_on = trace.regions[next(iter(workload.stacks))].entering
        passes = 2 + workload.passes  # forward, backward, and the passes without gradients
        hand_on = Communication("shift", "pp", plan.pp, handed_on)
        communication += passes * exchange_seconds(hand_on, plan, rates)
    tied = 0.0
    if plan.pp > 1 and workload.tied_bytes:
        # The gradient goes to the stage that steps the parameter, and the new values come back.
        tied = 2 * exchange_seconds(Communication("shift", "pp", plan.pp, workload.tied_bytes), plan, rates)
    parameters = _parameters(trace, workload, plan)
    memory = _memory(trace, workload, plan, parameters, checkpointing, count)
    offloaded = 0.0
    if checkpointing and host:
        # Two inputs stay: the one in use, and the one that is copied.
        largest = max(
            trace.regions[name].entering for name, repeat in workload.stacks.items() if repeat.layers
        )
        offloaded = max(0.0, min(host, memory["activations"] - 2 * largest))
        memory["activations"] -= offloaded
    copying = count * max(0.0, 2 * offloaded / rates.host_link - compute)
    together = count * plan.dp * plan.sp * plan.dap * plan.tp
    return Cost(
        plan,
        checkpointing,
        compute=count * compute + _optimizer_seconds(workload, plan, rates, parameters),
        communication=count * communication + tied,
        waiting=(turns - count) * (compute + communication) + copying,
        imbalance=(imbalance(plan.ranks, rates) - 1) * turns * (compute + communication),
        synchronization=0.0
        if workload.frozen
        else _exposed_synchronization(workload, plan, rates, parameters, count, compute),
        memory=memory,
        flops=flops * together,
        model_flops=model_flops * together,
        calibrated=rates.calibrated,
        host=offloaded,
    )


def imbalance(ranks: int, rates: Rates) -> float:
    """Return the time of the slowest of ``ranks`` ranks divided by the mean."""
    return rates.assumptions.imbalance if ranks > 1 else 1.0


def _parameters(trace: Trace, workload: Workload, plan: ParallelPlan) -> int:
    """Count the parameters of the largest stage, before ZeRO."""
    repeats = {name: workload.repeat(name) for name in trace.regions}
    layers = sum(
        repeats[name].count * x.parameters for name, x in trace.regions.items() if repeats[name].layers
    )
    rest = sum(x.parameters for name, x in trace.regions.items() if not repeats[name].layers)
    return rest + -(-layers // plan.pp)


def _optimizer_seconds(workload: Workload, plan: ParallelPlan, rates: Rates, parameters: int) -> float:
    """Compute the seconds to read parameter, gradient and moments, and to write all but the gradient."""
    if workload.frozen:
        return 0.0
    own = parameters / (plan.dp_shard or plan.replicas) if plan.zero else parameters
    sharded = 3 * workload.parameter_bytes + 2 * workload.sharded_bytes
    copied = 2 * workload.copied_bytes * parameters
    return (own * sharded + copied) / rates.bandwidth


def _memory(
    trace: Trace, workload: Workload, plan: ParallelPlan, parameters: int, checkpointing: bool, count: int
) -> dict[str, float]:
    alike, sizes = plan.dp_shard or plan.replicas, workload.parameter_bytes * parameters
    layers = [trace.regions[name] for name, repeat in workload.stacks.items() if repeat.layers]
    # Bytes that one block at a time needs whole, for any sharding.
    block = workload.parameter_bytes * max((region.parameters for region in layers), default=0)
    all_kept = sum(region.kept for region in layers)
    one_kept = max((region.kept / max(1, region.calls) for region in layers), default=0.0)
    in_flight, kept = min(plan.pp, count), 0.0
    for name, repeat in workload.stacks.items():
        region = trace.regions[name]
        # Repetitions inside a module share its inputs.
        own = region.entering * repeat.layers + (0 if checkpointing and repeat.layers else region.kept)
        held = in_flight * repeat.count / plan.pp if repeat.layers else repeat.count
        # The trace's peak includes one of each.
        kept += own * max(0.0, held - 1)
    activations = {
        "activations": kept,
        "working": trace.peak - (all_kept - one_kept if checkpointing else 0.0),
    }
    if workload.frozen:
        return {"parameters": sizes} | activations
    return {
        "parameters": sizes / alike + block if plan.zero == 3 else sizes,
        # Gradients of one sample's backward pass, and the sum over samples.
        "gradients": sizes / alike + block if plan.zero == 3 else sizes,
        "summed gradients": sizes
        / (plan.sp * plan.dap if plan.zero == 2 else alike if plan.zero == 3 else 1),
        "optimizer": workload.sharded_bytes * parameters / (alike if plan.zero else 1),
        "averages": workload.copied_bytes * parameters,
    } | activations


@cache
def _on_one_machine(plan: ParallelPlan, group: str, per_machine: int) -> int:
    """Count the ranks on the first machine in the first group of this name."""
    sizes = plan.axes
    strides, stride = {}, 1
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in plan.groups[group]]
    return sum(sum(place) < per_machine for place in itertools.product(*steps))


def exchange_seconds(entry: Communication, plan: ParallelPlan, rates: Rates) -> float:
    """Compute the time of one collective, in seconds.

    The entry is that of a mesh's log; its bytes are those that a rank sends. The whole plan determines the machines of
    the group's ranks.
    """
    here = _on_one_machine(plan, entry.group, rates.sheet.per_machine)
    if here == entry.size:
        busy = entry.sent / rates.link
    elif entry.op == "all_to_all":
        away = (entry.size - here) / (entry.size - 1)
        busy = max(entry.sent * away / rates.network, entry.sent * (1 - away) / rates.link)
    elif entry.op == "shift":
        busy = entry.sent / rates.network
    else:
        busy = entry.sent / min(rates.link, here * rates.network)
    rounds = 1 if entry.op in ("all_to_all", "shift") else math.ceil(math.log2(entry.size))
    return busy + rounds * rates.assumptions.latency_seconds


def exchanges_seconds(entries: Iterable[Communication], plan: ParallelPlan, rates: Rates) -> float:
    """Compute the time of successive collectives; see :func:`exchange_seconds`."""
    return sum(exchange_seconds(entry, plan, rates) for entry in entries)


_Messages = tuple[Communication, ...]


@cache
def _exchanged(zero: int, layout: ParallelPlan) -> tuple[_Messages, _Messages, int]:
    """Return rank 0's messages of a ZeRO stage for each sample and each step, and the number of parameters.

    The exchanges are real, on parameters without data.

    Bytes are proportional to the number of parameters, so one run serves all numbers. The layout has no pipeline.
    """
    elements = 1024 * layout.replicas
    with fake_mesh(layout) as mesh, torch.device("meta"), mesh.record() as log:
        if zero == 3:
            group = mesh.group("replicas")
            with torch.no_grad():
                collectives.gather(torch.empty(1024), 0, group)
                collectives.reduce_scatter(torch.empty(elements), 0, group)
            return tuple(log.entries), (), elements
        parameters = {"all": nn.Parameter(torch.empty(elements))}
        gradients = Replicated(parameters, mesh, {}, stage=zero)
        sums = gradients.take_sample()
        of_sample = tuple(log.entries)
        gradients.finish(sums)
        gradients.all_gather_params()
        return of_sample, tuple(log.entries)[len(of_sample) :], elements


def _expected_exchanges(zero: int, dp: int, dp_shard: int = 0) -> tuple[_Messages, _Messages, int]:
    """Predict :func:`_exchanged` in processes that have joined, where fake ranks cannot run."""
    elements = 1024 * dp
    if zero == 3:
        group, ranks = ("dp_shard", dp_shard) if dp_shard else ("replicas", dp)
        own = 4 * elements // ranks
        messages = [
            Communication(op, group, ranks, own * (ranks - 1)) for op in ("all_gather", "reduce_scatter")
        ]
        if (groups := dp // ranks) > 1:
            messages.append(
                Communication("all_reduce", "dp_replicate", groups, 2 * (groups - 1) / groups * own)
            )
        return tuple(messages), (), elements
    shards = 4 * 1024 * (dp - 1)
    ops = (("all_reduce", 2 * shards),) if zero == 0 else (("reduce_scatter", shards), ("all_gather", shards))
    return (), tuple(Communication(op, "dp", dp, sent) for op, sent in ops), elements


def _exposed_synchronization(
    workload: Workload, plan: ParallelPlan, rates: Rates, parameters: int, count: int, compute: float
) -> float:
    """Compute the seconds of exchanges that do not overlap with passes of ``compute`` seconds each.

    Exchanges of a pass overlap with that pass, and those of a step with its last pass.
    """
    of_pass, of_step = synchronization_seconds(workload, plan, rates, parameters)
    hidden = rates.assumptions.hidden_synchronization * compute
    return count * max(0.0, of_pass - hidden) + max(0.0, of_step - max(0.0, hidden - of_pass))


def synchronization_seconds(
    workload: Workload, plan: ParallelPlan, rates: Rates, parameters: int
) -> tuple[float, float]:
    """Compute the seconds that a rank exchanges gradients and ZeRO's shards, in each pass and once a step.

    A rank has ``parameters`` before ZeRO.
    """
    if plan.replicas == 1:
        return 0.0, 0.0
    if plan.dp_shard or (dist.is_initialized() and plan.replicas == plan.dp):
        *exchanges, traced = _expected_exchanges(plan.zero, plan.dp, plan.dp_shard)
    else:
        *exchanges, traced = _exchanged(plan.zero, replace(plan, pp=1, zero=0))
    share = parameters / traced * workload.parameter_bytes / 4  # the exchanges are of float32
    of_sample, of_step = (
        [exchange_seconds(replace(entry, sent=entry.sent * share), plan, rates) for entry in entries]
        for entries in exchanges
    )
    if plan.zero == 3:
        # The parameters are gathered for every pass, the gradients reduce-scattered once.
        of_sample[0] *= workload.passes + 2
    return sum(of_sample), sum(of_step)
