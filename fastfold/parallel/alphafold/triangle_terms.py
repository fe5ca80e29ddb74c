"""Triangle multiplication with gradients on shards; ranks send the terms of its sums in one message.

A rank with a part of the contracted residue has its term of every sum. The terms are summed on the rank with the
product's rows, so the update is made on a shard along the rows of the pair. The backward pass recomputes the
activations between factors and product while the product's gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold.kernels.common.backend import products_backend
from fastfold.kernels.common.scratch import without_autocast
from fastfold.kernels.ops.triangle_multiplication.params import TriangleParams
from fastfold.parallel.axial.matmul import padded_matmul
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.differentiable import first_order
from fastfold.parallel.comm.moves import Move, Shards


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
        found = torch.empty_like(factors)
        (left, right), (of_left, of_right) = factors.chunk(2, -3), found.chunk(2, -3)
        if self.outgoing:
            padded_matmul(grad, right, out=of_left)
            padded_matmul(grad.mT, left, out=of_right)
        else:
            padded_matmul(right, grad, out=of_left)
            padded_matmul(left, grad.mT, out=of_right)
        return found

    def send(self, terms: Tensor, pair: Tensor) -> list[AsyncResult[Tensor]]:
        """Start summing terms, and with outgoing edges resharding the pair to its rows."""
        moves = (terms, self._sum(terms)), (pair, self._to_rows(pair))
        return async_ops.start_exchange(moves if self.outgoing else moves[:1], self.shards.group)

    def send_back(self, grad: Tensor, pair: Tensor) -> list[AsyncResult[Tensor]]:
        """Start gathering the product's gradient, and with outgoing edges resharding the pair's to columns."""
        # The gather has its own message: in a shared one its data would be copied for each rank.
        moves = (grad, self._sum(grad).adjoint), (pair, self._to_rows(pair).adjoint)
        return [
            found
            for move in (moves if self.outgoing else moves[:1])
            for found in async_ops.start_exchange([move], self.shards.group)
        ]

    def _sum(self, x: Tensor) -> Move:
        return Move(before=None, after=Shards(x.dim() - 2, self.shards.sizes(self.length)))

    def _to_rows(self, pair: Tensor) -> Move:
        sizes = self.shards.sizes(self.length)
        return Move(before=Shards(pair.dim() - 2, sizes), after=Shards(pair.dim() - 3, sizes))


class _Multiplication(Function):
    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, pair: Tensor, mask: Tensor, dropout: Tensor | None, how: SummedTerms, *parameters: Tensor
    ) -> Tensor:
        group = TriangleParams(*parameters)
        ctx.how, ctx.begun, ctx.begin = how, None, _Multiplication.begin
        ctx.backend = products_backend(pair, max(group.out_weight.shape), None)
        factors = torch.ops.fastfold.triangle_factors(pair, mask, group.factors, ctx.backend)
        product, *rows = [found.wait() for found in how.send(how.product(factors), pair)]
        ctx.save_for_backward(pair, mask, dropout, product, rows[0] if rows else None, *parameters)
        out: Tensor = torch.ops.fastfold.triangle_update(
            product, rows[0] if rows else pair, dropout, group.update, True, ctx.backend
        )
        return out

    @staticmethod
    def begin(ctx: Any) -> None:
        # Saved tensors are read once: activation checkpointing returns them a single time.
        pair, mask, *others = saved = ctx.saved_tensors
        parameters = TriangleParams(*others[3:]).factors
        ctx.begun = saved, torch.ops.fastfold.triangle_factors(pair, mask, parameters, ctx.backend)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: SummedTerms = ctx.how
        saved, factors = ctx.begun or (ctx.saved_tensors, None)
        ctx.begun = None
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
        found = zip([*of_factors, *update[2:]], needs, strict=True)
        return grad_pair, None, None, None, *(g if need else None for g, need in found)


def multiplication_of_terms(
    pair: Tensor, mask: Tensor, dropout: Tensor | None, parameters: TriangleParams, how: SummedTerms
) -> Tensor:
    """Return ``pair [*, n, N, c_z]``, updated by :func:`fastfold.kernels.triangle_multiplication`, cut by rows.

    The pair and its mask are ``[*, N, n, c_z]`` with outgoing edges, ``[*, n, N, c_z]`` with incoming ones; the factors
    of the dropout are for the rows ``[*, 1, N, c_z]``.
    """
    out: Tensor = _Multiplication.apply(pair, mask, dropout, how, *parameters)
    return out
