"""OpenFold's parameter names of all releases, and the official keys that they map to.

The table is built module by module, as in :mod:`fastfold.evoformer.weights.alphafold_names`. Names that changed
between releases (published monomer weights, training checkpoints, the multimer refactoring) are first converted to one
spelling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from fastfold.evoformer.weights.alphafold_names import numbered

_TORSIONS = "template_single_embedder"
# Spelling in some release, and our common spelling. Wrappers add prefixes, and releases moved modules.
_SPELLINGS = tuple(
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"^(?:module\.)?(?:model\.)?", ""),
        (r"^template_embedder\.", ""),
        (r"^template_(?:angle|single)_embedder\.linear_1\.", f"{_TORSIONS}.template_single_embedder."),
        (r"^template_(?:angle|single)_embedder\.linear_2\.", f"{_TORSIONS}.template_projector."),
        (r"^extra_msa_stack\.stack\.", "extra_msa_stack."),
        (r"(\.blocks\.[0-9]+)\.(?:core|pair_stack)\.", r"\1."),
        (r"\.msa_att_col\._msa_att\.", ".msa_att_col."),
        (r"_points\.linear\.", "_points."),
    )
)
_BLOCK = re.compile(r"\.blocks\.([0-9]{1,6})\.")
_MAX_RESIDUAL_BLOCKS = 32


def spell(name: str) -> tuple[str, int | None]:
    """Return the common spelling of any release's name, with ``*`` for a block's number, and that number."""
    for pattern, spelling in _SPELLINGS:
        name = pattern.sub(spelling, name)
    match = _BLOCK.search(name)
    return _BLOCK.sub(".blocks.*.", name), int(match[1]) if match else None


@cache
def official_keys(*, multimer: bool, fused: bool, fused_templates: bool) -> Mapping[str, str]:
    """Return official keys by OpenFold name in the common spelling, with ``*`` for the number of a block.

    Args:
        multimer: True for the multimer network.
        fused: True if triangle multiplications have fused projections (multimer version 3).
        fused_templates: True if those of the template pair stack do.
    """
    return (
        _embedders(multimer)
        | _templates(multimer, fused_templates)
        | _block("extra_msa_stack", "evoformer/extra_msa_stack", fused, global_column=True)
        | _block("evoformer", "evoformer/evoformer_iteration", fused, global_column=False)
        | _linear("evoformer.linear", "evoformer/single_activations")
        | _structure_module(multimer)
        | _heads()
    )


def _linear(name: str, scope: str) -> dict[str, str]:
    return {f"{name}.weight": f"{scope}//weights", f"{name}.bias": f"{scope}//bias"}


def _norm(name: str, scope: str) -> dict[str, str]:
    return {f"{name}.weight": f"{scope}//scale", f"{name}.bias": f"{scope}//offset"}


def _linears(name: str, scope: str, modules: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for ours, theirs in modules.items():
        found |= _linear(f"{name}.{ours}", f"{scope}/{theirs}")
    return found


def _attention(name: str, scope: str) -> dict[str, str]:
    keys = {"q": "query_w", "k": "key_w", "v": "value_w", "g": "gating_w", "o": "output_w"}
    weights = {f"{name}.linear_{letter}.weight": f"{scope}//{key}" for letter, key in keys.items()}
    return weights | {
        f"{name}.linear_g.bias": f"{scope}//gating_b",
        f"{name}.linear_o.bias": f"{scope}//output_b",
    }


def _transition(name: str, scope: str) -> dict[str, str]:
    layers = {"linear_1": "transition1", "linear_2": "transition2"}
    return _norm(f"{name}.layer_norm", f"{scope}/input_layer_norm") | _linears(name, scope, layers)


def _triangle_multiplication(name: str, scope: str, fused: bool, *, outgoing: bool) -> dict[str, str]:
    norms = ("left_norm_input", "center_norm") if fused else ("layer_norm_input", "center_layer_norm")
    if fused:
        projections = {"linear_ab_p": "projection", "linear_ab_g": "gate"}
    else:
        left, right = ("a", "b") if outgoing else ("b", "a")
        projections = {
            f"linear_{left}_p": "left_projection",
            f"linear_{right}_p": "right_projection",
            f"linear_{left}_g": "left_gate",
            f"linear_{right}_g": "right_gate",
        }
    outputs = {"linear_z": "output_projection", "linear_g": "gating_linear"}
    return (
        _norm(f"{name}.layer_norm_in", f"{scope}/{norms[0]}")
        | _norm(f"{name}.layer_norm_out", f"{scope}/{norms[1]}")
        | _linears(name, scope, projections | outputs)
    )


def _pair_steps(name: str, scope: str, fused: bool) -> dict[str, str]:
    found = _transition(f"{name}.pair_transition", f"{scope}/pair_transition")
    for ours, theirs in (("start", "starting"), ("end", "ending")):
        step, at = f"{name}.tri_att_{ours}", f"{scope}/triangle_attention_{theirs}_node"
        found |= _norm(f"{step}.layer_norm", f"{at}/query_norm") | _attention(
            f"{step}.mha", f"{at}/attention"
        )
        found[f"{step}.linear.weight"] = f"{at}//feat_2d_weights"
    for ours, theirs in (("out", "outgoing"), ("in", "incoming")):
        step, at = f"{name}.tri_mul_{ours}", f"{scope}/triangle_multiplication_{theirs}"
        found |= _triangle_multiplication(step, at, fused, outgoing=ours == "out")
    return found


def _block(stack: str, scope: str, fused: bool, *, global_column: bool) -> dict[str, str]:
    name = f"{stack}.blocks.*"
    row, at = f"{name}.msa_att_row", f"{scope}/msa_row_attention_with_pair_bias"
    found = _norm(f"{row}.layer_norm_m", f"{at}/query_norm") | _norm(
        f"{row}.layer_norm_z", f"{at}/feat_2d_norm"
    )
    found |= _attention(f"{row}.mha", f"{at}/attention")
    found[f"{row}.linear_z.weight"] = f"{at}//feat_2d_weights"

    column = f"{name}.msa_att_col"
    at = f"{scope}/msa_column_global_attention" if global_column else f"{scope}/msa_column_attention"
    inner = "global_attention" if global_column else "mha"
    found |= _norm(f"{column}.layer_norm_m", f"{at}/query_norm")
    found |= _attention(f"{column}.{inner}", f"{at}/attention")

    outer, at = f"{name}.outer_product_mean", f"{scope}/outer_product_mean"
    found |= _norm(f"{outer}.layer_norm", f"{at}/layer_norm_input")
    found |= _linears(outer, at, {"linear_1": "left_projection", "linear_2": "right_projection"})
    found |= {f"{outer}.linear_out.weight": f"{at}//output_w", f"{outer}.linear_out.bias": f"{at}//output_b"}

    found |= _transition(f"{name}.msa_transition", f"{scope}/msa_transition")
    return found | _pair_steps(name, scope, fused)


def _embedders(multimer: bool) -> dict[str, str]:
    position = "~_relative_encoding/position_activations" if multimer else "pair_activiations"
    inputs = {
        "linear_tf_m": "preprocess_1d",
        "linear_msa_m": "preprocess_msa",
        "linear_tf_z_i": "left_single",
        "linear_tf_z_j": "right_single",
        "linear_relpos": position,
    }
    return (
        _linears("input_embedder", "evoformer", inputs)
        | _linear("recycling_embedder.linear", "evoformer/prev_pos_linear")
        | _norm("recycling_embedder.layer_norm_m", "evoformer/prev_msa_first_row_norm")
        | _norm("recycling_embedder.layer_norm_z", "evoformer/prev_pair_norm")
        | _linear("extra_msa_embedder.linear", "evoformer/extra_msa_activations")
    )


def _templates(multimer: bool, fused: bool) -> dict[str, str]:
    scope = "evoformer/template_embedding"
    single = f"{scope}/single_template_embedding"
    torsions = {
        "template_single_embedder": "template_single_embedding",
        "template_projector": "template_projection",
    }
    found = _linears("template_single_embedder", "evoformer", torsions)
    found |= _norm("template_pair_stack.layer_norm", f"{single}/output_layer_norm")
    pair = "template_pair_embedder"
    if not multimer:
        found |= _linear(f"{pair}.linear", f"{single}/embedding2d")
        found |= _attention("template_pointwise_att.mha", f"{scope}/attention")
        stack = f"{single}/template_pair_stack/__layer_stack_no_state"
        return found | _pair_steps("template_pair_stack.blocks.*", stack, fused)
    parts = ["dgram", "pseudo_beta_mask", "aatype", "aatype", *"xyz", "backbone_mask", "query_embedding"]
    for i, part in enumerate(parts):
        # aatype has two layers, one for columns and one for rows.
        number = f"_{i - 1}" if part == "aatype" else ""
        found |= _linear(f"{pair}.{part}_linear{number}", f"{single}/template_pair_embedding_{i}")
    found |= _norm(f"{pair}.query_embedding_layer_norm", f"{single}/query_embedding_norm")
    found |= _linear("linear_t", f"{scope}/output_linear")
    return found | _pair_steps(
        "template_pair_stack.blocks.*", f"{single}/template_embedding_iteration", fused
    )


def _structure_module(multimer: bool) -> dict[str, str]:
    name, scope = "structure_module", "structure_module"
    found = _norm(f"{name}.layer_norm_s", f"{scope}/single_layer_norm")
    found |= _norm(f"{name}.layer_norm_z", f"{scope}/pair_layer_norm")
    found |= _linear(f"{name}.linear_in", f"{scope}/initial_projection")
    scope += "/fold_iteration"
    point_attention = {"linear_b": "attention_2d", "linear_out": "output_projection"}
    if multimer:
        for letter in "qkv":
            point_attention[f"linear_{letter}"] = f"{letter}_scalar_projection"
            point_attention[f"linear_{letter}_points"] = f"{letter}_point_projection/point_projection"
    else:
        for part in ("q", "kv"):
            point_attention[f"linear_{part}"] = f"{part}_scalar"
            point_attention[f"linear_{part}_points"] = f"{part}_point_local"
    at = f"{scope}/invariant_point_attention"
    found |= _linears(f"{name}.ipa", at, point_attention)
    found[f"{name}.ipa.head_weights"] = f"{at}//trainable_point_weights"
    found |= _norm(f"{name}.layer_norm_ipa", f"{scope}/attention_layer_norm")
    layers = {f"linear_{i + 1}": numbered("transition", i) for i in range(3)}
    found |= _linears(f"{name}.transition.layers.0", scope, layers)
    found |= _norm(f"{name}.transition.layer_norm", f"{scope}/transition_layer_norm")
    found |= _linear(
        f"{name}.bb_update.linear", f"{scope}/{'quat_rigid/rigid' if multimer else 'affine_update'}"
    )
    angles = {
        "linear_in": "input_projection",
        "linear_initial": "input_projection_1",
        "linear_out": "unnormalized_angles",
    }
    for i in range(_MAX_RESIDUAL_BLOCKS):
        for j in (1, 2):
            angles[f"layers.{i}.linear_{j}"] = numbered(f"resblock{j}", i)
    return found | _linears(f"{name}.angle_resnet", f"{scope}/rigid_sidechain", angles)


def _heads() -> dict[str, str]:
    lddt = {"linear_1": "act_0", "linear_2": "act_1", "linear_3": "logits"}
    return (
        _norm("aux_heads.plddt.layer_norm", "predicted_lddt_head/input_layer_norm")
        | _linears("aux_heads.plddt", "predicted_lddt_head", lddt)
        | _linear("aux_heads.distogram.linear", "distogram_head/half_logits")
        | _linear("aux_heads.masked_msa.linear", "masked_msa_head/logits")
        | _linear("aux_heads.experimentally_resolved.linear", "experimentally_resolved_head/logits")
        | _linear("aux_heads.tm.linear", "predicted_aligned_error_head/logits")
    )
