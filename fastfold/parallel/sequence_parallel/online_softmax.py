"""Attention in parts: a softmax whose sums grow with the keys that have been seen, and its gradients.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Number of scores that exist at a time: 64 MiB of float32.
_MAX_SCORES = 2**24

Place = tuple[int, slice, slice]
"""Batch element, rows and queries of a block."""


def score_blocks(shape: Sequence[int]) -> Iterator[Place]:
    """Yield the blocks of scores ``[B, H, R, Nq, Nk]``, none without keys."""
    batch, heads, rows, queries, keys = shape
    queries = queries if keys else 0
    row_step = max(1, _MAX_SCORES // max(1, heads * queries * keys))
    query_step = max(1, min(queries, _MAX_SCORES // max(1, heads * keys)))
    starts = (range(batch), range(0, rows, row_step), range(0, queries, query_step))
    for b, r, n in itertools.product(*starts):
        yield b, slice(r, r + row_step), slice(n, n + query_step)


def heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[..., R, N, H, D]`` as ``[..., H, R, N, D]``."""
    return x.movedim(-2, -4).to(dtype)


class SoftmaxSum:
    """Sums of a softmax over the keys seen so far, for queries ``q [B, H, R, Nq, D]``.

    Attributes:
        mixed: Weighted sum of values ``[B, H, R, Nq, D]``.
        total: Sum of exponentials ``[B, H, R, Nq, 1]``.
        largest: Largest score ``[B, H, R, Nq, 1]``, minus infinity before any key.
    """

    def __init__(self, q: Tensor) -> None:
        self.mixed = torch.zeros_like(q)
        self.total = q.new_zeros(*q.shape[:-1], 1)
        self.largest = torch.full_like(self.total, -math.inf)

    def add(self, place: Place, scores: Tensor, v: Tensor) -> None:
        """Add keys: their scores ``[H, r, n, Nk]`` of a block, which are overwritten, and values ``[H, r, Nk, D]``."""
        b, row, query = place
        at = (b, slice(None), row, query)
        pivot, shrink = self._raise(at, scores.amax(-1, keepdim=True))
        weights = scores.sub_(pivot).exp_()
        self.total[at] = self.total[at] * shrink + weights.sum(-1, keepdim=True)
        self.mixed[at] = self.mixed[at] * shrink + weights @ v

    def merge(self, queries: slice, packed: Tensor) -> None:
        """Add the packed sums of other keys for some of the queries."""
        mixed, total, largest = packed.split([packed.shape[-1] - 2, 1, 1], -1)
        at = (..., queries, slice(None))
        pivot, shrink = self._raise(at, largest)
        share = (largest - pivot).exp()
        self.total[at] = self.total[at] * shrink + total * share
        self.mixed[at] = self.mixed[at] * shrink + mixed * share

    def packed(self) -> Tensor:
        """Return all sums as one tensor ``[B, H, R, Nq, D + 2]``."""
        return torch.cat((self.mixed, self.total, self.largest), -1)

    def finish(self) -> Tensor:
        """Return the attention's result; ``largest`` and ``total`` then give weights, zeros without any key."""
        # A query whose scores are all minus infinity has seen no key; its weights and result are zeros.
        unseen = self.largest == -math.inf
        self.largest.masked_fill_(unseen, 0)
        self.mixed /= self.total.masked_fill_(unseen, 1)
        return self.mixed

    def _raise(self, at: tuple[object, ...], largest: Tensor) -> tuple[Tensor, Tensor]:
        """Raise the largest score; return it, 0 where no key was seen, and the factor of earlier sums."""
        before = self.largest[at]  # type: ignore[index]
        highest = torch.maximum(before, largest)
        pivot = highest.masked_fill(highest == -math.inf, 0)
        shrink = (before - pivot).exp()
        self.largest[at] = highest  # type: ignore[index]
        return pivot, shrink


class SoftmaxGradient:
    """Queries of a backward pass, which recomputes the weights.

    Args:
        q: Scaled queries ``[B, H, R, Nq, D]``.
        gradient: Gradient of the attention's result ``[B, H, R, Nq, D]``.
        mean: Weighted mean of the weights' gradients ``[B, H, R, Nq, 1]``: the gradient times the result, summed.
        largest: As of :class:`SoftmaxSum` over all keys.
        total: As of :class:`SoftmaxSum` over all keys.
    """

    def __init__(self, q: Tensor, gradient: Tensor, mean: Tensor, largest: Tensor, total: Tensor) -> None:
        self.q, self.gradient, self.mean, self.largest, self.total = q, gradient, mean, largest, total

    @classmethod
    def unpacked(cls, packed: Tensor) -> SoftmaxGradient:
        """Return the queries of :meth:`packed`."""
        width = (packed.shape[-1] - 3) // 2
        return cls(*packed.split([width, width, 1, 1, 1], -1))

    def packed(self) -> Tensor:
        """Return all tensors as one ``[B, H, R, Nq, 2 D + 3]``."""
        return torch.cat((self.q, self.gradient, self.mean, self.largest, self.total), -1)

    def add(
        self,
        place: Place,
        scores: Tensor,
        keys: Tensor,
        hidden: Tensor | None,
        *,
        to_q: Tensor,
        to_keys: Tensor,
    ) -> Tensor:
        """Add a block's gradients by queries and keys; return those by its scores ``[H, r, n, Nk]``.

        Args:
            place: The block.
            scores: Its scores, which are overwritten.
            keys: Keys and values ``[2, B, H, R, Nk, D]``.
            hidden: Mask ``[r, 1, Nk]`` of keys that the queries do not see, or None.
            to_q: Sum of gradients by scaled queries ``[B, H, R, Nq, D]``.
            to_keys: Sum of gradients by keys and values ``[2, B, H, R, Nk, D]``.
        """
        b, row, query = place
        at, of_keys = (b, slice(None), row, query), (b, slice(None), row)
        k, v = keys.unbind(0)
        gradient = self.gradient[at]
        weights = scores.sub_(self.largest[at]).exp_().div_(self.total[at])
        to_keys[1][of_keys] += weights.mT @ gradient
        of_scores = (gradient @ v[of_keys].mT).sub_(self.mean[at]).mul_(weights)
        if hidden is not None:
            # A weight of 0 has done this already, except in rows whose keys are all masked.
            of_scores.masked_fill_(hidden, 0)
        to_q[at] += of_scores @ k[of_keys]
        to_keys[0][of_keys] += of_scores.mT @ self.q[at]
        return of_scores


def start_backward(
    q: Tensor, gradient: Tensor, out: Tensor, largest: Tensor, total: Tensor, scale: float
) -> SoftmaxGradient:
    """Return the queries of a backward pass from tensors that the forward pass keeps.

    ``q`` and ``gradient`` are ``[..., R, N, H, D]``, other tensors as of :class:`SoftmaxSum` after its end.
    """
    gradient = heads_first(gradient, out.dtype)
    mean = (gradient * out).sum(-1, keepdim=True)
    return SoftmaxGradient(heads_first(q, out.dtype) * scale, gradient, mean, largest, total)
