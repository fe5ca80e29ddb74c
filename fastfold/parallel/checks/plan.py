"""Checks that a plan matches a model, before any rank sends anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from fastfold.errors import ConfigError
from fastfold.parallel.plan import ParallelPlan
from fastfold.utils.module_structure import check_memory, is_inside


def check_arguments(
    model: nn.Module,
    plan: ParallelPlan,
    tied: Sequence[Sequence[str]],
    cuts: Iterable[str],
    *,
    split: object | None,
    spread: object | None,
    dap: object | None,
    policy: MixedPrecisionPolicy,
) -> None:
    """Refuse a plan that does not match a model.

    The model is not parallel yet. ``tied`` has the names of each parameter that has several, ``cuts`` the paths of the
    layers that are cut. ``split``, ``spread`` and ``dap`` divide stages, sequence and samples, or are None.

    Raises:
        ConfigError: An argument is missing, or the model does not support an axis; the message names it.
    """
    kind = type(model).__name__
    if plan.dap > 1 and dap is None:
        raise ConfigError(
            f"dap={plan.dap} needs to know how {kind} is sharded: give dap=, for an AlphaFold network "
            "fastfold.parallel.alphafold.shard; for other models use sp or tp"
        )
    if plan.sp > 1 and spread is None:
        raise ConfigError(
            f"sp={plan.sp} needs to know where {kind} combines positions of the sequence: give sequence="
        )
    if plan.pp > 1 and split is None:
        raise ConfigError(f"pp={plan.pp} needs to know how {kind} is split into stages: give stages=")
    if plan.pp > 1 and plan.zero > 1:
        raise ConfigError(
            f"zero={plan.zero} with pp={plan.pp}: a pipeline adds up the gradients of its microbatches, which stage "
            f"{plan.zero} would reduce after each one; use zero=1"
        )
    if plan.tp_mode != "1d" and tied and plan.tp > 1:
        raise ConfigError(
            f"tp={plan.tp_mode} cuts {' and '.join(tied[0])} differently, so they cannot be one parameter"
        )
    check_tied_layers(tied, cuts)
    if plan.zero or plan.tp > 1 or plan.pp > 1:
        check_memory(model)
    _check_batch_norm(model, plan)
    check_precision(model, policy)


def check_tied_layers(tied: Sequence[Sequence[str]], paths: Iterable[str]) -> None:
    """Refuse a tied parameter that is cut in some of its places, which would untie it.

    ``tied`` has the names of each such parameter, and ``paths`` those of the layers that are cut.

    Raises:
        ConfigError: A tied parameter is cut in part; the message names two of its places.
    """
    for names in tied:
        cut = [name for name in names if any(is_inside(name, path) for path in paths)]
        whole = [name for name in names if name not in cut]
        if cut and whole:
            raise ConfigError(
                f"{whole[0]} and {cut[0]} are one parameter, but layers= cuts only {cut[0]}; cut both, or neither"
            )


def check_precision(model: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Refuse a policy that the ZeRO stages would apply differently.

    Raises:
        ConfigError: ``reduce_dtype`` is not the dtype of every parameter, or ``output_dtype`` is set.
    """
    if policy.param_dtype is None:
        return
    if policy.output_dtype is not None:
        raise ConfigError(
            f"mp_policy: expected no output_dtype, found {policy.output_dtype}; convert the model's result"
        )
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.dtype != policy.reduce_dtype:
            raise ConfigError(
                f"mp_policy: expected reduce_dtype {p.dtype}, the dtype of {name}, found {policy.reduce_dtype}; "
                "parameters and optimizer states keep this dtype, so convert the model before parallelize(), for "
                "example model.float()"
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
