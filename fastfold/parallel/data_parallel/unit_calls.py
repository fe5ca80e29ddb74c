"""Agreement of ranks on the unit that they are about to gather, before FSDP2's message about it.

FSDP2 gathers a unit when it is called. Ranks that call others, as experts chosen by the data, would get each other's
parameters, or wait for each other until the time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.utils.module_structure import tensors_in

_FORWARD, _BACKWARD, _END = 1, 2, 3


class UnitCalls:
    """Hooks on units that compare the next unit of every rank over the host, before FSDP2's hooks.

    Args:
        module: The whole; FSDP2 has put its hooks on it and on the units.
        units: Its parts that are gathered alone.
        group: The ranks that hold shards of them.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], group: Group) -> None:
        self._side: dist.ProcessGroup | None = None
        if group.size == 1 or group.backend == "fake":
            return
        assert group.process_group is not None
        ranks = dist.get_process_group_ranks(group.process_group)
        self._side = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        paths = {part: path for path, part in module.named_modules()}
        every = [*units, module]
        self._names = [paths[unit] or "the module" for unit in every]
        for number, unit in enumerate(every):
            unit.register_forward_pre_hook(torch.compiler.disable(self._before(number)), prepend=True)
            unit.register_forward_hook(torch.compiler.disable(self._after(number)), prepend=True)
        module.register_forward_hook(torch.compiler.disable(lambda *_: self._agree(_END, -1)))

    def end_step(self) -> None:
        """Compare the end of the backward passes (a collective)."""
        self._agree(_END, -2)

    def _before(self, number: int) -> Callable[..., None]:
        return lambda *_: self._agree(_FORWARD, number)

    def _after(self, number: int) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            started = False

            def before_backward(_: Tensor) -> None:
                nonlocal started
                if not started:
                    started = True
                    self._agree(_BACKWARD, number)

            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(before_backward)

        return after

    def _agree(self, kind: int, number: int) -> None:
        if self._side is None:
            return
        own = torch.tensor([kind, number], device="cpu")
        of_all = [torch.empty_like(own) for _ in range(self._side.size())]
        dist.all_gather(of_all, own, group=self._side)
        other = next((x.tolist() for x in of_all if not torch.equal(x, own)), None)
        if other is not None:
            raise ConfigError(
                "under zero=3 all ranks have to use the same parameters in each pass, and here one "
                f"{self._shown(kind, number)} while another {self._shown(*other)}; use zero=2, or units= that all "
                "ranks always call"
            )

    def _shown(self, kind: int, number: int) -> str:
        if kind == _END:
            return "ends the pass"
        return f"{'calls' if kind == _FORWARD else 'goes back through'} {self._names[number]}"
