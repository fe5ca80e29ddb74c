"""Time of messages, by their links, and of the replicas' exchange of gradients and parameters.

A collective takes as long as its bytes on its slowest link, plus its latency for each doubling of the group. A ring
leaves a machine on as many network ports as the group has GPUs in that machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn

from fastfold.parallel.comm import collectives
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.data_parallel.zero import Replicated, ShardedGradients, ShardedStates
from fastfold.parallel.mesh import axes, groups
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.planner.hardware import Rates
from fastfold.parallel.planner.workload import Workload


@cache
def _on_one_machine(plan: ParallelPlan, group: str, per_machine: int) -> int:
    """Count the ranks on the first machine in the first group of this name."""
    sizes = axes(plan)
    strides, stride = {}, 1
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    steps = [range(0, sizes[name] * strides[name], strides[name]) for name in groups(plan)[group]]
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


@dataclass(frozen=True)
class _Exchanged:
    """Messages of a rank for its gradients and shards."""

    every_sample: tuple[Communication, ...]
    every_step: tuple[Communication, ...]


@cache
def _exchanged(zero: int, layout: ParallelPlan) -> tuple[_Exchanged, int]:
    """Return rank 0's messages of a ZeRO stage's real exchanges on parameters without data, and their number.

    Bytes are proportional to the number of parameters, so one run serves all numbers. The layout has no pipeline.
    """
    elements = 1024 * layout.replicas
    with fake_mesh(layout) as mesh, torch.device("meta"), mesh.record() as log:
        if zero == 3:
            group = mesh.group("replicas")
            with torch.no_grad():
                collectives.gather(torch.empty(1024), 0, group)
                collectives.reduce_scatter(torch.empty(elements), 0, group)
            return _Exchanged(tuple(log.entries), ()), elements
        parameters = {"all": nn.Parameter(torch.empty(elements))}
        kind = (Replicated, ShardedStates, ShardedGradients)[zero]
        gradients = kind(parameters, mesh, {})
        found = gradients.take_sample()
        of_sample = tuple(log.entries)
        gradients.finish(found)
        gradients.all_gather_params()
        return _Exchanged(of_sample, tuple(log.entries)[len(of_sample) :]), elements


def _expected_exchanges(zero: int, dp: int, dp_shard: int = 0) -> tuple[_Exchanged, int]:
    """Predict :func:`_exchanged` in processes that have joined, where fake ranks cannot run."""
    elements = 1024 * dp
    if dp_shard:
        own = 4 * elements // dp_shard
        messages = [
            Communication(op, "dp_shard", dp_shard, own * (dp_shard - 1))
            for op in ("all_gather", "reduce_scatter")
        ]
        if (groups := dp // dp_shard) > 1:
            sent = 2 * (groups - 1) / groups * own
            messages.append(Communication("all_reduce", "dp_replicate", groups, sent))
        return _Exchanged(tuple(messages), ()), elements
    shards = 4 * 1024 * (dp - 1)
    if zero == 3:
        gathered, reduced = (
            Communication(op, "replicas", dp, shards) for op in ("all_gather", "reduce_scatter")
        )
        return _Exchanged((gathered, reduced), ()), elements
    ops = (("all_reduce", 2 * shards),) if zero == 0 else (("reduce_scatter", shards), ("all_gather", shards))
    return _Exchanged((), tuple(Communication(op, "dp", dp, sent) for op, sent in ops)), elements


def synchronisation_seconds(
    workload: Workload, plan: ParallelPlan, rates: Rates, parameters: int, count: int
) -> float:
    """Compute the seconds that one step exchanges gradients and ZeRO's shards.

    A rank has ``parameters`` before ZeRO, and ``count`` samples.
    """
    if plan.replicas == 1:
        return 0.0
    if plan.dp_shard or (dist.is_initialized() and plan.replicas == plan.dp):
        found, traced = _expected_exchanges(plan.zero, plan.dp, plan.dp_shard)
    else:
        found, traced = _exchanged(plan.zero, replace(plan, pp=1, zero=0))
    of_sample, of_step = (
        [
            exchange_seconds(replace(entry, sent=entry.sent * parameters / traced), plan, rates)
            for entry in entries
        ]
        for entries in (found.every_sample, found.every_step)
    )
    if plan.zero == 3:
        # The parameters are gathered for every pass, the gradients reduce-scattered once.
        of_sample[0] *= workload.passes + 2
    return count * sum(of_sample) + sum(of_step)
