"""Triangle multiplication on any part of the pair, before and after the edges are contracted.

With gradients, ranks may send the terms of its sums in one message (:class:`TriangleOfTerms`). A rank with a
part of the contracted residue has its term of every sum. The terms are summed on the rank with the product's rows, so
the update is made on a shard along the rows of the pair. The backward pass recomputes the activations between factors
and product while the product's gradient is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold import kernels
from fastfold.evoformer.execution import Block
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.common.layout import MAX_CHANNELS, batch_elements
from fastfold.kernels.common.scratch import without_autocast
from fastfold.kernels.ops.triangle_multiplication.params import TriangleParams
from fastfold.memory.offload import HostBuffers, StreamedRows, kept_rows
from fastfold.parallel.axial.matmul import padded_matmul
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import first_order
from fastfold.parallel.comm.moves import Move, Shards

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
                updated = self.updated(pair[i][rows], product, None if dropout is None else dropout[i])
                if out is not pair:
                    out[i][rows] = updated
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
        for some, part in self._contracted(pair, mask, contract, step):
            kept[some] = part[:, :first]
            for index, rows in enumerate(blocks):
                waiting.send(waiting.part(len(part), index).copy_(part[:, rows]), some.start, index)
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
        out = pair.new_empty(0)
        for some, part in self._contracted(pair, mask, contract, self._step(ranks)):
            if some.start == 0:
                out = part.new_empty(*part.shape[:-3], channels, *part.shape[-2:])
            out[..., some, :, :] = part
            del part
        return out

    def _contracted(
        self, pair: Tensor, mask: Tensor, contract: Contract, step: int
    ) -> Iterator[tuple[slice, Tensor]]:
        channels = len(self.projection.weight) // 2
        for start in range(0, channels, step):
            some = slice(start, min(channels, start + step))
            yield some, contract(*self._factors(pair, mask, some).chunk(2, dim=-3))

    def _factors(self, pair: Tensor, mask: Tensor, channels: slice) -> Tensor:
        """Return the same channels of the left and the right factor, ``[*, 2 c, rows, columns]``."""
        parameters = self.collected(self.kernel_parameters).factors
        if 2 * (channels.stop - channels.start) < len(parameters.proj_weight):
            rows = {name: getattr(parameters, name).unflatten(0, (2, -1))[:, channels] for name in ROWS}
            parameters = parameters._replace(**{name: x.flatten(0, 1) for name, x in rows.items()})
        return kernels.triangle_factors(pair, mask, parameters)

    def updated(self, pair: Tensor, product: Tensor, dropout: Tensor | None) -> Tensor:
        """Return ``pair [*, rows, columns, c_z]`` plus its update from the product ``[*, c, rows, columns]``."""

        def add_update(block: Block) -> Tensor:
            return kernels.triangle_update(
                product,
                block.x,
                self.collected(self.kernel_parameters).update,
                add_z=True,
                dropout=block.dropout,
                out=block.out,
            )

        return self.apply_residual(pair, add_update, dim=None, dropout=dropout)


@dataclass(frozen=True)
class SummedTerms:
    """Options of one multiplication."""

    shards: AxialShards  #: The cut
    length: int  #: Residues N
    #: True for outgoing edges: the pair is then cut along its columns, otherwise along its rows. The result is cut
    #: along its rows.
    outgoing: bool
    #: First work of the backward pass while the product's gradient is sent
    meanwhile: Callable[[], None] | None = None

    def product(self, factors: Tensor) -> Tensor:
        """Return this rank's terms ``[*, c, N, N]`` of factors ``[*, 2 c, N, n]`` or ``[*, 2 c, n, N]``."""
        left, right = factors.chunk(2, -3)
        # The official program contracts left[k, j] with right[k, i] for incoming edges.
        return padded_matmul(left, right.mT) if self.outgoing else padded_matmul(right.mT, left)

    def gradients(self, grad: Tensor, factors: Tensor) -> Tensor:
        """Return the gradients of the factors, from that of the whole product."""
        gradients = torch.empty_like(factors)
        (left, right), (of_left, of_right) = factors.chunk(2, -3), gradients.chunk(2, -3)
        if self.outgoing:
            padded_matmul(grad, right, out=of_left)
            padded_matmul(grad.mT, left, out=of_right)
        else:
            padded_matmul(right, grad, out=of_left)
            padded_matmul(left, grad.mT, out=of_right)
        return gradients

    def send(self, terms: Tensor, pair: Tensor) -> list[AsyncResult[Tensor]]:
        """Start summing terms, and with outgoing edges resharding the pair to its rows."""
        moves = (terms, self._sum(terms)), (pair, self._to_rows(pair))
        return async_ops.start_exchange(moves if self.outgoing else moves[:1], self.shards.group)

    def send_back(self, grad: Tensor, pair: Tensor) -> list[AsyncResult[Tensor]]:
        """Start gathering the product's gradient, and with outgoing edges resharding the pair's to columns."""
        # The gather has its own message: in a shared one its data would be copied for each rank.
        moves = (grad, self._sum(grad).adjoint), (pair, self._to_rows(pair).adjoint)
        return [
            result
            for move in (moves if self.outgoing else moves[:1])
            for result in async_ops.start_exchange([move], self.shards.group)
        ]

    def _sum(self, x: Tensor) -> Move:
        return Move(before=None, after=Shards(x.dim() - 2, self.shards.sizes(self.length)))

    def _to_rows(self, pair: Tensor) -> Move:
        sizes = self.shards.sizes(self.length)
        return Move(before=Shards(pair.dim() - 2, sizes), after=Shards(pair.dim() - 3, sizes))


class TriangleOfTerms(Function):
    """``pair [*, n, N, c_z]``, updated by :func:`fastfold.kernels.triangle_multiplication` and cut by rows.

    The pair and its mask are ``[*, N, n, c_z]`` with outgoing edges, ``[*, n, N, c_z]`` with incoming ones; the factors
    of the dropout are for the rows ``[*, 1, N, c_z]``.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, pair: Tensor, mask: Tensor, dropout: Tensor | None, how: SummedTerms, *parameters: Tensor
    ) -> Tensor:
        group = TriangleParams(*parameters)
        ctx.how, ctx.factors, ctx.begin = how, None, TriangleOfTerms.begin
        ctx.backend = choose_backend(pair, fits=max(group.out_weight.shape) <= MAX_CHANNELS)
        factors = torch.ops.fastfold.triangle_factors(pair, mask, group.factors, ctx.backend)
        product, *rows = [result.wait() for result in how.send(how.product(factors), pair)]
        ctx.save_for_backward(pair, mask, dropout, product, rows[0] if rows else None, *parameters)
        out: Tensor = torch.ops.fastfold.triangle_update(
            product, rows[0] if rows else pair, dropout, group.update, True, ctx.backend
        )
        return out

    @staticmethod
    def begin(ctx: Any) -> None:
        """Compute the factors again, which needs no gradient."""
        # Saved tensors are read once: activation checkpointing returns them a single time.
        pair, mask, *others = saved = ctx.saved_tensors
        parameters = TriangleParams(*others[3:]).factors
        ctx.factors = saved, torch.ops.fastfold.triangle_factors(pair, mask, parameters, ctx.backend)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: SummedTerms = ctx.how
        saved, factors = ctx.factors or (ctx.saved_tensors, None)
        ctx.factors = None
        pair, mask, dropout, product, by_rows, *parameters = saved
        group, needs = TriangleParams(*parameters), list(ctx.needs_input_grad[4:])
        of_update = [*(needs[:2] if how.outgoing else [False] * 2), *needs[6:]]
        grad_product, grad_rows, *update = torch.ops.fastfold.triangle_update_backward(
            *(grad, product, pair if by_rows is None else by_rows, dropout, group.update),
            add_z=True,
            needs=[True, True, *of_update],
            backend=ctx.backend,
            # Factors of incoming edges are of the same part of the pair, so its norm continues with both gradients.
            normed=not how.outgoing,
        )
        gathered, *columns = how.send_back(grad_product, grad_rows)
        if how.meanwhile is not None:
            how.meanwhile()
        if factors is None:
            factors = torch.ops.fastfold.triangle_factors(pair, mask, group.factors, ctx.backend)
        grads = how.gradients(gathered.wait(), factors)
        others = [x.wait() for x in columns] or [grad, grad_rows]
        grad_pair, *of_factors = torch.ops.fastfold.triangle_factors_backward(
            grads, pair, mask, group.factors, others, [True, *needs[:6]], ctx.backend
        )
        if how.outgoing:
            of_factors[:2] = torch._foreach_add(of_factors[:2], update[:2])
        pairs = zip([*of_factors, *update[2:]], needs, strict=True)
        return grad_pair, None, None, None, *(g if need else None for g, need in pairs)
