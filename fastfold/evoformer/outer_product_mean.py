"""Outer product mean: from the MSA to the pair tensor (supplement Algorithm 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Block, PolicyModule, narrowed
from fastfold.evoformer.primitives import LayerNorm, Linear


class OuterProductMean(PolicyModule):
    """Mean over sequences of outer products of two residues' columns, added to the pair (supplement Algorithm 10).

    - Line 1: the MSA is normalised.
    - Line 2: every position has a left and a right projection.
    - Line 3: the outer products of two residues' projections are averaged over the sequences.
    - Line 4: the averages are projected to the pair's channels.
    - Algorithm 6, line 5: the result is added.

    As in the official program, the bias of the output projection is also divided by the number of sequences.
    """

    operator = "outer product mean"

    def __init__(self, config: ConfigDict, c_m: int, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        c = config.num_outer_channel
        self.norm = LayerNorm(c_m)
        self.left = Linear(c_m, c)
        self.right = Linear(c_m, c)
        self.output = Linear(c * c, c_z, init="final" if zero_init else "relu")

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Return ``pair + output(mean(left ⊗ right))``, ``[*, N, N, c_z]``.

        The MSA is ``[*, S, N, c_m]``, and ``msa_mask [*, S, N]`` is 0 for padding.
        """
        if torch.is_grad_enabled():
            return self.recorded(*self.sides(msa), pair, msa_mask, msa_mask)
        policy = self.policy
        if policy.block_elements is None:
            norm = self.norm
            if kernels.keeps_bfloat16(msa):
                both = kernels.normalized_linear(
                    msa,
                    norm.weight,
                    norm.bias,
                    torch.cat([self.left.weight, self.right.weight]),
                    torch.cat([self.left.bias, self.right.bias]),
                )
                all_left, all_right = both.chunk(2, -1)
            else:
                normed = kernels.layer_norm(msa, norm.weight, norm.bias)
                all_left, all_right = self.left(normed), self.right(normed)
                del normed
            return self.in_blocks(self.rows([all_right], msa_mask), lambda _: all_left, pair, msa_mask)
        # A side of a deep alignment is large, so the left one is computed for a block's rows only.
        parts = (self.side(narrowed(msa, -3, part), self.right) for part in policy.slices(msa, -3))
        updates = self.rows(parts, msa_mask)

        def left(rows: slice) -> Tensor:
            # Transposed because columns have an even stride in memory; parts of rows do not.
            columns = narrowed(msa, -2, rows).transpose(-3, -2)
            return self.side(columns, self.left).transpose(-3, -2)

        return self.in_blocks(updates, left, pair, msa_mask)

    def recorded(
        self, left: Tensor, right: Tensor, pair: Tensor, left_mask: Tensor, right_mask: Tensor
    ) -> Tensor:
        """Return the updated ``pair [*, I, J, c_z]``, with gradients.

        The sides are ``left [*, S, I, c]`` and ``right [*, S, J, c]``; their masks ``[*, S, I]`` and ``[*, S, J]`` are
        0 for padding.
        """
        weight, bias = self.collected(self.kernel_parameters)
        return kernels.outer_product_mean(left, right, left_mask, right_mask, weight, bias, residual=pair)

    def in_blocks(
        self,
        updates: kernels.OuterProductRows,
        left: Callable[[slice], Tensor],
        pair: Tensor,
        left_mask: Tensor,
    ) -> Tensor:
        """Return the updated ``pair [*, I, J, c_z]`` without gradients; ``left(rows)`` returns ``[*, S, rows, c]``."""

        def add_mean(block: Block) -> Tensor:
            assert block.out is not None  # without gradients there is one
            return updates.write(block.out, left(block.rows), narrowed(left_mask, -1, block.rows), block.x)

        return self.apply_residual(pair, add_mean, dim=-3)

    def rows(self, right: Iterable[Tensor], right_mask: Tensor) -> kernels.OuterProductRows:
        """Return the updates of pair rows, from right sides ``[*, s, N, c]`` of blocks of sequences."""
        return kernels.OuterProductRows(right, right_mask, *self.collected(self.kernel_parameters))

    def kernel_parameters(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the output projection."""
        return self.output.weight, self.output.bias

    def side(self, msa: Tensor, layer: Linear) -> Tensor:
        """Return a factor ``[*, S, N, c]`` of the products from ``msa [*, S, N, c_m]``, without gradients."""
        return kernels.normalized_linear(msa, self.norm.weight, self.norm.bias, layer.weight, layer.bias)

    def sides(self, msa: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors ``left`` and ``right`` ``[*, S, N, c]`` of the products from ``msa [*, S, N, c_m]``."""

        def project(rows: Tensor, _: slice) -> Tensor:
            x = self.norm(rows)
            return torch.cat([self.left(x), self.right(x)], -1)

        left, right = self.policy.map(msa, project, dim=-3).chunk(2, -1)
        return left, right
