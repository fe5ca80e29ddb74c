"""Multi-head self-attention whose heads are split over the ranks of a tensor parallel group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.tensor_parallel.layout import Partition, layouts
from fastfold.parallel.tensor_parallel.linear import ParallelLinear
from fastfold.parallel.tensor_parallel.plain_layers import require_type


class ParallelAttention(nn.Module):
    """Self-attention from the outer layout to the outer layout; make one with :meth:`from_plain`.

    One linear layer computes queries, keys and values; it is cut so that each rank gets all three of its heads. The
    attention itself communicates nothing, because batch and heads are split and the sequence is whole.
    """

    def __init__(self, inputs: ParallelLinear, output: ParallelLinear, heads: int, width: int) -> None:
        super().__init__()
        self.inputs, self.output = inputs, output
        self.heads, self.width = heads, width

    @classmethod
    def from_plain(cls, attention: nn.MultiheadAttention, mesh: ParallelMesh) -> ParallelAttention:
        """Return this rank's heads of a plain layer.

        Raises:
            ConfigError: The layer is of a subclass, has other key or value widths, extra keys or dropout, is not
                ``batch_first``, or has fewer heads than there are ranks to split them over.
        """
        require_type(attention, nn.MultiheadAttention, "ParallelAttention")
        if (
            not attention._qkv_same_embed_dim
            or attention.bias_k is not None
            or attention.add_zero_attn
            or attention.dropout
            or not attention.batch_first
        ):
            raise ConfigError(
                "parallel attention expects a MultiheadAttention with batch_first=True, equal key and value "
                "widths, no extra keys and no dropout"
            )
        _, inner = layouts(mesh)
        heads, width = attention.num_heads, attention.head_dim
        ranks = inner.features.size
        inputs = ParallelLinear.from_plain(
            _linear(attention.in_proj_weight, attention.in_proj_bias),
            mesh,
            "first",
            out_parts=Partition.heads(heads, width, ranks, 3),
        )
        output = ParallelLinear.from_plain(
            _linear(attention.out_proj.weight, attention.out_proj.bias),
            mesh,
            "second",
            in_parts=Partition.heads(heads, width, ranks),
        )
        return cls(inputs, output, heads, width)

    def to_plain(self) -> nn.MultiheadAttention:
        """Return the plain layer, gathered on every rank (a collective)."""
        joint, output = self.inputs.to_plain(), self.output.to_plain()
        attention = nn.MultiheadAttention(
            self.heads * self.width, self.heads, bias=self.inputs.bias is not None, batch_first=True
        )
        attention.in_proj_weight, attention.in_proj_bias = cast(nn.Parameter, joint.weight), joint.bias
        attention.out_proj.weight, attention.out_proj.bias = output.weight, output.bias
        return attention

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        *,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        row_sizes: Sequence[int] | None = None,
    ) -> tuple[Tensor, None]:
        """Attend within each sequence, with the arguments of ``nn.MultiheadAttention``.

        Args:
            query: ``[batch, L, features]``, this rank's block in the outer layout.
            key: The same tensor as ``query``, or None.
            value: The same tensor as ``query``, or None.
            key_padding_mask: Keys to leave out (True or minus infinity), ``[batch, L]``.
            need_weights: Expected False, since no rank has the weights of all heads.
            attn_mask: Keys to leave out (True), or added to the scores, ``[L, L]``.
            average_attn_weights: Not used.
            is_causal: True if ``attn_mask`` hides later positions and no others.
            row_sizes: As in :meth:`ParallelLinear.forward`.

        Returns:
            ``[batch, L, features]`` in the outer layout, and None.

        Raises:
            ConfigError: Keys or values are others than the queries, weights are asked for, or a mask is missing or has
                another shape.
        """
        if any(x is not None and x is not query for x in (key, value)):
            raise ConfigError(
                "parallel attention expects one tensor as query, key and value: leave it out of layers="
            )
        if need_weights:
            raise ConfigError(
                "parallel attention returns no weights, since no rank has all heads: call nn.MultiheadAttention "
                "with need_weights=False"
            )
        if is_causal and attn_mask is None:
            raise ConfigError(
                "parallel attention expects attn_mask with is_causal, as nn.MultiheadAttention does"
            )
        is_causal = is_causal and key_padding_mask is None
        bias = None if is_causal else _bias(attn_mask, key_padding_mask, query)
        joint = self.inputs(query, row_sizes)
        # [batch, L, 3 * heads * width] -> 3 x [batch, heads, L, width]
        queries, keys, values = torch.unflatten(joint, -1, (3, -1, self.width)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=is_causal)
        return self.output(mixed.transpose(1, 2).flatten(2), row_sizes), None


def _bias(mask: Tensor | None, padding: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the bias of the scores for PyTorch's masks, in which True hides a key; broadcasts to ``[B, H, L, L]``."""
    if mask is not None and mask.dim() > 2:
        raise ConfigError(
            f"parallel attention expects attn_mask of shape [L, L], found {list(mask.shape)}; leave this layer out of "
            "layers="
        )
    parts = [] if mask is None else [mask]
    if padding is not None:
        parts.append(padding[:, None, None, :])
    total: Tensor | None = None
    for part in parts:
        if part.dtype == torch.bool:
            part = torch.zeros_like(part, dtype=like.dtype).masked_fill(part, -torch.inf)
        total = part if total is None else total + part
    return total


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = cast(nn.Parameter, weight)
    if bias is not None:
        linear.bias = cast(nn.Parameter, bias)
    return linear
