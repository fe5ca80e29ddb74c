"""Causal attention over a sharded sequence, with equal work on all ranks and half of the messages.

A query sees its own position and earlier ones. So of P² pairs of a shard of queries and a shard of keys only those with
keys at a distance of 0 to r shards before the queries of rank r have work. In a ring where every rank computes its own
queries, the last rank has P pairs and the first has one. Here the pairs of a distance below P / 2 are computed by the
rank of the queries, which gets keys and values. Farther ones are computed by the rank of the keys, which gets queries
and returns sums. Pairs at P / 2 are computed by both, half of the queries each. Every rank then has (P + 1) / 2 pairs.

Source of the schedule: Li et al., "DistFlashAttn", 2023, which has whole pairs only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fastfold.kernels.common.layout import MASKED_LOGIT
from fastfold.kernels.common.scratch import accumulation_dtype, without_autocast
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult
from fastfold.parallel.comm.collectives import first_order
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.sequence_parallel.online_softmax import (
    Place,
    SoftmaxGradient,
    SoftmaxSum,
    heads_first,
    score_blocks,
    start_backward,
)


@dataclass(frozen=True)
class CausalRing:
    """Ranks of a causal attention, and who computes what."""

    group: Group  #: The ranks over which the sequence is sharded, in order
    sizes: Sequence[int]  #: Number of positions of each rank
    scale: float  #: Factor of the scores

    @cached_property
    def ranks(self) -> range:
        """Ranks of the group."""
        return range(self.group.size)

    @property
    def distances(self) -> range:
        """Distances between a shard of queries and an earlier one of keys."""
        return range(1, self.group.size)

    def keys(self, shard: int) -> slice:
        """Return the positions of a shard."""
        start = sum(self.sizes[:shard])
        return slice(start, start + self.sizes[shard])

    def helped(self, rank: int, distance: int) -> int:
        """Return the number of a rank's first queries that the rank ``distance`` before computes."""
        if not distance <= rank < self.group.size or 2 * distance < self.group.size:
            return 0
        size = self.sizes[rank]
        return size if 2 * distance > self.group.size else (size + 1) // 2

    def own_queries(self, rank: int, distance: int) -> slice:
        """Return the queries that a rank computes itself with the keys ``distance`` before."""
        has_keys = distance <= rank < self.group.size and self.sizes[rank - distance] > 0
        return slice(self.helped(rank, distance), self.sizes[rank]) if has_keys else slice(0, 0)

    def gets_keys(self, rank: int, distance: int) -> bool:
        """Return True if a rank needs the keys ``distance`` before."""
        own = self.own_queries(rank, distance)
        return own.start < own.stop

    def start_keys(self, kv: Tensor, distance: int) -> AsyncResult[Tensor] | None:
        """Start sending ``kv`` with keys in dimension -3 to the ranks that need them."""
        sizes = [self.sizes[r] if self.gets_keys(r + distance, distance) else 0 for r in self.ranks]
        return self._start(kv, distance, kv.dim() - 3, sizes)

    def start_key_gradients(self, gradient: Tensor, distance: int) -> AsyncResult[Tensor] | None:
        """Start returning gradients ``[2, B, H, R, keys, D]`` to the ranks of the keys."""
        sizes = [self.sizes[r - distance] if self.gets_keys(r, distance) else 0 for r in self.ranks]
        return self._start(gradient, -distance, 4, sizes)

    def start_queries(self, queries: Tensor, distance: int) -> AsyncResult[Tensor] | None:
        """Start sending tensors ``[B, H, R, Nq, *]`` of queries to the ranks that help with them."""
        sizes = [self.helped(r, distance) for r in self.ranks]
        return self._start(queries[..., : sizes[self.group.rank], :], -distance, 3, sizes)

    def start_results(self, results: Tensor, distance: int) -> AsyncResult[Tensor] | None:
        """Start returning tensors ``[B, H, R, queries, *]`` to the ranks of the queries."""
        sizes = [self.helped(r + distance, distance) for r in self.ranks]
        return self._start(results, distance, 3, sizes)

    def _start(self, x: Tensor, offset: int, dim: int, sizes: Sequence[int]) -> AsyncResult[Tensor] | None:
        """Start a shift in which a rank sends all of a tensor or nothing; None if no rank sends any."""
        if not any(sizes):
            return None
        x = x if sizes[self.group.rank] else x.narrow(dim, 0, 0)
        return async_ops.start_shift(x, offset, self.group, dim, sizes)

    def scores(
        self, q: Tensor, place: Place, k: Tensor, masked: Tensor | None, shard: int, *, diagonal: bool
    ) -> Tensor:
        """Return the scores ``[H, r, n, keys]`` of a block of scaled queries and the keys of a shard.

        ``q [B, H, R, Nq, D]``, ``k [B, H, R, keys, D]``, ``masked [B, R, N]`` of all keys. On the ``diagonal`` queries
        and keys are of one shard.
        """
        b, row, query = place
        scores = q[b, :, row, query] @ k[b, :, row].mT
        if masked is not None:
            scores.masked_fill_(masked[b, row, None, self.keys(shard)], MASKED_LOGIT)
        if diagonal:
            rows, columns = scores.shape[-2:]
            positions = torch.arange(max(rows + query.start, columns), device=scores.device)
            queries = positions[query.start : query.start + rows]
            scores.masked_fill_(positions[:columns] > queries[:, None], -math.inf)
        return scores


class CausalAttention(Function):
    """Causal attention of the shards of a :class:`CausalRing`.

    ``q [B, R, N, H, D]``, ``kv [2, B, R, N, H, D]``, ``masked [B, R, N]`` of all keys.
    """

    @staticmethod
    @without_autocast
    def forward(ctx: Any, q: Tensor, kv: Tensor, masked: Tensor | None, ring: CausalRing) -> Tensor:
        rank, exact = ring.group.rank, accumulation_dtype(q)
        sent = heads_first(q, q.dtype)
        own = sent.to(exact) * ring.scale
        sums = SoftmaxSum(own)

        def add(
            to: SoftmaxSum, queries: Tensor, first: int, pair: Tensor, shard: int, diagonal: bool = False
        ) -> None:
            k, v = pair.unbind(0)
            for b, row, query in score_blocks((*queries.shape[:-1], k.shape[-2])):
                place = b, row, query
                scores = ring.scores(queries, place, k, masked, shard, diagonal=diagonal)
                to.add((b, row, slice(first + query.start, first + query.stop)), scores, v[b, :, row])

        def start(distance: int) -> tuple[AsyncResult[Tensor] | None, AsyncResult[Tensor] | None]:
            return ring.start_keys(kv, distance), ring.start_queries(sent, distance)

        pair = heads_first(kv, exact)
        coming = start(1)
        add(sums, own, 0, pair, rank, diagonal=True)
        returned: list[Callable[[], None]] = []
        for distance in ring.distances:
            keys, queries = (None if part is None else part.wait() for part in coming)
            coming = start(distance + 1) if distance + 1 in ring.distances else (None, None)
            mine = ring.own_queries(rank, distance)
            if keys is not None and mine.start < mine.stop:
                add(sums, own[..., mine, :], mine.start, heads_first(keys, exact), rank - distance)
            returning: list[Callable[[], None]] = []
            if queries is not None:
                helped = queries.to(exact) * ring.scale
                part = SoftmaxSum(helped)
                add(part, helped, 0, pair, rank)
                result = ring.start_results(part.packed(), distance)
                returning.append(_merger(sums, slice(0, ring.helped(rank, distance)), result))
            # Results of the previous distance arrived meanwhile.
            for collect in returned:
                collect()
            returned = returning
        for collect in returned:
            collect()
        out = sums.finish()
        ctx.save_for_backward(q, kv, masked, out, sums.largest, sums.total)
        ctx.ring = ring
        return out.movedim(-4, -2).to(q.dtype)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, masked, out, largest, total = ctx.saved_tensors
        ring: CausalRing = ctx.ring
        rank, exact, width = ring.group.rank, out.dtype, out.shape[-1]
        own = start_backward(q, gradient, out, largest, total, ring.scale)
        queries = own.packed()
        pair = heads_first(kv, exact)
        grad_q, grad_pair = torch.zeros_like(own.q), torch.zeros_like(pair)

        def add(
            of_queries: Tensor, of_pair: Tensor, packed: Tensor, pair: Tensor, shard: int, diagonal: bool
        ) -> None:
            part = SoftmaxGradient.unpacked(packed)
            for place in score_blocks((*part.q.shape[:-1], pair.shape[-2])):
                b, row, _ = place
                scores = ring.scores(part.q, place, pair[0], masked, shard, diagonal=diagonal)
                hidden = None if masked is None else masked[b, row, None, ring.keys(shard)]
                part.add(place, scores, pair, hidden, to_q=of_queries, to_keys=of_pair)

        def start(distance: int) -> tuple[AsyncResult[Tensor] | None, AsyncResult[Tensor] | None]:
            return ring.start_keys(kv, distance), ring.start_queries(queries, distance)

        coming = start(1)
        add(grad_q, grad_pair, queries, pair, rank, True)
        returned: list[Callable[[], None]] = []
        for distance in ring.distances:
            keys, helped = (None if part is None else part.wait() for part in coming)
            coming = start(distance + 1) if distance + 1 in ring.distances else (None, None)
            returning: list[Callable[[], None]] = []
            if keys is not None:
                other = heads_first(keys, exact)
                of_other, mine = torch.zeros_like(other), ring.own_queries(rank, distance)
                if mine.start < mine.stop:
                    add(grad_q[..., mine, :], of_other, queries[..., mine, :], other, rank - distance, False)
                result = ring.start_key_gradients(of_other, distance)
                returning.append(_adder(grad_pair, result))
            if helped is not None:
                of_helped = helped.new_zeros(*helped.shape[:-1], width)
                add(of_helped, grad_pair, helped, pair, rank, False)
                result = ring.start_results(of_helped, distance)
                returning.append(_adder(grad_q[..., : ring.helped(rank, distance), :], result))
            for collect in returned:
                collect()
            returned = returning
        for collect in returned:
            collect()
        grad_kv = grad_pair.movedim(-4, -2).to(kv.dtype)
        return (grad_q * ring.scale).movedim(-4, -2).to(q.dtype), grad_kv, None, None


def _merger(sums: SoftmaxSum, queries: slice, result: AsyncResult[Tensor] | None) -> Callable[[], None]:
    """Return a function that merges sums from another rank, if there are any."""

    def merge() -> None:
        packed = None if result is None else result.wait()
        if packed is not None and packed.shape[-2]:
            sums.merge(queries, packed)

    return merge


def _adder(total: Tensor, result: AsyncResult[Tensor] | None) -> Callable[[], None]:
    """Return a function that adds gradients from another rank, if there are any."""

    def add() -> None:
        part = None if result is None else result.wait()
        if part is not None and part.shape[-2]:
            total.add_(part)

    return add
