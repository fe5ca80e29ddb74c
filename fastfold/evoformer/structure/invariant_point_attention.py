"""Invariant point attention (supplement Algorithm 22)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from ml_collections import ConfigDict
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.execution import LazyRows, PolicyModule, rows_of
from fastfold.evoformer.primitives import Linear
from fastfold.protein.rigid import Rigid

_SMALL = 2**21  #: Elements of all differences of points that are formed at once


class PairTerms(NamedTuple):
    """Terms of the logits of all rows that do not change between the iterations of a structure module."""

    pair: Tensor  #: ``[*, rows, N, c_z]``, normalised
    bias: Tensor  #: ``[*, H, rows, N]``
    hidden: Tensor  #: ``[*, 1, rows, N]``, large for padding
    weight: Tensor  #: ``[H, 1, 1]``, weight of squared distances


class InvariantPointAttention(PolicyModule):
    """Attention over residues that is invariant to a global rigid motion (supplement Algorithm 22).

    - Lines 1-3: scalar and point queries, keys and values are projected from the single representation.
    - Line 4: the bias of each head is projected from the pair.
    - Lines 5-6: three terms of the logits are weighted so that each has unit variance at initialisation.
    - Line 7: the terms are the scalar product, the bias, and minus the squared distances between query points and key
      points, each moved by its residue's frame; a softmax goes over the residues.
    - Lines 8-9: the pair and the scalar values are averaged with these weights.
    - Line 10: value points are averaged in global space and moved back into the residue's frame.
    - Line 11: all averages and the lengths of the points are projected.

    Points are projected as ``[heads, points, 3]``. The official monomer and multimer programs order these channels
    differently; reading their weights reorders them.

    The multimer network has no biases on scalar projections, and another bound on point norms.
    """

    operator = "structure module"

    def __init__(self, config: ConfigDict, c_s: int, c_z: int, *, multimer: bool, zero_init: bool) -> None:
        super().__init__()
        self.heads, self.multimer = config.num_head, multimer
        self.c_qk, self.c_v = config.num_scalar_qk, config.num_scalar_v
        self.p_qk, self.p_v = config.num_point_qk, config.num_point_v
        h = self.heads
        self.query = Linear(c_s, h * self.c_qk, bias=not multimer)
        self.key = Linear(c_s, h * self.c_qk, bias=not multimer)
        self.value = Linear(c_s, h * self.c_v, bias=not multimer)
        self.query_points = Linear(c_s, h * self.p_qk * 3)
        self.key_points = Linear(c_s, h * self.p_qk * 3)
        self.value_points = Linear(c_s, h * self.p_v * 3)
        self.pair_bias = Linear(c_z, h)
        # softplus of this is one.
        self.point_weights = nn.Parameter(torch.full((h,), math.log(math.e - 1.0)))
        self.output = Linear(
            h * (self.c_v + 4 * self.p_v + c_z), c_s, init="final" if zero_init else "default"
        )

    def forward(
        self,
        single: Tensor,
        pair: Tensor | LazyRows | PairTerms,
        frames: Rigid,
        mask: Tensor,
        rows: slice = slice(None),
    ) -> Tensor:
        """Compute the update ``[*, rows, c_s]`` of the single representation ``[*, N, c_s]``.

        The ``pair [*, rows, N, c_z]``, or its terms, holds the ``rows`` to update, by default all. Translations of the
        ``frames [*, N]`` are in the network's length unit; the ``mask [*, N]`` is 0 for padding.
        """
        h = self.heads
        q = by_head(self.query(single), h) * math.sqrt(1.0 / (3 * self.c_qk))
        k, v = by_head(self.key(single), h), by_head(self.value(single), h)
        # All points are moved at once.
        points = [self.query_points(single), self.key_points(single), self.value_points(single)]
        sizes = [x.shape[-1] for x in points]
        to_points = frames[..., None]
        moved = to_points.apply(torch.cat(points, -1).unflatten(-1, (-1, 3))).flatten(-2)
        q_points, k_points, v_points = (by_head(x, h) for x in moved.split(sizes, -1))
        first = rows.start or 0

        if rows != slice(None):
            q, q_points, to_points = q[..., rows, :], q_points[..., rows, :], to_points[..., rows, :]
        if isinstance(pair, PairTerms):
            return self._update(q, k, v, q_points, k_points, v_points, to_points, terms=pair)

        def update(_: Tensor, block: slice, pair: Tensor | LazyRows = pair) -> Tensor:
            own = slice(block.start - first, block.stop - first)
            terms = self.pair_terms(rows_of(pair, own), mask, block)
            return self._update(
                q[..., own, :],
                k,
                v,
                q_points[..., own, :],
                k_points,
                v_points,
                to_points[..., own, :],
                terms=terms,
            )

        *lead, columns, channels = pair.shape
        residues = single.new_empty(()).expand(*lead, 1)
        return self.policy.map(residues, update, dim=-2, start=first, channels=columns * channels)

    def pair_terms(self, pair: Tensor, mask: Tensor, rows: slice = slice(None)) -> PairTerms:
        """Return the terms of the logits of ``rows`` from ``pair [*, rows, N, c_z]`` and ``mask [*, N]``."""
        bias = math.sqrt(1.0 / 3.0) * self.pair_bias(pair).movedim(-1, -3)
        pair_mask = mask[..., rows, None] * mask[..., None, :]
        weight = F.softplus(self.point_weights) * math.sqrt(1.0 / (3 * self.p_qk * 9.0 / 2.0))
        return PairTerms(pair, bias, 1e5 * (1.0 - pair_mask).unsqueeze(-3), (0.5 * weight)[:, None, None])

    def _update(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_points: Tensor,
        k_points: Tensor,
        v_points: Tensor,
        to_points: Rigid,
        *,
        terms: PairTerms,
    ) -> Tensor:
        # Each of the three terms has unit variance at initialisation.
        distances = terms.weight * _squared_distances(q_points, k_points)
        logits = product(q, k.mT) - distances
        del distances
        logits = logits + terms.bias
        attention = torch.softmax(logits - terms.hidden, dim=-1)

        scalars = product(attention, v).transpose(-3, -2)
        points = product(attention, v_points).transpose(-3, -2).flatten(-2).unflatten(-1, (-1, 3))
        points = to_points.invert_apply(points)
        squared = points.square().sum(-1)
        norms = (squared.clamp(min=1e-16) if self.multimer else squared + 1e-8).sqrt()
        over_pair = product(attention.transpose(-3, -2), terms.pair)
        features = [scalars.flatten(-2), points.mT.flatten(-2), norms, over_pair.flatten(-2)]
        return self.output(torch.cat(features, -1))


def by_head(x: Tensor, heads: int) -> Tensor:
    """Return channels ``[*, N, H * c]`` by head, ``[*, H, N, c]``."""
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a [*, A, B] @ b [*, B, C]``; without batch axes in one operator, where ``matmul`` takes six."""
    return torch.bmm(a, b) if a.dim() == 3 else a @ b


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return summed squared distances ``[*, H, N, M]`` between points ``[*, H, N, 3 P]`` and ``[*, H, M, 3 P]``.

    Sums differences, because expanding the square cancels digits. All differences at once are ``3 P`` times the size
    of the result. On a CPU one operator forms and sums them; on other devices one point is processed at a time unless
    all differences are small.
    """
    if a.device.type == "cpu" and a.dtype in (torch.float32, torch.float64):
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
    if a.numel() * b.shape[-2] <= _SMALL:
        return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for p in range(0, a.shape[-1], 3):
        difference = a[..., :, None, p : p + 3] - b[..., None, :, p : p + 3]
        total = total + difference.square().sum(-1)
    return total
