"""Inference of a network's configuration from the shapes of its parameters.

Shapes determine widths, heads, blocks, bins and the parts of the network. Other settings (recycles, iterations of the
structure module, position scale, MSA sizes) come from the official model that the file is named after, or else from
the most similar official model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from itertools import count, takewhile
from math import prod
from operator import getitem
from typing import Any

from ml_collections import ConfigDict

from fastfold.evoformer.config import PRESETS, is_multimer, model_config, preset_tree
from fastfold.evoformer.weights.names import numbered

Shape = tuple[int, ...]

# Larger sizes are invalid; the comparison with the network's shapes reports them.
LARGEST_SIZE = 2**16
MAX_BLOCKS = 512

_EVOFORMER = "evoformer/evoformer_iteration"
_TEMPLATES = "evoformer/template_embedding"
_SINGLE_TEMPLATE = f"{_TEMPLATES}/single_template_embedding"
_FOLD = "structure_module/fold_iteration"
_POINT_ATTENTION = f"{_FOLD}/invariant_point_attention"
_POSITION = "evoformer/pair_activiations"
_CHAIN_POSITION = "evoformer/~_relative_encoding/position_activations"
_PAE_HEAD = "predicted_aligned_error_head"
_PRESET_IN_NAME = re.compile(
    r"(?<![a-z0-9])(model_[1-5](?:_ptm|_multimer(?:_v[1-3])?)?)(?![a-z0-9])", re.IGNORECASE
)

# Each line of a table is a setting, a parameter, and what of it is the setting: an axis, the product of the axes from
# one on, or its presence.
_TRUNK = f"""
    msa_channel                evoformer/preprocess_msa//weights                                   1
    pair_channel               evoformer/left_single//weights                                      1
    seq_channel                evoformer/single_activations//weights                               1
    extra_msa_channel          evoformer/extra_msa_activations//weights                            1
    prev_pos.num_bins          evoformer/prev_pos_linear//weights                                  0
    recycle_pos                evoformer/prev_pos_linear//weights                                  present
    recycle_features           evoformer/prev_pair_norm//scale                                     present
    evoformer_num_block        {_EVOFORMER}/pair_transition/transition1//bias                      0
    extra_msa_stack_num_block  evoformer/extra_msa_stack/pair_transition/transition1//bias         0
    template.enabled           {_SINGLE_TEMPLATE}/output_layer_norm//scale                         present
    template.embed_torsion_angles  evoformer/template_projection//weights                          present
"""
_BLOCK = """
    msa_row_attention_with_pair_bias.num_head  {scope}/msa_row_attention_with_pair_bias//feat_2d_weights      2
    msa_row_attention_with_pair_bias.gating    {scope}/msa_row_attention_with_pair_bias/attention//gating_w   present
    msa_column_attention.gating                {scope}/msa_column_attention/attention//gating_w               present
    outer_product_mean.num_outer_channel       {scope}/outer_product_mean/left_projection//weights            2
"""
_TRIANGLE_ATTENTION = """
    {step}.num_head   {scope}/{step}//feat_2d_weights      2
    {step}.gating     {scope}/{step}/attention//gating_w   present
    {step}.key_dim    {scope}/{step}/attention//key_w      2:
    {step}.value_dim  {scope}/{step}/attention//value_w    2:
"""
_TRIANGLE_MULTIPLICATION = """
    {step}.fuse_projection_weights   {scope}/{step}/projection//weights       present
    {step}.num_intermediate_channel  {scope}/{step}/center_layer_norm//scale  1
    {step}.num_intermediate_channel  {scope}/{step}/center_norm//scale        1
"""
_TEMPLATE = f"""
    num_channels                   {_SINGLE_TEMPLATE}/template_pair_embedding_0//weights                    1
    dgram_features.num_bins        {_SINGLE_TEMPLATE}/template_pair_embedding_0//weights                    0
    attention.key_dim              {_TEMPLATES}/attention//key_w                                            1:
    attention.value_dim            {_TEMPLATES}/attention//value_w                                          1:
    attention.gating               {_TEMPLATES}/attention//gating_w                                         present
    template_pair_stack.num_block  {{scope}}/pair_transition/transition1//bias                              0
"""
_HEADS = f"""
    distogram.num_bins                         distogram_head/half_logits//bias                       0
    predicted_lddt.num_bins                    predicted_lddt_head/logits//bias                       0
    predicted_lddt.num_channels                predicted_lddt_head/act_0//bias                        0
    predicted_aligned_error.num_bins           {_PAE_HEAD}/logits//bias                               0
    structure_module.num_channel               structure_module/initial_projection//weights           1
    structure_module.num_head                  {_POINT_ATTENTION}//trainable_point_weights            0
    structure_module.sidechain.num_channel     {_FOLD}/rigid_sidechain/input_projection//weights      1
"""


def infer_config(
    shapes: Mapping[str, Shape], *, name_hint: str | None = None, base: ConfigDict | None = None
) -> ConfigDict:
    """Infer the configuration of the network that parameters of these shapes belong to.

    Args:
        shapes: Shapes by official key, without the common prefix. Head axes may be joined with their channels;
            heads are then counted on the layers with one channel per head, or taken from the preset without such a
            layer (template attention).
        name_hint: File name. An official model's name in it (``params_model_1_ptm.npz``) decides settings that the
            shapes leave open, unless the shapes contradict it.
        base: Configuration of a network of the same kind, which is changed; None for the most similar official one.

    Returns:
        A tree with AlphaFold's keys. Missing and invalid sizes are the preset's; the comparison of the network's
        shapes with the file's reports them.
    """
    config = model_config(_closest_preset(shapes, name_hint)) if base is None else base
    trunk, heads = config.model.embeddings_and_evoformer, config.model.heads
    _set_sizes(trunk, _TRUNK, shapes)
    _set_relative_positions(config, shapes)
    _set_block(trunk.evoformer, shapes)
    _set_templates(config, shapes)
    _set_sizes(heads, _HEADS, shapes)
    residue_types = _axis(shapes, "masked_msa_head/logits//bias", "0")
    if residue_types not in (None, heads.masked_msa.get("num_output", 22)):
        heads.masked_msa.num_output = residue_types
    error = heads.predicted_aligned_error
    error.weight = (error.weight or 0.1) if f"{_PAE_HEAD}/logits//bias" in shapes else 0.0
    _set_structure_module(heads.structure_module, shapes, multimer=is_multimer(config))
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


def _set_sizes(node: ConfigDict, table: str, shapes: Mapping[str, Shape], **fields: str) -> None:
    """Set the settings of a table that the node has, except for missing or invalid parameters and disabled steps."""
    for row in table.format(**fields).strip().splitlines():
        path, key, axis = row.split()
        *parents, name = path.split(".")
        target = reduce(getitem, parents, node)
        value = key in shapes if axis == "present" else _axis(shapes, key, axis)
        too_large = name.endswith("num_block") and value is not None and value > MAX_BLOCKS
        if name in target and value is not None and not too_large and target.get("enabled", True):
            target[name] = value


def _axis(shapes: Mapping[str, Shape], key: str, axis: str) -> int | None:
    """Return the size of an axis, or the product of the axes from one on (``2:``); None if missing or invalid."""
    shape = shapes.get(key, ())
    first = int(axis.removesuffix(":"))
    sizes = shape[first:] if axis.endswith(":") else shape[first : first + 1]
    size = prod(sizes) if sizes else 0
    return size if 0 < size <= LARGEST_SIZE else None


def _divide(a: int | None, b: int | None) -> int | None:
    """Return the integer quotient of two sizes, or None if there is none."""
    return a // b if a and b and a % b == 0 else None


def _set_found(node: ConfigDict, **values: int | None) -> None:
    """Set values of a config node, except those that are None."""
    node.update({name: value for name, value in values.items() if value is not None})


def _set_relative_positions(config: ConfigDict, shapes: Mapping[str, Shape]) -> None:
    trunk = config.model.embeddings_and_evoformer
    if is_multimer(config):
        # Channels: one-hot of the clipped offset and of "another chain", same entity, one-hot of copies. Their number
        # leaves the split between offsets and copies open, so copies are the preset's.
        name, position, others = "max_relative_idx", _CHAIN_POSITION, 2 * trunk.max_relative_chain + 5
    else:
        name, position, others = "max_relative_feature", _POSITION, 1
    channels = _axis(shapes, f"{position}//weights", "0")
    if channels is not None and channels >= others and (channels - others) % 2 == 0:
        trunk[name] = (channels - others) // 2


def _set_block(block: ConfigDict, shapes: Mapping[str, Shape]) -> None:
    _set_sizes(block, _BLOCK, shapes, scope=_EVOFORMER)
    # Without a head axis (OpenFold): as many heads as row attention.
    query = f"{_EVOFORMER}/msa_column_attention/attention//query_w"
    split = len(shapes.get(query, ())) == 4
    heads = _axis(shapes, query, "2") if split else block.msa_row_attention_with_pair_bias.num_head
    if block.msa_column_attention.get("enabled", True):
        _set_found(block.msa_column_attention, num_head=heads)
    _set_transition(block.msa_transition, shapes, f"{_EVOFORMER}/msa_transition")
    _set_pair_steps(block, shapes, _EVOFORMER)


def _set_transition(node: ConfigDict, shapes: Mapping[str, Shape], scope: str) -> None:
    hidden, own = (_axis(shapes, f"{scope}/transition1//weights", axis) for axis in ("2", "1"))
    _set_found(node, num_intermediate_factor=_divide(hidden, own))


def _set_pair_steps(block: ConfigDict, shapes: Mapping[str, Shape], scope: str) -> None:
    for node in ("starting", "ending"):
        _set_sizes(block, _TRIANGLE_ATTENTION, shapes, scope=scope, step=f"triangle_attention_{node}_node")
    for direction in ("outgoing", "incoming"):
        step = f"triangle_multiplication_{direction}"
        _set_sizes(block, _TRIANGLE_MULTIPLICATION, shapes, scope=scope, step=step)
    _set_transition(block.pair_transition, shapes, f"{scope}/pair_transition")


def _set_templates(config: ConfigDict, shapes: Mapping[str, Shape]) -> None:
    template, multimer = config.model.embeddings_and_evoformer.template, is_multimer(config)
    if not multimer:
        config.data.common.use_templates = template.enabled
        config.data.common.reduce_msa_clusters_by_max_templates = template.enabled
    if not template.enabled:
        return
    stack = "template_embedding_iteration" if multimer else "template_pair_stack/__layer_stack_no_state"
    _set_sizes(template, _TEMPLATE, shapes, scope=f"{_SINGLE_TEMPLATE}/{stack}")
    if not multimer:
        # 49 other channels: pseudo-beta mask, two residue types, unit vector, backbone mask.
        features = _axis(shapes, f"{_SINGLE_TEMPLATE}/embedding2d//weights", "0")
        _set_found(template.dgram_features, num_bins=features - 49 if features and features > 49 else None)
        query = f"{_TEMPLATES}/attention//query_w"
        split = len(shapes.get(query, ())) == 3
        _set_found(template.attention, num_head=_axis(shapes, query, "1") if split else None)
    _set_pair_steps(template.template_pair_stack, shapes, f"{_SINGLE_TEMPLATE}/{stack}")


def _set_structure_module(node: ConfigDict, shapes: Mapping[str, Shape], *, multimer: bool) -> None:
    def per_head(key: str, axis: str, parts: int = 1) -> int | None:
        return _divide(_axis(shapes, f"{_POINT_ATTENTION}/{key}", axis), parts * node.num_head)

    def depth(scope: str, name: str) -> int | None:
        layers = (f"{scope}/{numbered(name, i)}//weights" for i in count())
        return len(list(takewhile(shapes.__contains__, layers))) or None

    _set_found(node, num_layer_in_transition=depth(_FOLD, "transition"))
    _set_found(node.sidechain, num_residual_block=depth(f"{_FOLD}/rigid_sidechain", "resblock1"))
    if multimer:
        _set_found(
            node,
            num_scalar_qk=per_head("q_scalar_projection//weights", "1:"),
            num_scalar_v=per_head("v_scalar_projection//weights", "1:"),
            num_point_qk=per_head("q_point_projection/point_projection//weights", "1:", 3),
            num_point_v=per_head("v_point_projection/point_projection//weights", "1:", 3),
        )
        return
    _set_found(
        node,
        num_scalar_qk=per_head("q_scalar//bias", "0"),
        num_point_qk=per_head("q_point_local//bias", "0", 3),
    )
    # Keys and values share a layer.
    scalars, points = per_head("kv_scalar//bias", "0"), per_head("kv_point_local//bias", "0", 3)
    _set_found(
        node,
        num_scalar_v=scalars - node.num_scalar_qk if scalars and scalars > node.num_scalar_qk else None,
        num_point_v=points - node.num_point_qk if points and points > node.num_point_qk else None,
    )
