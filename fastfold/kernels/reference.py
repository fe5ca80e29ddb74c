"""Definitions of the operators in plain PyTorch, by the operators' names: slow, and the reference of the fast paths.

Arguments and results are those of the operators of :mod:`fastfold.kernels`, without arguments for speed and memory
(``out``, ``scratch``, ``plan``, ``backend``) and, except for ``residual_update``, without residual and dropout. They
compute in float32, or in float64 for float64, and round once.
"""

from fastfold.kernels.ops.attention.op import attention_definition as attention
from fastfold.kernels.ops.gated_attention.op import gated_attention_definition as gated_attention
from fastfold.kernels.ops.layer_norm.op import layer_norm_definition as layer_norm
from fastfold.kernels.ops.outer_product_mean.op import outer_product_mean_definition as outer_product_mean
from fastfold.kernels.ops.pair_bias.op import pair_bias_definition as pair_bias
from fastfold.kernels.ops.residual_update.op import residual_update_definition as residual_update
from fastfold.kernels.ops.transition.op import transition_definition as transition
from fastfold.kernels.ops.triangle_multiplication.halves_op import (
    triangle_factors_definition as triangle_factors,
)
from fastfold.kernels.ops.triangle_multiplication.halves_op import (
    triangle_update_definition as triangle_update,
)
from fastfold.kernels.ops.triangle_multiplication.op import (
    triangle_multiplication_definition as triangle_multiplication,
)

__all__ = [
    "attention",
    "gated_attention",
    "layer_norm",
    "outer_product_mean",
    "pair_bias",
    "residual_update",
    "transition",
    "triangle_factors",
    "triangle_multiplication",
    "triangle_update",
]
