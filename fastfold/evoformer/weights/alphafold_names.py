"""Official AlphaFold parameter names, and the parameter of ours that each one maps to.

The names are Haiku's: scopes joined by slashes, then ``//`` and the parameter. Blocks of a stack are stacked along the
leading axis of one array. Each function below yields the mappings of one module: ``name`` is ours, ``scope`` theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from fastfold.errors import WeightsError
from fastfold.evoformer.attention import Attention, GlobalAttention
from fastfold.evoformer.embedders.templates import TemplateEmbedder
from fastfold.evoformer.evoformer import BlockStack
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import LayerNorm
from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.evoformer.weights.mapping import ParamMapping

PREFIX = "alphafold/alphafold_iteration/"  #: Prefix of every key of an official file


def numbered(name: str, i: int) -> str:
    """Return Haiku's name of the ``i``-th module ``name`` in a scope: ``name``, ``name_1``, ``name_2`` and so on."""
    return f"{name}_{i}" if i else name


def alphafold_mappings(model: AlphaFold) -> list[ParamMapping]:
    """Return the mappings of all official parameters to those of ``model``, each of ours exactly once.

    Raises:
        WeightsError: The network has parts that AlphaFold does not have, such as ``mini``.
    """
    embedder = model.input_embedder
    own = (embedder.coevolution, embedder.sequence_convolution)
    if any(part is not None for part in own) or model.extra_msa_embedder is None:
        raise WeightsError(
            ".npz files hold AlphaFold's networks only; this one reads coevolution or lacks the extra MSA. Save it as "
            ".safetensors"
        )
    mappings = [*_embedders(model), *_templates(model)]
    for name in ("extra_msa_stack", "evoformer"):
        scope = "evoformer/extra_msa_stack" if name == "extra_msa_stack" else "evoformer/evoformer_iteration"
        mappings += _stack(name, scope, getattr(model, name), _evoformer_block, fused=_fused(model.config))
    mappings += _linear("single_projection", "evoformer/single_activations", model.single_projection)
    mappings += _structure_module(model.structure_module, multimer=model.multimer)
    mappings += _heads(model)
    return mappings


def _fused(config: Any, *, templates: bool = False) -> bool:
    """Return True if triangle multiplications have fused projections, which have other names."""
    trunk = config.model.embeddings_and_evoformer
    steps = trunk.template.template_pair_stack if templates else trunk.evoformer
    return bool(steps.triangle_multiplication_outgoing.fuse_projection_weights)


def _linear(
    name: str, scope: str, linear: nn.Linear, shape: tuple[int, ...] = (), **how: Any
) -> Iterator[ParamMapping]:
    """Yield a linear layer's ``weights`` (inputs first) and ``bias``; ``how`` are further fields of the mapping."""
    shape = shape or (linear.in_features, linear.out_features)
    view = how.pop("view", ())
    yield ParamMapping(f"{name}.weight", f"{scope}//weights", shape, view, inputs=1, **how)
    if linear.bias is not None:
        yield ParamMapping(f"{name}.bias", f"{scope}//bias", shape[1:], view[1:], **how)


def _norm(name: str, scope: str, norm: LayerNorm) -> Iterator[ParamMapping]:
    yield ParamMapping(f"{name}.weight", f"{scope}//scale", tuple(norm.weight.shape))
    yield ParamMapping(f"{name}.bias", f"{scope}//offset", tuple(norm.bias.shape))


def _pair_bias(name: str, scope: str, linear: nn.Linear) -> Iterator[ParamMapping]:
    shape = (linear.in_features, linear.out_features)
    yield ParamMapping(f"{name}.weight", f"{scope}//feat_2d_weights", shape, inputs=1)


def _attention(name: str, scope: str, module: Attention | GlobalAttention) -> Iterator[ParamMapping]:
    h = module.heads
    c = module.query.out_features // h
    for part in ("query", "key", "value"):
        linear = getattr(module, part)
        # Global attention has one head for keys and values, without a head axis.
        per_head = (h, c) if linear.out_features == h * c else (c,)
        yield ParamMapping(
            f"{name}.{part}.weight", f"{scope}//{part}_w", (linear.in_features, *per_head), inputs=1
        )
    if module.gate is not None:
        yield ParamMapping(
            f"{name}.gate.weight", f"{scope}//gating_w", (module.gate.in_features, h, c), inputs=1
        )
        yield ParamMapping(f"{name}.gate.bias", f"{scope}//gating_b", (h, c))
    out = module.output.out_features
    yield ParamMapping(f"{name}.output.weight", f"{scope}//output_w", (h, c, out), inputs=2)
    yield ParamMapping(f"{name}.output.bias", f"{scope}//output_b", (out,))


def _triangle_multiplication(
    name: str, scope: str, module: TriangleMultiplication, *, fused: bool
) -> Iterator[ParamMapping]:
    norm_in, norm_out = (
        ("left_norm_input", "center_norm") if fused else ("layer_norm_input", "center_layer_norm")
    )
    yield from _norm(f"{name}.norm_in", f"{scope}/{norm_in}", module.norm_in)
    yield from _norm(f"{name}.norm_out", f"{scope}/{norm_out}", module.norm_out)
    yield from _linear(f"{name}.output", f"{scope}/output_projection", module.output)
    yield from _linear(f"{name}.output_gate", f"{scope}/gating_linear", module.output_gate)
    c_in, c = module.projection.in_features, module.projection.out_features // 2
    for part, linear in (("projection", module.projection), ("gate", module.gate)):
        if fused:
            yield from _linear(f"{name}.{part}", f"{scope}/{part}", linear)
            continue
        for side, rows in (("left", slice(0, c)), ("right", slice(c, 2 * c))):
            yield from _linear(f"{name}.{part}", f"{scope}/{side}_{part}", linear, (c_in, c), rows=rows)


def _transition(name: str, scope: str, module: Any) -> Iterator[ParamMapping]:
    yield from _norm(f"{name}.norm", f"{scope}/input_layer_norm", module.norm)
    yield from _linear(f"{name}.hidden", f"{scope}/transition1", module.hidden)
    yield from _linear(f"{name}.output", f"{scope}/transition2", module.output)


def _pair_steps(name: str, scope: str, block: Any, *, fused: bool) -> Iterator[ParamMapping]:
    for node in ("starting", "ending"):
        step = getattr(block, f"triangle_attention_{node}")
        ours, theirs = f"{name}.triangle_attention_{node}", f"{scope}/triangle_attention_{node}_node"
        yield from _norm(f"{ours}.norm", f"{theirs}/query_norm", step.norm)
        yield from _pair_bias(f"{ours}.pair_bias", theirs, step.pair_bias)
        yield from _attention(f"{ours}.attention", f"{theirs}/attention", step.attention)
    for step in ("triangle_multiplication_outgoing", "triangle_multiplication_incoming"):
        module = getattr(block, step)
        yield from _triangle_multiplication(f"{name}.{step}", f"{scope}/{step}", module, fused=fused)
    yield from _transition(f"{name}.pair_transition", f"{scope}/pair_transition", block.pair_transition)


def _evoformer_block(name: str, scope: str, block: Any, *, fused: bool) -> Iterator[ParamMapping]:
    row, ours, theirs = (
        block.msa_row_attention,
        f"{name}.msa_row_attention",
        f"{scope}/msa_row_attention_with_pair_bias",
    )
    yield from _norm(f"{ours}.norm", f"{theirs}/query_norm", row.norm)
    yield from _norm(f"{ours}.pair_norm", f"{theirs}/feat_2d_norm", row.pair_norm)
    yield from _pair_bias(f"{ours}.pair_bias", theirs, row.pair_bias)
    yield from _attention(f"{ours}.attention", f"{theirs}/attention", row.attention)

    column, ours = block.msa_column_attention, f"{name}.msa_column_attention"
    is_global = isinstance(column.attention, GlobalAttention)
    theirs = f"{scope}/msa_column_global_attention" if is_global else f"{scope}/msa_column_attention"
    yield from _norm(f"{ours}.norm", f"{theirs}/query_norm", column.norm)
    yield from _attention(f"{ours}.attention", f"{theirs}/attention", column.attention)

    yield from _transition(f"{name}.msa_transition", f"{scope}/msa_transition", block.msa_transition)

    outer, ours, theirs = (
        block.outer_product_mean,
        f"{name}.outer_product_mean",
        f"{scope}/outer_product_mean",
    )
    yield from _norm(f"{ours}.norm", f"{theirs}/layer_norm_input", outer.norm)
    yield from _linear(f"{ours}.left", f"{theirs}/left_projection", outer.left)
    yield from _linear(f"{ours}.right", f"{theirs}/right_projection", outer.right)
    c, c_z = outer.left.out_features, outer.output.out_features
    yield ParamMapping(f"{ours}.output.weight", f"{theirs}//output_w", (c, c, c_z), inputs=2)
    yield ParamMapping(f"{ours}.output.bias", f"{theirs}//output_b", (c_z,))

    yield from _pair_steps(name, scope, block, fused=fused)


def _stack(
    name: str,
    scope: str,
    stack: BlockStack,
    block_mappings: Callable[..., Iterator[ParamMapping]],
    *,
    fused: bool,
) -> Iterator[ParamMapping]:
    for i, block in enumerate(stack.blocks):
        for mapping in block_mappings(f"{name}.blocks.{i}", scope, block, fused=fused):
            yield replace(mapping, block=i, blocks=len(stack.blocks))


def _embedders(model: AlphaFold) -> Iterator[ParamMapping]:
    embedder: Any = model.input_embedder
    position = "~_relative_encoding/position_activations" if model.multimer else "pair_activiations"
    for ours, theirs in (
        ("target_to_msa", "preprocess_1d"),
        ("msa", "preprocess_msa"),
        ("target_left", "left_single"),
        ("target_right", "right_single"),
        ("relative_position.linear", position),
    ):
        yield from _linear(f"input_embedder.{ours}", f"evoformer/{theirs}", embedder.get_submodule(ours))
    if embedder.prev_distance is not None:
        yield from _linear(
            "input_embedder.prev_distance", "evoformer/prev_pos_linear", embedder.prev_distance
        )
    if embedder.prev_msa_norm is not None:
        for ours, theirs in (
            ("prev_msa_norm", "prev_msa_first_row_norm"),
            ("prev_pair_norm", "prev_pair_norm"),
        ):
            yield from _norm(f"input_embedder.{ours}", f"evoformer/{theirs}", getattr(embedder, ours))
    assert model.extra_msa_embedder is not None  # alphafold_mappings refuses networks without one
    yield from _linear("extra_msa_embedder", "evoformer/extra_msa_activations", model.extra_msa_embedder)


def _templates(model: AlphaFold) -> Iterator[ParamMapping]:
    if model.template_embedder is not None:
        embedder: Any = model.template_embedder
        name, scope = "template_embedder", "evoformer/template_embedding"
        single = f"{scope}/single_template_embedding"
        yield from _norm(f"{name}.norm", f"{single}/output_layer_norm", embedder.norm)
        if isinstance(embedder, TemplateEmbedder):
            yield from _linear(f"{name}.embedding", f"{single}/embedding2d", embedder.embedding)
            yield from _attention(f"{name}.attention", f"{scope}/attention", embedder.attention)
            stack = f"{single}/template_pair_stack/__layer_stack_no_state"
        else:
            yield from _multimer_template_inputs(name, single, embedder)
            yield from _linear(f"{name}.output", f"{scope}/output_linear", embedder.output)
            stack = f"{single}/template_embedding_iteration"
        fused = _fused(model.config, templates=True)
        yield from _stack(f"{name}.stack", stack, embedder.stack, _pair_steps, fused=fused)
    if model.template_torsion_embedder is not None:
        torsion: Any = model.template_torsion_embedder
        for ours, theirs in (("single", "template_single_embedding"), ("projection", "template_projection")):
            yield from _linear(
                f"template_torsion_embedder.{ours}", f"evoformer/{theirs}", getattr(torsion, ours)
            )


def _multimer_template_inputs(name: str, scope: str, module: Any) -> Iterator[ParamMapping]:
    yield from _norm(f"{name}.query_norm", f"{scope}/query_embedding_norm", module.query_norm)
    parts = ["distance", "beta_mask", "aatype_column", "aatype_row"]
    parts += [f"unit_vector.{axis}" for axis in range(3)]
    parts += ["backbone_mask", "query"]
    for i, part in enumerate(parts):
        linear, theirs = module.get_submodule(part), f"{scope}/template_pair_embedding_{i}"
        if linear.in_features > 1:
            yield from _linear(f"{name}.{part}", theirs, linear)
        else:  # One input channel: the official weight is a vector.
            yield ParamMapping(f"{name}.{part}.weight", f"{theirs}//weights", (linear.out_features,))
            yield ParamMapping(f"{name}.{part}.bias", f"{theirs}//bias", (linear.out_features,))


def _structure_module(module: Any, *, multimer: bool) -> Iterator[ParamMapping]:
    name, scope = "structure_module", "structure_module"
    yield from _norm(f"{name}.single_norm", f"{scope}/single_layer_norm", module.single_norm)
    yield from _norm(f"{name}.pair_norm", f"{scope}/pair_layer_norm", module.pair_norm)
    yield from _linear(f"{name}.initial", f"{scope}/initial_projection", module.initial)
    scope += "/fold_iteration"
    points = _multimer_point_attention if multimer else _monomer_point_attention
    ours, theirs = f"{name}.attention", f"{scope}/invariant_point_attention"
    yield from points(ours, theirs, module.attention)
    yield from _linear(f"{ours}.pair_bias", f"{theirs}/attention_2d", module.attention.pair_bias)
    yield ParamMapping(
        f"{ours}.point_weights", f"{theirs}//trainable_point_weights", (module.attention.heads,)
    )
    yield from _linear(f"{ours}.output", f"{theirs}/output_projection", module.attention.output)
    yield from _norm(f"{name}.attention_norm", f"{scope}/attention_layer_norm", module.attention_norm)
    for i, linear in enumerate(module.transition):
        yield from _linear(f"{name}.transition.{i}", f"{scope}/{numbered('transition', i)}", linear)
    yield from _norm(f"{name}.transition_norm", f"{scope}/transition_layer_norm", module.transition_norm)
    update = "quat_rigid/rigid" if multimer else "affine_update"
    yield from _linear(f"{name}.backbone_update", f"{scope}/{update}", module.backbone_update)

    name, scope, angles = f"{name}.angles", f"{scope}/rigid_sidechain", module.angles
    yield from _linear(f"{name}.input", f"{scope}/input_projection", angles.input)
    yield from _linear(f"{name}.initial_input", f"{scope}/input_projection_1", angles.initial_input)
    for i, block in enumerate(angles.blocks):
        yield from _linear(f"{name}.blocks.{i}.1", f"{scope}/{numbered('resblock1', i)}", block[1])
        yield from _linear(f"{name}.blocks.{i}.3", f"{scope}/{numbered('resblock2', i)}", block[3])
    yield from _linear(f"{name}.angles", f"{scope}/unnormalized_angles", angles.angles)


def _monomer_point_attention(
    name: str, scope: str, module: InvariantPointAttention
) -> Iterator[ParamMapping]:
    """Yield the monomer's attention layers.

    Keys and values share a layer. Points are stored by axis, head, point; ours by head, point, axis.
    """
    h, c_s = module.heads, module.query.in_features
    yield from _linear(f"{name}.query", f"{scope}/q_scalar", module.query)
    view, order = (c_s, 3, h, module.p_qk), (1, 2, 0)
    yield from _linear(
        f"{name}.query_points", f"{scope}/q_point_local", module.query_points, view=view, order=order
    )
    c, p = module.c_qk + module.c_v, module.p_qk + module.p_v
    for part, scalars, points in (
        ("key", slice(0, module.c_qk), slice(0, module.p_qk)),
        ("value", slice(module.c_qk, c), slice(module.p_qk, p)),
    ):
        linear, shape = getattr(module, part), (c_s, h * c)
        how: dict[str, Any] = {"view": (c_s, h, c), "part": scalars}
        yield from _linear(f"{name}.{part}", f"{scope}/kv_scalar", linear, shape, **how)
        linear, shape = getattr(module, f"{part}_points"), (c_s, 3 * h * p)
        how = {"view": (c_s, 3, h, p), "order": order, "part": points}
        yield from _linear(f"{name}.{part}_points", f"{scope}/kv_point_local", linear, shape, **how)


def _multimer_point_attention(
    name: str, scope: str, module: InvariantPointAttention
) -> Iterator[ParamMapping]:
    """Yield the multimer's attention layers; points are stored by head, axis, point, ours by head, point, axis."""
    h, c_s = module.heads, module.query.in_features
    for part, c, p in (
        ("query", module.c_qk, module.p_qk),
        ("key", module.c_qk, module.p_qk),
        ("value", module.c_v, module.p_v),
    ):
        letter = part[0]
        yield ParamMapping(
            f"{name}.{part}.weight", f"{scope}/{letter}_scalar_projection//weights", (c_s, h, c), inputs=1
        )
        linear, theirs = getattr(module, f"{part}_points"), f"{scope}/{letter}_point_projection"
        how: dict[str, Any] = {"view": (c_s, h, 3, p), "order": (0, 2, 1)}
        yield from _linear(
            f"{name}.{part}_points", f"{theirs}/point_projection", linear, (c_s, h, 3 * p), **how
        )


def _heads(model: AlphaFold) -> Iterator[ParamMapping]:
    for head, module in model.heads.items():
        name, scope = f"heads.{head}", f"{head}_head"
        if head == "predicted_lddt":
            lddt: Any = module
            yield from _norm(f"{name}.norm", f"{scope}/input_layer_norm", lddt.norm)
            yield from _linear(f"{name}.hidden", f"{scope}/act_0", lddt.hidden)
            yield from _linear(f"{name}.hidden_2", f"{scope}/act_1", lddt.hidden_2)
        last: Any = module.logits
        theirs = "half_logits" if head == "distogram" else "logits"
        yield from _linear(f"{name}.logits", f"{scope}/{theirs}", last)
