"""Bytes and operations of the network's layers, for plans of folds.

Bytes are those of a pass in place without gradients, in addition to the inputs. Buffers of operators for a part of a
block are not included. A simulated device and a trace of operators check these counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ml_collections import ConfigDict

from fastfold.evoformer.evoformer import is_enabled
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.kernels.ops.gated_attention.op import gated_attention_flops
from fastfold.kernels.ops.outer_product_mean.op import outer_product_flops
from fastfold.kernels.ops.transition.op import transition_flops
from fastfold.kernels.ops.triangle_multiplication.op import triangle_flops
from fastfold.parallel.axial.shards import gather_bytes

MSA, OUTER_PRODUCT = MSARowAttention.operator, OuterProductMean.operator
ATTENTION, MULTIPLICATION = TriangleAttention.operator, TriangleMultiplication.operator

_PASSING = 4  #: Left sides of outer products on a rank: its own, the one in use, and two in transit
#: Bytes per pair of the int64 classes of its distance and position, with intermediate values
_PAIR_CLASSES = 40
_ATTENTION_BUFFERS = 6.05
"""Elements that attention of a whole block holds for each of its input: 4 projections, attended values, and the update.

Masks take the rest. Sums of exponentials are counted separately."""
_POINT_TERMS = 9
"""Tensors ``[H, rows, N]`` of float32 in point attention: logits, their terms, and differences of points."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the tensors that a rank's layers read."""

    sequences: int  #: Rows of the MSA
    residues: int  #: N
    own: int  #: Residues of the rank's shard; N on one rank
    c_m: int  #: MSA channels
    c_z: int  #: Pair channels
    element_size: int  #: Bytes per element of the trunk
    ranks: int = 1  #: Processes that share the target
    at_once: bool = False  #: True if attention of a block of rows is computed at once


class LayerCost(NamedTuple):
    """Cost of a layer of a block; nothing if the network leaves it out."""

    layer: str  #: Attribute of the block
    step: str  #: Name of the step in plans; transitions are planned with the attention of the same tensor
    flops: float = 0.0  #: Operations of its matrix products on all ranks
    nbytes: Callable[[int], int] = lambda elements: 0  #: Bytes with a block of ``elements`` elements


def evoformer_costs(config: ConfigDict, sizes: LayerSizes, *, global_column: bool = False) -> list[LayerCost]:
    """Return the costs of an Evoformer block's layers from its official config node."""
    rows, n, c_m = sizes.sequences, sizes.residues, sizes.c_m
    row, column = config.msa_row_attention_with_pair_bias, config.msa_column_attention
    attended = partial(_attention_bytes, row.num_head, c_m, 1, sizes)
    column_cost = LayerCost("msa_column_attention", MSA)
    if is_enabled(column) and global_column:
        # A block's normalised input, keys and values, gated values, and output.
        column_cost = column_cost._replace(nbytes=lambda elements: 4 * sizes.element_size * elements)
    elif is_enabled(column):
        column_cost = column_cost._replace(flops=sum(gated_attention_flops(n, rows, c_m)))
    return [
        LayerCost("msa_row_attention", MSA, sum(gated_attention_flops(rows, n, c_m)), attended),
        column_cost,
        LayerCost("msa_transition", MSA, _transition_flops(config.msa_transition, rows * n, c_m)),
        LayerCost(
            "outer_product_mean",
            OUTER_PRODUCT,
            _outer_product_mean_flops(config.outer_product_mean, sizes),
            partial(_outer_product_bytes, config.outer_product_mean.num_outer_channel, sizes),
        ),
        *pair_costs(config, sizes),
    ]


def pair_costs(config: ConfigDict, sizes: LayerSizes) -> list[LayerCost]:
    """Return the costs of the layers that update the pair from itself, of an Evoformer or a template block."""
    n, c_z = sizes.residues, sizes.c_z
    costs = []
    for name in ("outgoing", "incoming"):
        c = config[f"triangle_multiplication_{name}"].num_intermediate_channel
        flops = sum(triangle_flops(n * n, n, c_z, c))
        costs.append(LayerCost(f"triangle_multiplication_{name}", MULTIPLICATION, flops))
    for name in ("starting", "ending"):
        node = config[f"triangle_attention_{name}_node"]
        cost = LayerCost(f"triangle_attention_{name}", ATTENTION)
        if is_enabled(node):
            attended = partial(_attention_bytes, node.num_head, c_z, 2, sizes)
            cost = cost._replace(flops=sum(gated_attention_flops(n, n, c_z)), nbytes=attended)
        costs.append(cost)
    transition = _transition_flops(config.pair_transition, n * n, c_z)
    return [*costs, LayerCost("pair_transition", ATTENTION, transition)]


def _transition_flops(config: ConfigDict, positions: int, channels: int) -> float:
    return transition_flops(positions, channels, channels * config.num_intermediate_factor)


def _outer_product_mean_flops(config: ConfigDict, sizes: LayerSizes) -> float:
    c, rows, n = config.num_outer_channel, sizes.sequences, sizes.residues
    return 4.0 * rows * n * sizes.c_m * c + sum(outer_product_flops(rows, n * n, c, sizes.c_z))


def _attention_bytes(heads: int, channels: int, copies: int, sizes: LayerSizes, elements: int) -> int:
    """Return the bytes of copies of a bias, whose rows are padded to a multiple of 16, or those of gathering it.

    If attention of a block of ``channels`` is computed at once, add its buffers.
    """
    n = sizes.residues
    bias = copies * heads * n * -(-n // 16) * 16 * sizes.element_size
    if sizes.at_once:
        bias += int(_ATTENTION_BUFFERS * elements) * sizes.element_size + 4 * heads * elements // channels
    if sizes.ranks == 1:
        return bias
    return max(bias, gather_bytes(heads, n, sizes.own, sizes.element_size))


def _outer_product_bytes(c: int, sizes: LayerSizes, elements: int) -> int:
    """Return the bytes of the right side with its mask, and of a part of the MSA or a block of rows."""
    n, depth, e = sizes.residues, sizes.sequences, sizes.element_size
    sequence = n * sizes.c_m
    side, mask = depth * c * sizes.own * e, 4 * depth * sizes.own
    # A part of the MSA is normalised, then projected.
    part = min(elements, depth * sequence) * e + side * min(depth, elements // sequence) // depth
    # For each row: its column of the MSA normalised, its left side and mask, and the float32 norm of each pair.
    row = depth * sizes.c_m * e + (side + mask) / n + 8 * n
    passing = _PASSING * side if sizes.ranks > 1 else 0
    return side + mask + max(part, passing + int(row * elements / (n * sizes.c_z)))


def embedding_bytes(config: ConfigDict, sizes: LayerSizes, elements: int) -> int:
    """Return the bytes of the terms of a block of the embedded pair, and of the classes of its pairs."""
    terms = 7 if "max_relative_chain" in config else 5
    return elements * terms * sizes.element_size + elements // sizes.c_z * _PAIR_CLASSES


def template_bytes(config: ConfigDict, sizes: LayerSizes, elements: int, *, multimer: bool) -> int:
    """Return the bytes of a block of the template embedding: features, attention logits or attended values."""
    bins, e, c_z = config.dgram_features.num_bins, sizes.element_size, sizes.c_z
    one_hot = 8 * (bins + 2) + 4 * bins  # with its int64 classes
    if multimer:
        # Distances, directions, terms and the query's pair.
        return elements // c_z * max(one_hot, 4 * (bins + 6) + e * (c_z + 3 * config.num_channels))
    attention = config.attention
    # The features are joined and masked while the embeddings of the block before are still there.
    embedded = e * config.template_pair_stack.triangle_attention_ending_node.value_dim
    features = max(one_hot, e * (bins + 5 + 2 * (bins + 49))) + embedded
    logits = 4 * (3 * attention.key_dim + 2 * attention.num_head)
    attended = 2 * e * (attention.value_dim + c_z)
    return elements // c_z * max(features, logits, attended)


def point_attention_bytes(config: ConfigDict, sizes: LayerSizes, elements: int) -> int:
    """Return the bytes of a block's normalised pair, its mask, and its float32 copy or the terms of its logits."""
    copied = sizes.c_z if sizes.element_size < 4 else 0
    return elements // sizes.c_z * 4 * (sizes.c_z + 2 + max(copied, _POINT_TERMS * config.num_head))


def aligned_error_bytes(elements: int) -> int:
    """Return the bytes of a block's logits of aligned errors, probabilities and terms of sums, in float32."""
    return 3 * 4 * elements
