"""Steps of the Evoformer that need more than their own shard: biases, outer products, triangle products.

The other steps (column attention of the MSA, transitions) run unchanged on a shard along the axis that they do not
act on. Each class here is a form of the layer that it derives from, with the same parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fastfold import kernels
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.parallel import exchange
from fastfold.parallel.alphafold.recomputing import recomputed
from fastfold.parallel.alphafold.triangle_shard import ShardedTriangleMultiplication
from fastfold.parallel.axial import AxialShards
from fastfold.parallel.panels import absent, broadcasts

# Of the outer product mean: added to the number of sequences.
_EPS = 1e-3


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

    def bias(self, pair: Tensor) -> Tensor:
        """Whole bias ``[*, H, N, N]`` from the shard that this step acts on."""
        cut, length = (-1, pair.shape[-3]) if self.columns else (-2, pair.shape[-2])
        return self.shards.gather(super().bias(pair), cut, length)


class AxialOuterProductMean(OuterProductMean):
    """Update of this rank's columns of the pair from its columns of the MSA and everybody's left projection."""

    shards: AxialShards

    def forward(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """Updated shard ``pair [*, N, n, c_z]`` from ``msa [*, S, n, c_m]`` and the whole ``msa_mask [*, S, N]``."""
        if not torch.is_grad_enabled():
            return self._passing(msa, pair, msa_mask)
        own_mask = self.shards.take(msa_mask, -1)
        left, right, *_ = recomputed(self.sides, msa, own_mask)
        masks = msa_mask, own_mask
        parameters = self.output.weight, self.output.bias
        if self._fetches_again(*msa_mask.shape[-2:]):
            updated: Tensor = _FetchedAgain.apply(left, right, pair, *masks, *parameters, self.shards)
            return updated
        whole = self.shards.gather(left, -2, msa_mask.shape[-1])
        return self.update(whole, right, *masks, pair, None)

    def _fetches_again(self, sequences: int, residues: int) -> bool:
        """Whether the backward pass gathers the left projection once more, rather than that it is kept whole.

        Not of alignments that are deeper than they are long, where it is much of all that is sent. Nor on more ranks
        than there are channels, which send the terms of all triangle products (``axial_product.py``).
        """
        return sequences <= residues and self.shards.group.size <= len(self.output.bias)

    def _passing(self, msa: Tensor, pair: Tensor, msa_mask: Tensor) -> Tensor:
        """:meth:`forward` without gradients, in which no rank ever has the left projection of all residues.

        One rank's part after another passes, and what it is for is computed while the next is under way.
        """
        own_mask, start = self.shards.take(msa_mask, -1), 0
        left, right, *_ = self.sides(msa, own_mask)
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


class _FetchedAgain(Function):
    """Outer product mean of which this rank's own projections are kept; both passes gather the left one."""

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        pair: Tensor,
        left_mask: Tensor,
        right_mask: Tensor,
        weight: Tensor,
        bias: Tensor,
        shards: AxialShards,
    ) -> Tensor:
        ctx.save_for_backward(left, right, left_mask, right_mask, weight, bias)
        ctx.shards = shards
        whole = _whole(left, left_mask, shards)
        return kernels.outer_product_mean(
            whole, right, left_mask, right_mask, weight, bias, _EPS, residual=pair
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, left_mask, right_mask, weight, bias = ctx.saved_tensors
        whole = _whole(left, left_mask, ctx.shards)
        # The operator's own backward pass, which needs nothing of its forward pass but the inputs.
        of_left, of_right, of_weight, of_bias = torch.ops.fastfold.outer_product_mean_backward(
            grad, whole, right, left_mask, right_mask, weight, bias, _EPS, [True] * 4, None
        )
        sizes = ctx.shards.sizes(left_mask.shape[-1])
        own = exchange.start_reduce_scatter(of_left, of_left.dim() - 2, ctx.shards.group, sizes).wait()
        return own, of_right, grad, None, None, of_weight, of_bias, None


def _whole(left: Tensor, mask: Tensor, shards: AxialShards) -> Tensor:
    """The left projection ``[*, S, N, c]`` of all residues."""
    return exchange.start_gather(left, left.dim() - 2, shards.group, shards.sizes(mask.shape[-1])).wait()


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
