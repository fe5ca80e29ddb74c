"""General operators, each specified by a plain PyTorch definition.

Each operator has a package in ``ops``. Its module ``op`` holds the definition, which is ``reference.<operator>``, and
the public function that networks call; the fast implementations are modules next to it.
"""

from fastfold.kernels import reference
from fastfold.kernels.ops.attention.op import attention
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.gated_attention.op import attention_bias, gated_attention
from fastfold.kernels.ops.layer_norm.op import keeps_bfloat16, layer_norm, normalized_linear
from fastfold.kernels.ops.outer_product_mean.op import OuterProductRows, outer_product_mean
from fastfold.kernels.ops.pair_bias.op import pair_bias
from fastfold.kernels.ops.residual_update.op import residual_update
from fastfold.kernels.ops.transition.op import transition
from fastfold.kernels.ops.transition.params import TransitionParams
from fastfold.kernels.ops.triangle_multiplication.halves_op import triangle_factors, triangle_update
from fastfold.kernels.ops.triangle_multiplication.op import triangle_multiplication
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, TriangleParams, UpdateParams
from fastfold.utils.lazy import old_functions

__all__ = [
    "FactorParams",
    "GatedAttentionParams",
    "OuterProductRows",
    "TransitionParams",
    "TriangleParams",
    "UpdateParams",
    "attention",
    "attention_bias",
    "gated_attention",
    "keeps_bfloat16",
    "layer_norm",
    "normalized_linear",
    "outer_product_mean",
    "pair_bias",
    "reference",
    "residual_update",
    "transition",
    "triangle_factors",
    "triangle_multiplication",
    "triangle_update",
]

__getattr__ = old_functions(__name__, {"normalised_linear": "normalized_linear"})
