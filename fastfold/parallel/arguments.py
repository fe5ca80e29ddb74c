"""Arguments of :func:`fastfold.parallel.parallelize` for one model, with a value in place of each ``"auto"``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.full_state import ShardFn
from fastfold.parallel.data_parallel.units import checkpointable_blocks
from fastfold.parallel.families.attention_calls import spread_attention
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.families.tensor_layers import Layers, find_cuts
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.own_stages import Split
from fastfold.parallel.plan import ParallelPlan

Plan = ParallelPlan | ParallelMesh | Mapping[str, Any] | str
Stages = Split | Literal["auto"] | None
Sequencing = Callable[[nn.Module, Group], Any]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arguments:
    """Plan of a model, and how its layers, stages and sequence are divided."""

    plan: ParallelPlan
    tied: Sequence[Sequence[str]]  #: Names of each parameter that has several
    cuts: Mapping[str, ShardFn]  #: Functions of the replaced layers, by path
    split: Split | None = None
    spread: Sequencing | None = None
    explanation: str = ""  #: Reasons of the cost model
    recomputed: Sequence[str] = ()  #: Paths of the blocks that are recomputed, as chosen by the cost model
    passes: int = 1  #: Backward passes of a step, as chosen by the cost model


def resolve(
    model: nn.Module,
    plan: Plan,
    tied: Sequence[Sequence[str]],
    *,
    example: Any,
    gpu: str | None,
    layers: Layers,
    stages: Stages,
    sequence: Sequencing | Literal["auto"] | None,
) -> Arguments:
    """Return the arguments of :func:`fastfold.parallel.parallelize`, with a value in place of each ``"auto"``.

    ``tied`` has the names of each parameter that has several.

    Raises:
        ConfigError: The plan has another type, ``"auto"`` finds nothing in this model, or no plan fits into memory.
    """
    axes = ParallelPlan(tp=2 if layers else 1) if plan == "auto" else _axes(plan)
    stages = stages if axes.pp > 1 or plan == "auto" else None
    sequence = sequence if axes.sp > 1 else None
    split = block_stages(model) if isinstance(stages, str) else stages
    spread = spread_attention(model) if isinstance(sequence, str) else sequence
    cuts = find_cuts(model, axes, layers, tied)
    if plan != "auto":
        return Arguments(axes, tied, cuts, split, spread)
    if example is None:
        raise ConfigError(
            'parallelize(model, "auto") needs example=, the inputs of a step of all ranks together'
        )
    from fastfold.parallel.planner.auto import choose_plan  # imports tracing, which most runs do not need

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    blocks = checkpointable_blocks(model)
    choice = choose_plan(model, example, ranks, cuts=list(cuts), blocks=blocks, stages=split, gpu=gpu)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.info("%s", choice.explanation)
    return Arguments(
        choice.plan,
        tied,
        cuts if choice.plan.tp > 1 else {},
        split,
        explanation=choice.explanation,
        recomputed=blocks if choice.checkpointing else (),
        passes=choice.passes,
    )


def _axes(plan: Plan) -> ParallelPlan:
    if isinstance(plan, str):
        raise ConfigError(f'a plan: expected "auto" or axes such as {{"dp": 2}}, found {plan!r}')
    if isinstance(plan, ParallelMesh):
        return plan.plan
    return plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_dict(plan)
