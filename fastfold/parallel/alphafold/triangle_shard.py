"""What triangle multiplications do on any part of the pair, before and after the edges are contracted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.primitives import Linear
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication

Contract = Callable[[Tensor, Tensor], Tensor]
"""From blocks or shards ``[*, c, rows, columns]`` of both factors to those of their product, for any c."""


class ShardedTriangleMultiplication(TriangleMultiplication):
    """Triangle multiplication of which this rank holds a part; the contraction is the derived class's matter."""

    def product(self, pair: Tensor, mask: Tensor, contract: Contract, ranks: int) -> Tensor:
        """The contracted edges of both gated projections, ``[*, c, rows, columns]``.

        Without gradients for ``policy.contraction.channels`` channels at a time, by default a quarter of them: no more
        of their factors then exist.

        Args:
            pair: ``[*, rows, columns, c_z]``, any part of the pair.
            mask: ``[*, rows, columns]``, the same part.
            contract: Gets the left and the right factor.
            ranks: How many take part; at least as many channels are contracted at a time.
        """
        channels = len(self.projection.weight) // 2
        if torch.is_grad_enabled():
            return contract(*self._factors(pair, mask, slice(0, channels)).chunk(2, dim=-3))
        step = min(channels, max(ranks, self.policy.contraction.channels or -(-channels // 4)))
        out = pair.new_empty(0)
        for start in range(0, channels, step):
            some = slice(start, min(channels, start + step))
            part = contract(*self._factors(pair, mask, some).chunk(2, dim=-3))
            if start == 0:
                out = part.new_empty(*part.shape[:-3], channels, *part.shape[-2:])
            out[..., some, :, :] = part
            del part
        return out

    def _factors(self, pair: Tensor, mask: Tensor, channels: slice) -> Tensor:
        """Some channels of the left factor and the same of the right one, ``[*, 2 c, rows, columns]``."""
        proj_weight, proj_bias = self._of_channels(self.projection, channels)
        gate_weight, gate_bias = self._of_channels(self.gate, channels)
        return kernels.triangle_factors(
            pair,
            mask,
            norm_weight=self.norm_in.weight,
            norm_bias=self.norm_in.bias,
            proj_weight=proj_weight,
            proj_bias=proj_bias,
            gate_weight=gate_weight,
            gate_bias=gate_bias,
        )

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

        def branch(rows: Tensor, _: slice, dropout: Tensor | None, out: Tensor | None) -> Tensor:
            return kernels.triangle_update(
                product,
                rows,
                norm_weight=self.norm_in.weight,
                norm_bias=self.norm_in.bias,
                norm_out_weight=self.norm_out.weight,
                norm_out_bias=self.norm_out.bias,
                out_weight=self.output.weight,
                out_bias=self.output.bias,
                out_gate_weight=self.output_gate.weight,
                out_gate_bias=self.output_gate.bias,
                add_z=True,
                dropout=dropout,
                out=out,
            )

        return self.policy.residual(pair, branch, dim=None, dropout=dropout)
