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
        x: Tensor,
        bias: Tensor | None = None,
        *,
        causal: bool = False,
        row_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: ``[batch, L, features]``, this rank's block in the outer layout.
            bias: Added to the scores; ``[L, L]`` or any shape that broadcasts to ``[batch, heads, L, L]`` of this rank
                in the inner layout. In a boolean one, False masks a key.
            causal: True if a position sees only itself and earlier ones.
            row_sizes: As in :meth:`ParallelLinear.forward`.

        Returns:
            ``[batch, L, features]`` in the outer layout.
        """
        joint = self.inputs(x, row_sizes)
        # [batch, L, 3 * heads * width] -> 3 x [batch, heads, L, width]
        queries, keys, values = torch.unflatten(joint, -1, (3, -1, self.width)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, is_causal=causal)
        return self.output(mixed.transpose(1, 2).flatten(2), row_sizes)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a plain layer of these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = cast(nn.Parameter, weight)
    if bias is not None:
        linear.bias = cast(nn.Parameter, bias)
    return linear
