"""What triangle multiplications do on any part of the pair, before and after the edges are contracted."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.evoformer.execution import add_update
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication


class ShardedTriangleMultiplication(TriangleMultiplication):
    """Triangle multiplication of which this rank holds a part; the contraction is the derived class's matter."""

    def factors(self, pair: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both gated projections of the edges.

        Args:
            pair: ``[*, rows, columns, c_z]``, any part of the pair.
            mask: ``[*, rows, columns]`` likewise.

        Returns:
            ``left`` and ``right``, ``[*, c, rows, columns]`` each; views of one tensor.
        """

        def project(rows: Tensor, index: slice) -> Tensor:
            x = self.norm_in(rows)
            return self.projection(x) * torch.sigmoid(self.gate(x)) * mask[..., index, :, None].to(x.dtype)

        left, right = self.policy.map(pair, project, dim=-3, channels=4).movedim(-1, -3).chunk(2, dim=-3)
        return left, right

    def updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        """``pair`` plus its update.

        Args:
            pair: ``[*, rows, columns, c_z]``.
            product: The contracted edges ``[*, c, rows, columns]``.
            dropout: Factors for this part of the pair, or None.
        """

        def branch(rows: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            update = self.output(self.norm_out(product[..., index, :].movedim(-3, -1)))
            update = update * torch.sigmoid(self.output_gate(self.norm_in(rows)))
            return add_update(rows, update if dropout is None else update * dropout, out)

        return self.policy.residual(pair, branch, dim=-3, dropout=dropout)
