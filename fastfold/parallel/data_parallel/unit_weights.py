"""Gathered weights of stage 3 that a forward pass changes in place: refused, since the changes would be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastfold.errors import ConfigError

_MEASURED_CALLS = 3
"""First calls whose weights are measured too: changes through ``.data`` count no version."""

State = tuple[list[int], Tensor | None]


class UnitWeights:
    """Hooks on units that look at their gathered weights before and after a call.

    Args:
        module: The whole; FSDP2 has put its hooks on it and on the units.
        units: Its parts that are gathered alone.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        self._paths = {part: path for path, part in module.named_modules()}
        self._before: dict[nn.Module, list[State]] = {}
        self._calls: dict[nn.Module, int] = {}
        for unit in (*units, module):
            # After FSDP2 has gathered, and before it gives back.
            unit.register_forward_pre_hook(torch.compiler.disable(self._enter))
            unit.register_forward_hook(torch.compiler.disable(self._leave), prepend=True)

    def _enter(self, unit: nn.Module, _: Any) -> None:
        self._calls[unit] = self._calls.get(unit, 0) + 1
        self._before.setdefault(unit, []).append(self._state(unit))

    def _leave(self, unit: nn.Module, _: Any, __: Any) -> None:
        versions, norms = self._before[unit].pop()
        now, norms_now = self._state(unit)
        is_measured = norms is not None and norms_now is not None
        if versions != now or (is_measured and not torch.equal(norms, norms_now)):  # type: ignore[arg-type]
            raise ConfigError(
                f"forward() of {self._paths[unit] or 'the module'} changes weights in place (max_norm, clamping), "
                "and under zero=3 it has a copy that is given back: change them after optimizer.step(), or use one "
                "process"
            )

    @torch.no_grad()
    def _state(self, unit: nn.Module) -> State:
        gathered = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        norms = None
        if gathered and self._calls[unit] <= _MEASURED_CALLS:
            norms = torch.stack([x.double() for x in torch._foreach_norm([p.detach() for p in gathered])])
        return [p._version for p in gathered], norms
