"""Rounding error of a residue's own CA position in its own backbone frame, as the official program computes it.

The multimer network reads, for each pair of residues, the direction of one residue's CA in the other's backbone
frame. In its own frame a residue is at the origin and has no direction. The official program however normalises the
rounding error: the difference between a rotated position and the same rotation of the frame's origin, in whole units
in the last place, divided by its length or by 1e-6 if it is shorter. The diagonal of the templates' pair features
contains these numbers, and outputs depend on them in the third digit.

The compiler chooses which products are rounded before they are added. The orders below are those of the machine code
that jaxlib 0.4.26 generates for an x86 CPU with fused multiply-adds. Loops process eight residues at a time and the
last ``N % 8`` one by one, in other orders. Below 16 residues a loop has a single order. From 16 to 23 residues the
order of the last ones changes with their number, and only the first 16 residues are reproduced. Other versions of
jaxlib choose other orders and give other pair representations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc
from fastfold.utils.device import to_float64

Vector = tuple[Tensor, ...]  #: Three components

_LANES = 8
_SHORTEST_VECTOR_LOOP = 16
_SMALLEST_SQUARE = 1e-12


def own_frame_direction(positions: Tensor) -> Tensor:
    """Return the normalised rounding error of each residue's CA in its own backbone frame.

    The frame is that of supplement Algorithm 21: the first axis from CA to C, the second in the plane of N. A position
    is rotated as ``(x + y) + z`` with y's product rounded, the frame's origin with x's.

    Args:
        positions: atom37 positions ``[*, N, 37, 3]`` in Å, cast to float32. Pass all ``N`` residues of the
            input together: the number of residues that follow decides how sums are rounded.

    Returns:
        ``[*, N, 3]`` float32, often zero. Vectors have length 1 or less, except the last ``N % 8`` of 16 or more
        residues: those are divided by the length of their first two components (the third is exactly 0 where that loop
        computes the length) and can be longer.
    """
    n, ca, c = (positions[..., rc.atom_order[name], :].float().unbind(-1) for name in ("N", "CA", "C"))
    count = positions.shape[-3]
    remainder = count % _LANES if count >= _SHORTEST_VECTOR_LOOP else 0
    single = torch.arange(count, device=positions.device) >= count - remainder

    e0 = _difference(c, ca)
    e0 = _divide(e0, _length(torch.where(single, _dot_z_fused(e0, e0), _dot_y_rounded(e0, e0))))

    # Each component of the second axis recomputes the projection on the first; the middle one uses another order.
    arm = _difference(n, ca)
    outer = torch.where(single, _dot_z_fused(arm, e0), _dot_y_rounded(arm, e0))
    middle = torch.where(
        single, _fma(arm[0], e0[0], arm[1] * e0[1]) + arm[2] * e0[2], _dot_x_rounded(arm, e0)
    )
    e1: Vector = (_fma(-outer, e0[0], arm[0]), _fma(-middle, e0[1], arm[1]), _fma(-outer, e0[2], arm[2]))
    e1 = _divide(e1, _length(_dot_y_rounded(e1, e1)))

    x, y, z = (_dot_y_rounded(axis, ca) - _dot_x_rounded(axis, ca) for axis in (e0, e1, _cross(e0, e1)))
    length = _length(torch.where(single, _fma(y, y, x * x), _dot_y_rounded((x, y, z), (x, y, z))))
    return torch.stack(_divide((x, y, z), length), -1)


def _difference(a: Vector, b: Vector) -> Vector:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _divide(a: Vector, length: Tensor) -> Vector:
    return a[0] / length, a[1] / length, a[2] / length


def _length(square: Tensor) -> Tensor:
    """Return the correctly rounded float32 root, by float64, because a float32 ``sqrt`` may be off by one bit."""
    return to_float64(square.clamp(min=_SMALLEST_SQUARE)).sqrt().to(square)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``a * b + c`` in float32, rounded once: products of float32 are exact in float64.

    The sum is first rounded to float64, which changes the result of about one in 2**29 operations.
    """
    return (to_float64(a) * to_float64(b) + to_float64(c)).to(a)


def _dot_x_rounded(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[1], b[1], a[0] * b[0]))


def _dot_y_rounded(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[0], b[0], a[1] * b[1]))


def _dot_z_fused(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], a[0] * b[0] + a[1] * b[1])


def _cross(a: Vector, b: Vector) -> Vector:
    def component(i: int, j: int) -> Tensor:
        return _fma(a[i], b[j], -(a[j] * b[i]))

    return component(1, 2), component(2, 0), component(0, 1)
