"""Start of a model without data: parameters are made and cut block by block, so that no rank holds the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.buckets import broadcast_tensors
from fastfold.parallel.data_parallel.units import listed_modules
from fastfold.parallel.mesh import ParallelMesh
from fastfold.utils.module_structure import joined

Initialize = Callable[[nn.Module], None]
"""Function that fills parameters and buffers of one module, as for :meth:`torch.nn.Module.apply`."""


def is_without_data(model: nn.Module) -> bool:
    """Return True if a model's parameters are on the device ``meta``.

    Raises:
        ConfigError: Only some of them are.
    """
    kinds = {p.is_meta: name for name, p in model.named_parameters()}
    if len(kinds) == 2:
        raise ConfigError(
            f"{kinds[True]} has no data (device meta) and {kinds[False]} has: make both in one way"
        )
    return True in kinds


def start_alike(model: nn.Module, mesh: ParallelMesh, initialize: Initialize | None) -> MetaStart | None:
    """Give every rank the first rank's weights, or return what will fill a model without data.

    Raises:
        ConfigError: Only some parameters have data.
    """
    if is_without_data(model) and initialize is not None:
        return MetaStart(model, initialize, torch.device(mesh.device_type))
    groups = [group for axis in ("pp", "dp", "sp", "dap", "tp") if (group := mesh.group(axis)).size > 1]
    for module in model.modules() if groups else ():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():  # an expanded element, which cannot be copied into
                setattr(module, name, buffer.contiguous())
    for group in groups:
        broadcast_tensors((*model.parameters(), *model.buffers()), group)
    return None


class MetaStart:
    """Values of a model without data, made in the order of ``model.apply(initialize)``.

    Args:
        model: The plain model on the device ``meta``, before a plan is applied.
        initialize: Fills one module; all ranks draw the same numbers.
        device: Device of the parameters.
    """

    def __init__(self, model: nn.Module, initialize: Initialize, device: torch.device) -> None:
        self._plain, self._initialize, self._device = copy.deepcopy(model), initialize, device
        self._modules = dict(model.named_modules())

    def fill(self, parallel: nn.Module) -> None:
        """Load all values into the model under its plan, some at a time.

        That draws no numbers of the initialisation.

        Raises:
            ConfigError: ``initialize`` left a tensor without values.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        for values in self.values():
            with torch.random.fork_rng(devices):
                parallel.load_state_dict(values, strict=False)

    def values(self) -> Iterator[dict[str, Tensor]]:
        """Yield the parameters of each block, and last those outside of blocks, by the plain model's names.

        Buffers are set in the model itself.

        Raises:
            ConfigError: ``initialize`` left a tensor without values.
        """
        listed = listed_modules(self._plain)
        within = {part for block in listed for part in block.modules() if part is not block}
        blocks = {block for block in listed if block not in within}
        inside = {part for block in blocks for part in block.modules()}
        paths = {module: path for path, module in self._plain.named_modules()}
        rest = [module for module in paths if module not in inside]
        self._give_memory(rest)
        for module in _children_first(self._plain):
            if module in blocks:
                yield self._block(module, paths)
            elif module not in inside:
                self._initialize(module)
        yield self._take(rest, paths)

    def _block(self, block: nn.Module, paths: Mapping[nn.Module, str]) -> dict[str, Tensor]:
        parts = list(_children_first(block))
        self._give_memory(parts)
        for part in parts:
            self._initialize(part)
        return self._take(parts, paths)

    def _give_memory(self, modules: list[nn.Module]) -> None:
        """Replace tensors without data by ones that no initialisation leaves as they are."""
        made: dict[int, Tensor] = {}
        for module in modules:
            for registry in (module._parameters, module._buffers):
                for name, x in registry.items():
                    if x is not None and x.is_meta:
                        if id(x) not in made:
                            made[id(x)] = self._unset(x)
                        registry[name] = made[id(x)]  # type: ignore[assignment]

    def _unset(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bool:
            raise ConfigError(
                "a buffer of truth values has no data (device meta): create the model's buffers on the host"
            )
        value = torch.nan if x.is_floating_point() or x.is_complex() else torch.iinfo(x.dtype).min
        made = torch.full_like(x, value, device=self._device)
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    @torch.no_grad()
    def _take(self, modules: list[nn.Module], paths: Mapping[nn.Module, str]) -> dict[str, Tensor]:
        """Return the parameters of modules, set their buffers in the model, and release both here."""
        parameters: dict[str, Tensor] = {}
        for module in modules:
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is None:
                    continue
                full = joined(paths[module], name)
                unset = (
                    x.isnan() if x.is_floating_point() or x.is_complex() else x == torch.iinfo(x.dtype).min
                )
                if bool(unset.any()):
                    raise ConfigError(
                        f"initialize= leaves {full} of {type(module).__name__} without values: fill it there, or "
                        "create it outside of torch.device('meta')"
                    )
                if name in module._buffers:
                    self._modules[paths[module]]._buffers[name] = x
                else:
                    parameters[full] = x.detach()
        for module in modules:
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
        return parameters


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's parts in the order of :meth:`torch.nn.Module.apply`."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Give a module's parameters without data memory on a device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                part._parameters[name] = made[id(p)]
