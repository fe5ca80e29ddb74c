"""Steps of the Evoformer that need more than their own shard: biases, outer products, triangle products.

The other steps (column attention of the MSA, transitions) run unchanged on a shard along the axis that they do not
act on. Each class here is a variant of the layer that it derives from, with the same parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.evoformer.execution import columns
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel.alphafold.regather import (
    Again,
    Regathered,
    RegatheringLayer,
    attention_regathered,
    outer_product_regathered,
    recomputed,
)
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from fastfold.parallel.axial.shards import AxialShards
from fastfold.parallel.comm.pipelined import absent, broadcasts


class AxialMSARowAttention(MSARowAttention, RegatheringLayer):
    """Attention of this rank's sequences; the pair is cut along its columns, and the bias is gathered."""

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated ``msa [*, s, N, c_m]`` from ``pair [*, N, n, c_z]`` and ``msa_mask [*, s, N]``.

        ``bias`` is that of this shard of the pair if it was computed before.
        """
        own = self.bias(pair) if bias is None else bias
        return self.attend(msa, pair, msa_mask, *self.gathered(own, -1, pair.shape[-3], pair))

    def attend(
        self, msa: Tensor, pair: Tensor, msa_mask: Tensor, bias: Tensor, again: Again | None
    ) -> Tensor:
        """Updated ``msa``.

        Args:
            msa: ``[*, s, N, c_m]``.
            pair: Any shard of the pair.
            msa_mask: ``[*, s, N]``.
            bias: Gathered, ``[*, H, N, N]``.
            again: Gathers it again in the backward pass; None where it is kept.
        """
        if again is None:
            return super().forward(msa, pair, msa_mask, bias)
        return attention_regathered(
            self.norm, self.attention, msa, bias, msa_mask, dropout=self.dropout(msa), again=again
        )


class AxialTriangleAttention(TriangleAttention, RegatheringLayer):
    """Attention of this rank's rows (starting node) or columns (ending node) of the pair, with a gathered bias."""

    @property
    def columns(self) -> bool:
        """Whether the pair is cut along its columns for this step, rather than along its rows."""
        return not self.starting

    def forward(self, pair: Tensor, pair_mask: Tensor, bias: Tensor | None = None) -> Tensor:
        """Updated shard of the pair, ``[*, n, N, c_z]`` or ``[*, N, n, c_z]``, under the same shard of the mask.

        ``bias`` is that of this shard if it was computed before.
        """
        own = self.bias(pair) if bias is None else bias
        cut, length = (-1, pair.shape[-3]) if self.columns else (-2, pair.shape[-2])
        return self.attend(pair, pair_mask, *self.gathered(own, cut, length, pair))

    def attend(self, pair: Tensor, pair_mask: Tensor, bias: Tensor, again: Again | None) -> Tensor:
        """Updated shard of the pair.

        Args:
            pair: As for :meth:`forward`.
            pair_mask: Its shard of the mask.
            bias: Gathered, ``[*, H, N, N]``, as read along the pair's rows.
            again: Gathers it again in the backward pass; None where it is kept.
        """
        if again is None:
            return super().forward(pair, pair_mask, bias)
        dropout = self.dropout(pair)
        if self.starting:
            return attention_regathered(
                self.norm, self.attention, pair, bias, pair_mask, dropout=dropout, again=again
            )
        return attention_regathered(
            *(self.norm, self.attention, pair.transpose(-3, -2), bias.mT, pair_mask.mT),
            dropout=columns(dropout),
            again=lambda: again().mT,
        ).transpose(-3, -2)


class AxialOuterProductMean(OuterProductMean, RegatheringLayer):
    """Update of this rank's columns of the pair from its columns of the MSA and everybody's left projection."""

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated shard ``pair [*, N, n, c_z]`` from ``msa [*, S, n, c_m]`` and the whole ``msa_mask [*, S, N]``."""
        if not torch.is_grad_enabled():
            return self._passing(msa, pair, msa_mask)
        sides = recomputed(self.sides, msa)
        residues = msa_mask.shape[-1]
        whole = self.shards.gather(sides[0], -2, residues)
        again = None
        if self.regathers_side(pair, msa_mask):
            again = Regathered(self.shards.group).add(sides[0], self.move(sides[0], -2, residues))
        return self.from_sides(sides, whole, pair, msa_mask, again, rows=False)

    def regathers_side(self, pair: Tensor, msa_mask: Tensor) -> bool:
        """:meth:`regathers`, but not where the projection, of a deep alignment, is much of all that is sent."""
        return msa_mask.shape[-2] <= msa_mask.shape[-1] and self.regathers(pair)

    def from_sides(
        self,
        sides: tuple[Tensor, Tensor],
        whole: Tensor,
        pair: Tensor,
        msa_mask: Tensor,
        again: Again | None,
        *,
        rows: bool,
    ) -> Tensor:
        """Update with gradients.

        Args:
            sides: Both projections of this rank's residues, ``[*, S, n, c]``.
            whole: The left one of all residues; with ``rows`` the right one.
            pair: ``[*, N, n, c_z]``; with ``rows`` ``[*, n, N, c_z]``.
            msa_mask: ``[*, S, N]``.
            again: Gathers it again in the backward pass; None where it is kept.
            rows: Whether the pair is cut along its rows rather than along its columns.
        """
        own_mask = self.shards.take(msa_mask, -1)
        left, right = (sides[0], whole) if rows else (whole, sides[1])
        masks = (own_mask, msa_mask) if rows else (msa_mask, own_mask)
        if again is None:
            return self.recorded(left, right, pair, *masks)
        parameters = self.output.weight, self.output.bias
        gathers = (None, again) if rows else (again, None)
        return outer_product_regathered(left, right, pair, masks, *parameters, again=gathers)

    def _passing(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """:meth:`forward` without gradients, in which no rank ever has the left projection of all residues.

        One rank's part after another passes, and what it is for is computed while the next is under way.
        """
        own_mask, start = self.shards.take(msa_mask, -1), 0
        left, right = self.sides(msa)
        updates = self.rows([right], own_mask)
        del right
        out = pair if self.policy.inplace else torch.empty_like(pair)
        sizes = self.shards.sizes(msa_mask.shape[-1])
        owners = [rank for rank, size in enumerate(sizes) if size]

        def piece(number: int) -> Tensor:
            rank = owners[number]
            if rank == self.shards.group.rank:
                return left
            return absent(left, *left.shape[:-2], sizes[rank], left.shape[-1])

        for passing in broadcasts(piece, owners, self.shards.group):
            stop = start + passing.shape[-2]
            rows, result = pair[..., start:stop, :, :], out[..., start:stop, :, :]
            for index in self.policy.slices(rows, -3):
                own = passing[..., index, :], msa_mask[..., start:stop][..., index]
                updates.write(result[..., index, :, :], *own, rows[..., index, :, :])
            start = stop
        return out


class AxialTriangleMultiplication(ShardedTriangleMultiplication):
    """Triangle multiplication whose contracted residue is the one that is cut.

    With outgoing edges ``out[i, j]`` sums over ``k`` of ``left[i, k] right[j, k]``: a rank that has the columns
    ``k`` of the pair has its terms of all sums, and one that has the rows has those of the incoming edges. So
    nothing is gathered: on few ranks the terms are reduce-scattered into the layout that the residual has, on more of
    them the factors are resharded to whole matrices of some channels, and the product is resharded back. The latter
    serves outgoing edges of a pair that is cut along its rows as well.
    """

    shards: AxialShards

    @property
    def columns(self) -> bool:
        """Whether the pair is cut along its columns for this step, rather than along its rows."""
        return self.outgoing

    def forward(self, pair: Tensor, pair_mask: Tensor, *, columns: bool | None = None) -> Tensor:
        """Updated shard of the pair.

        Args:
            pair: ``[*, N, n, c_z]`` with outgoing edges, ``[*, n, N, c_z]`` with incoming ones.
            pair_mask: The same shard of the mask, without channels.
            columns: With outgoing edges False if the pair is ``[*, n, N, c_z]``, whatever that costs.
        """
        cut_columns = self.columns if columns is None else columns
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

    def _dropout(self, pair: Tensor, cut_columns: bool) -> Tensor | None:
        """This rank's part of the factors for the whole pair, which every rank draws alike."""
        if not cut_columns:
            return self.dropout(pair)
        length = pair.shape[-3]
        whole = pair.new_empty(()).expand(*pair.shape[:-2], length, pair.shape[-1])
        factors = self.dropout(whole)
        return None if factors is None else self.shards.take(factors, -2)
