"""Steps of the Evoformer that need more than their own shard: biases, outer products, triangle products.

The other steps (column attention of the MSA, transitions) run unchanged on a shard along the axis that they do not
act on. Each class here is a variant of the layer that it derives from, with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastfold.evoformer.execution import columns
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel.alphafold.regather import (
    Regather,
    Regathered,
    RegatheredOuterProduct,
    RegatheringLayer,
    attention_regathered,
)
from fastfold.parallel.alphafold.triangle_shard import (
    ShardedTriangleMultiplication,
    SummedTerms,
    TriangleOfTerms,
)
from fastfold.parallel.axial.projections import ShardedProjections
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.async_ops import shards_in_turn


class GatheredBias(RegatheringLayer):
    """Attention whose bias is gathered from all ranks."""

    norm: Any
    attention: Any
    dropout: Any

    def attend(
        self,
        x: Tensor,
        mask: Tensor,
        bias: Tensor,
        again: Regather | None,
        projections: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the updated shard ``x [*, R, N, c]``, with gradients; ``mask [*, R, N]`` is that of the shard.

        The bias ``[*, H, N, N]`` is gathered; ``again`` gathers it again in the backward pass, None keeps it.
        ``projections`` are the result of :func:`~fastfold.parallel.alphafold.regather.begin_attention`, or empty.
        """
        dropout = self.dropout(x)
        return attention_regathered(
            self.norm, self.attention, x, bias, mask, dropout=dropout, again=again, projections=projections
        )


class AxialMSARowAttention(GatheredBias, MSARowAttention):
    """Attention of this rank's sequences; the pair is cut along its columns, and the bias is gathered."""

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the updated ``msa [*, s, N, c_m]`` from ``pair [*, N, n, c_z]``, ``msa_mask [*, s, N]``.

        ``bias`` is that of this shard of the pair if it was computed before.
        """
        own = self.bias(pair) if bias is None else bias
        whole, again = self.gathered(own, -1, pair.shape[-3], pair)
        if torch.is_grad_enabled():
            return self.attend(msa, msa_mask, whole, again)
        return super().forward(msa, pair, msa_mask, whole)


class AxialTriangleAttention(GatheredBias, TriangleAttention):
    """Attention of this rank's rows (starting node) or columns (ending node) of the pair, with a gathered bias."""

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the updated shard of the pair, ``[*, n, N, c_z]`` or ``[*, N, n, c_z]``.

        ``pair_mask`` is the same shard of the mask. ``bias`` is that of this shard if it was computed before.
        """
        own = self.bias(pair) if bias is None else bias
        cut, length = (-2, pair.shape[-2]) if self.starting else (-1, pair.shape[-3])
        whole, again = self.gathered(own, cut, length, pair)
        if torch.is_grad_enabled():
            return self.attend(pair, pair_mask, whole, again)
        return super().forward(pair, pair_mask, whole)

    def attend(
        self,
        x: Tensor,
        mask: Tensor,
        bias: Tensor,
        again: Regather | None,
        projections: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the updated shard of the pair; the bias is as read along the pair's rows."""
        if self.starting:
            return super().attend(x, mask, bias, again, projections)
        dropout = self.dropout(x)
        return attention_regathered(
            self.norm,
            self.attention,
            x.transpose(-3, -2),
            bias.mT,
            mask.mT,
            dropout=columns(dropout),
            again=None if again is None else lambda: again().mT,
            projections=projections,
        ).transpose(-3, -2)


class AxialOuterProductMean(OuterProductMean, RegatheringLayer):
    """Update of this rank's columns of the pair from its columns of the MSA and all ranks' left projections."""

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Return the updated ``pair [*, N, n, c_z]`` from ``msa [*, S, n, c_m]``, ``msa_mask [*, S, N]``.

        The mask is whole.
        """
        if not torch.is_grad_enabled():
            return self._passing(msa, pair, msa_mask)
        projections, residues = self.projections(msa), msa_mask.shape[-1]
        left = projections.first(self.left.weight, self.left.bias)
        gathering = self.shards.gather_async(left, -2, residues)
        sides = left, projections.second(self.right.weight, self.right.bias)
        whole = gathering.wait()
        again = None
        if self.regathers_side(pair, msa_mask):
            again = Regathered(self.shards.group).add(sides[0], self.move(sides[0], -2, residues))
        return self.from_sides(sides, whole, pair, msa_mask, again, rows=False)

    def projections(self, msa: Tensor) -> ShardedProjections:
        """Return the maker of both projections ``[*, S, n, c]`` of ``msa [*, S, n, c_m]``."""
        return ShardedProjections(msa, (self.norm.weight, self.norm.bias))

    def regathers_side(self, pair: Tensor, msa_mask: Tensor) -> bool:
        """Decide as :meth:`regathers`, but keep the projection of an alignment deep enough to dominate messages."""
        return msa_mask.shape[-2] <= msa_mask.shape[-1] and self.regathers(pair)

    def from_sides(
        self,
        sides: tuple[Tensor, Tensor],
        whole: Tensor,
        pair: Tensor,
        msa_mask: Tensor,
        again: Regather | None,
        *,
        rows: bool,
    ) -> Tensor:
        """Return the updated pair, with gradients.

        The sides are both projections ``[*, S, n, c]`` of this rank's residues. ``whole``, the left projection of all
        residues, is gathered ``again`` in the backward pass, or kept. The pair is ``[*, N, n, c_z]``. With ``rows`` the
        right projection is whole, and the pair ``[*, n, N, c_z]``.
        """
        own_mask = self.shards.take(msa_mask, -1)
        left, right = (sides[0], whole) if rows else (whole, sides[1])
        masks = (own_mask, msa_mask) if rows else (msa_mask, own_mask)
        if again is None:
            return self.recorded(left, right, pair, *masks)
        parameters = self.output.weight, self.output.bias
        gathers = (None, again) if rows else (again, None)
        out: Tensor = RegatheredOuterProduct.apply(left, right, pair, masks, gathers, *parameters)
        return out

    def _passing(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Compute :meth:`forward` without gradients, and without gathering the whole left projection.

        The ranks' parts arrive one after another. Each is used while the next one is sent.
        """
        own_mask, start = self.shards.take(msa_mask, -1), 0
        left, right = self.sides(msa)
        updates = self.rows([right], own_mask)
        del right
        out = pair if self.policy.inplace else torch.empty_like(pair)
        sizes = self.shards.sizes(msa_mask.shape[-1])
        owners = [rank for rank, size in enumerate(sizes) if size]
        for passing in shards_in_turn(left, -2, sizes, self.shards.group, owners):
            stop = start + passing.shape[-2]
            rows, result = pair[..., start:stop, :, :], out[..., start:stop, :, :]
            for index in self.policy.slices(rows, -3):
                own = passing[..., index, :], msa_mask[..., start:stop][..., index]
                updates.write(result[..., index, :, :], *own, rows[..., index, :, :])
            start = stop
        return out


class AxialTriangleMultiplication(ShardedTriangleMultiplication):
    """Triangle multiplication that is cut along its contracted residue.

    With outgoing edges ``out[i, j]`` sums over ``k`` of ``left[i, k] right[j, k]``. A rank with the columns ``k`` of
    the pair has its terms of all sums; a rank with the rows has those of the incoming edges. So nothing is gathered.

    On few ranks the terms are reduce-scattered into the layout of the residual. On more ranks the factors are
    resharded to whole matrices of some channels, and the product is resharded back. The second way also serves
    outgoing edges of a pair that is cut along its rows.
    """

    shards: AxialShards

    def forward(self, pair: Tensor, pair_mask: Tensor, *, columns: bool | None = None) -> Tensor:
        """Return the updated shard of the pair.

        The pair is ``[*, N, n, c_z]`` with outgoing edges, ``[*, n, N, c_z]`` with incoming ones, or always without
        ``columns``, at any cost in communication.
        """
        cut_columns = self.outgoing if columns is None else columns
        length = pair.shape[-3 if cut_columns else -2]

        def contract(left: Tensor, right: Tensor) -> Tensor:
            if self.outgoing:
                return self.shards.contract(
                    left, right, -1 if cut_columns else -2, length, free=not cut_columns
                )
            # The official program contracts left[k, j] with right[k, i].
            return self.shards.contract(right.mT, left.mT, -2, length)

        return self.multiplied(
            pair, pair_mask, contract, self.shards.group.size, self._dropout(pair, cut_columns)
        )

    def by_terms(self, pair: Tensor, pair_mask: Tensor, meanwhile: Callable[[], None] | None) -> Tensor:
        """Return the updated pair with gradients, cut along its rows.

        See :mod:`fastfold.parallel.alphafold.triangle_shard`. Arguments as of :meth:`forward`; ``meanwhile`` is the
        first work of the backward pass while the product's gradient is sent, or None.
        """
        length = pair.shape[-3 if self.outgoing else -2]
        row = pair.new_empty(()).expand(*pair.shape[:-3], 1, length, pair.shape[-1])
        terms = SummedTerms(self.shards, length, self.outgoing, meanwhile)
        parameters = self.collected(self.kernel_parameters)
        out: Tensor = TriangleOfTerms.apply(pair, pair_mask, self.dropout(row), terms, *parameters)
        return out

    def _dropout(self, pair: Tensor, cut_columns: bool) -> Tensor | None:
        """Return this rank's part of the whole pair's dropout factors, which all ranks draw alike."""
        if not cut_columns:
            return self.dropout(pair)
        length = pair.shape[-3]
        whole = pair.new_empty(()).expand(*pair.shape[:-2], length, pair.shape[-1])
        factors = self.dropout(whole)
        return None if factors is None else self.shards.take(factors, -2)
