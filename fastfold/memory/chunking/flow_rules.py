"""Rules of matrix products, and of operators that rearrange elements.

Rows, columns and batches of a product can be chunked, summed dimensions cannot.
"""

from __future__ import annotations

import math

from fastfold.memory.chunking.flow import Call, Cut, broadcast_dims, output_channels, place, rule, without
from fastfold.memory.chunking.graph import Path


@rule("linear")
def _linear(call: Call, dim: int) -> Cut | None:
    if dim < len(call.out) - 1:
        return Cut({("input",): dim})
    return output_channels(call)


@rule("matmul", "bmm", "mm")
def _matmul(call: Call, dim: int) -> Cut | None:
    second = "other" if call.is_tensor("other") else "mat2"
    return _product(call, "self", second, dim)


@rule("addmm", "baddbmm")
def _added_product(call: Call, dim: int) -> Cut | None:
    names = ("mat1", "mat2") if call.is_tensor("mat1") else ("batch1", "batch2")
    product = _product(call, *names, dim)
    if product is None:
        return None
    return Cut({**product.dims, **broadcast_dims([(("self",), call.shape("self"))], call.out, dim)})


def _product(call: Call, first: str, second: str, dim: int) -> Cut | None:
    a, b, rank = call.shape(first), call.shape(second), len(call.out)
    if len(a) < 2 or len(b) < 2:
        return None
    if dim == rank - 1:
        return Cut({(second,): len(b) - 1})
    if dim == rank - 2:
        return Cut({(first,): len(a) - 2})
    return Cut(_batches(call, (first, second), dim))


def _batches(call: Call, names: tuple[str, ...], dim: int) -> dict[Path, int]:
    """Return the chunked batch dimension of each tensor; the last two dimensions are matrices."""
    return broadcast_dims((((name,), call.shape(name)[:-2]) for name in names), call.out[:-2], dim)


@rule("einsum")
def _einsum(call: Call, dim: int) -> Cut | None:
    equation = call["equation"].replace(" ", "")
    sides = equation.split("->")
    if len(sides) != 2:
        return None
    terms, result = sides[0].split(","), sides[1]
    shapes = [call.shape("tensors", i) for i in range(len(terms))]
    labels = _spelled(result, len(call.out))
    if labels is None:
        return None
    wanted = labels[dim]
    dims: dict[Path, int] = {}
    for i, (term, shape) in enumerate(zip(terms, shapes, strict=True)):
        own = _spelled(term, len(shape))
        if own is None:
            return None
        # Dimensions of an ellipsis and lengths of 1 are broadcast.
        if wanted in own and shape[own.index(wanted)] == call.out[dim]:
            dims["tensors", i] = own.index(wanted)
    return Cut(dims)


def _spelled(term: str, rank: int) -> list[str | int] | None:
    """Return a label for each dimension, numbers from the right for an ellipsis; None for a diagonal."""
    if "..." not in term:
        labels: list[str | int] = list(term)
    else:
        before, after = term.split("...")
        count = rank - len(before) - len(after)
        labels = [*before, *range(-count, 0), *after]
    return labels if len(set(labels)) == len(labels) == rank else None


@rule("scaled_dot_product_attention")
def _attention(call: Call, dim: int) -> Cut | None:
    rank = len(call.out)
    if call["dropout_p"]:
        return None
    masks = ("attn_mask",) if call.is_tensor("attn_mask") else ()
    if dim < rank - 2:
        if call["enable_gqa"] and dim == rank - 3:
            return None
        return Cut(_batches(call, ("query", "key", "value", *masks), dim))
    # Queries can be chunked, unless their number determines the keys that they see.
    if dim == rank - 1 or call["is_causal"]:
        return None
    scores = (*call.out[:-1], call.shape("key")[-2])
    own = broadcast_dims((((name,), call.shape(name)) for name in masks), scores, dim)
    return Cut({("query",): len(call.shape("query")) - 2, **own})


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
    arguments = call.operation.arguments
    first, second = ("dim0", "dim1") if "dim0" in arguments else ("axis0", "axis1")
    a, b = place(call[first], len(call.out)), place(call[second], len(call.out))
    return Cut({("self",): b if dim == a else a if dim == b else dim})


@rule("t", "numpy_T", "mT")
def _transposed(call: Call, dim: int) -> Cut | None:
    return Cut({("self",): 1 - dim}) if len(call.out) == 2 else None


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
    return Cut(broadcast_dims([(("self",), call.shape("self"))], call.out, dim), (("size", dim),))


@rule("expand_as")
def _expand_as(call: Call, dim: int) -> Cut | None:
    return Cut({("other",): dim, **broadcast_dims([(("self",), call.shape("self"))], call.out, dim)})


@rule("squeeze")
def _squeeze(call: Call, dim: int) -> Cut | None:
    shape, dims = call.shape("self"), call["dim"]
    if dims is None:
        dims = range(len(shape))
    elif isinstance(dims, int):
        dims = [dims]
    gone = {place(d, len(shape)) for d in dims}
    return Cut({("self",): without({d for d in gone if shape[d] == 1}, dim)})


@rule("cat", "concat", "concatenate")
def _cat(call: Call, dim: int) -> Cut | None:
    if place(call["dim"], len(call.out)) == dim:
        return None
    # An empty list of numbers may be concatenated with anything.
    if any(len(shape) != len(call.out) for _, shape in call.tensors()):
        return None
    return Cut({path: dim for path, _ in call.tensors()})


@rule("stack", "unsqueeze")
def _stack(call: Call, dim: int) -> Cut | None:
    new = place(call["dim"], len(call.out))
    return None if dim == new else Cut({path: dim - (dim > new) for path, _ in call.tensors()})


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
