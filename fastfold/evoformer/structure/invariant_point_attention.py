"""Invariant point attention (supplement Algorithm 22)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastfold.evoformer.execution import LayerSizes, LazyRows, PolicyModule, rows_of
from fastfold.evoformer.primitives import Linear
from fastfold.protein.rigid import Rigid

_TERMS = 9
"""Tensors ``[*, H, N, N]`` of float32 that exist at a time: logits, their terms, and differences of points."""


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

    def __init__(self, config: Any, c_s: int, c_z: int, *, multimer: bool, zero_init: bool) -> None:
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
        self, single: Tensor, pair: Tensor | LazyRows, frames: Rigid, mask: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """Compute the update ``[*, rows, c_s]`` of the single representation ``[*, N, c_s]``.

        The ``pair [*, rows, N, c_z]`` holds the ``rows`` to update, by default all. Translations of the ``frames [*,
        N]`` are in the network's length unit; the ``mask [*, N]`` is 0 for padding.
        """
        h = self.heads
        to_points = frames[..., None, None]
        keys = (
            self.key(single).unflatten(-1, (h, self.c_qk)),
            self.value(single).unflatten(-1, (h, self.c_v)),
            to_points.apply(self.key_points(single).unflatten(-1, (h, self.p_qk, 3))),
            to_points.apply(self.value_points(single).unflatten(-1, (h, self.p_v, 3))),
        )
        first = rows.start or 0

        def update(_: Tensor, own: slice) -> Tensor:
            index = slice(own.start - first, own.stop - first)
            return self._update(single, rows_of(pair, index), frames, mask, own, keys)

        *lead, columns, channels = pair.shape
        residues = single.new_empty(()).expand(*lead, 1)
        return self.policy.map(residues, update, dim=-2, start=first, channels=columns * channels)

    @classmethod
    def workspace(cls, config: Any, sizes: LayerSizes, elements: int) -> int:
        """Return the bytes of a block's normalised pair, its mask, and its float32 copy or the terms of its logits."""
        copied = sizes.c_z if sizes.element_size < 4 else 0
        return elements // sizes.c_z * 4 * (sizes.c_z + 2 + max(copied, _TERMS * config.num_head))

    def _update(
        self,
        single: Tensor,
        pair: Tensor,
        frames: Rigid,
        mask: Tensor,
        rows: slice,
        keys: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> Tensor:
        h = self.heads
        k, v, k_points, v_points = keys
        q = self.query(single[..., rows, :]).unflatten(-1, (h, self.c_qk))
        to_points = frames[..., rows, None, None]
        q_points = to_points.apply(self.query_points(single[..., rows, :]).unflatten(-1, (h, self.p_qk, 3)))

        # Each of the three terms has unit variance at initialisation.
        logits = torch.einsum("...ihc,...jhc->...hij", q * math.sqrt(1.0 / (3 * self.c_qk)), k)
        weight = F.softplus(self.point_weights) * math.sqrt(1.0 / (3 * self.p_qk * 9.0 / 2.0))
        logits = logits - 0.5 * weight[:, None, None] * _squared_distances(q_points, k_points)
        logits = logits + math.sqrt(1.0 / 3.0) * self.pair_bias(pair).movedim(-1, -3)
        pair_mask = mask[..., rows, None] * mask[..., None, :]
        attention = torch.softmax(logits - 1e5 * (1.0 - pair_mask).unsqueeze(-3), dim=-1)

        scalars = torch.einsum("...hij,...jhc->...ihc", attention, v)
        points = torch.einsum("...hij,...jhpx->...ihpx", attention, v_points)
        points = to_points.invert_apply(points)
        squared = points.square().sum(-1)
        norms = (squared.clamp(min=1e-16) if self.multimer else squared + 1e-8).sqrt()
        over_pair = torch.einsum("...hij,...ijc->...ihc", attention, pair)
        features = [scalars, *points.unbind(-1), norms, over_pair]
        return self.output(torch.cat([f.flatten(-2) for f in features], -1))


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return summed squared distances ``[*, H, N, M]`` between points ``[*, N, H, P, 3]`` and ``[*, M, H, P, 3]``.

    Sums differences, because expanding the square cancels digits. All differences at once would be ``3 P`` times the
    size of the result. On a CPU one operator forms and sums them; on other devices one point is processed at a time.
    """
    a, b = a.movedim(-3, -4), b.movedim(-3, -4)  # [*, H, N, P, 3]
    if a.device.type == "cpu" and a.dtype in (torch.float32, torch.float64):
        return torch.cdist(a.flatten(-2), b.flatten(-2), compute_mode="donot_use_mm_for_euclid_dist").square()
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for p in range(a.shape[-2]):
        difference = a[..., :, None, p, :] - b[..., None, :, p, :]
        total = total + difference.square().sum(-1)
    return total
