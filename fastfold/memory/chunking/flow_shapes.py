"""Rules of operators that rearrange elements: views, permutations, concatenations and splits."""

from __future__ import annotations

import math

from fastfold.memory.chunking.flow import Call, Cut, broadcast, place, rule, without
from fastfold.memory.chunking.graph import Path


@rule("reshape")
def _view(call: Call, dim: int) -> Cut | None:
    """Apply the rule of views: the dimension keeps its length and the number of elements before it."""
    shape, out = call.shape("self"), call.out
    before = math.prod(out[:dim])
    for own, size in enumerate(shape):
        if size == out[dim] and math.prod(shape[:own]) == before:
            return Cut({("self",): own}, (("shape", dim),))
    return None


@rule("permute")
def _permute(call: Call, dim: int) -> Cut | None:
    return Cut({("self",): place(call["dims"][dim], len(call.out))})


@rule("transpose", "swapaxes", "swapdims")
def _transpose(call: Call, dim: int) -> Cut | None:
    given = call.operation.given
    first, second = ("dim0", "dim1") if "dim0" in given else ("axis0", "axis1")
    a, b = place(call[first], len(call.out)), place(call[second], len(call.out))
    return Cut({("self",): b if dim == a else a if dim == b else dim})


@rule("t", "numpy_T", "mT")
def _transposed(call: Call, dim: int) -> Cut | None:
    rank = len(call.out)
    if rank != 2:
        return None
    return Cut({("self",): 1 - dim})


@rule("movedim")
def _movedim(call: Call, dim: int) -> Cut | None:
    source, target = call["source"], call["destination"]
    if isinstance(source, int):
        source, target = [source], [target]
    rank = len(call.out)
    order: list[int | None] = [None] * rank
    for a, b in zip(source, target, strict=True):
        order[place(b, rank)] = place(a, rank)
    rest = iter([d for d in range(rank) if d not in order])
    return Cut({("self",): [next(rest) if d is None else d for d in order][dim]})


@rule("expand")
def _expand(call: Call, dim: int) -> Cut | None:
    own = broadcast(call.shape("self"), call.out, dim)
    return Cut({} if own is None else {("self",): own}, (("size", dim),))


@rule("expand_as")
def _expand_as(call: Call, dim: int) -> Cut | None:
    own = broadcast(call.shape("self"), call.out, dim)
    dims: dict[Path, int] = {("other",): dim}
    if own is not None:
        dims["self",] = own
    return Cut(dims)


@rule("unsqueeze")
def _unsqueeze(call: Call, dim: int) -> Cut | None:
    new = place(call["dim"], len(call.out))
    return None if dim == new else Cut({("self",): dim - (dim > new)})


@rule("squeeze")
def _squeeze(call: Call, dim: int) -> Cut | None:
    shape, given = call.shape("self"), call["dim"]
    if given is None:
        given = range(len(shape))
    elif isinstance(given, int):
        given = [given]
    gone = {place(d, len(shape)) for d in given}
    return Cut({("self",): without({d for d in gone if shape[d] == 1}, dim)})


@rule("cat", "concat", "concatenate")
def _cat(call: Call, dim: int) -> Cut | None:
    if place(call["dim"], len(call.out)) == dim:
        return None
    # An empty list of numbers may be concatenated with anything.
    if any(len(shape) != len(call.out) for _, shape in call.tensors()):
        return None
    return Cut({path: dim for path, _ in call.tensors()})


@rule("stack")
def _stack(call: Call, dim: int) -> Cut | None:
    new = place(call["dim"], len(call.out))
    return None if dim == new else Cut({path: dim - (dim > new) for path, _ in call.tensors()})


@rule("slice", "split", "split_with_sizes", "chunk", "narrow")
def _slice(call: Call, dim: int) -> Cut | None:
    return None if place(call["dim"], len(call.out)) == dim else Cut({("self",): dim})


@rule("select", "unbind")
def _select(call: Call, dim: int) -> Cut | None:
    gone = place(call["dim"], len(call.shape("self")))
    return Cut({("self",): dim + (dim >= gone)})


@rule("constant_pad_nd", "pad")
def _pad(call: Call, dim: int) -> Cut | None:
    padded = call["pad"]
    if call["mode"] not in (None, "constant"):
        return None
    from_end = len(call.out) - 1 - dim
    own = padded[2 * from_end : 2 * from_end + 2]
    return Cut({("self",): dim}) if not any(own) else None


@rule("zeros", "ones", "full")
def _filled(call: Call, dim: int) -> Cut | None:
    return Cut({}, (("size", dim),))
