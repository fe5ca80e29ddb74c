""":func:`parallelize` applies a plan to any ``nn.Module`` in one call."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from fastfold.errors import ConfigError, suggest
from fastfold.parallel.agreement import StepAgreement, agree_over_store, compare_inputs
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comparison import Split, StageComparison, without_data
from fastfold.parallel.data_parallel.buckets import broadcast_tensors
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.full_state import FullStateDict, ShardFn
from fastfold.parallel.data_parallel.kept_gradients import ReducedGradients
from fastfold.parallel.data_parallel.precision import check_precision, compute_in
from fastfold.parallel.data_parallel.units import checkpoint_blocks
from fastfold.parallel.data_parallel.zero import Replicated
from fastfold.parallel.families.attention_calls import spread_attention
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.families.tensor_layers import find_layers
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.meta_start import Initialise, MetaStart, give_memory, is_without_data
from fastfold.parallel.own_stages import SharedParameter, take_own_stages
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.paths import below, is_inside, replace_at, tied_names
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.tensor_parallel.first_call import compare_first_calls
from fastfold.parallel.tensor_parallel.layout import parameter_shard_specs
from fastfold.parallel.tensor_parallel.plain_layers import (
    check_alike,
    check_restored,
    check_unchanged,
    signature,
)
from fastfold.utils.module_structure import module_structure

Sequencing = Callable[[nn.Module, Group], Any]
if TYPE_CHECKING:
    from fastfold.parallel.planner.auto import Choice

AxialSharding = Callable[[nn.Module, ParallelMesh], nn.Module]

_LOG = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    plan: ParallelPlan | ParallelMesh | Mapping[str, Any] | str,
    *,
    example: Any = None,
    gpu: str | None = None,
    layers: Mapping[str, ShardFn] | Literal["auto"] | None = None,
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
            :func:`fastfold.parallel.tensor_parallel.ParallelMLP.from_plain`.
        stages: For ``pp``: splits the model into a number of modules, which compose to it; see
            :mod:`fastfold.parallel.pipeline`.
        sequence: For ``sp``: applies sequence parallelism to the model, as
            :class:`fastfold.parallel.sequence_parallel.module.SequenceParallel` does. Its return value becomes the
            result's ``sequence``.
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
    explanation, is_checkpointed, passes = "", False, 1
    if isinstance(stages, str):
        stages = block_stages(model)
    if isinstance(plan, str):
        chosen = _automatic(model, plan, example, layers, stages, gpu)
        plan, explanation, is_checkpointed = chosen.plan, chosen.explanation, chosen.checkpointing
        passes = chosen.passes
    elif isinstance(plan, Mapping):
        plan = ParallelPlan.from_dict(plan)
    asked = plan.plan if isinstance(plan, ParallelMesh) else plan
    if isinstance(sequence, str):
        sequence = spread_attention(model) if asked.sp > 1 else None
    shard_fns = _shard_fns(model, asked, layers)
    check_plan(model, asked, stages, sequence, dap)
    check_tied_layers(model, shard_fns)
    kind = next((p.device.type for p in model.parameters()), "cpu")
    kind = "cpu" if kind == "meta" else kind  # parameters without data will be on the host first
    mesh = plan if isinstance(plan, ParallelMesh) else ParallelMesh(plan, device_type or kind)
    agree_over_store("model", module_structure(model), "the models of the ranks differ")
    policy = mp_policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None:
        check_precision(model, policy)
    start = None
    if is_without_data(model) and initialise is not None:
        start = MetaStart(model, initialise, torch.device(mesh.device_type))
    if start is None:
        _same_weights(model, mesh)
    shapes = {name: (x.shape, x.dtype) for name, x in model.state_dict().items()}
    comparison = None
    if asked.pp > 1 and stages is not None and compare_first and asked.dap == 1:
        comparison = StageComparison(model, stages, asked.pp)
    if asked.dap > 1 and dap is not None:
        model = dap(model, mesh)
    tied = tied_names(model)
    plain: dict[str, nn.Module] = {}
    for path, shard_fn in shard_fns.items():
        if compare_first:
            plain[path] = without_data(model.get_submodule(path))
        _replace(model, path, shard_fn, mesh)
    _retie(model, tied)
    found = sequence(model, mesh.group("sp")) if asked.sp > 1 and sequence is not None else None
    model = getattr(found, "module", model)  # a model that is an attention layer itself is replaced
    if is_checkpointed:
        checkpoint_blocks(model)
    module, renamed, shared = model, dict[str, str](), list[SharedParameter]()
    if asked.pp > 1:
        assert stages is not None
        own = take_own_stages(model, stages, mesh)
        module, renamed, shared = own.module, own.renamed, own.shared
        shard_fns, plain = own.moved(shard_fns), own.moved(plain)
    if asked.tp_mode == "1d":
        for name, part in module.named_children() if asked.pp > 1 else [("", module)]:
            compare_inputs(part, mesh.group("tp"))
            cut_layers, plain_layers = below(name, shard_fns), below(name, plain)
            for by_path in (cut_layers, plain_layers):
                by_path.pop("", None)  # a stage that is cut as a whole
            if compare_first:
                compare_first_calls(part, plain_layers, cut_layers, mesh)
            check_alike(part, mesh.group("tp"), cut_layers)
    computing = list(module.children()) if asked.pp > 1 else [module]
    if asked.zero < 3 or mesh.group("replicas").is_alone:
        for part in computing:
            compute_in(part, policy)
        if start is not None:
            give_memory(module, torch.device(mesh.device_type))
    shard_groups = {
        name: [spec.group for spec in of_one] for name, of_one in parameter_shard_specs(module).items()
    }
    gradients: ReducedGradients
    if asked.zero == 3:
        gradients = FullySharded(module, mesh, shard_groups, policy)
    else:
        followers = {id(x.parameter) for x in shared if not x.is_owner}
        named = {
            name: p for name, p in module.named_parameters() if p.requires_grad and id(p) not in followers
        }
        gradients = Replicated(named, mesh, shard_groups, stage=asked.zero, shared=shared)
    cut = frozenset(name for name, of_one in shard_groups.items() if of_one)
    shares = [mesh.group(name) for name in ("dap", "sp", "dp")] if asked.zero else []
    gradients.agreement = StepAgreement(module, mesh, cut, shares)
    full_state = FullStateDict(module, mesh, shard_fns, shapes, renamed)
    parallel = Parallel(
        module,
        mesh,
        gradients,
        full_state,
        sequence=found,
        explanation=explanation,
        passes=passes,
        stage_comparison=comparison,
    )
    if start is not None:
        start.fill(lambda values: parallel.load_state_dict(values, strict=False))
    return parallel


def _automatic(
    model: nn.Module,
    plan: str,
    example: Any,
    layers: Mapping[str, ShardFn] | Literal["auto"] | None,
    stages: Split | None,
    gpu: str | None,
) -> Choice:
    from fastfold.parallel.planner.auto import choose_plan  # imports tracing, which most runs do not need

    if plan != "auto":
        raise ConfigError(f'a plan: expected "auto" or axes such as {{"dp": 2}}, found {plan!r}')
    if example is None:
        raise ConfigError(
            'parallelize(model, "auto") needs example=, the inputs of a step of all ranks together'
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    cuts = list(_shard_fns(model, ParallelPlan(tp=2), layers)) if layers else []
    found = choose_plan(model, example, ranks, cuts=cuts, stages=stages, gpu=gpu)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.info("%s", found.explanation)
    return found


def _shard_fns(
    model: nn.Module, plan: ParallelPlan, layers: Mapping[str, ShardFn] | Literal["auto"] | None
) -> dict[str, ShardFn]:
    """Return the functions of replaced layers, by path; the outermost matching module wins."""
    if plan.tp == 1:
        return {}
    if not layers:
        raise ConfigError(
            f"tp={plan.tp} needs to know which layers of {type(model).__name__} are cut: give "
            'layers={pattern: function}, or layers="auto" for a model of transformers'
        )
    if isinstance(layers, str):
        layers = find_layers(model, plan)
    paths = [path for path, _ in model.named_modules() if path]
    found: dict[str, ShardFn] = {}
    for pattern, shard_fn in layers.items():
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            hint = suggest(pattern, paths, cutoff=0.0)
            raise ConfigError(f"layers=: no module of {type(model).__name__} is called {pattern}; {hint}")
        for path in matching:  # outer modules precede their children
            if not any(is_inside(path, outer) for outer in found if outer != path):
                found[path] = shard_fn
    if plan.tp_mode != "1d":
        left = [
            name for name, _ in model.named_parameters() if not any(is_inside(name, path) for path in found)
        ]
        if left:
            raise ConfigError(
                f"tp={plan.tp_mode} splits batch and features, so every layer has to be replaced; layers= lacks "
                f"{', '.join(left[:3])}{' ...' if len(left) > 3 else ''}"
            )
    return found


def _same_weights(model: nn.Module, mesh: ParallelMesh) -> None:
    """Give every rank the first rank's parameters and buffers, also those that are not saved."""
    groups = [group for axis in ("pp", "dp", "sp", "dap", "tp") if (group := mesh.group(axis)).size > 1]
    if not groups:
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():  # an expanded element, which cannot be copied into
                setattr(module, name, buffer.contiguous())
    for group in groups:
        broadcast_tensors((*model.parameters(), *model.buffers()), group)


def _replace(model: nn.Module, path: str, shard_fn: ShardFn, mesh: ParallelMesh) -> None:
    """Replace a layer by this rank's part of it; shared parameters stay shared."""
    owner, layer = model.get_submodule(path.rpartition(".")[0]), model.get_submodule(path)
    try:
        check_unchanged(layer, owner)
        before = signature(layer)
        cut = shard_fn(layer, mesh)
        check_restored(before, cut)
    except ConfigError as error:
        raise ConfigError(f"layers= cuts {path}: {error}") from error
    replace_at(model, path, cut)


def _retie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie parameters again that were tied before layers were replaced."""
    for names in tied:
        found = dict(model.named_parameters(remove_duplicate=False))
        present = [name for name in names if name in found]
        for name in present[1:]:
            replace_at(model, name, found[present[0]])


def check_plan(
    model: nn.Module, plan: ParallelPlan, stages: object | None, sequence: object | None, dap: object | None
) -> None:
    """Refuse a plan that does not match a model.

    The model is not parallel yet; the other arguments are those of :func:`fastfold.parallel.parallelize`.

    Raises:
        ConfigError: An argument is missing, or the model does not support an axis; the message names it.
    """
    kind = type(model).__name__
    tied = next(iter(tied_names(model)), None)
    if plan.dap > 1 and dap is None:
        raise ConfigError(
            f"dap={plan.dap} needs to know how {kind} is sharded: give dap=, for an AlphaFold network "
            "fastfold.parallel.alphafold.shard; for other models use sp or tp"
        )
    if plan.sp > 1 and sequence is None:
        raise ConfigError(
            f"sp={plan.sp} needs to know where {kind} combines positions of the sequence: give sequence="
        )
    if plan.pp > 1 and stages is None:
        raise ConfigError(f"pp={plan.pp} needs to know how {kind} is split into stages: give stages=")
    if plan.pp > 1 and plan.zero > 1:
        raise ConfigError(
            f"zero={plan.zero} with pp={plan.pp}: a pipeline adds up the gradients of its microbatches, which stage "
            f"{plan.zero} would reduce after each one; use zero=1"
        )
    if plan.tp_mode != "1d" and tied is not None and plan.tp > 1:
        raise ConfigError(
            f"tp={plan.tp_mode} cuts {' and '.join(tied)} differently, so they cannot be one parameter"
        )
    _check_batch_norm(model, plan)


def check_tied_layers(model: nn.Module, shard_fns: Iterable[str]) -> None:
    """Refuse a tied parameter that is cut in some of its places, which would untie it.

    ``shard_fns`` are the paths of the layers that are cut.

    Raises:
        ConfigError: A tied parameter is cut in part; the message names two of its places.
    """
    for names in tied_names(model):
        cut = [name for name in names if any(is_inside(name, path) for path in shard_fns)]
        whole = [name for name in names if name not in cut]
        if cut and whole:
            raise ConfigError(
                f"{whole[0]} and {cut[0]} are one parameter, but layers= cuts only {cut[0]}; cut both, or neither"
            )


def _check_batch_norm(model: nn.Module, plan: ParallelPlan) -> None:
    """Refuse statistics over each rank's part of a batch, here and at every call."""
    axes = [axis for axis in ("dp", "sp", "dap", "pp") if getattr(plan, axis) > 1]
    for path, module in model.named_modules():
        if axes and isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            message = (
                f"{axes[0]}={getattr(plan, axes[0])}: {path or type(model).__name__} is {type(module).__name__}, whose "
                "statistics would be those of each rank's part of the batch; use LayerNorm or GroupNorm, eval() of "
                "this module, or on GPUs torch.nn.SyncBatchNorm.convert_sync_batchnorm"
            )
            _refuse_statistics(message, module)
            module.register_forward_pre_hook(partial(_refuse_statistics, message))


def _refuse_statistics(message: str, module: nn.Module, *_: Any) -> None:
    if module.training or module.running_mean is None:
        raise ConfigError(message)
