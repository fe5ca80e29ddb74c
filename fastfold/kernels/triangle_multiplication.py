"""Triangle multiplication: every edge is updated from the other two edges of all triangles it is part of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.kernels.layer_norm import layer_norm_definition


def triangle_multiplication_definition(
    z: Tensor,
    mask: Tensor,
    *,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
    outgoing: bool,
    eps: float = 1e-5,
) -> Tensor:
    """Specification of :func:`triangle_multiplication`."""
    exact = torch.promote_types(z.dtype, torch.float32)

    def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, weight.to(exact), bias.to(exact))

    x = layer_norm_definition(z.to(exact), norm_in_weight, norm_in_bias, eps)
    p = mask.to(exact)[..., None] * affine(x, proj_weight, proj_bias)
    p = p * affine(x, gate_weight, gate_bias).sigmoid()
    left, right = p.chunk(2, dim=-1)
    if outgoing:
        out = torch.einsum("...ikc,...jkc->...ijc", left, right)
    else:
        out = torch.einsum("...kjc,...kic->...ijc", left, right)
    out = affine(layer_norm_definition(out, norm_out_weight, norm_out_bias, eps), out_weight, out_bias)
    return (out * affine(x, out_gate_weight, out_gate_bias).sigmoid()).to(z.dtype)


def triangle_multiplication(
    z: Tensor,
    mask: Tensor,
    *,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    out_gate_weight: Tensor,
    out_gate_bias: Tensor,
    outgoing: bool,
    eps: float = 1e-5,
) -> Tensor:
    """Update of the pair representation by triangle multiplication (AlphaFold supplement, algorithms 11, 12).

    With ``x = LN(z)`` and ``left, right = chunk(mask · (x Pᵀ + b) · sigmoid(x Gᵀ + g))``, the contraction is
    ``out[i, j] = Σ_k left[i, k] · right[j, k]`` (outgoing) or ``Σ_k left[k, j] · right[k, i]`` (incoming, in
    the order of AlphaFold's own program), and the update ``(LN(out) Oᵀ + o) · sigmoid(x Ogᵀ + og)``.

    Args:
        z: Pair representation ``[*, N, N, c_z]``.
        mask: ``[*, N, N]``, 1 for pairs to use and 0 otherwise. A constant: it receives no gradient.
        norm_in_weight: ``[c_z]``, scale of the first normalisation.
        norm_in_bias: ``[c_z]``, its shift.
        proj_weight: P ``[2 c, c_z]``, the rows of ``left`` before those of ``right``.
        proj_bias: b ``[2 c]``.
        gate_weight: G ``[2 c, c_z]``, in the same order.
        gate_bias: g ``[2 c]``.
        norm_out_weight: ``[c]``, scale of the second normalisation.
        norm_out_bias: ``[c]``, its shift.
        out_weight: O ``[c_z, c]``.
        out_bias: o ``[c_z]``.
        out_gate_weight: Og ``[c_z, c_z]``.
        out_gate_bias: og ``[c_z]``.
        outgoing: Which of the two contractions.
        eps: Added to the variance in both normalisations (AlphaFold's fused program uses 1e-6, the others 1e-5).

    Returns:
        The update ``[*, N, N, c_z]``, in the dtype of ``z``.
    """
    return triangle_multiplication_definition(
        z,
        mask,
        norm_in_weight=norm_in_weight,
        norm_in_bias=norm_in_bias,
        proj_weight=proj_weight,
        proj_bias=proj_bias,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        norm_out_weight=norm_out_weight,
        norm_out_bias=norm_out_bias,
        out_weight=out_weight,
        out_bias=out_bias,
        out_gate_weight=out_gate_weight,
        out_gate_bias=out_gate_bias,
        outgoing=outgoing,
        eps=eps,
    )
