""":func:`parallelize` applies a plan to any ``nn.Module`` in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastfold.errors import ConfigError
from fastfold.parallel.checks.cut_layers import watch_first_calls
from fastfold.parallel.checks.plan import check_arguments
from fastfold.parallel.checks.stages import compare_stages
from fastfold.parallel.comm.groups import Group, agree_over_store
from fastfold.parallel.cut_layers import cut_layers
from fastfold.parallel.data_parallel.by_stage import make_gradients
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.units import checkpoint_blocks, checkpointable_blocks
from fastfold.parallel.families.attention_calls import spread_attention
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.families.tensor_layers import Layers, find_cuts
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.meta_start import Initialize, start_alike
from fastfold.parallel.own_stages import Split, take_own_stages
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.plan import ParallelPlan
from fastfold.utils.lazy import old_keywords
from fastfold.utils.module_structure import check_shapes, module_structure, tied_names

Plan = ParallelPlan | ParallelMesh | Mapping[str, Any] | str
Stages = Split | Literal["auto"] | None
Sequencing = Callable[[nn.Module, Group], Any]
AxialSharding = Callable[[nn.Module, ParallelMesh], nn.Module]

_LOG = logging.getLogger(__name__)


@old_keywords({"initialise": "initialize"})
def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    example: Any = None,
    gpu: str | None = None,
    layers: Layers = None,
    stages: Stages = None,
    sequence: Sequencing | Literal["auto"] | None = None,
    dap: AxialSharding | None = None,
    device_type: str | None = None,
    compare_first: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    initialize: Initialize | None = None,
) -> Parallel:
    """Apply a plan to a model; every kind of parallelism uses this call.

    The model is single-device code and is changed in place; every rank starts from the first rank's weights.

    Args:
        model: Any module, the same on every rank.
        plan: The axes, as an object, a configuration or a mesh. ``"auto"`` selects the plan that is fastest by the
            cost model, with pipeline stages if ``stages`` is given, and may checkpoint activations of the
            blocks in ``nn.ModuleList``s; the result's ``explanation`` gives the reasons, and ``passes`` the number of
            backward passes of a step. Call it under ``torch.autocast`` to plan for autocast.
        example: For ``"auto"``: inputs of one step of all ranks together, as of
            :func:`fastfold.parallel.planner.auto.choose_plan`.
        gpu: For ``"auto"``: name of the GPU; None for the one of this machine.
        layers: For ``tp``: functions that replace parts of the model. Keys are patterns of module paths
            (``blocks.*.mlp``). Values make this rank's part of a plain module, such as
            :func:`fastfold.parallel.tensor_parallel.ParallelMLP.from_plain`. ``"auto"`` reads the ``tp_plan`` of a
            model of transformers, or finds attention and pairs of linear layers.
        stages: For ``pp``: splits the model into a number of modules, which compose to it; see
            :mod:`fastfold.parallel.pipeline`. ``"auto"`` splits the list of blocks with most parameters.
        sequence: For ``sp``: applies sequence parallelism to the model, as
            :class:`fastfold.parallel.sequence_parallel.module.SequenceParallel` does. Its return value becomes the
            result's ``sequence``. ``"auto"`` names the modules that call PyTorch's attention.
        dap: For ``dap``: returns the model with its work sharded over the ranks of one sample, as
            :func:`fastfold.parallel.alphafold.shard` does. Use the result's ``module`` in place of ``model``.
        device_type: ``cpu`` or ``cuda``; None for the device of the model's parameters.
        compare_first: For ``tp`` in 1d: at their first call, run modules whose layers are cut by ``ParallelLinear`` or
            by your own function once more, and refuse them if the plain layers give other numbers. For ``pp``: before
            the first step, trace the model and its stages without data, and refuse stages that compute something else.
        mp_policy: Computes with copies of the parameters in ``param_dtype``, as ``torch.distributed.fsdp.fully_shard``
            does. Parameters, sums of gradients and optimizer states stay in ``reduce_dtype``.
        initialize: For a model on the device ``meta``: fills the tensors of one module, as for
            :meth:`torch.nn.Module.apply`. All ranks draw the same numbers, block by block, and keep their part.

    Raises:
        ConfigError: The plan is impossible, differs between ranks, needs another number of ranks, or does not match
            this model. Raised on every rank before any collective.

    Example:
        >>> import copy
        >>> import torch
        >>> from fastfold import parallelize
        >>> from fastfold.parallel import started_processes
        >>> plain, x = torch.nn.Linear(4, 2), torch.randn(8, 4)
        >>> parallel = parallelize(copy.deepcopy(plain), {"dp": started_processes(), "zero": 1})
        >>> optimizer = parallel.optimizer(lambda named: torch.optim.AdamW(named.values()))
        >>> parallel(x[parallel.rows(8)]).square().mean().backward()
        >>> _ = optimizer.step()

        The step on one process without a plan has the same result:

        >>> optimizer = torch.optim.AdamW(plain.parameters())
        >>> plain(x).square().mean().backward()
        >>> optimizer.step()
        >>> torch.allclose(parallel.state_dict()["weight"], plain.weight)
        True
    """
    # Read the model, and replace each "auto" by a value.
    check_shapes(model)
    structure, tied = module_structure(model), tied_names(model)
    axes = ParallelPlan(tp=2 if layers else 1) if plan == "auto" else _axes(plan)
    if plan != "auto" and axes.pp == 1:
        stages = None
    if axes.sp == 1:
        sequence = None
    split = block_stages(model) if isinstance(stages, str) else stages
    spread = spread_attention(model) if isinstance(sequence, str) else sequence
    cuts = find_cuts(model, axes, layers, tied)
    recomputed, passes, explanation = list[str](), 1, ""
    if plan == "auto":
        if example is None:
            raise ConfigError(
                'parallelize(model, "auto") needs example=, the inputs of a step of all ranks together'
            )
        from fastfold.parallel.planner.auto import choose_plan  # imports tracing, which most runs do not need

        ranks = dist.get_world_size() if dist.is_initialized() else 1
        blocks = checkpointable_blocks(model)
        choice = choose_plan(model, example, ranks, cuts=list(cuts), blocks=blocks, stages=split, gpu=gpu)
        axes, passes, explanation = choice.plan, choice.passes, choice.explanation
        recomputed = blocks if choice.checkpointing else []
        cuts = cuts if axes.tp > 1 else {}
        if not dist.is_initialized() or dist.get_rank() == 0:
            _LOG.info("%s", explanation)

    # Refuse what cannot work before any rank sends anything.
    policy = mp_policy or MixedPrecisionPolicy()
    check_arguments(model, axes, tied, cuts, split=split, spread=spread, dap=dap, policy=policy)

    # Meet the other ranks, and start from the same weights.
    devices = (p.device.type for p in model.parameters() if p.device.type != "meta")
    device = device_type or next(devices, "cpu")
    mesh = plan if isinstance(plan, ParallelMesh) else ParallelMesh(axes, device)
    agree_over_store("model", structure, "the models of the ranks differ")
    meta_start = start_alike(model, mesh, initialize)

    # Note what later checks and checkpoints need of the plain model.
    shapes = {name: (x.shape, x.dtype) for name, x in model.state_dict().items()}
    comparison = compare_stages(model, split, axes) if compare_first else None

    # Keep this rank's part of the model, one axis after the other.
    if dap is not None and axes.dap > 1:
        model = dap(model, mesh)
    plain_layers = cut_layers(model, cuts, mesh, tied)
    over_sequence = None if spread is None else spread(model, mesh.group("sp"))
    model = getattr(over_sequence, "module", model)  # a model that is an attention layer itself is replaced
    if recomputed:
        checkpoint_blocks(model, recomputed)
    own = take_own_stages(model, split, mesh)
    own_cuts = own.moved(cuts)
    watch_first_calls(own, own.moved(plain_layers), own_cuts, mesh, is_compared=compare_first)

    # Sum its gradients over the ranks, and save and load it by the plain model's names.
    gradients = make_gradients(own, mesh, policy, is_filled_later=meta_start is not None)
    parallel = Parallel(
        own.module,
        mesh,
        gradients,
        FullStateDict(own.module, mesh, own_cuts, shapes, own.renamed),
        sequence=over_sequence,
        explanation=explanation,
        passes=passes,
        stage_comparison=comparison,
    )
    if meta_start is not None:
        meta_start.fill(parallel)
    return parallel


def _axes(plan: Plan) -> ParallelPlan:
    if isinstance(plan, str):
        raise ConfigError(f'a plan: expected "auto" or axes such as {{"dp": 2}}, found {plan!r}')
    if isinstance(plan, ParallelMesh):
        return plan.plan
    return plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_dict(plan)
