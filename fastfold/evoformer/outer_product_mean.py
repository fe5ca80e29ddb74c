"""Outer product mean: from the MSA to the pair tensor (supplement Algorithm 10)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Executed
from fastfold.evoformer.primitives import LayerNorm, Linear


class OuterProductMean(Executed):
    """Mean over sequences of the outer products of two projected columns, as a residual update of the pair.

    As in the official program the bias of the output projection is divided by the number of sequences too.

    Args:
        config: Official config node (``num_outer_channel``).
        c_m: MSA channels.
        c_z: Pair channels.
        zero_init: Initialise the output projection with zeros.
    """

    operator = "outer product mean"

    def __init__(self, config: Any, c_m: int, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        c = config.num_outer_channel
        self.norm = LayerNorm(c_m)
        self.left = Linear(c_m, c)
        self.right = Linear(c_m, c)
        self.output = Linear(c * c, c_z, init="final" if zero_init else "relu")

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated ``pair [*, N, N, c_z]`` from ``msa [*, S, N, c_m]`` under ``msa_mask [*, S, N]``."""
        left, right, left_mask, right_mask = self.sides(msa, msa_mask)

        def branch(rows: Tensor, index: slice, _: Tensor | None, out: Tensor | None) -> Tensor:
            return self.update(left[..., index, :], right, left_mask[..., index], right_mask, rows, out)

        return self.policy.residual(pair, branch, dim=-3)

    def update(
        self,
        left: Tensor,
        right: Tensor,
        left_mask: Tensor,
        right_mask: Tensor,
        rows: Tensor,
        out: Tensor | None,
    ) -> Tensor:
        """Some rows of the pair ``[*, I, J, c_z]`` with their update, from what :meth:`sides` gives for them."""
        weight, bias = self.output.weight, self.output.bias
        return kernels.outer_product_mean(
            left, right, left_mask, right_mask, weight, bias, residual=rows, out=out
        )

    def sides(self, msa: Tensor, msa_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the products are of: ``left`` and ``right`` ``[*, S, N, c]``, and their masks ``[*, S, N]``."""

        def project(rows: Tensor, _: slice) -> Tensor:
            x = self.norm(rows)
            return torch.cat([self.left(x), self.right(x)], -1)

        left, right = self.policy.map(msa, project, dim=-3).chunk(2, -1)
        return left, right, msa_mask, msa_mask
