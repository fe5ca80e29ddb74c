"""Sequence parallelism: attention over a sequence that is cut over the ranks.

There are two methods. :func:`ring_attention` sends keys and values round a ring. :func:`ulysses_attention` reshards
from parts of the sequence to parts of the heads and back (Jacobs et al., "DeepSpeed Ulysses", 2023). The ring supports
any number of heads and never holds scores against all keys. The reshard sends less on many ranks.
:class:`~fastfold.parallel.sequence_parallel.module.SequenceParallel` uses either in a module written for one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastfold import kernels
from fastfold.errors import ConfigError, InputError
from fastfold.kernels.common.layout import batched
from fastfold.parallel.comm.collectives import all_to_all, gather
from fastfold.parallel.comm.groups import Group, shard_sizes
from fastfold.parallel.sequence_parallel.ring_attention import Ring, RingAttention


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
    and values forward, and three times that plus one shard backward.

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
    found = [k.shape[-3]] * group.size if sizes is None else list(sizes)
    if bias_group is not None and bias_group.size != group.size:
        raise ConfigError(
            f"a ring of {group.size} ranks expects a bias_group of as many, one for each shard of the keys, found "
            f"{bias_group.size}"
        )
    columns = sum(found) if bias_group is None else found[bias_group.rank]
    _check(q, k, v, bias, mask, found[group.rank], columns)
    if len(found) != group.size or (causal and q.shape[-3] != k.shape[-3]):
        raise InputError(
            f"ring_attention: expected {group.size} shards of keys, and as many queries as keys if causal; found "
            f"{q.shape[-3]} queries and shards of {found} keys over {group}"
        )
    masked = None if mask is None else batched(gather(mask.detach(), -1, group, found), 2) == 0
    ring = Ring(
        group,
        found,
        q.shape[-1] ** -0.5 if scale is None else scale,
        sum(found[: group.rank]) if causal else None,
        bias_group,
    )
    kv = torch.stack((batched(k), batched(v)))
    bias = None if bias is None else batched(bias, 3)
    out: Tensor = RingAttention.apply(batched(q), kv, bias, masked, ring)
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
