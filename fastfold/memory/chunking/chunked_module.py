"""Module that runs a chunked program, and a printable summary of its regions and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fastfold.errors import ConfigError
from fastfold.memory.chunking.graph import ChunkLayout, Graph
from fastfold.memory.chunking.program import Program
from fastfold.memory.chunking.steps import Loop, Step


@dataclass(frozen=True)
class Region:
    """Part of a module that runs in chunks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.memory import autochunk
        >>> module = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))
        >>> (region,) = autochunk(module, torch.randn(512, 8), "256KiB").plan.regions
        >>> print(region)
        3 operations, aten::linear to aten::linear [512, 8]: dimension 0 in 5 chunks of 103
    """

    first: str  #: Operator of its first operation
    last: str  #: Operator of its last operation
    operations: int  #: Number of operations
    shape: tuple[int, ...]  #: Shape of its last result
    dim: int  #: Chunked dimension of that result
    chunks: int  #: Number of chunks
    size: int  #: Length of a chunk along the dimension; the last one may be shorter
    in_place: bool  #: True if results overwrite values that are not used again

    def __str__(self) -> str:
        place = ", in place" if self.in_place else ""
        return (
            f"{self.operations} operations, {self.first} to {self.last} {list(self.shape)}: dimension {self.dim} in "
            f"{self.chunks} chunks of {self.size}{place}"
        )


@dataclass(frozen=True)
class ChunkPlan:
    """Chunked regions of a module, and its peak memory.

    Bytes count inputs, results and intermediate values; parameters and buffers come on top.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.memory import autochunk
        >>> module = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8))
        >>> plan = autochunk(module, torch.randn(512, 8), "256KiB").plan
        >>> plan.peak <= plan.budget, plan.peak_before, len(plan.regions)
        (True, 1064960, 1)
    """

    budget: int  #: Budget in bytes
    regions: tuple[Region, ...]  #: Regions that run in chunks
    peak_before: int  #: Peak in bytes without chunks, measured on the simulated device
    peak: int  #: Peak in bytes with chunks, measured on the simulated device
    estimated: int  #: Estimate of ``peak`` by the search
    parameters: int  #: Bytes of parameters, buffers and constants

    def __str__(self) -> str:
        lines = [
            f"peak {self.peak:,} bytes of a budget of {self.budget:,}, {self.peak_before:,} without chunks (measured "
            f"on the simulated device; estimated {self.estimated:,}); parameters take {self.parameters:,} more",
            *(f"- {region}" for region in self.regions),
        ]
        return "\n".join(lines)


def regions_of(graph: Graph, steps: Sequence[Step]) -> tuple[Region, ...]:
    """Return a summary of each loop."""
    return tuple(
        Region(
            first=graph.operation(step.members[0]).name,
            last=graph.operation(step.members[-1]).name,
            operations=len(step.members),
            shape=graph.layout(step.members[-1]).shape,
            dim=step.dims[step.members[-1]],
            chunks=-(-step.length // step.size),
            size=step.size,
            in_place=bool(step.reuse),
        )
        for step in steps
        if isinstance(step, Loop)
    )


class ChunkedModule(nn.Module):
    """Chunked form of a module, returned by :func:`fastfold.memory.autochunk`.

    Inputs and outputs are those of the module. Its parameters are read at each call, so weights can be loaded later.
    Numbers that the module keeps as plain attributes, such as a scale, are those at the time of the export. With
    ``donate`` inputs may be overwritten.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fastfold.memory import autochunk
        >>> module, x = nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)), torch.randn(512, 8)
        >>> chunked = autochunk(module, x, "256KiB")
        >>> _ = nn.init.zeros_(module[2].weight)  # the parameters are read at each call
        >>> with torch.no_grad():
        ...     torch.equal(chunked(x), module[2].bias.expand(512, 8))
        True
    """

    def __init__(self, module: nn.Module, program: Program, plan: ChunkPlan, *, donate: bool) -> None:
        super().__init__()
        self.module, self.plan = module, plan
        self._program, self._donate = program, donate
        self._modes = [inner.training for inner in module.modules()]
        for number, constant in enumerate(program.graph.constants.values()):
            self.register_buffer(f"constant_{number}", constant, persistent=False)
        self._constants = {name: f"constant_{i}" for i, name in enumerate(program.graph.constants)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's result, equal within rounding.

        The arguments are like the example's: equal shapes, dtypes and devices, and equal values of those that are not
        tensors.

        Raises:
            ConfigError: Gradients are recorded, the module's mode, dtype or device has changed, or the arguments differ
                from the example.
        """
        inputs = self._inputs(args, kwargs)
        sources = [self._source(number, inputs) for number in range(len(self._program.graph.sources))]
        self._check(sources, inputs)
        with torch.no_grad():
            flat = self._program.run(sources)
        return tree_unflatten(flat, self._program.graph.out_spec)

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        graph = self._program.graph
        _, by_name = graph.in_spec.unflatten(list(graph.inputs))
        if kwargs.keys() == by_name.keys():
            kwargs = {name: kwargs[name] for name in by_name}
        inputs, spec = tree_flatten((args, kwargs))
        if spec != graph.in_spec:
            raise ConfigError(
                "the arguments differ from the example of autochunk: pass the same number of positional arguments and "
                f"these by name: {', '.join(by_name) or 'none'}"
            )
        names = {source.position: source.name for source in graph.sources}
        for position, (value, expected) in enumerate(zip(inputs, graph.inputs, strict=True)):
            name = names.get(position, f"argument {position}")
            if isinstance(expected, ChunkLayout):
                self._check_tensor(name, value, expected)
            elif value is not expected and value != expected:
                raise ConfigError(
                    f"{name} is {value!r}, and was {expected!r} in the example of autochunk, on which its plan "
                    "depends: call autochunk again"
                )
        return inputs

    def _check_tensor(self, name: str, value: Any, expected: ChunkLayout) -> None:
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"{name}: expected a tensor, as in the example of autochunk, found {type(value).__name__}"
            )
        layout = ChunkLayout.of(value)
        if layout.kind != expected.kind or (self._donate and layout != expected):
            raise ConfigError(
                f"{name} is {list(layout.shape)} {layout.dtype} on {layout.device} with strides {list(layout.stride)}, "
                f"and was {list(expected.shape)} {expected.dtype} on {expected.device} with strides "
                f"{list(expected.stride)} in the example of autochunk: call autochunk again with such an example"
            )

    def _source(self, number: int, inputs: list[Any]) -> Any:
        source = self._program.graph.sources[number]
        if source.kind == "input":
            return inputs[source.position]
        if source.name in self._constants:
            return getattr(self, self._constants[source.name])
        if source.kind == "parameter":
            return self.module.get_parameter(source.name)
        return self.module.get_buffer(source.name)

    def _check(self, sources: list[Any], inputs: list[Any]) -> None:
        graph = self._program.graph
        tensors = [value for value in (*sources, *inputs) if isinstance(value, Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ConfigError(
                "a module made by autochunk does not record gradients: call it inside torch.no_grad(), and train the "
                "original module"
            )
        if any(torch.is_autocast_enabled(kind) for kind in {tensor.device.type for tensor in tensors}):
            raise ConfigError(
                "autochunk does not support autocast: convert the module and its inputs instead"
            )
        if [inner.training for inner in self.module.modules()] != self._modes:
            raise ConfigError(
                "the mode of the module, train() or eval(), has changed since autochunk was called: call it again"
            )
        for number, source in enumerate(graph.sources):
            if source.kind not in ("parameter", "buffer") or sources[number] is None:
                continue
            if ChunkLayout.of(sources[number]).kind != graph.layout(number).kind:
                raise ConfigError(
                    f"the shape, dtype or device of {source.name} has changed since autochunk was called: call it again"
                )
        memories = [
            value.untyped_storage().data_ptr()
            for value in inputs
            if self._donate and isinstance(value, Tensor) and value.numel()
        ]
        if len(set(memories)) < len(memories):
            raise ConfigError("two inputs share memory, so neither can be overwritten: leave out donate=True")
