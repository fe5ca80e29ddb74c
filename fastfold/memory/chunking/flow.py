"""Rules of operators: the parts of arguments needed for a part of the result.

Each rule is registered under the name of an ATen operator. Operators without a rule, and dimensions that a rule does
not return, are not chunked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastfold.memory.chunking.graph import Graph, GraphOperation, Path, Ref


@dataclass(frozen=True)
class Cut:
    """Parts of arguments from which a part of a result is computed."""

    #: Chunked dimension of each tensor, by its place among the arguments; other tensors are used whole
    dims: Mapping[Path, int] = field(default_factory=dict)
    sizes: tuple[Path, ...] = ()  #: Places of numbers among the arguments that equal the length of the part


class Call:
    """Operation as its rule sees it."""

    def __init__(self, graph: Graph, operation: GraphOperation) -> None:
        self._graph, self.operation = graph, operation
        self.out = graph.layout(operation.index).shape

    def __getitem__(self, name: str) -> Any:
        return self.operation.arguments.get(name)

    def shape(self, *path: str | int) -> tuple[int, ...]:
        """Return the shape of a tensor argument, or of the first tensor in a list."""
        value: Any = self.operation.arguments[str(path[0])]
        for place in path[1:]:
            value = value[place]
        return self._graph.layout(value.index).shape

    def tensors(self) -> list[tuple[Path, tuple[int, ...]]]:
        """Return the place and shape of each tensor argument."""
        return [(path, self._graph.layout(index).shape) for path, index in self.operation.values()]

    def is_tensor(self, name: str) -> bool:
        """Return True if an argument is a tensor."""
        return isinstance(self[name], Ref)


Rule = Callable[[Call, int], Cut | None]
"""Rule from an operation and a dimension of its result, counted from 0, to the parts of its arguments."""

_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule of ATen operators, by their names without ``aten::``."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert "aten::" + name not in _RULES, name
            _RULES["aten::" + name] = function
        return function

    return register


def find_cut(graph: Graph, operation: GraphOperation, dim: int) -> Cut | None:
    """Return the parts of arguments for a part of each result along ``dim``, from 0; None without a rule."""
    call = Call(graph, operation)
    if operation.name == "getitem":
        return Cut({("self",): dim})
    find = _RULES.get(operation.name)
    if find is None and torch.Tag.pointwise in operation.target.tags:
        find = elementwise
    return None if find is None else find(call, dim)


def broadcast(shape: tuple[int, ...], out: tuple[int, ...], dim: int) -> int | None:
    """Return the dimension that becomes ``dim`` when broadcast to ``out``; None if it is broadcast along ``dim``."""
    own = dim - (len(out) - len(shape))
    return own if own >= 0 and shape[own] == out[dim] else None


def broadcast_dims(
    tensors: Iterable[tuple[Path, tuple[int, ...]]], out: tuple[int, ...], dim: int
) -> dict[Path, int]:
    """Return the dimension of each tensor that becomes ``dim`` when broadcast to ``out``, by place, if it has one."""
    dims = {path: broadcast(shape, out, dim) for path, shape in tensors}
    return {path: own for path, own in dims.items() if own is not None}


def output_channels(call: Call) -> Cut:
    """Return the parts of a layer's weight and bias for a part of its output channels."""
    return Cut({("weight",): 0, ("bias",): 0} if call.is_tensor("bias") else {("weight",): 0})


def elementwise(call: Call, dim: int) -> Cut | None:
    """Apply the rule of tensors that broadcast against each other."""
    return Cut(broadcast_dims(call.tensors(), call.out, dim))


def place(dim: int, rank: int) -> int:
    """Return a dimension counted from 0."""
    return dim + rank if dim < 0 else dim


def without(dims: set[int], dim: int) -> int:
    """Return the dimension that becomes ``dim`` when ``dims`` are removed."""
    own = -1
    for _ in range(dim + 1):
        own += 1
        while own in dims:
            own += 1
    return own


rule("clone", "alias", "contiguous", "detach", "to", "_to_copy", "lift_fresh_copy", "masked_fill", "where")(
    elementwise
)
rule("zeros_like", "ones_like", "full_like")(elementwise)


@rule(
    *("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod"),
    *("slice", "split", "split_with_sizes", "chunk", "narrow"),
)
def _along_one(call: Call, dim: int) -> Cut | None:
    return None if place(call["dim"], len(call.out)) == dim else Cut({("self",): dim})


@rule("layer_norm", "native_layer_norm", "rms_norm")
def _normalized(call: Call, dim: int) -> Cut | None:
    free = len(call.shape("input")) - len(call["normalized_shape"])
    return Cut({("input",): dim}) if dim < free else None


@rule("group_norm")
def _group_norm(call: Call, dim: int) -> Cut | None:
    return Cut({("input",): 0}) if dim == 0 else None


@rule("batch_norm", "_native_batch_norm_legit_no_training")
def _batch_norm(call: Call, dim: int) -> Cut | None:
    if call["training"] or dim == 1:  # the second form has no training mode
        return None
    return Cut({("input",): dim})


@rule(
    *("sum", "mean", "amax", "amin", "prod", "any", "all", "max", "min"),
    *("argmax", "argmin", "logsumexp", "var", "std"),
)
def _reduction(call: Call, dim: int) -> Cut | None:
    dims = call["dim"]
    if dims is None or dims == []:
        return None
    shape = call.shape("self")
    reduced = {place(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)}
    own = dim if call["keepdim"] else without(reduced, dim)
    return None if own in reduced else Cut({("self",): own})


@rule("embedding")
def _embedding(call: Call, dim: int) -> Cut | None:
    if dim == len(call.out) - 1:
        return Cut({("weight",): 1})
    return Cut({("indices",): dim})


@rule("index_select")
def _index_select(call: Call, dim: int) -> Cut | None:
    along = place(call["dim"], len(call.out))
    return Cut({("index",): 0}) if dim == along else Cut({("self",): dim})


@rule("gather")
def _gather(call: Call, dim: int) -> Cut | None:
    if dim == place(call["dim"], len(call.out)):
        return Cut({("index",): dim})
    # Only the first elements of a longer tensor are used.
    same = call.shape("self")[dim] == call.out[dim]
    return Cut({("self",): dim, ("index",): dim}) if same else None


@rule("one_hot")
def _one_hot(call: Call, dim: int) -> Cut | None:
    return Cut({("self",): dim}) if dim < len(call.out) - 1 and call["num_classes"] > 0 else None


@rule("tril", "triu")
def _triangle(call: Call, dim: int) -> Cut | None:
    return Cut({("self",): dim}) if dim < len(call.out) - 2 else None


@rule("flip", "roll")
def _moved(call: Call, dim: int) -> Cut | None:
    moved = {place(d, len(call.out)) for d in call["dims"]}
    return Cut({("self",): dim}) if moved and dim not in moved else None


@rule("conv1d", "conv2d", "conv3d", "convolution")
def _convolution(call: Call, dim: int) -> Cut | None:
    batched = len(call.shape("input")) == len(call.shape("weight"))
    if not batched:
        return None
    if dim == 0:
        return Cut({("input",): 0})
    if dim == 1 and call["groups"] == 1 and not call["transposed"]:
        return output_channels(call)
    return None
