"""What triangle multiplications do on any part of the pair, before and after the edges are contracted.

The backward pass computes both again from the pair and the contracted edges, as the operator of one process does
(:func:`fastfold.kernels.triangle_multiplication`): what is kept is a third of what PyTorch would keep.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fastfold.evoformer.execution import add_update
from fastfold.evoformer.primitives import Linear
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.parallel.alphafold.recomputing import recomputed

Contract = Callable[[Tensor, Tensor], Tensor]
"""From blocks or shards ``[*, c, rows, columns]`` of both factors to those of their product, for any c."""


class ShardedTriangleMultiplication(TriangleMultiplication):
    """Triangle multiplication of which this rank holds a part; the contraction is the derived class's matter."""

    def product(self, pair: Tensor, mask: Tensor, contract: Contract, ranks: int) -> Tensor:
        """The contracted edges of both gated projections, ``[*, c, rows, columns]``.

        Without gradients for so many channels at a time as the policy's plan says, by default a quarter: only so many
        of their factors then exist.

        Args:
            pair: ``[*, rows, columns, c_z]``, any part of the pair.
            mask: ``[*, rows, columns]`` likewise.
            contract: Gets the left and the right factor.
            ranks: How many take part; at least as many channels are contracted at a time.
        """
        channels = len(self.projection.weight) // 2
        if torch.is_grad_enabled():
            factors = recomputed(self._factors, pair, mask, slice(0, channels))
            return contract(*factors.movedim(-1, -3).chunk(2, dim=-3))
        step = min(channels, max(ranks, self.policy.contraction.channels or -(-channels // 4)))
        out = pair.new_empty(0)
        for start in range(0, channels, step):
            some = slice(start, min(channels, start + step))
            factors = self._factors(pair, mask, some).movedim(-1, -3)
            part = contract(*factors.chunk(2, dim=-3))
            del factors
            if start == 0:
                out = part.new_empty(*part.shape[:-3], channels, *part.shape[-2:])
            out[..., some, :, :] = part
            del part
        return out

    def _factors(self, pair: Tensor, mask: Tensor, channels: slice) -> Tensor:
        """Some channels of the left factor and the same of the right one, ``[*, rows, columns, 2 c]``."""
        layers = [self._of_channels(layer, channels) for layer in (self.projection, self.gate)]

        def project(rows: Tensor, index: slice) -> Tensor:
            x = self.norm_in(rows)
            projection, gate = (linear(x, *layer) for layer in layers)
            return projection * torch.sigmoid(gate) * mask[..., index, :, None].to(x.dtype)

        return self.policy.map(pair, project, dim=-3, channels=4)

    def _of_channels(self, layer: Linear, channels: slice) -> tuple[Tensor, ...]:
        """Weight and bias of a layer that gives both factors, for some channels of each."""
        whole = (layer.weight, layer.bias)
        if 2 * (channels.stop - channels.start) == len(layer.weight):
            return whole
        return tuple(x.unflatten(0, (2, -1))[:, channels].flatten(0, 1) for x in whole)

    def updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        """``pair`` plus its update.

        Args:
            pair: ``[*, rows, columns, c_z]``.
            product: The contracted edges ``[*, c, rows, columns]``.
            dropout: Factors for this part of the pair, or None.
        """
        found: Tensor = recomputed(self._updated, pair, product, dropout)
        return found

    def _updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        def branch(rows: Tensor, index: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            update = self.output(self.norm_out(product[..., index, :].movedim(-3, -1)))
            update = update * torch.sigmoid(self.output_gate(self.norm_in(rows)))
            return add_update(rows, update if dropout is None else update * dropout, out)

        return self.policy.residual(pair, branch, dim=-3, dropout=dropout)
