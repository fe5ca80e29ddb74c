"""Check of the parts of a module that ZeRO's stage 3 gathers alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fastfold.errors import ConfigError


def check_units(module: nn.Module, units: Sequence[nn.Module]) -> None:
    """Refuse parameters that FSDP2 cannot shard, before it shards any.

    The units are the parts of the module that are gathered alone.

    Raises:
        ConfigError: A parameter is a scalar or empty, has sparse gradients or a hook, or is not contiguous; or a unit
            has several dtypes.
    """
    claimed: set[nn.Parameter] = set()
    names = {p: name for name, p in module.named_parameters()}
    paths = {part: path for path, part in module.named_modules()}
    remedy = "zero=3 cannot shard that; use zero=2"
    for part, path in paths.items():
        if getattr(part, "sparse", False) is True:
            raise ConfigError(
                f"{path} has sparse gradients, and ranks sum dense ones: create it with sparse=False"
            )
    for unit in (*units, module):
        own = [p for p in unit.parameters() if p not in claimed]
        claimed.update(own)
        for p in own:
            if not p.dim():
                raise ConfigError(f"{names[p]} is a parameter without a dimension (a scalar): {remedy}")
            if not p.numel():
                raise ConfigError(f"{names[p]} is a parameter without elements ({list(p.shape)}): {remedy}")
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                raise ConfigError(
                    f"{names[p]} has a hook, which zero=3 would not call: use zero=0, 1 or 2, or register the hook "
                    "after parallelize() by register_post_accumulate_grad_hook(), which gets this rank's shard"
                )
            if not p.is_contiguous():
                raise ConfigError(
                    f"{names[p]} is not contiguous ({list(p.shape)} with strides {list(p.stride())}, as in "
                    f"channels_last): {remedy}, or call contiguous() on it"
                )
        kinds = sorted({str(p.dtype) for p in own})
        if len(kinds) > 1:
            raise ConfigError(
                f"{paths.get(unit) or type(unit).__name__} has parameters of {' and '.join(kinds)}, which are gathered "
                f"together: {remedy}, or convert them to one dtype"
            )
