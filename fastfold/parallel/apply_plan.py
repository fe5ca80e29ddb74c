""":func:`parallelize` applies a plan to any ``nn.Module`` in one call."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from fastfold.errors import ConfigError, suggest
from fastfold.parallel.agreement import StepAgreement, agree_over_store, compare_inputs
from fastfold.parallel.checkpointing import checkpoint_blocks
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.buckets import Buckets
from fastfold.parallel.data_parallel.fsdp import FullySharded
from fastfold.parallel.data_parallel.full_state import FullStateDict, ShardFn
from fastfold.parallel.data_parallel.zero import Replicated, ShardedGradients, ShardedStates
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.parallel_model import Parallel
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.plan_checks import check_plan, check_tied_layers, tied_names
from fastfold.parallel.stage_comparison import Split, StageComparison
from fastfold.parallel.tensor_parallel.first_call import compare_first_calls, without_data
from fastfold.parallel.tensor_parallel.layout import parameter_shard_specs
from fastfold.parallel.tensor_parallel.plain_layers import check_restored, check_unchanged, signature
from fastfold.parallel.tensor_parallel.randomness import check_alike
from fastfold.utils.module_structure import module_structure

Sequencing = Callable[[nn.Module, Group], Any]
if TYPE_CHECKING:
    from fastfold.parallel.planner.auto import Choice

AxialSharding = Callable[[nn.Module, ParallelMesh], nn.Module]
T = TypeVar("T")

_LOG = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    plan: ParallelPlan | ParallelMesh | Mapping[str, Any] | str,
    *,
    example: Any = None,
    gpu: str | None = None,
    layers: Mapping[str, ShardFn] | None = None,
    stages: Split | None = None,
    sequence: Sequencing | None = None,
    dap: AxialSharding | None = None,
    device_type: str | None = None,
    compare_first: bool = True,
) -> Parallel:
    """Apply a plan to a model; every kind of parallelism uses this call.

    The model is single-device code and is changed in place; every rank starts from the first rank's weights.

    Args:
        model: Any module, the same on every rank.
        plan: The axes, as an object, a configuration or a mesh. ``"auto"`` selects the plan that is fastest by the
            cost model, with pipeline stages if ``stages`` is given, and may checkpoint activations of the
            blocks in ``nn.ModuleList``s; the result's ``explanation`` gives the reasons.
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

    Raises:
        ConfigError: The plan is impossible, differs between ranks, needs another number of ranks, or does not match
            this model. Raised on every rank before any collective.
    """
    explanation, is_checkpointed = "", False
    if isinstance(plan, str):
        chosen = _automatic(model, plan, example, layers, stages, gpu)
        plan, explanation, is_checkpointed = chosen.plan, chosen.explanation, chosen.checkpointing
    elif isinstance(plan, Mapping):
        plan = ParallelPlan.from_dict(plan)
    asked = plan.plan if isinstance(plan, ParallelMesh) else plan
    shard_fns = _shard_fns(model, asked, layers)
    check_plan(model, asked, stages, sequence, dap)
    check_tied_layers(model, shard_fns)
    mesh = plan if isinstance(plan, ParallelMesh) else ParallelMesh(plan, device_type or _device_type(model))
    agree_over_store("model", module_structure(model), "the models of the ranks differ")
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
    module, renamed = model, dict[str, str]()
    if asked.pp > 1:
        assert stages is not None
        module, renamed = _own_stages(model, stages, mesh)
        shard_fns, plain = _moved(shard_fns, renamed), _moved(plain, renamed)
    if asked.tp_mode == "1d":
        for part in module.children() if asked.pp > 1 else (module,):
            compare_inputs(part, mesh.group("tp"))
            if compare_first:
                compare_first_calls(part, _below(plain, module, part), _below(shard_fns, module, part), mesh)
            check_alike(part, mesh.group("tp"), _below(shard_fns, module, part))
    shard_groups = {
        name: [spec.group for spec in of_one] for name, of_one in parameter_shard_specs(module).items()
    }
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    gradients: Replicated | FullySharded
    if asked.zero == 3:
        gradients = FullySharded(module, mesh, shard_groups)
    else:
        kind = (Replicated, ShardedStates, ShardedGradients)[asked.zero]
        gradients = kind(named, mesh, shard_groups)
    cut = frozenset(name for name, of_one in shard_groups.items() if of_one)
    shares = [mesh.group(name) for name in ("dap", "sp", "dp")] if asked.zero else []
    gradients.agreement = StepAgreement(module, mesh, cut, shares)
    full_state = FullStateDict(module, mesh, shard_fns, shapes, renamed)
    return Parallel(
        module,
        mesh,
        gradients,
        full_state,
        sequence=found,
        explanation=explanation,
        stage_comparison=comparison,
    )


def _automatic(
    model: nn.Module,
    plan: str,
    example: Any,
    layers: Mapping[str, ShardFn] | None,
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


def _device_type(model: nn.Module) -> str:
    """Return the type of the parameters' device; those without data will be on the host first."""
    found = next((p.device.type for p in model.parameters()), "cpu")
    return "cpu" if found == "meta" else found


def _shard_fns(
    model: nn.Module, plan: ParallelPlan, layers: Mapping[str, ShardFn] | None
) -> dict[str, ShardFn]:
    """Return the functions of replaced layers, by path; the outermost matching module wins."""
    if plan.tp == 1:
        return {}
    if not layers:
        raise ConfigError(
            f"tp={plan.tp} needs to know which layers of {type(model).__name__} are cut: give "
            "layers={pattern: function}"
        )
    paths = [path for path, _ in model.named_modules() if path]
    found: dict[str, ShardFn] = {}
    for pattern, shard_fn in layers.items():
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            hint = suggest(pattern, paths, cutoff=0.0)
            raise ConfigError(f"layers=: no module of {type(model).__name__} is called {pattern}; {hint}")
        for path in matching:  # outer modules precede their children
            if not any(path.startswith(f"{outer}.") for outer in found):
                found[path] = shard_fn
    if plan.tp_mode != "1d":
        left = [
            name for name, _ in model.named_parameters() if not any(name.startswith(f"{p}.") for p in found)
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
    tensors = [x.detach() for x in (*model.parameters(), *model.buffers())]
    for group in groups:
        buckets = Buckets(tensors)
        for bucket in buckets:
            flat = async_ops.start_broadcast(buckets.join(bucket, tensors), 0, group).wait()
            for number, x in buckets.split(bucket, flat).items():
                tensors[number].copy_(x)


def _below(by_path: Mapping[str, T], module: nn.Module, part: nn.Module) -> dict[str, T]:
    """Return values by paths in a module, by those in the module or one of its children."""
    if part is module:
        return dict(by_path)
    name = next(name for name, child in module.named_children() if child is part)
    return {path.removeprefix(f"{name}."): x for path, x in by_path.items() if path.startswith(f"{name}.")}


def _replace(model: nn.Module, path: str, shard_fn: ShardFn, mesh: ParallelMesh) -> None:
    """Replace a layer by this rank's part of it; shared parameters stay shared."""
    name_of_owner, _, name = path.rpartition(".")
    owner, layer = model.get_submodule(name_of_owner), model.get_submodule(path)
    try:
        check_unchanged(layer, owner)
        before = signature(layer)
        cut = shard_fn(layer, mesh)
        check_restored(before, cut)
    except ConfigError as error:
        raise ConfigError(f"layers= cuts {path}: {error}") from error
    setattr(owner, name, cut)


def _retie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Tie parameters again that were tied before layers were replaced."""
    for names in tied:
        found = dict(model.named_parameters(remove_duplicate=False))
        present = [name for name in names if name in found]
        for name in present[1:]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, found[present[0]])


def _own_stages(model: nn.Module, split: Split, mesh: ParallelMesh) -> tuple[nn.ModuleDict, dict[str, str]]:
    """Return this rank's stages, and their modules' paths to those in the model."""
    group = mesh.group("pp")
    paths = {id(module): path for path, module in model.named_modules() if path}
    stages = list(split(model, group.size))
    if len(stages) % group.size or not stages:
        raise ConfigError(f"{len(stages)} stages cannot be spread over pp={group.size} ranks")
    stage_of: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for name, x in (*stage.named_parameters(), *stage.named_buffers()):
            if stage_of.setdefault(id(x), number) != number:
                raise ConfigError(
                    f"{name} is in the pipeline's stages {stage_of[id(x)]} and {number}, which would train it "
                    "separately; put the blocks that share it into one stage, or use tp or dp instead of pp"
                )
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if id(x) not in stage_of:
            raise ConfigError(
                f"no stage of the pipeline has {name}: stages= must return every part of the model"
            )
    idle = next((i for i, x in enumerate(stages) if not any(p.requires_grad for p in x.parameters())), None)
    if idle is not None:
        raise ConfigError(
            f"stage {idle} of {len(stages)} of the pipeline has no parameter to train: put its layers into a stage "
            "with others, or use tp or dp instead of pp"
        )
    module = nn.ModuleDict(
        {str(number): stage for number, stage in enumerate(stages) if number % group.size == group.rank}
    )
    own = {id(p) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            # Releases the memory of other ranks' stages.
            parameter.data = parameter.data.new_empty(0)
    renamed: dict[str, str] = {}
    for here, part in module.named_modules():
        if id(part) in paths and not any(here.startswith(f"{outer}.") for outer in renamed):
            renamed[here] = paths[id(part)]
    return module, renamed


def _moved(by_path: Mapping[str, T], renamed: Mapping[str, str]) -> dict[str, T]:
    """Return values of layers by their paths in this rank's stages."""
    found = {}
    for path, value in by_path.items():
        for here, there in renamed.items():
            if path == there or path.startswith(f"{there}."):
                found[here + path[len(there) :]] = value
    return found
