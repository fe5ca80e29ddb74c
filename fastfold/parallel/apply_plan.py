""":func:`parallelize` applies a plan to any ``nn.Module`` in one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fastfold.errors import ConfigError
from fastfold.parallel.checks.agreement import StepAgreement
from fastfold.parallel.checks.cut_layers import watch_first_calls
from fastfold.parallel.checks.plan import check_plan, check_tied_layers
from fastfold.parallel.checks.stages import StageComparison
from fastfold.parallel.comm.groups import Group, agree_over_store
from fastfold.parallel.cut_layers import Layers, cut_layers, find_cuts
from fastfold.parallel.data_parallel.buckets import broadcast_tensors
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.full_state import FullStateDict
from fastfold.parallel.data_parallel.kept_gradients import ReducedGradients
from fastfold.parallel.data_parallel.precision import check_precision, compute_in
from fastfold.parallel.data_parallel.units import checkpoint_blocks
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.families.attention_calls import spread_attention
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.meta_start import Initialise, MetaStart, give_memory, is_without_data
from fastfold.parallel.own_stages import OwnStages, Split, take_own_stages
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel.layout import parameter_shard_specs
from fastfold.utils.module_structure import module_structure

Sequencing = Callable[[nn.Module, Group], Any]
AxialSharding = Callable[[nn.Module, ParallelMesh], nn.Module]

_LOG = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    plan: ParallelPlan | ParallelMesh | Mapping[str, Any] | str,
    *,
    example: Any = None,
    gpu: str | None = None,
    layers: Layers = None,
    stages: Split | Literal["auto"] | None = None,
    sequence: Sequencing | Literal["auto"] | None = None,
    dap: AxialSharding | None = None,
    device_type: str | None = None,
    compare_first: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    initialise: Initialise | None = None,
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
        initialise: For a model on the device ``meta``: fills the tensors of one module, as for
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
    split = block_stages(model) if isinstance(stages, str) else stages
    chosen = _choose(model, plan, example, layers, split, gpu)
    asked, policy = chosen.plan, mp_policy or MixedPrecisionPolicy()
    spread = _find_attention(model, asked, sequence)
    cuts = find_cuts(model, asked, layers)
    check_plan(model, asked, split, spread, dap)
    check_tied_layers(model, cuts)
    check_precision(model, policy)

    mesh = plan if isinstance(plan, ParallelMesh) else ParallelMesh(asked, device_type or _device_type(model))
    agree_over_store("model", module_structure(model), "the models of the ranks differ")
    start = _start(model, mesh, initialise)
    shapes = {name: (x.shape, x.dtype) for name, x in model.state_dict().items()}
    comparison = None
    if compare_first and split is not None and asked.pp > 1 and asked.dap == 1:
        comparison = StageComparison(model, split, asked.pp)

    if dap is not None and asked.dap > 1:
        model = dap(model, mesh)
    plain = cut_layers(model, cuts, mesh)
    over_sequence = None if spread is None else spread(model, mesh.group("sp"))
    model = getattr(over_sequence, "module", model)  # a model that is an attention layer itself is replaced
    if chosen.checkpointing:
        checkpoint_blocks(model)
    own = take_own_stages(model, split, mesh)
    watch_first_calls(own, own.moved(plain), own.moved(cuts), mesh, is_compared=compare_first)

    if start is not None and (asked.zero < 3 or mesh.group("replicas").is_alone):
        give_memory(own.module, torch.device(mesh.device_type))
    gradients = _reduce_gradients(own, mesh, policy)
    full_state = FullStateDict(own.module, mesh, own.moved(cuts), shapes, own.renamed)
    parallel = Parallel(
        own.module,
        mesh,
        gradients,
        full_state,
        sequence=over_sequence,
        explanation=chosen.explanation,
        passes=chosen.passes,
        stage_comparison=comparison,
    )
    if start is not None:
        start.fill(lambda values: parallel.load_state_dict(values, strict=False))
    return parallel


class _Choice(NamedTuple):
    """A plan, and the cost model's reasons, recomputation of blocks and number of backward passes."""

    plan: ParallelPlan
    explanation: str = ""
    checkpointing: bool = False
    passes: int = 1


def _choose(
    model: nn.Module,
    plan: ParallelPlan | ParallelMesh | Mapping[str, Any] | str,
    example: Any,
    layers: Layers,
    stages: Split | None,
    gpu: str | None,
) -> _Choice:
    """Return the plan that was given, or for ``"auto"`` the fastest one."""
    if isinstance(plan, ParallelMesh):
        return _Choice(plan.plan)
    if not isinstance(plan, str):
        return _Choice(plan if isinstance(plan, ParallelPlan) else ParallelPlan.from_dict(plan))
    if plan != "auto":
        raise ConfigError(f'a plan: expected "auto" or axes such as {{"dp": 2}}, found {plan!r}')
    if example is None:
        raise ConfigError(
            'parallelize(model, "auto") needs example=, the inputs of a step of all ranks together'
        )
    from fastfold.parallel.planner.auto import choose_plan  # imports tracing, which most runs do not need

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    cuts = list(find_cuts(model, ParallelPlan(tp=2), layers)) if layers else []
    choice = choose_plan(model, example, ranks, cuts=cuts, stages=stages, gpu=gpu)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.info("%s", choice.explanation)
    return _Choice(choice.plan, choice.explanation, choice.checkpointing, choice.passes)


def _find_attention(
    model: nn.Module, plan: ParallelPlan, sequence: Sequencing | Literal["auto"] | None
) -> Sequencing | None:
    if plan.sp == 1:
        return None
    return spread_attention(model) if isinstance(sequence, str) else sequence


def _device_type(model: nn.Module) -> str:
    kind = next((p.device.type for p in model.parameters()), "cpu")
    return "cpu" if kind == "meta" else kind  # parameters without data will be on the host first


def _start(model: nn.Module, mesh: ParallelMesh, initialise: Initialise | None) -> MetaStart | None:
    """Give every rank the first rank's weights, or return what will fill a model without data."""
    if is_without_data(model) and initialise is not None:
        return MetaStart(model, initialise, torch.device(mesh.device_type))
    groups = [group for axis in ("pp", "dp", "sp", "dap", "tp") if (group := mesh.group(axis)).size > 1]
    for module in model.modules() if groups else ():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():  # an expanded element, which cannot be copied into
                setattr(module, name, buffer.contiguous())
    for group in groups:
        broadcast_tensors((*model.parameters(), *model.buffers()), group)
    return None


def _reduce_gradients(own: OwnStages, mesh: ParallelMesh, policy: MixedPrecisionPolicy) -> ReducedGradients:
    """Return the gradients of this rank's module by ZeRO stage; the module computes by the policy."""
    plan, module = mesh.plan, own.module
    specs = parameter_shard_specs(module)
    shard_groups = {name: [spec.group for spec in of_one] for name, of_one in specs.items()}
    if plan.zero < 3 or mesh.group("replicas").is_alone:
        for _, part in own.called:
            compute_in(part, policy)
    gradients: ReducedGradients
    if plan.zero == 3:
        gradients = FullySharded(module, mesh, shard_groups, policy)
    else:
        gradients = Replicated(own.trained(), mesh, shard_groups, stage=plan.zero, shared=own.shared)
    cut = frozenset(name for name, of_one in shard_groups.items() if of_one)
    shares = [mesh.group(name) for name in ("dap", "sp", "dp")] if plan.zero else []
    gradients.agreement = StepAgreement(module, mesh, cut, shares)
    return gradients
