"""Steps of the Evoformer that need more than their own shard: biases, outer products, triangle products.

The other steps (column attention of the MSA, transitions) run unchanged on a shard along the axis that they do not
act on. Each class here is a form of the layer that it derives from, with the same parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from fastfold.parallel.axial import AxialShards
from fastfold.parallel.handle import Handle
from fastfold.parallel.panels import absent, broadcasts


class AxialMSARowAttention(MSARowAttention):
    """Attention of this rank's sequences; the pair is cut along its columns, and the bias is gathered."""

    shards: AxialShards

    def bias(self, pair: Tensor) -> Tensor:
        """Whole bias ``[*, H, N, N]`` from a shard ``pair [*, N, n, c_z]``."""
        return self.shards.gather(super().bias(pair), -1, pair.shape[-3])


class AxialTriangleAttention(TriangleAttention):
    """Attention of this rank's rows (starting node) or columns (ending node) of the pair, with a gathered bias."""

    shards: AxialShards

    @property
    def columns(self) -> bool:
        """Whether the pair is cut along its columns for this step, rather than along its rows."""
        return not self.starting

    def start_bias(self, pair: Tensor, *, columns: bool) -> Handle:
        """Start gathering the bias ``[*, H, N, N]`` from a shard of the pair along its rows or its columns."""
        cut, length = (-1, pair.shape[-3]) if columns else (-2, pair.shape[-2])
        return self.shards.gather_async(super().bias(pair), cut, length)

    def bias(self, pair: Tensor) -> Tensor:
        """Whole bias ``[*, H, N, N]`` from the shard that this step acts on."""
        return self.start_bias(pair, columns=self.columns).wait()


class AxialOuterProductMean(OuterProductMean):
    """Update of this rank's columns of the pair from its columns of the MSA and everybody's left projection."""

    shards: AxialShards

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated shard ``pair [*, N, n, c_z]`` from ``msa [*, S, n, c_m]`` and the whole ``msa_mask [*, S, N]``.

        With gradients, the left projection of all residues is gathered and kept. Without, no rank ever has all of it:
        one rank's part after another passes, and what it is for is computed while the next is under way.
        """
        if torch.is_grad_enabled():
            return super().forward(msa, pair, msa_mask)
        left, right = self._project(self.left, msa), self._project(self.right, msa)
        out = pair if self.policy.inplace else torch.empty_like(pair)
        sizes = self.shards.sizes(msa_mask.shape[-1])
        owners = [rank for rank, size in enumerate(sizes) if size]

        def piece(number: int) -> Tensor:
            rank = owners[number]
            if rank == self.shards.group.rank:
                return left
            return absent(left, *left.shape[:-2], sizes[rank], left.shape[-1])

        own_mask, start = self.shards.take(msa_mask, -1), 0
        for passing in broadcasts(piece, owners, self.shards.group):
            stop = start + passing.shape[-2]
            rows, result = pair[..., start:stop, :, :], out[..., start:stop, :, :]
            for index in self.policy.slices(rows, -3):
                self.update(
                    passing[..., index, :],
                    right,
                    msa_mask[..., start:stop][..., index],
                    own_mask,
                    rows[..., index, :, :],
                    result[..., index, :, :],
                )
            start = stop
        return out

    def sides(self, msa: Tensor, msa_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``left [*, S, N, c]``, ``right [*, S, n, c]`` and masks from ``msa [*, S, n, c_m]`` and the whole mask."""
        whole = self.shards.gather_async(self._project(self.left, msa), -2, msa_mask.shape[-1])
        right = self._project(self.right, msa)
        return whole.wait(), right, msa_mask, self.shards.take(msa_mask, -1)

    def _project(self, layer: nn.Module, msa: Tensor) -> Tensor:
        return self.policy.map(msa, lambda rows, _: layer(self.norm(rows)), dim=-3)


class AxialTriangleMultiplication(ShardedTriangleMultiplication):
    """Triangle multiplication whose contracted residue is the one that is cut.

    With outgoing edges ``out[i, j]`` sums over ``k`` of ``left[i, k] right[j, k]``: a rank that has the columns
    ``k`` of the pair has its terms of all sums, and one that has the rows has those of the incoming edges. So
    nothing is gathered: on few ranks the terms are reduce-scattered into the layout that the residual has, on more of
    them the factors are switched to whole matrices of some channels, and the product is switched back.
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

        product = self.product(pair, pair_mask, contract, self.shards.group.size)
        return self.updated(pair, product, self._dropout(pair))

    def _dropout(self, pair: Tensor) -> Tensor | None:
        """This rank's part of the factors for the whole pair, which every rank draws alike."""
        if not self.outgoing:
            return self.dropout(pair)
        length = pair.shape[-3]
        whole = pair.new_empty(()).expand(*pair.shape[:-2], length, pair.shape[-1])
        factors = self.dropout(whole)
        return None if factors is None else self.shards.take(factors, -2)
