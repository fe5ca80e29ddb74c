"""Sequence parallelism: attention over a sequence that is cut over the ranks.

There are two methods. :func:`ring_attention` sends keys and values round a ring. :func:`ulysses_attention` reshards
from parts of the sequence to parts of the heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023). The ring supports
any number of heads and never holds scores against all keys. The reshard sends less on many ranks.
:class:`~fastfold.parallel.sequence_parallel.module.SequenceParallel` uses either in a module written for one device.

In the ring, rank r has the queries and keys of shard r. At step t it attends to shard r - t, which its neighbour sent
during step t - 1. It updates an online softmax: the largest score so far, the sum of exponentials and the weighted sum
of values. The backward pass sends keys and values round again. Their gradients follow one step later, and are on their
own rank at the end.

Source of the ring: Liu, Zaharia and Abbeel, "Ring Attention with blockwise transformers", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import scaled_dot_product_attention

from fastfold import kernels
from fastfold.errors import ConfigError, InputError
from fastfold.kernels.common.layout import MASKED_LOGIT, batched
from fastfold.kernels.common.scratch import accumulation_dtype, without_autocast
from fastfold.parallel.comm import async_ops
from fastfold.parallel.comm.async_ops import AsyncResult, completed, shards_in_turn
from fastfold.parallel.comm.collectives import all_to_all, first_order, gather
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.sequence_parallel.causal_ring import CausalAttention, CausalRing
from fastfold.parallel.sequence_parallel.online_softmax import (
    SoftmaxSum,
    heads_first,
    score_blocks,
    start_backward,
)


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    group: Group,
    sizes: Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
    bias_group: Group | None = None,
) -> Tensor:
    """Compute attention whose keys are sharded over a ring; see :func:`fastfold.kernels.attention`.

    The next shard is sent while one is computed, and a rank holds at most two. A rank sends (P - 1) / P of all keys
    and values forward, and three times that plus one shard backward. Causal attention without a bias has equal work on
    all ranks and about half of these messages; see :mod:`fastfold.parallel.sequence_parallel.causal_ring`.

    Args:
        q: Own queries ``[*, R, Nq, H, D]``.
        k: Own keys ``[*, R, sizes[rank], H, D]``.
        v: Own values, like ``k``.
        bias: Added to the scaled scores: ``[*, H, Nq, N]`` for all keys, or with a ``bias_group`` ``[*, H, Nq,
            sizes[bias_group.rank]]``.
        mask: Own keys to use (not 0) and to leave out (0), ``[*, R, sizes[rank]]``; in a row whose keys are all masked
            every key gets the same weight.
        group: The ring.
        sizes: Number of keys of each rank; None if all have as many as this one.
        causal: True if a query sees its own position and earlier ones. Queries are then sharded as keys are.
        scale: Factor of the scores, by default ``D ** -0.5``.
        bias_group: Ranks with the same queries, as many as the ring has. Rank k of it holds the bias for the keys of
            shard k: the bias is sharded both ways, and fetched for one shard at a time.

    Returns:
        ``[*, R, Nq, H, D]`` in the dtype of ``q``, computed in float32 or better. Gradients are those of the sum of
        all ranks' losses. The gradient of a bias is complete on its rank if only this rank (with a ``bias_group``,
        only that group) has these queries in these rows.

    Raises:
        InputError: Shapes do not match.
        ConfigError: Ring and ``bias_group`` have different sizes.
    """
    lengths = [k.shape[-3]] * group.size if sizes is None else list(sizes)
    if bias_group is not None and bias_group.size != group.size:
        raise ConfigError(
            f"a ring of {group.size} ranks expects a bias_group of as many, one for each shard of the keys, found "
            f"{bias_group.size}"
        )
    columns = sum(lengths) if bias_group is None else lengths[bias_group.rank]
    _check(q, k, v, bias, mask, lengths[group.rank], columns)
    if len(lengths) != group.size or (causal and q.shape[-3] != k.shape[-3]):
        raise InputError(
            f"ring_attention: expected {group.size} shards of keys, and as many queries as keys if causal; found "
            f"{q.shape[-3]} queries and shards of {lengths} keys over {group}"
        )
    masked = None if mask is None else batched(gather(mask.detach(), -1, group, lengths), 2) == 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv = torch.stack((batched(k), batched(v)))
    out: Tensor
    if causal and bias is None and group.size > 1:
        out = CausalAttention.apply(batched(q), kv, masked, CausalRing(group, lengths, scale))
        return out.reshape(q.shape)
    ring = Ring(group, lengths, scale, sum(lengths[: group.rank]) if causal else None, bias_group)
    bias = None if bias is None else batched(bias, 3)
    out = RingAttention.apply(batched(q), kv, bias, masked, ring)
    return out.reshape(q.shape)


def _check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, keys: int, columns: int
) -> None:
    if q.dim() < 4:
        raise InputError(
            f"sequence parallel attention: expected q [*, R, Nq, H, D], found shape {list(q.shape)}"
        )
    *lead, rows, queries, heads, width = q.shape
    for name, x, shape in (
        ("k", k, [*lead, rows, keys, heads, width]),
        ("v", v, [*lead, rows, keys, heads, width]),
        ("bias", bias, [*lead, heads, queries, columns]),
        ("mask", mask, [*lead, rows, keys]),
    ):
        if x is not None and list(x.shape) != shape:
            raise InputError(
                f"sequence parallel attention: expected {name} of shape {shape} for q of shape {list(q.shape)}, found "
                f"{list(x.shape)}"
            )


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    group: Group,
    sizes: Sequence[int] | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention over a sharded sequence by resharding to whole sequences of some heads, and back.

    A rank sends (P - 1) / P of its own queries, keys, values and results, each way. If the ranks do not divide the
    number of heads, heads are split unevenly. Arguments are those of :func:`ring_attention`, with own queries, keys and
    values ``[*, R, sizes[rank], H, D]`` and a bias of own queries ``[*, H, sizes[rank], N]``. The result is as the
    queries.

    Raises:
        InputError: Shapes do not match.
        ConfigError: There are fewer heads than ranks.
    """
    heads = q.shape[-2]
    if heads < group.size:
        raise ConfigError(
            f"ulysses attention: expected at least one head for each of {group.size} ranks, found {heads}; use ring"
        )
    parts = [q.shape[-3]] * group.size if sizes is None else list(sizes)
    _check(q, k, v, bias, mask, q.shape[-3], sum(parts))
    own_heads = shard_sizes(heads, group.size)
    joint = all_to_all(torch.stack((q, k, v)), -2, -3, group, split_sizes=own_heads, concat_sizes=parts)
    if bias is not None:
        bias = all_to_all(bias, -3, -2, group, split_sizes=own_heads, concat_sizes=parts)
    if mask is not None:
        mask = gather(mask.detach(), -1, group, parts)
    q, k, v = joint.unbind(0)
    mixed = _whole_attention(q, k, v, bias, mask, causal, scale)
    return all_to_all(mixed, -3, -2, group, split_sizes=parts, concat_sizes=own_heads)


def _whole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> Tensor:
    """Compute attention of whole sequences ``[*, R, N, H, D]`` on one rank, without all scores at once."""
    if not causal:
        return kernels.attention(q, k, v, bias, mask, scale=scale)
    if bias is None and mask is None:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(-3, -2)
    return ring_attention(q, k, v, bias, mask, group=Group(None), causal=True, scale=scale)


@dataclass(frozen=True)
class Ring:
    """Ring of ranks and its options."""

    group: Group  #: The ranks over which the keys are sharded, in ring order
    sizes: Sequence[int]  #: Number of keys of each rank
    scale: float  #: Factor of the scores
    #: Position of the first own query if a query sees only its own and earlier keys; None if it sees all
    first_query: int | None
    #: Ranks with the same queries; rank k of it holds the bias for the keys of shard k. None if the own bias is for
    #: all keys.
    bias_group: Group | None

    @property
    def order(self) -> list[int]:
        """Shards in the order of the steps."""
        return [(self.group.rank - step) % self.group.size for step in range(self.group.size)]

    def shift(self, x: Tensor, step: int) -> AsyncResult[Tensor]:
        """Send a tensor of a step's shard, with its keys in dimension -3, to the next rank."""
        ranks = range(self.group.size)
        sizes = [self.sizes[(rank - step) % self.group.size] for rank in ranks]
        return async_ops.start_shift(x, 1, self.group, x.dim() - 3, sizes)

    def travel(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard's number and its rank's ``x``; the next shard is sent meanwhile."""
        for step, shard in enumerate(self.order):
            following = self.shift(x, step) if step + 1 < self.group.size else completed(x)
            yield shard, x
            x = following.wait()

    def keys(self, shard: int) -> slice:
        """Return the positions of a shard's keys."""
        start = sum(self.sizes[:shard])
        return slice(start, start + self.sizes[shard])

    def biases(self, bias: Tensor | None) -> Iterator[Tensor | None]:
        """Yield the bias ``[B, H, Nq, keys]`` for each step's shard."""
        if bias is None or self.bias_group is None:
            for shard in self.order:
                yield None if bias is None else bias[..., self.keys(shard)]
            return
        yield from shards_in_turn(bias, -1, self.sizes, self.bias_group, self.order)

    def scores(
        self,
        q: Tensor,
        place: tuple[int, slice, slice],
        shard: int,
        k: Tensor,
        bias: Tensor | None,
        masked: Tensor | None,
    ) -> Tensor:
        """Return the scores ``[H, r, n, keys]`` of one block of queries and a shard's keys.

        Queries are ``q [B, H, R, Nq, D]``, already scaled, and keys ``k [B, H, R, keys, D]``.
        """
        b, row, query = place
        scores = q[b, :, row, query] @ k[b, :, row].mT
        if bias is not None:
            scores += bias[b, :, None, query]
        if masked is not None:
            scores.masked_fill_(masked[b, row, None, self.keys(shard)], MASKED_LOGIT)
        if self.first_query is not None:
            first = self.first_query + query.start
            queries = torch.arange(first, first + scores.shape[-2], device=scores.device)
            keys = self.keys(shard)
            positions = torch.arange(keys.start, keys.stop, device=scores.device)
            scores.masked_fill_(positions > queries[:, None], -math.inf)
        return scores

    def sees(self, shard: int, queries: int) -> bool:
        """Return True if any of the own queries sees any key of the shard."""
        keys, first = self.keys(shard), self.first_query
        return keys.start < keys.stop and (first is None or keys.start < first + queries)


class RingAttention(Function):
    """Attention over one batch axis; see :func:`fastfold.parallel.sequence_parallel.attention.ring_attention`.

    ``q [B, R, Nq, H, D]``, ``kv [2, B, R, Nk, H, D]``, ``bias [B, H, Nq, N or Nk]``, ``masked [B, R, N]`` of all keys.
    """

    @staticmethod
    @without_autocast
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, bias: Tensor | None, masked: Tensor | None, ring: Ring
    ) -> Tensor:
        exact = accumulation_dtype(q)
        own = heads_first(q, exact) * ring.scale
        sums = SoftmaxSum(own)
        for (shard, passing), b_bias in zip(ring.travel(kv), ring.biases(bias), strict=True):
            if not ring.sees(shard, own.shape[-2]):
                continue
            k, v = heads_first(passing, exact).unbind(0)
            for place in score_blocks((*own.shape[:-1], k.shape[-2])):
                b, row, _ = place
                sums.add(place, ring.scores(own, place, shard, k, b_bias, masked), v[b, :, row])
        out = sums.finish()
        ctx.save_for_backward(q, kv, bias, masked, out, sums.largest, sums.total)
        ctx.ring = ring
        return out.movedim(-4, -2).to(q.dtype)

    @staticmethod
    @first_order
    @without_autocast
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, bias, masked, out, largest, total = ctx.saved_tensors
        ring: Ring = ctx.ring
        own = start_backward(q, gradient, out, largest, total, ring.scale)
        grad_q = torch.zeros_like(own.q)
        grad_bias = _BiasGradient(bias, ring) if bias is not None and ctx.needs_input_grad[2] else None
        arriving: AsyncResult[Tensor] | None = None
        for step, ((shard, passing), b_bias) in enumerate(
            zip(ring.travel(kv), ring.biases(bias), strict=True)
        ):
            pair = heads_first(passing, out.dtype)
            grad_pair = torch.zeros_like(pair)
            h_bias = None if grad_bias is None else grad_bias.start(shard)
            for place in (
                score_blocks((*own.q.shape[:-1], pair.shape[-2])) if ring.sees(shard, own.q.shape[-2]) else ()
            ):
                b, row, query = place
                scores = ring.scores(own.q, place, shard, pair[0], b_bias, masked)
                hidden = None if masked is None else masked[b, row, None, ring.keys(shard)]
                grad_scores = own.add(place, scores, pair, hidden, to_q=grad_q, to_keys=grad_pair)
                if h_bias is not None:
                    h_bias[b, :, query] += grad_scores.sum(1)
            if grad_bias is not None:
                grad_bias.finish(shard)
            grad_kv = grad_pair.movedim(-4, -2)
            if arriving is not None:
                grad_kv = arriving.wait() + grad_kv
            arriving = ring.shift(grad_kv, step)
        assert arriving is not None
        # The last shift returns every gradient to its own rank.
        grad_kv = arriving.wait().to(kv.dtype)
        grad_q = (grad_q * ring.scale).movedim(-4, -2).to(q.dtype)
        return grad_q, grad_kv, None if grad_bias is None else grad_bias.result(), None, None


class _BiasGradient:
    """Sum of the gradient of the bias, sent to the ranks that hold the bias."""

    def __init__(self, bias: Tensor, ring: Ring) -> None:
        self.ring, self.dtype = ring, bias.dtype
        self.total = bias.new_zeros(bias.shape, dtype=accumulation_dtype(bias))
        self.part = self.total
        self.pending: tuple[int, AsyncResult[Tensor]] | None = None

    def start(self, shard: int) -> Tensor:
        """Return the buffer for the gradient of a shard's keys, ``[B, H, Nq, keys]``."""
        if self.ring.bias_group is None:
            return self.total[..., self.ring.keys(shard)]
        self.part = self.total.new_zeros(*self.total.shape[:-1], self.ring.sizes[shard])
        return self.part

    def finish(self, shard: int) -> None:
        """Start summing the complete gradient for a shard's keys; the sum overlaps with the next shard."""
        group = self.ring.bias_group
        if group is not None:
            self._collect()
            self.pending = shard, async_ops.start_reduce(self.part, shard, group)

    def _collect(self) -> None:
        if self.pending is not None:
            shard, pending = self.pending
            summed = pending.wait()
            assert self.ring.bias_group is not None
            if shard == self.ring.bias_group.rank:
                self.total = summed

    def result(self) -> Tensor:
        self._collect()
        return self.total.to(self.dtype)
