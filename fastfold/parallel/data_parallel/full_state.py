"""Conversion between this rank's tensors and those of the plain, whole model.

Checkpoints hold the tensors of the model before :func:`fastfold.parallel.parallelize`, whatever the plan. So a
checkpoint of any plan can be loaded under any other. :meth:`FullStateDict.cut` keeps no whole tensor on any rank:
``torch.distributed.checkpoint`` writes and reads its slices for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from fastfold.parallel.comm import async_ops
from fastfold.parallel.data_parallel.sharded_norm import whole
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import below, is_inside, joined, replace_at, shallow_copy

ShardFn = Callable[[nn.Module, ParallelMesh], nn.Module]
"""Function that creates this rank's part of a plain layer; its result has a method ``to_plain``."""

T = TypeVar("T")

_LEAST = 4096  # minimum number of elements of a tensor that is cut


class FullStateDict:
    """Converter of tensors laid out like this rank's parameters to plain ones, and back.

    Args:
        module: This rank's module, with its tensor parallel layers.
        mesh: The ranks.
        shard_fns: Function that created each tensor parallel layer, by the layer's path in the module.
        shapes: Shape and dtype of every plain parameter and buffer, of all pipeline stages.
        renamed: Prefixes of names in this stage's module, to their prefixes in the plain model.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        shard_fns: Mapping[str, ShardFn],
        shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
        renamed: Mapping[str, str],
    ) -> None:
        self._module, self.mesh = module, mesh
        self._shard_fns, self._shapes = dict(shard_fns), dict(shapes)
        # This stage's names in the plain model, to those in its module, and back.
        self._own_names = {
            name: joined(here, name[len(there) :].removeprefix("."))
            for name in shapes
            for here, there in (renamed or {"": ""}).items()
            if is_inside(name, there)
        }
        self._plain_names = {here: there for there, here in self._own_names.items()}

    @property
    def names(self) -> list[str]:
        """Names of the plain model's parameters and buffers."""
        return list(self._shapes)

    def cut_together(self, names: Iterable[str]) -> list[list[str]]:
        """Group this rank's names for :meth:`plain`: those of a cut layer together, others alone."""
        groups: dict[str, list[str]] = {}
        for name in names:
            layer = self._layer_of(name)
            groups.setdefault(name if layer is None else f"{layer}.", []).append(name)
        return list(groups.values())

    def joined_together(self, names: Iterable[str]) -> list[list[str]]:
        """Group this stage's plain names for :meth:`shard`: those of a cut layer together, others alone."""
        own = {self._own_names[name]: name for name in names if name in self._own_names}
        return [[own[name] for name in group] for group in self.cut_together(own)]

    def plain(self, values: Mapping[str, Tensor], *, everywhere: bool = True) -> dict[str, Tensor]:
        """Return the plain model's tensors by its names (a collective), from those of this rank.

        With pipeline stages, ``everywhere`` returns all stages' tensors on every rank, otherwise this stage's only.
        Tensors that are not cut share the memory of ``values``.
        """
        tensors = dict(values)
        for path in self._shard_fns:
            own = _pop_below(path, tensors)
            if own:
                plain = _to_plain(self._layer_with(path, own))
                tensors |= {joined(path, name): p.detach() for name, p in plain.named_parameters()}
        tensors = {self._plain_names.get(name, name): x.detach() for name, x in tensors.items()}
        return dict(self.one_by_one(tensors)) if everywhere else tensors

    def one_by_one(self, own: Mapping[str, Tensor], *, scalars: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all pipeline stages, one at a time, on every rank (a collective).

        ``own`` has those of this stage. All names are the plain model's. A DTensor is gathered at its turn. ``scalars``
        says that each tensor is one number for a parameter.
        """
        group = self.mesh.group("pp")
        if group.size == 1:
            yield from ((name, whole(x)) for name, x in own.items())
            return
        names = list(self._shapes)
        held = torch.tensor([name in own for name in names], dtype=torch.uint8)
        device = next(iter(own.values())).device if own else torch.device("cpu")
        of_all = async_ops.gather_numbers(held.to(device), group)
        for number, name in enumerate(names):
            holders = of_all[:, number].nonzero()
            if len(holders):
                shape, dtype = (torch.Size(), torch.float32) if scalars else self._shapes[name]
                own_tensor = (
                    whole(own[name]) if name in own else torch.empty(shape, dtype=dtype, device=device)
                )
                pending = async_ops.start_broadcast(own_tensor, int(holders[0]), group)
                del own_tensor
                # A tensor is released before the next one is gathered.
                yield name, pending.wait()

    def cut(self, names: Sequence[str], parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return this rank's slices of the plain tensors of its pipeline stage as DTensors (a collective).

        The result has the plain model's names. ``names`` are this rank's names of all tensors in ``parts``. These come
        in the shapes of this rank's parameters, some at a time, in the same order on all ranks of a stage, and are
        released before the next ones are requested. Small tensors stay whole. Nothing is cut where every rank has all
        parameters and states anyway.
        """
        missing = {name: group for group in self.cut_together(names) for name in group}
        waiting: dict[str, Tensor] = {}
        slices: dict[str, Tensor] = {}
        for part in parts:
            waiting |= part
            for name in part:
                group = missing[name]
                if all(each in waiting for each in group):
                    plain = self.plain({each: waiting.pop(each) for each in group}, everywhere=False)
                    slices |= {each: self._slice(x) for each, x in plain.items()}
                    del plain
        return slices

    def _slice(self, x: Tensor) -> Tensor:
        """Slice a tensor that all ranks of the stage have along its longest dimension."""
        plan = self.mesh.plan
        if x.numel() < _LEAST or (plan.tp == 1 and not plan.zero):
            return x
        ranks = self.mesh.stage()
        if ranks is None:
            return x
        longest = max(range(x.dim()), key=lambda dim: x.shape[dim])
        return distribute_tensor(x, ranks, [Shard(longest)], src_data_rank=None)

    def shard(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of plain tensors, without those of other stages (a collective).

        Values are by the plain model's names.
        """
        names = self._own_names
        tensors = {names[name]: x for name, x in values.items() if name in names}
        for path, shard_fn in self._shard_fns.items():
            own = _pop_below(path, tensors)
            if own:
                plain = _to_plain(self._layer_with(path, {}))
                with torch.no_grad():
                    for name, parameter in plain.named_parameters():
                        if name in own:
                            parameter.copy_(own[name])
                layer = shard_fn(plain, self.mesh)
                tensors |= {joined(path, name): p.detach() for name, p in layer.named_parameters()}
        return tensors

    def plain_scalars(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one number per parameter as :meth:`plain` does (a collective).

        A parameter of a plain layer that several of the cut layer make gets the number of the first.
        """
        numbers = dict(values)
        for path in self._shard_fns:
            own = _pop_below(path, numbers)
            if own:
                layer = self._layer_with(path, {})
                choices = _number_parameters(layer, own)
                numbers |= {joined(path, name): x for name, x in _read_numbers(_to_plain(layer), choices)}
        numbers = {self._plain_names.get(name, name): x for name, x in numbers.items()}
        return dict(self.one_by_one(numbers, scalars=True))

    def shard_scalars(self, values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Convert one number per parameter as :meth:`shard` does (a collective).

        Values are by the plain model's names; the result has those of ``names``, which are this rank's.
        """
        numbers = {own: values[plain] for plain, own in self._own_names.items() if plain in values}
        for path, shard_fn in self._shard_fns.items():
            held = _pop_below(path, numbers)
            if held:
                plain = _to_plain(self._layer_with(path, {}))
                choices = _number_parameters(plain, held)
                layer = shard_fn(plain, self.mesh)
                numbers |= {joined(path, name): x for name, x in _read_numbers(layer, choices)}
        return {name: numbers[name] for name in names if name in numbers}

    def _layer_of(self, name: str) -> str | None:
        """Return the path of the cut layer with a tensor of this rank's name, or None."""
        return next((path for path in self._shard_fns if is_inside(name, path)), None)

    def _layer_with(self, path: str, values: Mapping[str, Tensor]) -> nn.Module:
        layer = shallow_copy(self._module.get_submodule(path))
        for name, parameter in list(layer.named_parameters()):
            # The old parameter may be a shard of the new one, so it is not written.
            x = values.get(name, torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
            replace_at(layer, name, nn.Parameter(x, requires_grad=False))
        return layer


def _to_plain(layer: nn.Module) -> nn.Module:
    plain = layer.to_plain()  # type: ignore[operator]
    assert isinstance(plain, nn.Module)
    return plain


@torch.no_grad()
def _number_parameters(layer: nn.Module, values: Mapping[str, Tensor]) -> list[Tensor]:
    """Fill each parameter of a layer with the place of its value among the results, counted from 1; zero for none."""
    choices: list[Tensor] = []
    for name, parameter in layer.named_parameters():
        place = 0
        if name in values:
            choices.append(values[name])
            place = len(choices)
        parameter.fill_(place)
    return choices


def _read_numbers(layer: nn.Module, choices: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the values of parameters by name, after :func:`_number_parameters` of the layer that they are made of."""
    for name, parameter in layer.named_parameters():
        place = int(parameter.detach().flatten()[0]) if parameter.numel() else 1
        if place:
            yield name, choices[place - 1]


def _pop_below(path: str, values: dict[str, T]) -> dict[str, T]:
    """Remove the values of a layer; return them by their names inside it."""
    own = below(path, values)
    for name in own:
        del values[joined(path, name)]
    return own
