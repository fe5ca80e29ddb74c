"""Between this rank's part of a model and the plain, whole model's names and shapes.

Checkpoints are plain: whatever the plan, they hold the tensors of the model as it was before
:func:`fastfold.parallel.parallelize`, so any plan reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from fastfold.parallel.comm import async_ops
from fastfold.parallel.data_parallel.sharded_norm import whole
from fastfold.parallel.mesh import ParallelMesh

ShardFn = Callable[[nn.Module, ParallelMesh], nn.Module]
"""Makes this rank's part of a plain layer; what it makes has a method ``to_plain``."""

T = TypeVar("T")


class FullStateDict:
    """Turns tensors that lie like this rank's parameters into plain ones, and back.

    Args:
        module: This rank's module, tensor parallel layers in place.
        mesh: The ranks.
        shard_fns: What each tensor parallel layer was made by, by its path in the module.
        shapes: Shape and dtype of every plain parameter and buffer, of all pipeline stages.
        renamed: Where this stage's module has other names than the plain model: its prefix to the plain one.
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
        self._shard_fns, self._shapes, self._renamed = dict(shard_fns), dict(shapes), dict(renamed)

    @property
    def names(self) -> list[str]:
        """Those of the plain model's parameters and buffers."""
        return list(self._shapes)

    def cut_together(self, names: Iterable[str]) -> list[list[str]]:
        """This rank's names in groups, each to be given to :meth:`plain` at once: a cut layer's, and others alone."""
        groups: dict[str, list[str]] = {}
        for name in names:
            layer = self._layer_of(name)
            groups.setdefault(name if layer is None else f"{layer}.", []).append(name)
        return list(groups.values())

    def joined_together(self, names: Iterable[str]) -> list[list[str]]:
        """The plain model's names, those of this stage, in groups, each to be given to :meth:`shard` at once."""
        own = {self._own_names[name]: name for name in names if name in self._own_names}
        return [[own[name] for name in group] for group in self.cut_together(own)]

    def plain(self, values: Mapping[str, Tensor], *, everywhere: bool = True) -> dict[str, Tensor]:
        """The plain model's tensors (a collective).

        Args:
            values: By this rank's names, in the shapes of its parameters.
            everywhere: With pipeline stages: all stages' tensors on every rank; otherwise this stage's.

        Returns:
            By the plain model's names. Tensors that are not cut share the memory of those given.
        """
        found = dict(values)
        for path in self._shard_fns:
            own = _below(path, found)
            if own:
                for name in own:
                    del found[_joined(path, name)]
                plain = _to_plain(self._layer_with(path, own))
                found |= {_joined(path, name): p.detach() for name, p in plain.named_parameters()}
        found = {self._plain_name(name): x.detach() for name, x in found.items()}
        return dict(self.one_by_one(found)) if everywhere else found

    def one_by_one(self, own: Mapping[str, Tensor], *, scalars: bool = False) -> Iterator[tuple[str, Tensor]]:
        """The tensors of all pipeline stages, one after the other, on every rank (a collective).

        Args:
            own: Those of this stage, by the plain model's names. Of a DTensor the whole is made when its turn comes.
            scalars: They are one number of each parameter.

        Yields:
            The plain model's names with their tensors.
        """
        group = self.mesh.group("pp")
        if group.size == 1:
            yield from ((name, whole(x)) for name, x in own.items())
            return
        names = list(self._shapes)
        held = torch.tensor([name in own for name in names], dtype=torch.uint8)
        device = next(iter(own.values())).device if own else torch.device("cpu")
        of_all = async_ops.start_gather(held[None].to(device), 0, group, [1] * group.size).wait()
        for number, name in enumerate(names):
            holders = of_all[:, number].nonzero()
            if len(holders):
                shape, dtype = (torch.Size(), torch.float32) if scalars else self._shapes[name]
                # Nothing here keeps a tensor while the next is made.
                yield (
                    name,
                    async_ops.start_broadcast(
                        whole(own[name]) if name in own else torch.empty(shape, dtype=dtype, device=device),
                        int(holders[0]),
                        group,
                    ).wait(),
                )

    def shard(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's tensors of plain ones; those of other stages are left out (a collective).

        Args:
            values: By the plain model's names.
        """
        names = self._own_names
        found = {names[name]: x for name, x in values.items() if name in names}
        for path, shard_fn in self._shard_fns.items():
            own = _below(path, found)
            if own:
                for name in own:
                    del found[_joined(path, name)]
                plain = _to_plain(self._layer_with(path, {}))
                with torch.no_grad():
                    for name, parameter in plain.named_parameters():
                        if name in own:
                            parameter.copy_(own[name])
                layer = shard_fn(plain, self.mesh)
                found |= {_joined(path, name): p.detach() for name, p in layer.named_parameters()}
        return found

    def plain_scalars(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`plain`, for one number of each parameter; those of a cut layer get its first."""
        found = dict(values)
        for path in self._shard_fns:
            own = _below(path, found)
            if own:
                for name in own:
                    del found[_joined(path, name)]
                first = next(iter(own.values()))
                found |= {name: first for name in self._plain_names_of_stage() if _below(path, {name: first})}
        found = {self._plain_name(name): x for name, x in found.items()}
        return dict(self.one_by_one(found, scalars=True))

    def shard_scalars(self, values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """As :meth:`shard`, for one number of each parameter.

        Args:
            values: By the plain model's names.
            names: This rank's.
        """
        held = {
            name: values[self._plain_name(name)]
            for name in self._plain_names_of_stage()
            if self._plain_name(name) in values
        }
        found = {}
        for name in names:
            layer = self._layer_of(name)
            alike = [
                x
                for other, x in held.items()
                if (other == name if layer is None else _below(layer, {other: x}))
            ]
            if alike:
                found[name] = alike[0]
        return found

    @cached_property
    def _own_names(self) -> dict[str, str]:
        """The plain model's names of what this stage has, to those in its module."""
        return {self._plain_name(name): name for name in self._plain_names_of_stage()}

    def _layer_of(self, name: str) -> str | None:
        """Path of the cut layer that a tensor is in, by this rank's name."""
        return next((path for path in self._shard_fns if not path or name.startswith(f"{path}.")), None)

    def _plain_names_of_stage(self) -> list[str]:
        """Names of this stage's plain parameters and buffers, still with the stage's prefixes."""
        found = []
        inverse = {there: here for here, there in self._renamed.items()}
        for name in self._shapes:
            for there, here in inverse.items():
                if name == there or name.startswith(f"{there}."):
                    found.append(here + name[len(there) :])
            if not inverse:
                found.append(name)
        return found

    def _plain_name(self, name: str) -> str:
        for here, there in self._renamed.items():
            if name == here or name.startswith(f"{here}."):
                return there + name[len(here) :]
        return name

    def _layer_with(self, path: str, values: Mapping[str, Tensor]) -> nn.Module:
        layer = _shallow(self._module.get_submodule(path))
        for name, parameter in list(layer.named_parameters()):
            # Not into the old parameter: that may be a shard of it.
            x = values.get(name, torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
            owner, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(owner), attribute, nn.Parameter(x, requires_grad=False))
        return layer


def _to_plain(layer: nn.Module) -> nn.Module:
    """The plain layer of one that a :data:`ShardFn` made (a collective)."""
    found = layer.to_plain()  # type: ignore[operator]
    assert isinstance(found, nn.Module)
    return found


def _shallow(module: nn.Module) -> nn.Module:
    """The same module with parameters that may be replaced; nothing of it is copied."""
    found = object.__new__(type(module))  # not by FSDP2's class, which would call __init__
    found.__dict__ = dict(module.__dict__)
    for registry in ("_parameters", "_buffers"):
        found.__dict__[registry] = dict(module.__dict__[registry])
    found._modules = {name: child and _shallow(child) for name, child in module._modules.items()}
    return found


def _below(path: str, values: Mapping[str, T]) -> dict[str, T]:
    """The values of a layer, by their names in it."""
    if not path:
        return dict(values)
    return {name[len(path) + 1 :]: x for name, x in values.items() if name.startswith(f"{path}.")}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
