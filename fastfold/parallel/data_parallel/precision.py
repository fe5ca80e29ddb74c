"""Mixed precision as under FSDP2: layers compute with narrow copies of parameters, which keep their dtype.

ZeRO 3 passes the policy to FSDP2. The other stages use the same units and the same casts, so that gradients of each
backward pass are rounded alike, and are summed over passes and ranks in the parameters' dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from fastfold.parallel.data_parallel.units import gathered_alone, listed_modules


def compute_in(module: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Make a module and its blocks compute with copies of their parameters in ``param_dtype``."""
    if policy.param_dtype is None:
        return
    seen: set[nn.Module] = set()
    for unit in (*gathered_alone(module, listed_modules(module)), module):
        owners = [part for part in unit.modules() if part not in seen]
        seen.update(owners)
        hooks = _NarrowCopies(owners, policy.param_dtype, policy.cast_forward_inputs)
        unit.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        unit.register_forward_hook(hooks.leave, always_call=True)


class _NarrowCopies:
    """Hooks around a unit, in which its modules have copies for parameters; gradients pass through the cast."""

    def __init__(self, owners: list[nn.Module], dtype: torch.dtype, casts_inputs: bool) -> None:
        self._owners, self._dtype, self._casts_inputs = owners, dtype, casts_inputs
        self._kept: list[list[tuple[nn.Module, str, nn.Parameter]]] = []

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        kept = [
            (part, name, p)
            for part in self._owners
            for name, p in part._parameters.items()
            if p is not None and p.is_floating_point()
        ]
        copies = {id(p): p.to(self._dtype) for _, _, p in kept}  # once for each tied parameter
        for part, name, p in kept:
            part._parameters[name] = copies[id(p)]  # type: ignore[assignment]
        self._kept.append(kept)
        if not self._casts_inputs:
            return None
        return tree_map_only(Tensor, self._cast, (args, kwargs))

    def leave(self, *_: Any) -> None:
        for part, name, p in self._kept.pop():
            part._parameters[name] = p

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x
