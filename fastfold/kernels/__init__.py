"""General operators: a plain PyTorch definition of each is its specification.

One file per operator. It holds the definition (``<operator>_definition``), the fast path, and the public
function, which is what networks call.
"""

from fastfold.kernels.attention import attention
from fastfold.kernels.gated_attention import gated_attention
from fastfold.kernels.layer_norm import layer_norm
from fastfold.kernels.outer_product_mean import OuterProductRows, outer_product_mean
from fastfold.kernels.pair_bias import pair_bias
from fastfold.kernels.residual_update import residual_update
from fastfold.kernels.softmax import softmax
from fastfold.kernels.transition import transition
from fastfold.kernels.triangle_factors import triangle_factors
from fastfold.kernels.triangle_multiplication import triangle_multiplication
from fastfold.kernels.triangle_update import triangle_update

__all__ = [
    "OuterProductRows",
    "attention",
    "gated_attention",
    "layer_norm",
    "outer_product_mean",
    "pair_bias",
    "residual_update",
    "softmax",
    "transition",
    "triangle_factors",
    "triangle_multiplication",
    "triangle_update",
]
