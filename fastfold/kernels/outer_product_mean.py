"""Outer product mean: what two columns of an alignment have in common becomes their pair's update."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


def outer_product_mean_definition(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-3,
) -> Tensor:
    """Specification of :func:`outer_product_mean`: holds all ``[*, I, J, c, c]`` products."""
    dtype, exact = left.dtype, torch.promote_types(left.dtype, torch.float32)
    left_mask, right_mask = left_mask.to(exact), right_mask.to(exact)
    left = left.to(exact) * left_mask[..., None]
    right = right.to(exact) * right_mask[..., None]
    products = torch.einsum("...sic,...sje->...ijce", left, right).flatten(-2)
    counts = torch.einsum("...si,...sj->...ij", left_mask, right_mask)
    out = linear(products, weight.to(exact), bias.to(exact)) / (eps + counts[..., None])
    return out.to(dtype)


def outer_product_mean(
    left: Tensor,
    right: Tensor,
    left_mask: Tensor,
    right_mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-3,
) -> Tensor:
    """Mean over the sequences of the outer products of two columns, projected to pair channels.

    ``(Σ_s left[s, i, c] · right[s, j, e] · weight[:, c·C + e] + bias) / (eps + Σ_s left_mask · right_mask)``:
    steps 2 to 4 of algorithm 10 of the AlphaFold supplement. As in its program the bias is divided too.

    Args:
        left: Projected alignment ``[*, S, I, c]``.
        right: Projected alignment ``[*, S, J, c]``.
        left_mask: ``[*, S, I]``, multiplies ``left``. A constant: it receives no gradient.
        right_mask: ``[*, S, J]``, multiplies ``right``. A constant likewise.
        weight: ``[c_z, c * c]``.
        bias: ``[c_z]``.
        eps: Added to the number of sequences that both columns have.

    Returns:
        The update ``[*, I, J, c_z]``, in the dtype of ``left``.
    """
    return outer_product_mean_definition(left, right, left_mask, right_mask, weight, bias, eps)
