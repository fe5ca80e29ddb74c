"""Outer product mean: from the MSA to the pair tensor (supplement Algorithm 10)."""

from __future__ import annotations

from collections.abc import Callable
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
        if torch.is_grad_enabled():
            left, right = self.sides(msa)
            return self.updated(pair, lambda rows: left[..., rows, :], right, msa_mask, msa_mask)
        # Of a deep alignment a side is much: the left one is made for the rows that need it.
        right = self._projected(msa, self.right)
        return self.updated(
            pair, lambda rows: self._projected(msa[..., rows, :], self.left), right, msa_mask, msa_mask
        )

    def updated(
        self,
        pair: Tensor,
        left: Callable[[slice], Tensor],
        right: Tensor,
        left_mask: Tensor,
        right_mask: Tensor,
    ) -> Tensor:
        """Updated ``pair [*, I, J, c_z]``.

        Args:
            pair: Before.
            left: Gives ``[*, S, rows, c]`` of some residues of I.
            right: ``[*, S, J, c]``.
            left_mask: ``[*, S, I]``.
            right_mask: ``[*, S, J]``.
        """

        def branch(rows: Tensor, index: slice, _: Tensor | None, out: Tensor | None) -> Tensor:
            return self.update(left(index), right, left_mask[..., index], right_mask, rows, out)

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
        """Some rows of the pair ``[*, I, J, c_z]`` with their update, from both sides for them."""
        weight, bias = self.output.weight, self.output.bias
        return kernels.outer_product_mean(
            left, right, left_mask, right_mask, weight, bias, residual=rows, out=out
        )

    def sides(self, msa: Tensor) -> tuple[Tensor, Tensor]:
        """What the products are of: ``left`` and ``right`` ``[*, S, N, c]``."""

        def project(rows: Tensor, _: slice) -> Tensor:
            x = self.norm(rows)
            return torch.cat([self.left(x), self.right(x)], -1)

        left, right = self.policy.map(msa, project, dim=-3).chunk(2, -1)
        return left, right

    def _projected(self, msa: Tensor, side: Linear) -> Tensor:
        return self.policy.map(msa, lambda rows, _: side(self.norm(rows)), dim=-3)
