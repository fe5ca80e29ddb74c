"""What float32 rounding leaves of a residue's own position in its own backbone frame.

The multimer network reads, for each pair of residues, the direction of one residue's CA in the other's backbone
frame. In its own frame a residue lies at the origin and has no direction, but the official program normalises what
rounding left: the difference between a rotated position and the same rotation of the frame's origin, in whole units
in the last place, divided by its length or by 1e-6 if it is shorter. Templates' pair features contain these numbers
on their diagonal, and outputs depend on them in the third digit.

Which products are rounded before they are added is the compiler's choice. The orders below are those of the machine
code that jaxlib 0.4.26 makes for an x86 CPU with fused multiply-adds, read there for 50 and for 140 residues, where
they are the same: loops take eight residues at a time and the ``N % 8`` last ones singly, in other orders. Below 16
residues a loop has one order throughout. From 16 to 23 the order of the last ones changes with their number and only
the first 16 residues are reproduced. Nothing in the model prescribes all this: jaxlib 0.10.2 chooses other orders, and
with it the official pair representation of one dimer changes by a relative 2.5e-3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

Vector = tuple[Tensor, Tensor, Tensor]

_LANES = 8
_SHORTEST_VECTOR_LOOP = 16
_SMALLEST_SQUARE = 1e-12


def own_frame_direction(positions: Tensor) -> Tensor:
    """Normalised rounding residue of each residue's CA in its own backbone frame.

    The frame is that of the AlphaFold supplement's algorithm 21: the first axis from CA to C, the second in the
    plane of N. A position is rotated as ``(x + y) + z`` with y's product rounded, the frame's origin with x's.

    Args:
        positions: atom37 positions ``[*, N, 37, 3]`` in Å, taken as float32. All ``N`` residues of the input belong
            together: how many follow a residue decides how its sums are rounded.

    Returns:
        ``[*, N, 3]`` float32, often zero. Vectors have length 1 or less, but from 16 residues on the last ``N % 8``
        are divided by the length of their first two components alone (the third is exactly 0 where that loop computes
        the length) and can be longer.
    """
    n, ca, c = (_components(positions[..., rc.atom_order[name], :].float()) for name in ("N", "CA", "C"))
    count = positions.shape[-3]
    remainder = count % _LANES if count >= _SHORTEST_VECTOR_LOOP else 0
    single = torch.arange(count, device=positions.device) >= count - remainder

    e0 = _difference(c, ca)
    e0 = _divide(e0, _length(torch.where(single, _dot_z_fused(e0, e0), _dot_y_rounded(e0, e0))))

    # Each component of the second axis recomputes the projection on the first, the middle one in an order of its own.
    arm = _difference(n, ca)
    outer = torch.where(single, _dot_z_fused(arm, e0), _dot_y_rounded(arm, e0))
    middle = torch.where(single, _dot_x_fused(arm, e0), _dot_x_rounded(arm, e0))
    e1 = (_fma(-outer, e0[0], arm[0]), _fma(-middle, e0[1], arm[1]), _fma(-outer, e0[2], arm[2]))
    e1 = _divide(e1, _length(_dot_y_rounded(e1, e1)))

    x, y, z = (_dot_y_rounded(axis, ca) - _dot_x_rounded(axis, ca) for axis in (e0, e1, _cross(e0, e1)))
    length = _length(torch.where(single, _fma(y, y, x * x), _dot_y_rounded((x, y, z), (x, y, z))))
    return torch.stack(_divide((x, y, z), length), -1)


def _components(points: Tensor) -> Vector:
    x, y, z = points.unbind(-1)
    return x, y, z


def _difference(a: Vector, b: Vector) -> Vector:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _divide(a: Vector, length: Tensor) -> Vector:
    return a[0] / length, a[1] / length, a[2] / length


def _length(square: Tensor) -> Tensor:
    """The correctly rounded float32 root, which a float32 ``sqrt`` need not be: through float64, it is."""
    return square.clamp(min=_SMALLEST_SQUARE).double().sqrt().float()


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in float32, rounded once: products of float32 are exact in float64.

    The sum is rounded to float64 before, which reaches the result of about one in 2**29 operations.
    """
    return (a.double() * b.double() + c.double()).float()


def _dot_x_rounded(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[1], b[1], a[0] * b[0]))


def _dot_y_rounded(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[0], b[0], a[1] * b[1]))


def _dot_z_fused(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], a[0] * b[0] + a[1] * b[1])


def _dot_x_fused(a: Vector, b: Vector) -> Tensor:
    return _fma(a[0], b[0], a[1] * b[1]) + a[2] * b[2]


def _cross(a: Vector, b: Vector) -> Vector:
    def component(i: int, j: int) -> Tensor:
        return _fma(a[i], b[j], -(a[j] * b[i]))

    return component(1, 2), component(2, 0), component(0, 1)
