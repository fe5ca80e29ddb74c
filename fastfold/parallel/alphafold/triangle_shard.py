"""What triangle multiplications do on any part of the pair, before and after the edges are contracted.

The backward pass computes both again from the pair and the contracted edges, as the operator of one process does
(:func:`fastfold.kernels.triangle_multiplication`): what is kept is a third of what PyTorch would keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

        left, right = _recomputed(self._factors, pair, mask).movedim(-1, -3).chunk(2, dim=-3)
        return left, right

    def _factors(self, pair: Tensor, mask: Tensor) -> Tensor:
        """``[*, rows, columns, 2 c]``."""

        def project(rows: Tensor, index: slice) -> Tensor:
            x = self.norm_in(rows)
            return self.projection(x) * torch.sigmoid(self.gate(x)) * mask[..., index, :, None].to(x.dtype)

        return self.policy.map(pair, project, dim=-3, channels=4)

    def updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        """``pair`` plus its update.

        Args:
            pair: ``[*, rows, columns, c_z]``.
            product: The contracted edges ``[*, c, rows, columns]``.
            dropout: Factors for this part of the pair, or None.
        """
        return _recomputed(self._updated, pair, product, dropout)

    def _updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        def branch(rows: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            update = self.output(self.norm_out(product[..., index, :].movedim(-3, -1)))
            update = update * torch.sigmoid(self.output_gate(self.norm_in(rows)))
            return add_update(rows, update if dropout is None else update * dropout, out)

        return self.policy.residual(pair, branch, dim=-3, dropout=dropout)


def _recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """A function's result, of which only the arguments are kept for the backward pass; it draws no numbers."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    found: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return found
