"""Names of the network's parameters: ours, the official program's and OpenFold's, in one table.

Official names are Haiku's: scopes joined by slashes, then ``//`` and the parameter. Blocks of a stack are stacked along
the leading axis of one array. OpenFold has a tensor for each block, as we have; its names are those of version 2. A
``*`` is the number of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import count, takewhile
from math import prod
from typing import Any, NamedTuple

from torch import nn

from fastfold.errors import WeightsError
from fastfold.evoformer.attention import Attention, GlobalAttention
from fastfold.evoformer.config import has_whole_blocks
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.evoformer.weights.mapping import ParamMapping

PREFIX = "alphafold/alphafold_iteration/"  #: Prefix of every key of an official file
#: Official weights of layers with one input channel, which are vectors
ONE_CHANNEL = re.compile(r"/template_pair_embedding_[14567]//weights$")
_BLOCK = re.compile(r"\.blocks\.([0-9]{1,6})\.")


class Names(NamedTuple):
    """Names of a layer, or of a parameter if the official name has ``//``."""

    ours: str
    official: str
    openfold: str


# Each line of a table is a layer with its three names, in the order of official files.
_INPUTS = """
    input_embedder.target_to_msa             preprocess_1d              input_embedder.linear_tf_m
    input_embedder.msa                       preprocess_msa             input_embedder.linear_msa_m
    input_embedder.target_left               left_single                input_embedder.linear_tf_z_i
    input_embedder.target_right              right_single               input_embedder.linear_tf_z_j
    input_embedder.relative_position.linear  {position}                 input_embedder.linear_relpos
    input_embedder.prev_distance             prev_pos_linear            recycling_embedder.linear
    input_embedder.prev_msa_norm             prev_msa_first_row_norm    recycling_embedder.layer_norm_m
    input_embedder.prev_pair_norm            prev_pair_norm             recycling_embedder.layer_norm_z
    extra_msa_embedder                       extra_msa_activations      extra_msa_embedder.linear
"""
_MONOMER_TEMPLATES = """
    norm            single_template_embedding/output_layer_norm            template_pair_stack.layer_norm
    embedding       single_template_embedding/embedding2d                  template_pair_embedder.linear
    attention       attention                                              template_pointwise_att.mha
"""
_MULTIMER_TEMPLATES = """
    norm            single_template_embedding/output_layer_norm            template_pair_stack.layer_norm
    query_norm      single_template_embedding/query_embedding_norm   {pair}.query_embedding_layer_norm
    distance        single_template_embedding/template_pair_embedding_0    {pair}.dgram_linear
    beta_mask       single_template_embedding/template_pair_embedding_1    {pair}.pseudo_beta_mask_linear
    aatype_column   single_template_embedding/template_pair_embedding_2    {pair}.aatype_linear_1
    aatype_row      single_template_embedding/template_pair_embedding_3    {pair}.aatype_linear_2
    unit_vector.0   single_template_embedding/template_pair_embedding_4    {pair}.x_linear
    unit_vector.1   single_template_embedding/template_pair_embedding_5    {pair}.y_linear
    unit_vector.2   single_template_embedding/template_pair_embedding_6    {pair}.z_linear
    backbone_mask   single_template_embedding/template_pair_embedding_7    {pair}.backbone_mask_linear
    query           single_template_embedding/template_pair_embedding_8    {pair}.query_embedding_linear
    output          output_linear                                          linear_t
"""
_MONOMER_TORSIONS = """
    single      template_single_embedding    linear_1
    projection  template_projection          linear_2
"""
_MULTIMER_TORSIONS = """
    single      template_single_embedding    template_single_embedder
    projection  template_projection          template_projector
"""
_MSA_STEPS = """
    msa_row_attention.norm              msa_row_attention_with_pair_bias/query_norm        msa_att_row.layer_norm_m
    msa_row_attention.pair_norm         msa_row_attention_with_pair_bias/feat_2d_norm      msa_att_row.layer_norm_z
    msa_row_attention.pair_bias.weight  msa_row_attention_with_pair_bias//feat_2d_weights  msa_att_row.linear_z.weight
    msa_row_attention.attention         msa_row_attention_with_pair_bias/attention         msa_att_row.mha
    msa_column_attention.norm           msa_column_{is_global}attention/query_norm         msa_att_col.{own}layer_norm_m
    msa_column_attention.attention      msa_column_{is_global}attention/attention          msa_att_col.{own}{mha}
    msa_transition.norm                 msa_transition/input_layer_norm            msa_transition.layer_norm
    msa_transition.hidden               msa_transition/transition1                 msa_transition.linear_1
    msa_transition.output               msa_transition/transition2                 msa_transition.linear_2
    outer_product_mean.norm             outer_product_mean/layer_norm_input        outer_product_mean.layer_norm
    outer_product_mean.left             outer_product_mean/left_projection         outer_product_mean.linear_1
    outer_product_mean.right            outer_product_mean/right_projection        outer_product_mean.linear_2
    outer_product_mean.output.weight    outer_product_mean//output_w       outer_product_mean.linear_out.weight
    outer_product_mean.output.bias      outer_product_mean//output_b       outer_product_mean.linear_out.bias
"""
_TRIANGLE_ATTENTION = """
    triangle_attention_{node}.norm              triangle_attention_{node}_node/query_norm        {step}.layer_norm
    triangle_attention_{node}.pair_bias.weight  triangle_attention_{node}_node//feat_2d_weights  {step}.linear.weight
    triangle_attention_{node}.attention         triangle_attention_{node}_node/attention         {step}.mha
"""
_TRIANGLE_MULTIPLICATION = """
    norm_in      layer_norm_input   layer_norm_in
    norm_out     center_layer_norm  layer_norm_out
    output       output_projection  linear_z
    output_gate  gating_linear      linear_g
    projection   left_projection    linear_{left}_p
    projection   right_projection   linear_{right}_p
    gate         left_gate          linear_{left}_g
    gate         right_gate         linear_{right}_g
"""
_FUSED_TRIANGLE_MULTIPLICATION = """
    norm_in      left_norm_input    layer_norm_in
    norm_out     center_norm        layer_norm_out
    output       output_projection  linear_z
    output_gate  gating_linear      linear_g
    projection   projection         linear_ab_p
    gate         gate               linear_ab_g
"""
_PAIR_TRANSITION = """
    pair_transition.norm    pair_transition/input_layer_norm  pair_transition.layer_norm
    pair_transition.hidden  pair_transition/transition1       pair_transition.linear_1
    pair_transition.output  pair_transition/transition2       pair_transition.linear_2
"""
_STRUCTURE_INPUTS = """
    single_norm  single_layer_norm   layer_norm_s
    pair_norm    pair_layer_norm     layer_norm_z
    initial      initial_projection  linear_in
"""
_MONOMER_POINT_ATTENTION = """
    query         q_scalar        linear_q
    query_points  q_point_local   linear_q_points.linear
    key           kv_scalar       linear_kv
    key_points    kv_point_local  linear_kv_points.linear
    value         kv_scalar       linear_kv
    value_points  kv_point_local  linear_kv_points.linear
"""
_MULTIMER_POINT_ATTENTION = """
    query         q_scalar_projection                   linear_q
    query_points  q_point_projection/point_projection   linear_q_points.linear
    key           k_scalar_projection                   linear_k
    key_points    k_point_projection/point_projection   linear_k_points.linear
    value         v_scalar_projection                   linear_v
    value_points  v_point_projection/point_projection   linear_v_points.linear
"""
_POINT_ATTENTION_OUTPUTS = """
    attention.pair_bias      invariant_point_attention/attention_2d               ipa.linear_b
    attention.point_weights  invariant_point_attention//trainable_point_weights   ipa.head_weights
    attention.output         invariant_point_attention/output_projection          ipa.linear_out
    attention_norm           attention_layer_norm                                 layer_norm_ipa
"""
_STRUCTURE_OUTPUTS = """
    transition_norm       transition_layer_norm                 transition.layer_norm
    backbone_update       {update}                              bb_update.linear
    angles.input          rigid_sidechain/input_projection      angle_resnet.linear_in
    angles.initial_input  rigid_sidechain/input_projection_1    angle_resnet.linear_initial
"""
_HEADS = """
    distogram.logits                distogram_head/half_logits             distogram.linear
    masked_msa.logits               masked_msa_head/logits                 masked_msa.linear
    experimentally_resolved.logits  experimentally_resolved_head/logits    experimentally_resolved.linear
    predicted_lddt.norm             predicted_lddt_head/input_layer_norm   plddt.layer_norm
    predicted_lddt.hidden           predicted_lddt_head/act_0              plddt.linear_1
    predicted_lddt.hidden_2         predicted_lddt_head/act_1              plddt.linear_2
    predicted_lddt.logits           predicted_lddt_head/logits             plddt.linear_3
    predicted_aligned_error.logits  predicted_aligned_error_head/logits    tm.linear
"""
_LINEAR = (Names("weight", "weights", "weight"), Names("bias", "bias", "bias"))
_NORM = (Names("weight", "scale", "weight"), Names("bias", "offset", "bias"))
_ATTENTION = (
    Names("query.weight", "query_w", "linear_q.weight"),
    Names("key.weight", "key_w", "linear_k.weight"),
    Names("value.weight", "value_w", "linear_v.weight"),
    Names("gate.weight", "gating_w", "linear_g.weight"),
    Names("gate.bias", "gating_b", "linear_g.bias"),
    Names("output.weight", "output_w", "linear_o.weight"),
    Names("output.bias", "output_b", "linear_o.bias"),
)


def numbered(name: str, i: int) -> str:
    """Return Haiku's name of the ``i``-th module ``name`` in a scope: ``name``, ``name_1``, ``name_2`` and so on."""
    return f"{name}_{i}" if i else name


def _rows(
    table: str, *, ours: str = "", official: str = "", openfold: str = "", **fields: str
) -> Iterator[Names]:
    """Yield the rows of a table with prefixes of names and values of its fields."""
    for row in table.format(**fields).strip().splitlines():
        names = Names(*row.split())
        yield Names(ours + names.ours, official + names.official, openfold + names.openfold)


def _pair_steps(ours: str, official: str, openfold: str, *, fused: bool) -> Iterator[Names]:
    stack = {"ours": f"{ours}.blocks.*.", "official": f"{official}/", "openfold": openfold}
    for node, step in (("starting", "tri_att_start"), ("ending", "tri_att_end")):
        yield from _rows(_TRIANGLE_ATTENTION, **stack, node=node, step=step)
    # For incoming edges OpenFold contracts a with b, the official program b with a.
    for direction, short, left, right in (("outgoing", "out", "a", "b"), ("incoming", "in", "b", "a")):
        yield from _rows(
            _FUSED_TRIANGLE_MULTIPLICATION if fused else _TRIANGLE_MULTIPLICATION,
            ours=f"{stack['ours']}triangle_multiplication_{direction}.",
            official=f"{stack['official']}triangle_multiplication_{direction}/",
            openfold=f"{stack['openfold']}tri_mul_{short}.",
            left=left,
            right=right,
        )
    yield from _rows(_PAIR_TRANSITION, **stack)


def _block(ours: str, official: str, *, fused: bool, is_global: bool) -> Iterator[Names]:
    yield from _rows(
        _MSA_STEPS,
        ours=f"{ours}.blocks.*.",
        official=f"{official}/",
        openfold=f"{ours}.blocks.*.",
        is_global="global_" if is_global else "",
        own="" if is_global else "_msa_att.",
        mha="global_attention" if is_global else "mha",
    )
    yield from _pair_steps(ours, official, f"{ours}.blocks.*.pair_stack.", fused=fused)


def _templates(*, multimer: bool, fused: bool) -> Iterator[Names]:
    official, table = "evoformer/template_embedding", _MULTIMER_TEMPLATES if multimer else _MONOMER_TEMPLATES
    yield from _rows(
        table,
        ours="template_embedder.",
        official=f"{official}/",
        openfold="template_embedder.",
        pair="template_pair_embedder",
    )
    stack = "template_embedding_iteration" if multimer else "template_pair_stack/__layer_stack_no_state"
    official = f"{official}/single_template_embedding/{stack}"
    blocks = "template_embedder.template_pair_stack.blocks.*."
    yield from _pair_steps("template_embedder.stack", official, blocks, fused=fused)
    yield from _rows(
        _MULTIMER_TORSIONS if multimer else _MONOMER_TORSIONS,
        ours="template_torsion_embedder.",
        official="evoformer/",
        openfold="template_embedder.template_single_embedder.",
    )


def _structure_module(*, multimer: bool, transitions: int, residual_blocks: int) -> Iterator[Names]:
    name, fold = "structure_module.", "structure_module/fold_iteration/"
    yield from _rows(_STRUCTURE_INPUTS, ours=name, official="structure_module/", openfold=name)
    yield from _rows(
        _MULTIMER_POINT_ATTENTION if multimer else _MONOMER_POINT_ATTENTION,
        ours=f"{name}attention.",
        official=f"{fold}invariant_point_attention/",
        openfold=f"{name}ipa.",
    )
    prefixes = {"ours": name, "official": fold, "openfold": name}
    yield from _rows(_POINT_ATTENTION_OUTPUTS, **prefixes)
    for i in range(transitions):
        layer = f"transition.layers.0.linear_{i + 1}"
        yield from _rows(f"transition.{i} {numbered('transition', i)} {layer}", **prefixes)
    update = "quat_rigid/rigid" if multimer else "affine_update"
    yield from _rows(_STRUCTURE_OUTPUTS, **prefixes, update=update)
    prefixes = {"ours": f"{name}angles.", "official": f"{fold}rigid_sidechain/"}
    for i in range(residual_blocks):
        for j in (1, 2):
            row = f"blocks.{i}.{2 * j - 1} {numbered(f'resblock{j}', i)} layers.{i}.linear_{j}"
            yield from _rows(row, **prefixes, openfold=f"{name}angle_resnet.")
    yield from _rows("angles unnormalized_angles linear_out", **prefixes, openfold=f"{name}angle_resnet.")


def parameter_names(
    *, multimer: bool, fused: bool, fused_templates: bool, transitions: int, residual_blocks: int
) -> Iterator[Names]:
    """Yield the three names of all parameters that networks may have.

    Args:
        multimer: True for the multimer network.
        fused: True if triangle multiplications have fused projections (multimer version 3).
        fused_templates: True if those of the template pair stack do.
        transitions: Layers of the structure module's transition.
        residual_blocks: Residual blocks of the torsion angles.
    """
    position = "~_relative_encoding/position_activations" if multimer else "pair_activiations"
    rows = (
        *_rows(_INPUTS, official="evoformer/", position=position),
        *_templates(multimer=multimer, fused=fused_templates),
        *_block("extra_msa_stack", "evoformer/extra_msa_stack", fused=fused, is_global=True),
        *_block("evoformer", "evoformer/evoformer_iteration", fused=fused, is_global=False),
        Names("single_projection", "evoformer/single_activations", "evoformer.linear"),
        *_structure_module(multimer=multimer, transitions=transitions, residual_blocks=residual_blocks),
        *_rows(_HEADS, ours="heads.", openfold="aux_heads."),
    )
    for ours, official, openfold in rows:
        kind = ours.rpartition(".")[2]
        if "//" in official:
            yield Names(ours, official, openfold)
            continue
        for own in _ATTENTION if kind == "attention" else _NORM if "norm" in kind else _LINEAR:
            yield Names(f"{ours}.{own.ours}", f"{official}//{own.official}", f"{openfold}.{own.openfold}")


@cache
def known_names(*, multimer: bool, fused: bool, fused_templates: bool) -> tuple[Names, ...]:
    """Return the names of every depth that a file may have; see :func:`parameter_names`."""
    return tuple(
        parameter_names(
            multimer=multimer, fused=fused, fused_templates=fused_templates, transitions=3, residual_blocks=32
        )
    )


def split_block(name: str) -> tuple[str, int | None]:
    """Return a name with ``*`` for its first block's number, and that number."""
    match = _BLOCK.search(name)
    return _BLOCK.sub(".blocks.*.", name, count=1), int(match[1]) if match else None


def official_axes(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the official axes of a PyTorch parameter's ``shape``: reversed, head axes joined."""
    shape = shape[::-1]
    return shape[1:] if ONE_CHANNEL.search(key) and len(shape) == 2 and shape[0] == 1 else shape


def network_names(model: AlphaFold) -> list[Names]:
    """Return the rows of the table for a network's kind; see :func:`parameter_names`.

    Raises:
        WeightsError: The network has parts that AlphaFold does not have, such as ``mini``.
    """
    embedder = model.input_embedder
    is_own = any(part is not None for part in (embedder.coevolution, embedder.sequence_convolution))
    if is_own or model.extra_msa_embedder is None or not has_whole_blocks(model.config):
        raise WeightsError(
            ".npz and .pt files hold AlphaFold's networks only; this one reads coevolution, or lacks the extra MSA or "
            "steps of its blocks. Save it as .safetensors"
        )
    trunk = model.config.model.embeddings_and_evoformer
    stacks = [
        trunk.evoformer,
        *([] if model.template_embedder is None else [trunk.template.template_pair_stack]),
    ]
    fused = [bool(steps.triangle_multiplication_outgoing.fuse_projection_weights) for steps in stacks]
    return list(
        parameter_names(
            multimer=model.multimer,
            fused=fused[0],
            fused_templates=fused[-1],
            transitions=len(model.structure_module.transition),
            residual_blocks=len(model.structure_module.angles.blocks),
        )
    )


def alphafold_mappings(model: AlphaFold) -> list[ParamMapping]:
    """Return the mappings of all official parameters to those of ``model``, each of ours exactly once.

    Raises:
        WeightsError: As :func:`network_names`.
    """
    parameters = model.state_dict()
    mappings = []
    for ours, key, _ in network_names(model):
        if "*" in ours:
            blocks = (ours.replace("*", str(i)) for i in count())
            present = list(takewhile(parameters.__contains__, blocks))
            if present:  # all blocks are alike
                first = _mapping(model, present[0], key)
                stacked = partial(replace, first, blocks=len(present))
                mappings += [stacked(name=name, block=i) for i, name in enumerate(present)]
        elif ours in parameters:
            mappings.append(_mapping(model, ours, key))
    return mappings


def _mapping(model: AlphaFold, name: str, key: str) -> ParamMapping:
    layer, _, leaf = name.rpartition(".")
    linear = model.get_submodule(layer)
    if not isinstance(linear, nn.Linear):
        return ParamMapping(name, key, tuple(model.get_parameter(name).shape))
    owner, _, part = layer.rpartition(".")
    how = _axes(model.get_submodule(owner), part, linear, key)
    inputs, outputs = how.pop("inputs", (linear.in_features,)), how.pop("outputs", (linear.out_features,))
    inputs = inputs if leaf == "weight" else ()
    if "view" in how:
        how["view"] = (*inputs, *how["view"])
    return ParamMapping(name, key, (*inputs, *outputs), inputs=len(inputs), **how)


def _axes(owner: nn.Module, part: str, linear: nn.Linear, key: str) -> dict[str, Any]:
    """Return official axes of a layer, ``inputs`` and ``outputs`` if they are split, and fields of its mapping."""
    if isinstance(owner, Attention | GlobalAttention):
        heads = (owner.heads, owner.query.out_features // owner.heads)
        if part == "output":
            return {"inputs": heads}
        # Global attention has one head for keys and values, without a head axis.
        return {"outputs": heads} if linear.out_features == prod(heads) else {}
    if isinstance(owner, OuterProductMean) and part == "output":
        return {"inputs": (owner.left.out_features,) * 2}
    if isinstance(owner, TriangleMultiplication) and ("/left_" in key or "/right_" in key):
        c = linear.out_features // 2
        return {"outputs": (c,), "rows": slice(0, c) if "/left_" in key else slice(c, 2 * c)}
    if isinstance(owner, InvariantPointAttention) and part.startswith(("query", "key", "value")):
        return _point_axes(owner, part)
    if "/template_pair_embedding_" in key and linear.in_features == 1:
        return {"inputs": ()}  # The official weight of one input channel is a vector.
    return {}


def _point_axes(module: InvariantPointAttention, part: str) -> dict[str, Any]:
    """Return official axes of queries, keys and values; our points are in the order head, point, axis.

    The multimer program stores points by head, axis, point. The monomer program stores them by axis, head, point, and
    has keys and values in one layer.
    """
    h, has_points = module.heads, part.endswith("_points")
    qk, v = (module.p_qk, module.p_v) if has_points else (module.c_qk, module.c_v)
    if module.multimer:
        size = v if part.startswith("value") else qk
        if has_points:
            return {"outputs": (h, 3 * size), "view": (h, 3, size), "order": (0, 2, 1)}
        return {"outputs": (h, size)}
    size = qk if part.startswith("query") else qk + v
    how: dict[str, Any] = {"view": (3, h, size), "order": (1, 2, 0)} if has_points else {"view": (h, size)}
    if part.startswith("query"):
        return how
    part_of_layer = slice(qk, size) if part.startswith("value") else slice(0, qk)
    return how | {"outputs": (prod(how["view"]),), "part": part_of_layer}
