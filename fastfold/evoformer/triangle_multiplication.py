"""Triangular multiplicative update (supplement Algorithms 11 and 12)."""

from __future__ import annotations

from ml_collections import ConfigDict
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.execution import Block, PolicyModule
from fastfold.evoformer.primitives import LayerNorm, Linear, SharedDropout


class TriangleMultiplication(PolicyModule):
    """Triangular multiplicative update with outgoing or incoming edges, as a residual update.

    Supplement Algorithm 11 with outgoing edges, Algorithm 12 with incoming ones:

    - Line 1: the pair is normalised.
    - Line 2: two projections of every edge are gated. One layer of twice the width computes both: first the official
      program's ``left``, then its ``right``.
    - Line 3: an output gate is projected.
    - Line 4: the products of a triangle's other two edges are summed over the third node, normalised, projected and
      gated. Outgoing edges are ``left[i, k] right[j, k]``; with incoming ones the official program contracts
      ``left[k, j]`` with ``right[k, i]``.
    - Algorithm 6, lines 6 and 7: the result is added with dropout factors that all rows share.

    ``equation`` in the official config node tells outgoing from incoming.
    """

    operator = "triangle multiplication"

    def __init__(self, config: ConfigDict, c_z: int, *, zero_init: bool) -> None:
        super().__init__()
        self.outgoing = config.equation == "ikc,jkc->ijc"
        c = config.num_intermediate_channel
        self.norm_in = LayerNorm(c_z)
        self.projection = Linear(c_z, 2 * c)
        self.gate = Linear(c_z, 2 * c, init="gating")
        self.norm_out = LayerNorm(c)
        self.output = Linear(c, c_z, init="final" if zero_init else "default")
        self.output_gate = Linear(c_z, c_z, init="gating")
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-3)

    def forward(self, pair: Tensor, pair_mask: Tensor) -> Tensor:
        """Return ``pair + dropout_rowwise(multiplication(pair))``, ``[*, N, N, c_z]``; mask ``[*, N, N]``."""
        parameters = self.collected(self.kernel_parameters)

        def add_multiplication(block: Block) -> Tensor:
            return kernels.triangle_multiplication(
                block.x,
                pair_mask,
                parameters,
                outgoing=self.outgoing,
                residual=block.x,
                dropout=block.dropout,
                out=block.out,
                plan=block.policy.contraction,
                keep=block.policy.keep_projections,
            )

        return self.apply_residual(pair, add_multiplication, dim=None, dropout=self.dropout)

    def kernel_parameters(self) -> kernels.TriangleParams:
        """Return the parameters of :func:`fastfold.kernels.triangle_multiplication`."""
        return kernels.TriangleParams(
            norm_in_weight=self.norm_in.weight,
            norm_in_bias=self.norm_in.bias,
            proj_weight=self.projection.weight,
            proj_bias=self.projection.bias,
            gate_weight=self.gate.weight,
            gate_bias=self.gate.bias,
            norm_out_weight=self.norm_out.weight,
            norm_out_bias=self.norm_out.bias,
            out_weight=self.output.weight,
            out_bias=self.output.bias,
            out_gate_weight=self.output_gate.weight,
            out_gate_bias=self.output_gate.bias,
        )
