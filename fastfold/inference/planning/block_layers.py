"""Layers of a block as plans count them: class, config node, updated tensor, and the step that is planned with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastfold.evoformer.evoformer import is_enabled
from fastfold.evoformer.execution import LayerSizes, PolicyModule
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.transition import Transition
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication


class PlannedLayer(NamedTuple):
    """Layer of a block."""

    layer: type[PolicyModule]
    node: Any  #: The layer's official config node
    updates: str  #: ``msa`` or ``pair``
    step: str  #: Name of the step in plans; transitions are planned with the attention of the same tensor

    def flops(self, sizes: LayerSizes) -> float:
        """Return the operations of the layer's matrix products; 0 for a layer that is left out."""
        if not is_enabled(self.node):
            return 0.0
        rows, channels = (
            (sizes.sequences, sizes.c_m) if self.updates == "msa" else (sizes.residues, sizes.c_z)
        )
        return self.layer.flops(self.node, sizes, (rows, sizes.residues, channels))


def evoformer_layers(config: Any, *, global_column: bool = False) -> list[PlannedLayer]:
    """Return the layers of an Evoformer block from its official config node, also those that are left out."""
    column = MSAColumnGlobalAttention if global_column else MSAColumnAttention
    msa = MSARowAttention.operator
    return [
        PlannedLayer(MSARowAttention, config.msa_row_attention_with_pair_bias, "msa", msa),
        PlannedLayer(column, config.msa_column_attention, "msa", msa),
        PlannedLayer(Transition, config.msa_transition, "msa", msa),
        PlannedLayer(OuterProductMean, config.outer_product_mean, "pair", OuterProductMean.operator),
        *pair_layers(config),
    ]


def pair_layers(config: Any) -> list[PlannedLayer]:
    """Return the layers that update the pair from itself, of an Evoformer or a template block."""
    attention, multiplication = TriangleAttention.operator, TriangleMultiplication.operator
    return [
        PlannedLayer(TriangleMultiplication, config.triangle_multiplication_outgoing, "pair", multiplication),
        PlannedLayer(TriangleMultiplication, config.triangle_multiplication_incoming, "pair", multiplication),
        PlannedLayer(TriangleAttention, config.triangle_attention_starting_node, "pair", attention),
        PlannedLayer(TriangleAttention, config.triangle_attention_ending_node, "pair", attention),
        PlannedLayer(Transition, config.pair_transition, "pair", attention),
    ]
