"""Triangle multiplication on any part of the pair, before and after the edges are contracted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Block
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.kernels.common.layout import batch_elements
from fastfold.memory.offload import HostBuffers, StreamedRows, kept_rows

Contract = Callable[[Tensor, Tensor], Tensor]
"""Function from blocks or shards ``[*, c, rows, columns]`` of both factors to those of their product, for any c."""


ROWS = ("proj_weight", "proj_bias", "gate_weight", "gate_bias")
"""Parameters with a row for each channel of both factors."""


class ShardedTriangleMultiplication(TriangleMultiplication):
    """Triangle multiplication on this rank's part of the pair; derived classes contract the edges."""

    def multiplied(
        self, pair: Tensor, mask: Tensor, contract: Contract, ranks: int, dropout: Tensor | None
    ) -> Tensor:
        """Return ``pair [*, rows, columns, c_z]``, any part of the pair, plus its update.

        The product is offloaded as the policy says. ``contract`` is a function of the left and the right factor. The
        dropout's factors are the same in all rows.
        """
        host = self.policy.contraction.host
        if host is None or torch.is_grad_enabled():
            return self.updated(pair, self.product(pair, mask, contract, ranks), dropout)
        out = pair if self.policy.inplace else torch.empty_like(pair)
        for i in batch_elements(pair):
            for rows, product in self._streamed(pair[i], mask[i], contract, ranks, host):
                found = self.updated(pair[i][rows], product, None if dropout is None else dropout[i])
                if out is not pair:
                    out[i][rows] = found
        return out

    def _streamed(
        self, pair: Tensor, mask: Tensor, contract: Contract, ranks: int, host: HostBuffers
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of the complete product with their content ``[c, rows, columns]``."""
        (length, columns, _), channels = pair.shape, len(self.projection.weight) // 2
        step = self._step(ranks)
        first, size = kept_rows(length, self.policy.contraction.kept), max(1, step * length // channels)
        size = max(1, min(size, length - first))
        blocks = [slice(start, min(length, start + size)) for start in range(first, length, size)]
        kept = pair.new_empty(channels, first, columns)
        staging = pair.new_empty(2, step * size * columns if blocks else 0)
        waiting = StreamedRows(host, channels, blocks, columns, (staging[0], staging[1]), pair)
        for start in range(0, channels, step):
            some = slice(start, min(channels, start + step))
            part = contract(*self._factors(pair, mask, some).chunk(2, dim=-3))
            kept[some] = part[:, :first]
            for index, rows in enumerate(blocks):
                waiting.send(waiting.part(len(part), index).copy_(part[:, rows]), start, index)
            del part
        back = pair.new_empty(2, channels * size * columns if blocks else 0)
        yield from itertools.chain(
            [(slice(0, first), kept)] if first else [], waiting.read((back[0], back[1]))
        )

    def _step(self, ranks: int) -> int:
        channels = len(self.projection.weight) // 2
        return min(channels, max(ranks, self.policy.contraction.channels or -(-channels // 4)))

    def product(self, pair: Tensor, mask: Tensor, contract: Contract, ranks: int) -> Tensor:
        """Return the contracted edges of both gated projections, ``[*, c, rows, columns]``.

        Without gradients ``policy.contraction.channels`` channels are contracted at a time, a quarter of them by
        default, and at least as many as there are ranks. So only factors of these channels exist at once. Arguments
        as of :meth:`multiplied`.
        """
        channels = len(self.projection.weight) // 2
        if torch.is_grad_enabled():
            return contract(*self._factors(pair, mask, slice(0, channels)).chunk(2, dim=-3))
        step = self._step(ranks)
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
        """Return the same channels of the left and the right factor, ``[*, 2 c, rows, columns]``."""
        parameters = self.kernel_parameters().factors
        return kernels.triangle_factors(
            pair,
            mask,
            parameters._replace(**{x: self._of_channels(getattr(parameters, x), channels) for x in ROWS}),
        )

    def _of_channels(self, x: Tensor, channels: slice) -> Tensor:
        """Return the rows for these channels of both factors, of a parameter ``[2 c, *]``."""
        if 2 * (channels.stop - channels.start) == len(x):
            return x
        return x.unflatten(0, (2, -1))[:, channels].flatten(0, 1)

    def updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        """Return ``pair [*, rows, columns, c_z]`` plus its update from the product ``[*, c, rows, columns]``."""

        def add_update(block: Block) -> Tensor:
            return kernels.triangle_update(
                product,
                block.x,
                self.kernel_parameters().update,
                add_z=True,
                dropout=block.dropout,
                out=block.out,
            )

        return self.policy.apply_residual(pair, add_update, dim=None, dropout=dropout)
