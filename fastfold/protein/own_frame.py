"""What float32 rounding leaves of a residue's own position in its own backbone frame.

The multimer network reads, for each pair of residues, the direction of one residue's CA in the other's backbone
frame. In its own frame a residue lies at the origin and has no direction, but the official program normalises what
rounding left: the difference between a rotated position and the same rotation of the frame's origin, in whole units
in the last place, divided by its length or by 1e-6 if it is shorter. Templates' pair features contain these numbers
on their diagonal, and outputs depend on them in the third digit. They are reproduced here with fused multiply-adds
where jaxlib 0.4.26 has them on a CPU in the scalar form of its loops.

What the official program itself leaves there changes with the compiler: in its vector loops, from 64 residues on,
some sums are contracted in another order, and between jaxlib 0.4.26 and 0.10.2 its pair representations of one
dimer of 140 residues differ by a relative 2.5e-3. No implementation can match all of them to more digits than that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.protein import residue_constants as rc

Vector = tuple[Tensor, Tensor, Tensor]


def own_frame_direction(positions: Tensor) -> Tensor:
    """Normalised rounding residue of each residue's CA in its own backbone frame.

    Args:
        positions: atom37 positions ``[*, N, 37, 3]`` in Å, taken as float32.

    Returns:
        ``[*, N, 3]`` float32, of length 1 or less, often zero.
    """
    n, ca, c = (_components(positions[..., rc.atom_order[name], :].float()) for name in ("N", "CA", "C"))
    e0 = _normalize(_difference(c, ca), _dot_plain_first)
    e1 = _difference(n, ca)
    along = _dot(e1, e0)
    e1 = _normalize(tuple(_fma(-along, a, b) for a, b in zip(e0, e1, strict=True)), _dot)  # type: ignore[arg-type]
    axes = (e0, e1, _cross(e0, e1))
    residue = torch.stack([_dot(axis, ca) - _dot_in_order(axis, ca) for axis in axes], -1)
    return residue / residue.double().norm(dim=-1, keepdim=True).clamp(min=1e-6).float()


def _components(points: Tensor) -> Vector:
    x, y, z = points.unbind(-1)
    return x, y, z


def _difference(a: Vector, b: Vector) -> Vector:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` in float32 with one rounding: products of float32 are exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def _dot(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[0], b[0], a[1] * b[1]))


def _dot_in_order(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], _fma(a[1], b[1], a[0] * b[0]))


def _dot_plain_first(a: Vector, b: Vector) -> Tensor:
    return _fma(a[2], b[2], a[0] * b[0] + a[1] * b[1])


def _normalize(v: Vector, dot: object) -> Vector:
    length = dot(v, v).clamp(min=1e-12).sqrt()  # type: ignore[operator]
    return v[0] / length, v[1] / length, v[2] / length


def _cross(a: Vector, b: Vector) -> Vector:
    def component(i: int, j: int) -> Tensor:
        return _fma(a[i], b[j], -(a[j] * b[i]))

    return component(1, 2), component(2, 0), component(0, 1)
