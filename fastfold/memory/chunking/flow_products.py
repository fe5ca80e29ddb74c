"""Rules of matrix products: rows, columns and batches can be chunked, summed dimensions cannot."""

from __future__ import annotations

from fastfold.memory.chunking.flow import Call, Cut, broadcast, rule
from fastfold.memory.chunking.graph import Path


@rule("linear")
def _linear(call: Call, dim: int) -> Cut | None:
    if dim < len(call.out) - 1:
        return Cut({("input",): dim})
    dims: dict[Path, int] = {("weight",): 0}
    if call.is_tensor("bias"):
        dims["bias",] = 0
    return Cut(dims)


@rule("matmul", "bmm", "mm")
def _matmul(call: Call, dim: int) -> Cut | None:
    second = "other" if call.is_tensor("other") else "mat2"
    return _product(call, "self", second, dim)


@rule("addmm", "baddbmm")
def _added_product(call: Call, dim: int) -> Cut | None:
    names = ("mat1", "mat2") if call.is_tensor("mat1") else ("batch1", "batch2")
    found = _product(call, *names, dim)
    own = broadcast(call.shape("self"), call.out, dim)
    if found is None or own is None:
        return found
    return Cut({**found.dims, ("self",): own})


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
    found: dict[Path, int] = {}
    for name in names:
        own = broadcast(call.shape(name)[:-2], call.out[:-2], dim)
        if own is not None:
            found[name,] = own
    return found


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
    has_mask = call.is_tensor("attn_mask")
    if dim < rank - 2:
        if call["enable_gqa"] and dim == rank - 3:
            return None
        dims = _batches(call, ("query", "key", "value"), dim)
        if has_mask:
            dims |= _batches(call, ("attn_mask",), dim)
        return Cut(dims)
    # Queries can be chunked, unless their number determines the keys that they see.
    if dim == rank - 1 or call["is_causal"]:
        return None
    dims = {("query",): len(call.shape("query")) - 2}
    if has_mask:
        own = broadcast(call.shape("attn_mask"), (*call.out[:-1], call.shape("key")[-2]), dim)
        if own is not None:
            dims["attn_mask",] = own
    return Cut(dims)
