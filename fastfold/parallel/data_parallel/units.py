"""Units of a module: blocks that stage 3 gathers one at a time, or whose activations are recomputed.

Hooks around those of FSDP2 check that ranks agree on the next unit, and that gathered weights are not changed in place.
FSDP2 gathers a unit when it is called. If ranks call different units, as with experts chosen by the data, they would
get each other's parameters or wait until the timeout. It sums the gradients of a unit in one message, whose lengths
differ if ranks used different parameters. Changes of gathered weights are lost when FSDP2 releases them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from fastfold.errors import ConfigError
from fastfold.parallel.comm.groups import Group
from fastfold.utils.module_structure import is_inside, tensors_in


def listed_modules(module: nn.Module) -> list[nn.Module]:
    """Return the members of every ``nn.ModuleList`` in a module: the blocks of most networks."""
    return [
        block
        for part in module.modules()
        if isinstance(part, nn.ModuleList)
        for block in part
        if any(True for _ in block.parameters())
    ]


def gathered_alone(module: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units that can be gathered at their call and released after it.

    Containers are never called, so their members replace them. Units without parameters, and units that share a
    parameter with a module outside, are gathered with the module. Inner units precede outer ones, as FSDP2 requires.
    """
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(part)
    alone: dict[nn.Module, None] = {}
    waiting = list(reversed(units))
    while waiting:
        unit = waiting.pop()
        if type(unit).forward is nn.Module.forward:
            waiting += reversed(list(unit.children()))
            continue
        inside, own = set(unit.modules()), list(unit.parameters())
        if own and all(owners[parameter] <= inside for parameter in own):
            alone[unit] = None
    places = {part: place for place, part in enumerate(module.modules())}
    return sorted(alone, key=lambda unit: -places.get(unit, 0))


_FORWARD, _BACKWARD, _END, _REDUCE = 1, 2, 3, 4

_MEASURED_CALLS = 3
"""Number of first calls that also compare the weights' norms: changes through ``.data`` count no version."""

State = tuple[list[int], Tensor | None]


class UnitCalls:
    """Hooks that compare the next unit of all ranks over the host, before FSDP2's hooks.

    FSDP2 has put its hooks on the whole module and on the units, its parts that are gathered alone.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], group: Group) -> None:
        self._side: dist.ProcessGroup | None = None
        if group.is_alone:
            return
        assert group.process_group is not None
        ranks = dist.get_process_group_ranks(group.process_group)
        self._side = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        paths = {part: path for path, part in module.named_modules()}
        every = [*units, module]
        self._names = [paths[unit] or "the module" for unit in every]
        for number, unit in enumerate(every):
            before = torch.compiler.disable(lambda *_, number=number: self._agree(_FORWARD, number))
            unit.register_forward_pre_hook(before, prepend=True)
            unit.register_forward_hook(torch.compiler.disable(partial(self._after, number)), prepend=True)
            if isinstance(unit, FSDPModule):
                reduction: Any = _AgreedReduction(partial(self._agree, _REDUCE, number))
                unit.set_custom_reduce_scatter(reduction)
        module.register_forward_hook(torch.compiler.disable(lambda *_: self._agree(_END, -1)))

    def end_step(self) -> None:
        """Compare the end of the backward passes (a collective)."""
        self._agree(_END, -2)

    def _after(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        started = False

        def before_backward(_: Tensor) -> None:
            nonlocal started
            if not started:
                started = True
                self._agree(_BACKWARD, number)

        for x in tensors_in(output):
            if x.requires_grad:
                x.register_hook(before_backward)

    def _agree(self, kind: int, number: int, elements: int = 0) -> None:
        if self._side is None:
            return
        own = torch.tensor([kind, number, elements], device="cpu")
        of_all = [torch.empty_like(own) for _ in range(self._side.size())]
        dist.all_gather(of_all, own, group=self._side)
        other = next((x.tolist() for x in of_all if not torch.equal(x, own)), None)
        if other is not None:
            raise ConfigError(
                "under zero=3 all ranks have to use the same parameters in each pass, and here one "
                f"{self._shown(kind, number, elements)} while another {self._shown(*other)}; use zero=2, or "
                "call the same modules on all ranks"
            )

    def _shown(self, kind: int, number: int, elements: int) -> str:
        if kind == _END:
            return "ends the pass"
        if kind == _REDUCE:
            return f"has gradients of {elements:,} elements of {self._names[number]}"
        return f"{'calls' if kind == _FORWARD else 'goes back through'} {self._names[number]}"


class _AgreedReduction:
    """Reduction of a unit's gradients for FSDP2, after ranks have compared their number of elements."""

    def __init__(self, agree: Callable[[int], None]) -> None:
        self._agree = agree

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._agree(input_tensor.numel())
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class UnitWeights:
    """Hooks that compare a unit's gathered weights before and after a call.

    Module and units are those of :class:`UnitCalls`.
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        self._paths = {part: path for path, part in module.named_modules()}
        self._before: dict[nn.Module, list[State]] = {}
        self._calls: dict[nn.Module, int] = {}
        for unit in (*units, module):
            # These hooks run after FSDP2 has gathered the weights, and before it releases them.
            unit.register_forward_pre_hook(torch.compiler.disable(self._enter))
            unit.register_forward_hook(torch.compiler.disable(self._leave), prepend=True)

    def _enter(self, unit: nn.Module, _: Any) -> None:
        self._calls[unit] = self._calls.get(unit, 0) + 1
        self._before.setdefault(unit, []).append(self._state(unit))

    def _leave(self, unit: nn.Module, _: Any, __: Any) -> None:
        versions, norms = self._before[unit].pop()
        now, norms_now = self._state(unit)
        is_same = norms is None or norms_now is None or bool(_equal(norms, norms_now))
        if versions != now or not is_same:
            raise ConfigError(
                f"forward() of {self._paths[unit] or 'the module'} changes weights in place (max_norm, clamping), and "
                "zero=3 discards the changed copy: change weights after optimizer.step(), or use one process"
            )

    @torch.no_grad()
    def _state(self, unit: nn.Module) -> State:
        gathered = [p for p in unit.parameters() if not isinstance(p, DTensor)]
        norms = None
        if gathered and self._calls[unit] <= _MEASURED_CALLS:
            norms = torch.stack([x.double() for x in torch._foreach_norm([p.detach() for p in gathered])])
        return [p._version for p in gathered], norms


def _equal(norms: Tensor, others: Tensor) -> Tensor:
    """Return whether norms are equal; those of weights that training has made NaN are."""
    return ((norms == others) | (norms.isnan() & others.isnan())).all()


def checkpointable_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the blocks that may be recomputed: the outermost members of each ``nn.ModuleList``.

    Empty if a second forward pass would change the running statistics of a norm.
    """
    if any(isinstance(x, _NormBase) and x.track_running_stats for x in model.modules()):
        return []
    listed = {id(block) for block in listed_modules(model)}
    blocks: list[str] = []
    for path, module in model.named_modules():
        is_nested = any(is_inside(path, outer) for outer in blocks)
        if id(module) in listed and not is_nested and type(module).forward is not nn.Module.forward:
            blocks.append(path)
    return blocks


def checkpoint_blocks(model: nn.Module, paths: Iterable[str]) -> None:
    """Keep only the inputs of the blocks at some paths for the backward pass, and recompute the rest.

    Models of Hugging Face switch it on themselves, and their caches of keys off. Paths inside a layer that was cut as a
    whole are left out.
    """
    foreign: Any = model
    if getattr(foreign, "supports_gradient_checkpointing", False):
        foreign.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    present = dict(model.named_modules())
    for block in (present[path] for path in paths if path in present):
        # A copy of the block runs the copy's layers, unlike a bound method.
        block.forward = partial(checkpoint, type(block).forward, block, use_reentrant=False)
