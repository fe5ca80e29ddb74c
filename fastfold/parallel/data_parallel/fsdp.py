"""ZeRO stage 3 by PyTorch's FSDP2: parameters are sharded, and gathered unit by unit for use."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from fastfold.errors import ConfigError, first_line
from fastfold.parallel.checks.units import check_units
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.data_parallel.kept_gradients import BEFORE_REDUCTION, ReducedGradients, changed_message
from fastfold.parallel.data_parallel.sharded_norm import ShardNorms, local, whole
from fastfold.parallel.data_parallel.units import (
    UnitCalls,
    UnitWeights,
    gathered_alone,
    listed_modules,
)
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import tensors_in, tie, tied_names


def _refuse_inference_mode(_: nn.Module, __: Any) -> None:
    """Refuse a pass in which FSDP2 would keep tensors that later passes with gradients cannot use."""
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "under zero=3 a module cannot train after it has run in torch.inference_mode(): call the object that "
            "parallelize() returned, or use torch.no_grad()"
        )


def _refuse_second_derivatives(_: nn.Module, __: Any, output: Any) -> None:
    """Refuse ``create_graph=True``: FSDP2 releases the parameters that a second backward pass needs."""

    def refuse(_: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True (a gradient penalty or second derivative) needs parameters that zero=3 has "
                "released; use zero=0, 1 or 2"
            )

    for x in tensors_in(output):
        if x.requires_grad:
            x.register_hook(refuse)


class _ShardsAsInputs(torch.autograd.Function):
    """Identity whose graph also leads to sharded parameters, which FSDP2 leaves out of it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *shards: Tensor) -> Tensor:
        ctx.made_by, ctx.count = output.grad_fn, len(shards)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Refuse a pass that only asks for gradients of shards, such as ``torch.autograd.grad(loss, parameters)``."""
        if not torch._C._will_engine_execute_node(ctx.made_by):
            raise ConfigError(
                "torch.autograd.grad() gives no gradients of parameters that zero=3 shards: call backward(), which "
                "leaves them in .grad, or use zero=0, 1 or 2"
            )
        return (gradient, *[None] * ctx.count)


def _lead_to_shards(shards: Sequence[nn.Parameter], _: nn.Module, __: Any, output: Any) -> Any:
    """Make :func:`torch.autograd.grad` of a module's output refuse its shards by name."""
    # Hooks of a parameter would run once more, without a gradient.
    own = [
        p for p in shards if p.requires_grad and not p._backward_hooks and not p._post_accumulate_grad_hooks
    ]

    def lead(x: Tensor) -> Tensor:
        return _ShardsAsInputs.apply(x, *own) if x.grad_fn is not None else x

    return tree_map_only(Tensor, lead, output)


def _shard_group(mesh: ParallelMesh) -> Group:
    """Return the ranks over which each parameter is cut."""
    return mesh.group("dp_shard" if mesh.plan.dp_shard else "replicas")


def _shard_mesh(mesh: ParallelMesh) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards, in two dimensions where groups of ranks hold the same shards."""
    shards = _shard_group(mesh).process_group
    assert shards is not None
    if not mesh.plan.dp_shard or mesh.plan.dp_shard == mesh.plan.dp:
        return DeviceMesh.from_group(shards, mesh.device_type)
    assert mesh.device_mesh is not None
    return mesh.device_mesh["dp_replicate", "dp_shard"]


def _give_memory_to_shards(module: nn.Module, mesh: ParallelMesh) -> None:
    """Give the shards of a model without data memory, as ``to_empty()`` does; tied ones stay tied."""
    if not any(p.is_meta for p in module.parameters()):
        return
    tied = tied_names(module)
    module._apply(lambda x: torch.empty_like(x, device=mesh.device_type) if x.is_meta else x)
    tie(module, tied)


class FullySharded(ReducedGradients):
    """Stage 3: each rank holds a shard of parameters, gradients and optimizer states.

    FSDP2 sums gradients over all ranks that hold the same parameters while the backward pass runs. So the gradient of
    one sample is not available where ranks have different samples. The module's parameters become DTensors.

    The module is sharded in place, and computes by the policy. ``shard_groups`` has, by name, the groups over which
    tensor parallel layers cut a parameter.
    """

    stage = 3

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        shard_groups: Mapping[str, Sequence[Group]],
        policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        self.mesh = mesh
        self._group = mesh.group("replicas")
        self._calls: UnitCalls | None = None
        if self._group.process_group is not None:
            ranks = _shard_mesh(mesh)
            alone = gathered_alone(module, listed_modules(module))
            check_units(module, alone)
            for unit in (*alone, module):
                if isinstance(unit, FSDPModule):
                    continue
                try:
                    fully_shard(unit, mesh=ranks, mp_policy=policy or MixedPrecisionPolicy())
                except (ValueError, TypeError, AssertionError, RuntimeError) as error:
                    raise ConfigError(
                        f"zero=3 cannot shard {type(unit).__name__} on rank {self._group.rank} of {self._group.name} "
                        f"({type(error).__name__}: {first_line(error)}): use zero=2"
                    ) from error
            _give_memory_to_shards(module, mesh)
            self._calls = UnitCalls(module, alone, self._group)
            UnitWeights(module, alone)
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    # Gradients are summed, as in the other stages; callers scale the loss for a mean.
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)
            module.register_forward_pre_hook(_refuse_inference_mode, prepend=True)
            module.register_forward_hook(_refuse_second_derivatives)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if self._group.size > 1:
            lead = partial(_lead_to_shards, list(parameters.values()))
            # Before the hooks that FSDP2 and a plan put on outputs, whose order counts.
            module.register_forward_hook(torch.compiler.disable(lead), prepend=True)
        cut = {name: [*shard_groups.get(name, ()), _shard_group(mesh)] for name in parameters}
        super().__init__(parameters, ShardNorms(cut, mesh.group("pp")))
        # Includes frozen parameters and those with a second name.
        self._held = dict(module.named_parameters(remove_duplicate=False))
        self._used: list[list[bool]] = []
        # Norms of DTensors cover all replicas, but not tensor parallel or pipeline ranks.
        self._others = [mesh.group(name) for name in ("tp", "pp") if mesh.group(name).size > 1]

    def all_gather_params(self) -> None:
        """Do nothing: FSDP2 gathers parameters for use."""

    def wholes(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for name, x in values.items():
            yield {name: whole(x)}

    def part(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's shards as DTensors; buffers stay whole on every rank."""
        shards: dict[str, Tensor] = {}
        for name, x in values.items():
            like = self._held.get(name)
            if isinstance(like, DTensor):
                x = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
            shards[name] = x
        return shards

    def overlapped(self, *, data: bool = False) -> AbstractContextManager[None]:
        """Return an empty context: FSDP2 sums gradients while the backward pass runs."""
        return nullcontext()

    def take_sample(self) -> list[Tensor]:
        """Return this rank's shards of the gradient, summed over all ranks, and set ``grad`` to None."""
        gradients = []
        self._used.append([parameter.grad is not None for parameter in self.parameters.values()])
        for parameter in self.parameters.values():
            gradient, parameter.grad = parameter.grad, None
            gradients.append(local(torch.zeros_like(parameter) if gradient is None else gradient).detach())
        return gradients

    def check_parameter(self, name: str, parameter: nn.Parameter) -> None:
        if self._group.process_group is not None and parameter._backward_hooks:
            raise ConfigError(
                f"{name} has a hook of register_hook(), which zero=3 does not call: use "
                "register_post_accumulate_grad_hook(), which gets this rank's shard, or zero=0, 1 or 2"
            )
        if isinstance(self.parameters[name], DTensor) and not isinstance(parameter, DTensor):
            raise ConfigError(
                f"{name} is still gathered: an error ended an earlier backward pass, or forward() returned its result "
                "in something other than tensors, tuples, lists, dicts and dataclasses, and zero=3 cannot continue. "
                "Return one of these, continue from the last checkpoint in a new run, or use zero=2"
            )
        super().check_parameter(name, parameter)

    def set_by_user(self) -> dict[str, Tensor]:
        reduced = {name: gradient() for name, (gradient, _) in (self._finished or {}).items()}
        new = [n for n, p in self.parameters.items() if p.grad is not None and p.grad is not reduced.get(n)]
        # torch.autograd.grad() gives gradients of gathered parameters, which are not those of the optimizer.
        is_empty = not reduced and any(p.requires_grad for p in self.parameters.values())
        if self._group.size > 1 and (new or is_empty):
            raise ConfigError(
                f"the last backward pass left no gradient of {(new or self.names)[0]}, and zero=3 sums gradients over "
                "the ranks in backward() alone: call backward() instead of torch.autograd.grad(), or use zero=0, 1 or 2"
            )
        return {}

    def check_step(self) -> None:
        if self._finished is None:
            if self._group.size > 1 or self._aside:
                raise ConfigError(BEFORE_REDUCTION)
            return
        if not self._others:
            return
        self._check_kept(self._finished)
        # Operators on DTensors count no versions. So the norms' ratio is compared: GradScaler scales by one
        # factor on all ranks.
        factor = self._local_square() / self._finished_square
        for group in self._others:
            of_all = async_ops.gather_numbers(factor, group)
            if bool(((of_all - factor).abs() > 1e-6 * factor).any()):
                raise ConfigError(changed_message("the parameters"))

    def accept_gradients(self) -> None:
        super().accept_gradients()
        if self._others:
            self._finished_square = self._local_square()

    def _local_square(self) -> Tensor:
        """Return the squared norm of this rank's shards, a scalar above zero."""
        held = [local(p.grad) for p in self.parameters.values() if p.grad is not None]
        norms = torch._foreach_norm([x for x in held if x.numel()]) if held else ()
        least = torch.full((), 1e-300, dtype=torch.float64, device=self._device())
        return sum((x.double().square() for x in norms), least)

    def _device(self) -> torch.device:
        return next((local(p).device for p in self.parameters.values()), torch.device("cpu"))

    def forget_gradients(self) -> None:
        super().forget_gradients()
        self._used = []

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(local(parameter)) for parameter in self.parameters.values()]

    def squared_norm(self, buffers: Sequence[Tensor]) -> Tensor:
        return self._norms.total(dict(zip(self.names, buffers, strict=True)))

    def _finish(self, buffers: Sequence[Tensor]) -> None:
        if self._calls is not None:
            self._calls.end_step()
        used, self._used = self._used, []
        history = zlib.crc32(repr(used).encode())
        if not self._group.is_alone:
            of_all = async_ops.gather_numbers(torch.tensor(history, device=self._device()), self._group)
            if bool((of_all != history).any()):
                raise ConfigError(
                    "under zero=3 all ranks have to use the same parameters in each backward pass, and they used "
                    "different ones; use zero=2"
                )
        present = [any(of_one) for of_one in zip(*used, strict=True)] or [True] * len(self.names)
        for parameter, gradient, is_used in zip(self.parameters.values(), buffers, present, strict=True):
            if not is_used:
                parameter.grad = None
                continue
            if isinstance(parameter, DTensor):
                gradient = DTensor.from_local(
                    gradient,
                    parameter.device_mesh,
                    parameter.placements,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            parameter.grad = gradient
