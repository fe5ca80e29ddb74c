"""Checks of an operator's shapes, because kernels read and write memory outside of tensors that do not match."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fastfold.errors import InputError

#: Name of a tensor, the tensor or None, and its shape
ShapedTensor = tuple[str, Tensor | None, tuple[int, ...]]


def axes_of(operator: str, name: str, x: Tensor, layout: str) -> tuple[int, ...]:
    """Return the shape of floating ``x``, which has at least the axes of a ``layout`` such as ``R, N, c``.

    Raises:
        InputError: There are fewer axes, or the numbers are not floating.
    """
    if not x.is_floating_point():
        raise InputError(f"{operator}: expected {name} of a floating dtype, found {x.dtype}")
    if x.dim() <= layout.count(","):
        raise InputError(f"{operator}: expected {name} [*, {layout}], found {list(x.shape)}")
    return x.shape


def check_shapes(operator: str, name: str, x: Tensor, others: Iterable[ShapedTensor]) -> None:
    """Check the shapes of other tensors, which follow from that of ``x``, the operator's argument ``name``.

    Raises:
        InputError: A shape differs.
    """
    for other, tensor, shape in others:
        if tensor is not None and tensor.shape != shape:
            raise InputError(
                f"{operator}: expected {other} {list(shape)} for {name} {list(x.shape)}, "
                f"found {list(tensor.shape)}"
            )
