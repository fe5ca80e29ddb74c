"""Checked graph of a module, exported by ``torch.export``.

Nothing in it changes in place: an operation computes its value from earlier values. Operations can therefore run in
another order, in chunks, or twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from fastfold.errors import ConfigError

Path = tuple[str | int, ...]  #: Place of an argument: its name, and the index in a list

# The same operators where the strides of a part do not allow a view.
_REARRANGED = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
_SQUEEZES = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)
# Operators that draw random numbers only if an argument asks for it.
_RANDOM_IF_ASKED = {
    "aten::scaled_dot_product_attention": "dropout_p",
    **dict.fromkeys(("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"), "dropout"),
}


@dataclass(frozen=True)
class Ref:
    """Reference to a value that an operation uses."""

    index: int


@dataclass(frozen=True)
class ChunkLayout:
    """Shape, strides, dtype and device of a tensor that is not computed yet."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> ChunkLayout:
        """Return the layout of a tensor of any shape."""
        return ChunkLayout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Shape, dtype and device, without the strides."""
        return self.shape, self.dtype, self.device

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class GraphSource:
    """Value that exists before the first operation."""

    kind: str  #: ``parameter``, ``buffer``, ``constant`` or ``input``
    name: str
    position: int = -1  #: Place among the inputs; -1 for other kinds


@dataclass(frozen=True)
class GraphOperation:
    """Call of an operator."""

    index: int  #: Number of the value that it computes
    target: Any  #: The operator, or ``operator.getitem`` for one of several results
    arguments: Mapping[str, Any]  #: Arguments by name, with :class:`Ref` for values
    named: frozenset[str]  #: Names of keyword arguments

    @property
    def name(self) -> str:
        """Name such as ``aten::linear``."""
        return "getitem" if self.target is operator.getitem else str(self.target._schema.name)

    def values(self) -> list[tuple[Path, int]]:
        """Return each value that the operation uses, with its place."""
        places: list[tuple[Path, int]] = []
        for name, value in self.arguments.items():
            if isinstance(value, Ref):
                places.append(((name,), value.index))
            elif isinstance(value, list | tuple):
                places += [((name, i), item.index) for i, item in enumerate(value) if isinstance(item, Ref)]
        return places

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Values that the operation uses, each once."""
        return tuple(dict.fromkeys(index for _, index in self.values()))

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Compute the result with other arguments."""
        positional = [value for name, value in arguments.items() if name not in self.named]
        return self.target(*positional, **{name: arguments[name] for name in self.named})


@dataclass(frozen=True)
class Graph:
    """Operations of a module."""

    sources: tuple[GraphSource, ...]  #: First values
    operations: tuple[GraphOperation, ...]  #: Operations that compute the other values, in order
    #: Layout of each value; a tuple if an operation has several results
    layouts: tuple[ChunkLayout | tuple[ChunkLayout, ...], ...]
    outputs: tuple[Any, ...]  #: Flat results: :class:`Ref`, or a constant
    in_spec: TreeSpec  #: Structure of the inputs ``(args, kwargs)``
    out_spec: TreeSpec  #: Structure of the outputs
    inputs: tuple[Any, ...]  #: Flat inputs of the example: layouts, or constants
    constants: Mapping[str, Tensor]  #: Tensors that the module creates, by name

    def operation(self, index: int) -> GraphOperation:
        """Return the operation that computes a value."""
        return self.operations[index - len(self.sources)]

    def layout(self, index: int) -> ChunkLayout:
        """Return the layout of a value; of the first tensor if there are several."""
        layout = self.layouts[index]
        return layout if isinstance(layout, ChunkLayout) else layout[0]

    def output_indices(self) -> set[int]:
        """Return the numbers of the values that are results."""
        return {value.index for value in self.outputs if isinstance(value, Ref)}


def export_graph(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Graph:
    """Export a module.

    The module is in the mode in which it will run, the arguments are examples, and functions of ``decompositions``
    replace operators.

    Raises:
        ConfigError: The module cannot be exported, because it depends on the values of tensors, changes inputs or
            buffers, or draws random numbers.
    """
    try:
        program = torch.export.export(module, args, dict(kwargs), strict=False)
        program = program.run_decompositions(dict(decompositions))
    except Exception as error:  # the type differs between versions of PyTorch
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        name, problem = (
            type(module).__name__,
            f"torch.export cannot export {type(module).__name__}: {first[:300]}",
        )
        if "data-dependent" in str(error):
            problem = (
                f"{name} branches on the values of its tensors ({first[:200]}): call autochunk on its parts without "
                "that branch, or use torch.where"
            )
        raise ConfigError(problem) from error
    return _graph(program, args, kwargs)


def _graph(program: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    signature = program.graph_signature
    for output in signature.output_specs:
        if output.kind is not OutputKind.USER_OUTPUT:
            raise ConfigError(
                f"the module changes {output.target or 'one of its inputs'} in place, so it cannot run in chunks: "
                "return the changed tensor instead, or call eval() if it is a running statistic"
            )
    indices: dict[Any, int] = {}
    sources: list[GraphSource] = []
    operations: list[GraphOperation] = []
    layouts: list[ChunkLayout | tuple[ChunkLayout, ...]] = []
    outputs: tuple[Any, ...] = ()
    names = {spec.arg.name: spec for spec in signature.input_specs}
    position = 0
    for node in program.graph.nodes:
        if node.op == "output":
            outputs = tuple(_refs(value, indices) for value in node.args[0])
            continue
        indices[node] = len(layouts)
        if node.op == "placeholder":
            spec = names[node.name]
            is_input = spec.kind is InputKind.USER_INPUT
            kind = _KINDS.get(spec.kind)
            if kind is None:
                raise ConfigError(f"autochunk does not support inputs such as {node.name} ({spec.kind.name})")
            sources.append(
                GraphSource(kind, node.name if is_input else str(spec.target), position if is_input else -1)
            )
            position += is_input
            value = node.meta.get("val")
            layouts.append(ChunkLayout.of(value) if isinstance(value, Tensor) else ())
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            del indices[node]  # checked by the export, and by the layouts of the inputs
            continue
        operations.append(_operation(node, indices))
        layouts.append(_layouts(node))
    flat, _ = tree_flatten((args, dict(kwargs)))
    inputs = tuple(ChunkLayout.of(value) if isinstance(value, Tensor) else value for value in flat)
    constants = {name: value for name, value in program.constants.items() if isinstance(value, Tensor)}
    spec_in, spec_out = program.call_spec.in_spec, program.call_spec.out_spec
    assert spec_in is not None
    assert spec_out is not None
    return Graph(
        *(tuple(sources), tuple(operations), tuple(layouts), outputs),
        in_spec=spec_in,
        out_spec=spec_out,
        inputs=inputs,
        constants=constants,
    )


_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def _refs(value: Any, indices: Mapping[Any, int]) -> Any:
    return tree_map(lambda leaf: Ref(indices[leaf]) if isinstance(leaf, torch.fx.Node) else leaf, value)


def _operation(node: torch.fx.Node, indices: Mapping[Any, int]) -> GraphOperation:
    target, index = node.target, indices[node]
    if target is operator.getitem:
        arguments = {"self": _refs(node.args[0], indices), "item": node.args[1]}
        return GraphOperation(index, target, arguments, frozenset())
    if not isinstance(target, torch._ops.OpOverload):
        raise ConfigError(
            f"the module contains {target}, whose branches depend on the values of tensors or have settings of their "
            "own: call autochunk on its parts without that"
        )
    target = _REARRANGED.get(target, target)
    schema = target._schema
    arguments, named = {}, set()
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    for argument, value in zip(positional, node.args, strict=False):
        arguments[argument.name] = _refs(value, indices)
    for argument in positional[len(node.args) :]:
        if argument.name not in node.kwargs and argument.has_default_value():
            arguments[argument.name] = argument.default_value
    for name, value in node.kwargs.items():
        arguments[name] = _refs(value, indices)
        named.add(name)
    # An argument after one given by name is given by name too.
    names, seen = [argument.name for argument in positional], False
    for name in names:
        seen = seen or name in named
        if seen and name in arguments:
            named.add(name)
    if target in _SQUEEZES:
        target = torch.ops.aten.squeeze.dims
        arguments["dim"] = _squeezed_dims(node.all_input_nodes[0].meta["val"].shape, arguments.get("dim"))
    operation = GraphOperation(index, target, arguments, frozenset(named))
    rate = _RANDOM_IF_ASKED.get(operation.name)
    has_rate = rate is None or (arguments.get(rate, 0.0) and arguments.get("train", True))
    if torch.Tag.nondeterministic_seeded in target.tags and has_rate:
        raise ConfigError(
            f"the module draws random numbers ({operation.name}), which would differ in chunks: call eval() first, or "
            "pass the random numbers as an input"
        )
    return operation


def _squeezed_dims(shape: Sequence[int], asked: Any) -> list[int]:
    """Return the dimensions of length 1 among those that a squeeze names; None names all.

    In a chunk of length 1 the chunked dimension has that length too, and must stay.
    """
    dims = range(len(shape)) if asked is None else [asked] if isinstance(asked, int) else asked
    return sorted({dim % len(shape) for dim in dims if shape and shape[dim] == 1})


def _layouts(node: torch.fx.Node) -> ChunkLayout | tuple[ChunkLayout, ...]:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return ChunkLayout.of(value)
    if isinstance(value, Sequence) and all(isinstance(item, Tensor) for item in value):
        return tuple(ChunkLayout.of(item) for item in value)
    raise ConfigError(
        f"the module reads a number out of a tensor ({node.target}), on which later operations depend: keep it a tensor"
    )
