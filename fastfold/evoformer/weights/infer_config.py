"""Inference of a network's configuration from the shapes of its parameters.

Shapes determine widths, heads, blocks, bins and the parts of the network. Other settings (recycles, iterations of the
structure module, position scale, MSA sizes) come from the official model that the file is named after, or else from
the most similar official model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Any

from ml_collections import ConfigDict

from fastfold.evoformer.config import PRESETS, is_multimer, model_config, preset_tree
from fastfold.evoformer.weights.alphafold_names import numbered

Shape = tuple[int, ...]

# Larger sizes are invalid; the comparison with the network's shapes reports them.
LARGEST_SIZE = 2**16
MAX_BLOCKS = 512


class Sizes:
    """Sizes read from the shapes of parameters; None for missing or invalid ones."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes

    def axis(self, key: str, axis: int, *, most: int = LARGEST_SIZE) -> int | None:
        """Return the size of one axis of a parameter."""
        shape = self.shapes.get(key, ())
        if not -len(shape) <= axis < len(shape):
            return None
        return shape[axis] if 0 < shape[axis] <= most else None

    def output(self, key: str, *, leading: int) -> int | None:
        """Return the product of the axes after the ``leading`` ones: channels of all heads."""
        shape = self.shapes.get(key, ())[leading:]
        size = prod(shape) if shape else 0
        return size if 0 < size <= LARGEST_SIZE else None

    def ratio(self, key: str, axis: int, over: int) -> int | None:
        """Return the quotient of two axes of one parameter, or None if it is not an integer."""
        return divide(self.axis(key, axis), self.axis(key, over))

    def count(self, scope: str, name: str) -> int | None:
        """Return the number of modules ``name``, ``name_1``, … in a scope, or None for zero."""
        found = 0
        while f"{scope}/{numbered(name, found)}//weights" in self.shapes:
            found += 1
        return found or None

    def has(self, key: str) -> bool:
        """Return True if the parameter exists."""
        return key in self.shapes


def divide(a: int | None, b: int | None) -> int | None:
    """Return the integer quotient of two sizes, or None if there is none."""
    return a // b if a and b and a % b == 0 else None


def set_found(node: Any, **values: int | None) -> None:
    """Set values of a config node, except those that are None."""
    for name, value in values.items():
        if value is not None:
            node[name] = value


def half(size: int) -> int | None:
    """Return half of an even size, or None for an odd one."""
    return size // 2 if size % 2 == 0 else None


_EVOFORMER = "evoformer/evoformer_iteration"
_EXTRA_MSA = "evoformer/extra_msa_stack"
_TEMPLATES = "evoformer/template_embedding"
_SINGLE_TEMPLATE = f"{_TEMPLATES}/single_template_embedding"
_FOLD = "structure_module/fold_iteration"
_POSITION = "evoformer/pair_activiations"
_CHAIN_POSITION = "evoformer/~_relative_encoding/position_activations"
_PAE_HEAD = "predicted_aligned_error_head"
_PRESET_IN_NAME = re.compile(
    r"(?<![a-z0-9])(model_[1-5](?:_ptm|_multimer(?:_v[1-3])?)?)(?![a-z0-9])", re.IGNORECASE
)


def infer_config(shapes: Mapping[str, Shape], *, name_hint: str | None = None) -> ConfigDict:
    """Infer the configuration of the network that parameters of these shapes belong to.

    Args:
        shapes: Shapes by official key, without the common prefix. Head axes may be joined with their channels;
            heads are then counted on the layers with one channel per head, or taken from the preset without such a
            layer (template attention).
        name_hint: File name. An official model's name in it (``params_model_1_ptm.npz``) decides settings that the
            shapes leave open, unless the shapes contradict it.

    Returns:
        A tree with AlphaFold's keys. Missing and invalid sizes are the preset's; the comparison of the network's
        shapes with the file's reports them.
    """
    config = model_config(_closest_preset(shapes, name_hint))
    found = Sizes(shapes)
    _embedders(config, found)
    _evoformer(config.model.embeddings_and_evoformer, found)
    _templates(config, found)
    _heads(config.model.heads, found)
    _structure_module(config, found)
    return config


def preset_of(config: Mapping[str, Any], name_hint: str | None = None) -> str | None:
    """Return the official name of a configuration, or None; ``name_hint`` decides between equal ones."""
    hinted = preset_in_name(name_hint)
    names = (hinted, *PRESETS) if hinted else PRESETS
    tree = config.to_dict() if isinstance(config, ConfigDict) else config
    return next((name for name in names if preset_tree(name) == tree), None)


def preset_in_name(name: str | None) -> str | None:
    """Return the official model's name in a file name, or None."""
    match = _PRESET_IN_NAME.search(name or "")
    if match is None:
        return None
    preset = match[1].lower().removesuffix("_v1")
    return preset if preset in PRESETS else None


def has_templates(config: Mapping[str, Any]) -> bool:
    """Return True if a network has template embedders."""
    return bool(config["model"]["embeddings_and_evoformer"]["template"]["enabled"])


def has_ptm(config: Mapping[str, Any]) -> bool:
    """Return True if a network has the head for predicted aligned errors and pTM."""
    return bool(config["model"]["heads"]["predicted_aligned_error"]["weight"])


def _closest_preset(shapes: Mapping[str, Shape], name_hint: str | None) -> str:
    """Return the preset that shares most parts with the shapes, the hinted one first."""
    parts = {key.split("//")[0] for key in shapes}
    multimer = f"{_CHAIN_POSITION}" in parts
    templates = f"{_SINGLE_TEMPLATE}/output_layer_norm" in parts
    ptm = f"{_PAE_HEAD}/logits" in parts
    fused = f"{_EVOFORMER}/triangle_multiplication_outgoing/projection" in parts
    hinted = preset_in_name(name_hint)

    def likeness(name: str) -> tuple[bool, int, bool]:
        config = preset_tree(name)
        steps = config["model"]["embeddings_and_evoformer"]["evoformer"]
        alike = [
            has_templates(config) == templates,
            has_ptm(config) == ptm,
            steps["triangle_multiplication_outgoing"]["fuse_projection_weights"] == fused,
        ]
        return is_multimer(config) == multimer, sum(alike), name == hinted

    return max(PRESETS, key=likeness)


def _embedders(config: ConfigDict, found: Sizes) -> None:
    trunk = config.model.embeddings_and_evoformer
    set_found(
        trunk,
        msa_channel=found.axis("evoformer/preprocess_msa//weights", 1),
        pair_channel=found.axis("evoformer/left_single//weights", 1),
        seq_channel=found.axis("evoformer/single_activations//weights", 1),
        extra_msa_channel=found.axis("evoformer/extra_msa_activations//weights", 1),
    )
    set_found(trunk.prev_pos, num_bins=found.axis("evoformer/prev_pos_linear//weights", 0))
    trunk.recycle_pos = found.has("evoformer/prev_pos_linear//weights")
    trunk.recycle_features = found.has("evoformer/prev_pair_norm//scale")
    if is_multimer(config):
        # Channels: one-hot of the clipped offset and of "another chain", same entity, one-hot of copies. Their number
        # leaves the split between offsets and copies open, so copies are the preset's.
        channels = found.axis(f"{_CHAIN_POSITION}//weights", 0)
        offsets = None if channels is None else channels - 2 * trunk.max_relative_chain - 5
        if offsets is not None and offsets >= 0:
            set_found(trunk, max_relative_idx=half(offsets))
    else:
        channels = found.axis(f"{_POSITION}//weights", 0)
        set_found(trunk, max_relative_feature=None if channels is None else half(channels - 1))


def _evoformer(trunk: ConfigDict, found: Sizes) -> None:
    set_found(
        trunk,
        evoformer_num_block=_blocks(found, _EVOFORMER),
        extra_msa_stack_num_block=_blocks(found, _EXTRA_MSA),
    )
    block = trunk.evoformer
    row, column = block.msa_row_attention_with_pair_bias, block.msa_column_attention
    scope = f"{_EVOFORMER}/msa_row_attention_with_pair_bias"
    set_found(row, num_head=found.axis(f"{scope}//feat_2d_weights", 2))
    row.gating = found.has(f"{scope}/attention//gating_w")
    scope = f"{_EVOFORMER}/msa_column_attention"
    # Without a head axis (OpenFold): as many heads as row attention.
    query = f"{scope}/attention//query_w"
    split = len(found.shapes.get(query, ())) == 4
    set_found(column, num_head=found.axis(query, 2) if split else row.num_head)
    column.gating = found.has(f"{scope}/attention//gating_w")
    set_found(
        block.msa_transition,
        num_intermediate_factor=found.ratio(f"{_EVOFORMER}/msa_transition/transition1//weights", 2, 1),
    )
    scope = f"{_EVOFORMER}/outer_product_mean"
    set_found(block.outer_product_mean, num_outer_channel=found.axis(f"{scope}/left_projection//weights", 2))
    _pair_steps(block, found, _EVOFORMER)


def _blocks(found: Sizes, scope: str) -> int | None:
    return found.axis(f"{scope}/pair_transition/transition1//bias", 0, most=MAX_BLOCKS)


def _pair_steps(block: ConfigDict, found: Sizes, scope: str) -> None:
    for node in ("starting_node", "ending_node"):
        step, at = block[f"triangle_attention_{node}"], f"{scope}/triangle_attention_{node}"
        set_found(step, num_head=found.axis(f"{at}//feat_2d_weights", 2))
        step.gating = found.has(f"{at}/attention//gating_w")
        if "value_dim" in step:
            set_found(
                step,
                key_dim=found.output(f"{at}/attention//key_w", leading=2),
                value_dim=found.output(f"{at}/attention//value_w", leading=2),
            )
    for direction in ("outgoing", "incoming"):
        step = block[f"triangle_multiplication_{direction}"]
        at = f"{scope}/triangle_multiplication_{direction}"
        step.fuse_projection_weights = found.has(f"{at}/projection//weights")
        norm = "center_norm" if step.fuse_projection_weights else "center_layer_norm"
        set_found(step, num_intermediate_channel=found.axis(f"{at}/{norm}//scale", 1))
    factor = found.ratio(f"{scope}/pair_transition/transition1//weights", 2, 1)
    set_found(block.pair_transition, num_intermediate_factor=factor)


def _templates(config: ConfigDict, found: Sizes) -> None:
    template = config.model.embeddings_and_evoformer.template
    multimer = is_multimer(config)
    template.enabled = found.has(f"{_SINGLE_TEMPLATE}/output_layer_norm//scale")
    if not multimer:
        template.embed_torsion_angles = found.has("evoformer/template_projection//weights")
        config.data.common.use_templates = template.enabled
        config.data.common.reduce_msa_clusters_by_max_templates = template.enabled
    if not template.enabled:
        return
    if multimer:
        first = f"{_SINGLE_TEMPLATE}/template_pair_embedding_0//weights"
        set_found(template, num_channels=found.axis(first, 1))
        set_found(template.dgram_features, num_bins=found.axis(first, 0))
        scope = f"{_SINGLE_TEMPLATE}/template_embedding_iteration"
    else:
        # 49 other channels: pseudo-beta mask, two residue types, unit vector, backbone mask.
        features = found.axis(f"{_SINGLE_TEMPLATE}/embedding2d//weights", 0)
        set_found(template.dgram_features, num_bins=features - 49 if features and features > 49 else None)
        attention, at = template.attention, f"{_TEMPLATES}/attention"
        split = len(found.shapes.get(f"{at}//query_w", ())) == 3
        set_found(
            attention,
            num_head=found.axis(f"{at}//query_w", 1) if split else None,
            key_dim=found.output(f"{at}//key_w", leading=1),
            value_dim=found.output(f"{at}//value_w", leading=1),
        )
        attention.gating = found.has(f"{at}//gating_w")
        scope = f"{_SINGLE_TEMPLATE}/template_pair_stack/__layer_stack_no_state"
    stack = template.template_pair_stack
    set_found(stack, num_block=_blocks(found, scope))
    _pair_steps(stack, found, scope)


def _heads(heads: ConfigDict, found: Sizes) -> None:
    set_found(heads.distogram, num_bins=found.axis("distogram_head/half_logits//bias", 0))
    set_found(
        heads.predicted_lddt,
        num_bins=found.axis("predicted_lddt_head/logits//bias", 0),
        num_channels=found.axis("predicted_lddt_head/act_0//bias", 0),
    )
    residue_types = found.axis("masked_msa_head/logits//bias", 0)
    if residue_types != heads.masked_msa.get("num_output", 22):
        set_found(heads.masked_msa, num_output=residue_types)
    error = heads.predicted_aligned_error
    if found.has(f"{_PAE_HEAD}/logits//bias"):
        set_found(error, num_bins=found.axis(f"{_PAE_HEAD}/logits//bias", 0))
        error.weight = error.weight or 0.1
    else:
        error.weight = 0.0


def _structure_module(config: ConfigDict, found: Sizes) -> None:
    node = config.model.heads.structure_module
    at = f"{_FOLD}/invariant_point_attention"
    set_found(
        node,
        num_channel=found.axis("structure_module/initial_projection//weights", 1),
        num_head=found.axis(f"{at}//trainable_point_weights", 0),
        num_layer_in_transition=found.count(_FOLD, "transition"),
    )
    heads = node.num_head
    if is_multimer(config):

        def per_head(layer: str, parts: int = 1) -> int | None:
            return divide(found.output(f"{at}/{layer}//weights", leading=1), parts * heads)

        set_found(
            node,
            num_scalar_qk=per_head("q_scalar_projection"),
            num_scalar_v=per_head("v_scalar_projection"),
            num_point_qk=per_head("q_point_projection/point_projection", 3),
            num_point_v=per_head("v_point_projection/point_projection", 3),
        )
    else:
        set_found(
            node,
            num_scalar_qk=divide(found.axis(f"{at}/q_scalar//bias", 0), heads),
            num_point_qk=divide(found.axis(f"{at}/q_point_local//bias", 0), 3 * heads),
        )
        # Keys and values share a layer.
        scalars = divide(found.axis(f"{at}/kv_scalar//bias", 0), heads)
        points = divide(found.axis(f"{at}/kv_point_local//bias", 0), 3 * heads)
        set_found(
            node,
            num_scalar_v=scalars - node.num_scalar_qk if scalars and scalars > node.num_scalar_qk else None,
            num_point_v=points - node.num_point_qk if points and points > node.num_point_qk else None,
        )
    angles = f"{_FOLD}/rigid_sidechain"
    set_found(
        node.sidechain,
        num_channel=found.axis(f"{angles}/input_projection//weights", 1),
        num_residual_block=found.count(angles, "resblock1"),
    )
