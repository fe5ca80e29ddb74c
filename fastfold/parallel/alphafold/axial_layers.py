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
        if self.regathers(pair):
            return attention_regathered(
                *(self.norm, self.attention, msa, own, msa_mask),
                cut=-1,
                dropout=self.dropout(msa),
                shards=self.shards,
            )
        return super().forward(msa, pair, msa_mask, self.shards.gather(own, -1, pair.shape[-3]))


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
        if not self.regathers(pair):
            cut, length = (-1, pair.shape[-3]) if self.columns else (-2, pair.shape[-2])
            return super().forward(pair, pair_mask, self.shards.gather(own, cut, length))
        dropout, transposed = self.dropout(pair), self.columns
        if transposed:
            pair, own, pair_mask, dropout = pair.transpose(-3, -2), own.mT, pair_mask.mT, columns(dropout)
        updated = attention_regathered(
            *(self.norm, self.attention, pair, own, pair_mask), cut=-2, dropout=dropout, shards=self.shards
        )
        return updated.transpose(-3, -2) if transposed else updated


class AxialOuterProductMean(OuterProductMean, RegatheringLayer):
    """Update of this rank's columns of the pair from its columns of the MSA and everybody's left projection."""

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated shard ``pair [*, N, n, c_z]`` from ``msa [*, S, n, c_m]`` and the whole ``msa_mask [*, S, N]``."""
        if not torch.is_grad_enabled():
            return self._passing(msa, pair, msa_mask)
        own_mask = self.shards.take(msa_mask, -1)
        left, right = recomputed(self.sides, msa)
        masks = msa_mask, own_mask
        parameters = self.output.weight, self.output.bias
        sequences, residues = msa_mask.shape[-2:]
        # Of a deep alignment the projection is much of all that is sent.
        if sequences <= residues and self.regathers(pair):
            return outer_product_regathered(left, right, pair, masks, *parameters, self.shards)
        return self.recorded(self.shards.gather(left, -2, residues), right, pair, *masks)

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
    them the factors are resharded to whole matrices of some channels, and the product is resharded back.
    """

    shards: AxialShards

    @property
    def columns(self) -> bool:
        """Whether the pair is cut along its columns for this step, rather than along its rows."""
        return self.outgoing

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Updated shard of the pair.

        Args:
            pair: ``[*, N, n, c_z]`` with outgoing edges, ``[*, n, N, c_z]`` with incoming ones.
            pair_mask: The same shard of the mask, without channels.
        """
        length = pair.shape[-3 if self.outgoing else -2]

        def contract(left: Tensor, right: Tensor) -> Tensor:
            if self.outgoing:
                return self.shards.contract(left, right, -1, length)
            # The official program contracts left[k, j] with right[k, i].
            return self.shards.contract(right.mT, left.mT, -2, length)

        return self.multiplied(pair, pair_mask, contract, self.shards.group.size, self._dropout(pair))

    def _dropout(self, pair: Tensor) -> Tensor | None:
        """This rank's part of the factors for the whole pair, which every rank draws alike."""
        if not self.outgoing:
            return self.dropout(pair)
        length = pair.shape[-3]
        whole = pair.new_empty(()).expand(*pair.shape[:-2], length, pair.shape[-1])
        factors = self.dropout(whole)
        return None if factors is None else self.shards.take(factors, -2)
