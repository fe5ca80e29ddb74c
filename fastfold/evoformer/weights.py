"""Parameter names of the official AlphaFold files and of OpenFold, and how their tensors lie in ours.

The only module that knows other projects' names. A :class:`Tie` says where one official parameter (or a part of
it) lies in a parameter of ours; :func:`alphafold_ties` lists them for a model. OpenFold's tensors are the official
ones transposed, so they are first renamed to official keys (:func:`openfold_to_alphafold`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fastfold.errors import WeightsError
from fastfold.evoformer.attention import Attention, GlobalAttention
from fastfold.evoformer.evoformer import BlockStack
from fastfold.evoformer.invariant_point_attention import InvariantPointAttention
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.primitives import LayerNorm
from fastfold.evoformer.templates import TemplateEmbedder
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication

PREFIX = "alphafold/alphafold_iteration/"


@dataclass(frozen=True)
class Tie:
    """One official parameter, or a part of its last axis, and the place in ours that holds it.

    Attributes:
        name: Our parameter.
        key: Official key ``scope//name`` without :data:`PREFIX`.
        shape: Official shape of one block.
        view: Shape in which the official axes are told apart.
        inputs: How many leading axes of ``view`` are input channels (0 for biases and vectors).
        order: Order in which our layout has the remaining axes; as they are when empty.
        part: Slice of the last axis of ``view``.
        rows: Slice of our parameter's first axis.
        block: Index along the official leading axis, for blocks of a stack.
        blocks: Size of that axis.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    view: tuple[int, ...] = ()
    inputs: int = 0
    order: tuple[int, ...] = ()
    part: slice = field(default_factory=lambda: slice(None))
    rows: slice = field(default_factory=lambda: slice(None))
    block: int | None = None
    blocks: int = 0

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Official shape, stack axis included."""
        return self.shape if self.block is None else (self.blocks, *self.shape)

    def read(self, array: np.ndarray) -> np.ndarray:
        """The part of ours, matrices as ``[out, in]``, from the official ``array``."""
        x = array if self.block is None else array[self.block]
        x = x.reshape(self.view or self.shape)[..., self.part]
        axes = tuple(self.inputs + i for i in self.order)
        x = x.transpose(*range(self.inputs), *axes) if axes else x
        if self.inputs == 0:
            return x.reshape(-1)
        return x.reshape(prod(x.shape[: self.inputs]), -1).T

    def write(self, ours: np.ndarray, array: np.ndarray) -> None:
        """Put our part into the official ``array``: the inverse of :meth:`read`."""
        target = (array if self.block is None else array[self.block]).reshape(self.view or self.shape)
        target = target[..., self.part]
        axes = tuple(self.inputs + i for i in self.order)
        target = target.transpose(*range(self.inputs), *axes) if axes else target
        target[...] = (ours.T if self.inputs else ours).reshape(target.shape)


def _matrix(
    name: str, scope: str, linear: nn.Linear, shape: tuple[int, ...] = (), **how: Any
) -> Iterator[Tie]:
    """A linear layer stored as ``weights`` (inputs first) and ``bias``."""
    shape = shape or (linear.in_features, linear.out_features)
    inputs = how.pop("inputs", 1)
    view = how.pop("view", ())
    yield Tie(f"{name}.weight", f"{scope}//weights", shape, view, inputs=inputs, **how)
    if linear.bias is not None:
        yield Tie(f"{name}.bias", f"{scope}//bias", shape[inputs:], view[inputs:], **how)


def _norm(name: str, scope: str, norm: LayerNorm) -> Iterator[Tie]:
    yield Tie(f"{name}.weight", f"{scope}//scale", tuple(norm.weight.shape))
    yield Tie(f"{name}.bias", f"{scope}//offset", tuple(norm.bias.shape))


def _attention(name: str, scope: str, module: Attention | GlobalAttention) -> Iterator[Tie]:
    h = module.heads
    c = module.query.out_features // h
    for part, theirs in (("query", "query_w"), ("key", "key_w"), ("value", "value_w")):
        linear = getattr(module, part)
        per_head = (h, c) if linear.out_features == h * c else (c,)
        yield Tie(f"{name}.{part}.weight", f"{scope}//{theirs}", (linear.in_features, *per_head), inputs=1)
    if module.gate is not None:
        shape = (module.gate.in_features, h, c)
        yield Tie(f"{name}.gate.weight", f"{scope}//gating_w", shape, inputs=1)
        yield Tie(f"{name}.gate.bias", f"{scope}//gating_b", (h, c))
    out = module.output.out_features
    yield Tie(f"{name}.output.weight", f"{scope}//output_w", (h, c, out), inputs=2)
    yield Tie(f"{name}.output.bias", f"{scope}//output_b", (out,))


def _triangle_multiplication(
    name: str, scope: str, module: TriangleMultiplication, fused: bool
) -> Iterator[Tie]:
    yield from _norm(
        f"{name}.norm_in", f"{scope}/{'left_norm_input' if fused else 'layer_norm_input'}", module.norm_in
    )
    yield from _norm(
        f"{name}.norm_out", f"{scope}/{'center_norm' if fused else 'center_layer_norm'}", module.norm_out
    )
    yield from _matrix(f"{name}.output", f"{scope}/output_projection", module.output)
    yield from _matrix(f"{name}.output_gate", f"{scope}/gating_linear", module.output_gate)
    c = module.projection.out_features // 2
    for ours, linear in (("projection", module.projection), ("gate", module.gate)):
        if fused:
            yield from _matrix(f"{name}.{ours}", f"{scope}/{ours}", linear)
            continue
        for side, rows in (("left", slice(0, c)), ("right", slice(c, 2 * c))):
            yield from _matrix(
                f"{name}.{ours}", f"{scope}/{side}_{ours}", linear, (linear.in_features, c), rows=rows
            )


def _transition(name: str, scope: str, module: Any) -> Iterator[Tie]:
    yield from _norm(f"{name}.norm", f"{scope}/input_layer_norm", module.norm)
    yield from _matrix(f"{name}.hidden", f"{scope}/transition1", module.hidden)
    yield from _matrix(f"{name}.output", f"{scope}/transition2", module.output)


def _pair_steps(name: str, scope: str, block: Any, fused: bool) -> Iterator[Tie]:
    for ours, theirs in (("starting", "starting_node"), ("ending", "ending_node")):
        step, at = getattr(block, f"triangle_attention_{ours}"), f"{scope}/triangle_attention_{theirs}"
        ours = f"{name}.triangle_attention_{ours}"
        yield from _norm(f"{ours}.norm", f"{at}/query_norm", step.norm)
        bias = step.pair_bias
        yield Tie(
            f"{ours}.pair_bias.weight", f"{at}//feat_2d_weights", tuple(bias.weight.shape[::-1]), inputs=1
        )
        yield from _attention(f"{ours}.attention", f"{at}/attention", step.attention)
    for direction in ("outgoing", "incoming"):
        step = f"triangle_multiplication_{direction}"
        yield from _triangle_multiplication(f"{name}.{step}", f"{scope}/{step}", getattr(block, step), fused)
    yield from _transition(f"{name}.pair_transition", f"{scope}/pair_transition", block.pair_transition)


def _evoformer_block(name: str, scope: str, block: Any, fused: bool) -> Iterator[Tie]:
    row, at = block.msa_row_attention, f"{scope}/msa_row_attention_with_pair_bias"
    yield from _norm(f"{name}.msa_row_attention.norm", f"{at}/query_norm", row.norm)
    yield from _norm(f"{name}.msa_row_attention.pair_norm", f"{at}/feat_2d_norm", row.pair_norm)
    shape = tuple(row.pair_bias.weight.shape[::-1])
    yield Tie(f"{name}.msa_row_attention.pair_bias.weight", f"{at}//feat_2d_weights", shape, inputs=1)
    yield from _attention(f"{name}.msa_row_attention.attention", f"{at}/attention", row.attention)
    column = block.msa_column_attention
    is_global = isinstance(column.attention, GlobalAttention)
    at = f"{scope}/msa_column_{'global_' if is_global else ''}attention"
    yield from _norm(f"{name}.msa_column_attention.norm", f"{at}/query_norm", column.norm)
    yield from _attention(f"{name}.msa_column_attention.attention", f"{at}/attention", column.attention)
    yield from _transition(f"{name}.msa_transition", f"{scope}/msa_transition", block.msa_transition)
    outer, at = block.outer_product_mean, f"{scope}/outer_product_mean"
    yield from _norm(f"{name}.outer_product_mean.norm", f"{at}/layer_norm_input", outer.norm)
    yield from _matrix(f"{name}.outer_product_mean.left", f"{at}/left_projection", outer.left)
    yield from _matrix(f"{name}.outer_product_mean.right", f"{at}/right_projection", outer.right)
    c, c_z = outer.left.out_features, outer.output.out_features
    yield Tie(f"{name}.outer_product_mean.output.weight", f"{at}//output_w", (c, c, c_z), inputs=2)
    yield Tie(f"{name}.outer_product_mean.output.bias", f"{at}//output_b", (c_z,))
    yield from _pair_steps(name, scope, block, fused)


def _stack(name: str, scope: str, stack: BlockStack, block_ties: Any, fused: bool) -> Iterator[Tie]:
    for i, block in enumerate(stack.blocks):
        for tie in block_ties(f"{name}.blocks.{i}", scope, block, fused):
            yield replace(tie, block=i, blocks=len(stack.blocks))


def _invariant_point_attention(name: str, scope: str, module: InvariantPointAttention) -> Iterator[Tie]:
    h, c_s = module.heads, module.query.in_features
    how: dict[str, Any]
    if module.multimer:
        for part, c in (("query", module.c_qk), ("key", module.c_qk), ("value", module.c_v)):
            shape = (c_s, h, c)
            yield Tie(
                f"{name}.{part}.weight", f"{scope}/{part[0]}_scalar_projection//weights", shape, inputs=1
            )
        for part, p in (("query", module.p_qk), ("key", module.p_qk), ("value", module.p_v)):
            at, linear = (
                f"{scope}/{part[0]}_point_projection/point_projection",
                getattr(module, f"{part}_points"),
            )
            # Official order: heads, axes, points. Ours: heads, points, axes.
            how = {"view": (c_s, h, 3, p), "order": (0, 2, 1)}
            yield from _matrix(f"{name}.{part}_points", at, linear, (c_s, h, 3 * p), **how)
    else:
        c = module.c_qk + module.c_v
        p = module.p_qk + module.p_v
        yield from _matrix(f"{name}.query", f"{scope}/q_scalar", module.query)
        # Official order: axes, heads, points.
        how = {"view": (c_s, 3, h, module.p_qk), "order": (1, 2, 0)}
        yield from _matrix(f"{name}.query_points", f"{scope}/q_point_local", module.query_points, **how)
        for part, scalars, points in (
            ("key", slice(0, module.c_qk), slice(0, module.p_qk)),
            ("value", slice(module.c_qk, c), slice(module.p_qk, p)),
        ):
            linear, how = getattr(module, part), {"view": (c_s, h, c), "part": scalars}
            yield from _matrix(f"{name}.{part}", f"{scope}/kv_scalar", linear, (c_s, h * c), **how)
            linear = getattr(module, f"{part}_points")
            how = {"view": (c_s, 3, h, p), "order": (1, 2, 0), "part": points}
            yield from _matrix(
                f"{name}.{part}_points", f"{scope}/kv_point_local", linear, (c_s, 3 * h * p), **how
            )
    yield from _matrix(f"{name}.pair_bias", f"{scope}/attention_2d", module.pair_bias)
    yield Tie(f"{name}.point_weights", f"{scope}//trainable_point_weights", (h,))
    yield from _matrix(f"{name}.output", f"{scope}/output_projection", module.output)


def _structure_module(module: Any, multimer: bool) -> Iterator[Tie]:
    name, scope = "structure_module", "structure_module"
    yield from _norm(f"{name}.single_norm", f"{scope}/single_layer_norm", module.single_norm)
    yield from _norm(f"{name}.pair_norm", f"{scope}/pair_layer_norm", module.pair_norm)
    yield from _matrix(f"{name}.initial", f"{scope}/initial_projection", module.initial)
    scope += "/fold_iteration"
    yield from _invariant_point_attention(
        f"{name}.attention", f"{scope}/invariant_point_attention", module.attention
    )
    yield from _norm(f"{name}.attention_norm", f"{scope}/attention_layer_norm", module.attention_norm)
    for i, linear in enumerate(module.transition):
        yield from _matrix(f"{name}.transition.{i}", f"{scope}/transition{_suffix(i)}", linear)
    yield from _norm(f"{name}.transition_norm", f"{scope}/transition_layer_norm", module.transition_norm)
    update = "quat_rigid/rigid" if multimer else "affine_update"
    yield from _matrix(f"{name}.backbone_update", f"{scope}/{update}", module.backbone_update)
    name, scope, angles = f"{name}.angles", f"{scope}/rigid_sidechain", module.angles
    yield from _matrix(f"{name}.input", f"{scope}/input_projection", angles.input)
    yield from _matrix(f"{name}.initial_input", f"{scope}/input_projection_1", angles.initial_input)
    for i, block in enumerate(angles.blocks):
        yield from _matrix(f"{name}.blocks.{i}.1", f"{scope}/resblock1{_suffix(i)}", block[1])
        yield from _matrix(f"{name}.blocks.{i}.3", f"{scope}/resblock2{_suffix(i)}", block[3])
    yield from _matrix(f"{name}.angles", f"{scope}/unnormalized_angles", angles.angles)


def _suffix(i: int) -> str:
    return f"_{i}" if i else ""


def _template_embedder(module: Any, fused: bool) -> Iterator[Tie]:
    name, scope = "template_embedder", "evoformer/template_embedding"
    single = f"{scope}/single_template_embedding"
    yield from _norm(f"{name}.norm", f"{single}/output_layer_norm", module.norm)
    if isinstance(module, TemplateEmbedder):
        yield from _matrix(f"{name}.embedding", f"{single}/embedding2d", module.embedding)
        yield from _attention(f"{name}.attention", f"{scope}/attention", module.attention)
        stack = f"{single}/template_pair_stack/__layer_stack_no_state"
    else:
        yield from _norm(f"{name}.query_norm", f"{single}/query_embedding_norm", module.query_norm)
        parts = ["distance", "beta_mask", "aatype_column", "aatype_row"]
        parts += [f"unit_vector.{axis}" for axis in range(3)] + ["backbone_mask", "query"]
        for i, part in enumerate(parts):
            linear = module.get_submodule(part)
            # One input channel: the official weight is a vector.
            how = {"shape": (linear.out_features,), "inputs": 0} if linear.in_features == 1 else {}
            yield from _single_channel(
                f"{name}.{part}", f"{single}/template_pair_embedding_{i}", linear, **how
            )
        yield from _matrix(f"{name}.output", f"{scope}/output_linear", module.output)
        stack = f"{single}/template_embedding_iteration"
    yield from _stack(f"{name}.stack", stack, module.stack, _pair_steps, fused)


def _single_channel(name: str, scope: str, linear: nn.Linear, **how: Any) -> Iterator[Tie]:
    yield Tie(
        f"{name}.weight",
        f"{scope}//weights",
        how.get("shape", (linear.in_features, linear.out_features)),
        inputs=how.get("inputs", 1),
    )
    yield Tie(f"{name}.bias", f"{scope}//bias", (linear.out_features,))


def alphafold_ties(model: AlphaFold) -> list[Tie]:
    """Where every official parameter lies in ``model``; each parameter of ours is covered exactly once."""
    c = model.config.model.embeddings_and_evoformer
    fused = bool(c.evoformer.triangle_multiplication_outgoing.fuse_projection_weights)
    template_fused = bool(
        c.template.template_pair_stack.triangle_multiplication_outgoing.fuse_projection_weights
    )
    multimer = model.multimer
    ties: list[Tie] = []
    embedder: Any = model.input_embedder
    position = "~_relative_encoding/position_activations" if multimer else "pair_activiations"
    for ours, theirs, module in (
        ("input_embedder.target_to_msa", "preprocess_1d", embedder.target_to_msa),
        ("input_embedder.msa", "preprocess_msa", embedder.msa),
        ("input_embedder.target_left", "left_single", embedder.target_left),
        ("input_embedder.target_right", "right_single", embedder.target_right),
        ("input_embedder.relative_position.linear", position, embedder.relative_position.linear),
        ("input_embedder.prev_distance", "prev_pos_linear", embedder.prev_distance),
        ("extra_msa_embedder", "extra_msa_activations", model.extra_msa_embedder),
        ("single_projection", "single_activations", model.single_projection),
    ):
        if module is not None:
            ties += _matrix(ours, f"evoformer/{theirs}", module)
    if embedder.prev_msa_norm is not None:
        ties += _norm(
            "input_embedder.prev_msa_norm", "evoformer/prev_msa_first_row_norm", embedder.prev_msa_norm
        )
        ties += _norm("input_embedder.prev_pair_norm", "evoformer/prev_pair_norm", embedder.prev_pair_norm)
    if model.template_embedder is not None:
        ties += _template_embedder(model.template_embedder, template_fused)
    if model.template_torsion_embedder is not None:
        torsion: Any = model.template_torsion_embedder
        ties += _matrix(
            "template_torsion_embedder.single", "evoformer/template_single_embedding", torsion.single
        )
        ties += _matrix(
            "template_torsion_embedder.projection", "evoformer/template_projection", torsion.projection
        )
    ties += _stack(
        "extra_msa_stack", "evoformer/extra_msa_stack", model.extra_msa_stack, _evoformer_block, fused
    )
    ties += _stack("evoformer", "evoformer/evoformer_iteration", model.evoformer, _evoformer_block, fused)
    ties += _structure_module(model.structure_module, multimer)
    for head, module in model.heads.items():
        scope = f"{head}_head"
        if head == "predicted_lddt":
            lddt: Any = module
            ties += _norm(f"heads.{head}.norm", f"{scope}/input_layer_norm", lddt.norm)
            ties += _matrix(f"heads.{head}.hidden", f"{scope}/act_0", lddt.hidden)
            ties += _matrix(f"heads.{head}.hidden_2", f"{scope}/act_1", lddt.hidden_2)
        final: Any = module.logits
        leaf = "half_logits" if head == "distogram" else "logits"
        ties += _matrix(f"heads.{head}.logits", f"{scope}/{leaf}", final)
    return ties


def read_alphafold(
    model: AlphaFold, arrays: Mapping[str, np.ndarray], *, origin: str, label: Any = str
) -> dict[str, Tensor]:
    """State dict of ``model`` from official arrays.

    Args:
        model: The network that the parameters are for; its own values are not touched.
        arrays: Official arrays by key, :data:`PREFIX` removed.
        origin: File name for errors.
        label: Turns an official key into the name that the file itself has for it.

    Raises:
        WeightsError: A parameter is missing, has another shape, or has no place in the network; all such
            parameters are counted and the first ones named.
    """
    ties = alphafold_ties(model)
    wanted = {tie.key: tie.full_shape for tie in ties}
    problems = [f"missing parameter {label(key)}" for key in wanted if key not in arrays]
    problems += [
        f"parameter {label(key)} has no place in this network" for key in arrays if key not in wanted
    ]
    problems += [
        f"parameter {label(key)} has shape {list(arrays[key].shape)}, the network needs {list(shape)}"
        for key, shape in wanted.items()
        if key in arrays and arrays[key].shape != shape
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise WeightsError(f"{origin}: " + "; ".join(problems[:5]) + more)
    state = {name: torch.empty_like(p, device="cpu") for name, p in model.state_dict().items()}
    for tie in ties:
        part = state[tie.name][tie.rows]
        part.copy_(torch.from_numpy(np.ascontiguousarray(tie.read(arrays[tie.key]))).reshape(part.shape))
    return state


def write_alphafold(model: AlphaFold) -> dict[str, np.ndarray]:
    """Official arrays, by full official key, of a model's parameters."""
    state = {name: value.detach().cpu().float().numpy() for name, value in model.state_dict().items()}
    arrays: dict[str, np.ndarray] = {}
    for tie in alphafold_ties(model):
        array = arrays.setdefault(PREFIX + tie.key, np.zeros(tie.full_shape, np.float32))
        tie.write(state[tie.name][tie.rows], array)
    return arrays


# --- OpenFold -------------------------------------------------------------------------------------------------

# Spellings of older and newer releases that mean the same module.
_OPENFOLD_SPELLINGS = (
    (r"^(?:model|module)\.", ""),
    (r"^template_embedder\.", ""),
    (r"^extra_msa_stack\.stack\.", "extra_msa_stack."),
    (r"^template_angle_embedder\.", "template_single_embedder."),
    (r"\.(?:core|pair_stack|_msa_att)\.", "."),
    (r"_points\.linear\.", "_points."),
)

_OPENFOLD_MODULES = {
    "input_embedder.linear_tf_m": "evoformer/preprocess_1d",
    "input_embedder.linear_msa_m": "evoformer/preprocess_msa",
    "input_embedder.linear_tf_z_i": "evoformer/left_single",
    "input_embedder.linear_tf_z_j": "evoformer/right_single",
    "input_embedder.linear_relpos": "evoformer/pair_activiations",
    "recycling_embedder.linear": "evoformer/prev_pos_linear",
    "recycling_embedder.layer_norm_m": "evoformer/prev_msa_first_row_norm",
    "recycling_embedder.layer_norm_z": "evoformer/prev_pair_norm",
    "extra_msa_embedder.linear": "evoformer/extra_msa_activations",
    "evoformer.linear": "evoformer/single_activations",
    "template_pair_embedder.linear": "evoformer/template_embedding/single_template_embedding/embedding2d",
    "template_pair_stack.layer_norm": "evoformer/template_embedding/single_template_embedding/output_layer_norm",
    "template_pointwise_att.mha": "evoformer/template_embedding/attention",
    "template_single_embedder.linear_1": "evoformer/template_single_embedding",
    "template_single_embedder.linear_2": "evoformer/template_projection",
    "template_single_embedder.template_single_embedder": "evoformer/template_single_embedding",
    "template_single_embedder.template_projector": "evoformer/template_projection",
    "linear_t": "evoformer/template_embedding/output_linear",
    "template_pair_embedder.query_embedding_layer_norm": (
        "evoformer/template_embedding/single_template_embedding/query_embedding_norm"
    ),
    **{
        f"template_pair_embedder.{name}": (
            f"evoformer/template_embedding/single_template_embedding/template_pair_embedding_{i}"
        )
        for i, name in enumerate(
            ("dgram_linear", "pseudo_beta_mask_linear", "aatype_linear_1", "aatype_linear_2", "x_linear")
            + ("y_linear", "z_linear", "backbone_mask_linear", "query_embedding_linear")
        )
    },
    "structure_module.layer_norm_s": "structure_module/single_layer_norm",
    "structure_module.layer_norm_z": "structure_module/pair_layer_norm",
    "structure_module.linear_in": "structure_module/initial_projection",
    "structure_module.layer_norm_ipa": "structure_module/fold_iteration/attention_layer_norm",
    "structure_module.transition.layer_norm": "structure_module/fold_iteration/transition_layer_norm",
    **{
        f"structure_module.transition.layers.0.linear_{i + 1}": (
            f"structure_module/fold_iteration/transition{_suffix(i)}"
        )
        for i in range(3)
    },
    "structure_module.bb_update.linear": "structure_module/fold_iteration/affine_update",
    **{
        f"structure_module.ipa.{ours}": f"structure_module/fold_iteration/invariant_point_attention/{theirs}"
        for ours, theirs in {
            "linear_q": "q_scalar",
            "linear_kv": "kv_scalar",
            "linear_q_points": "q_point_local",
            "linear_kv_points": "kv_point_local",
            "linear_k": "k_scalar_projection",
            "linear_v": "v_scalar_projection",
            "linear_k_points": "k_point_projection/point_projection",
            "linear_v_points": "v_point_projection/point_projection",
            "linear_b": "attention_2d",
            "linear_out": "output_projection",
        }.items()
    },
    **{
        f"structure_module.angle_resnet.{ours}": f"structure_module/fold_iteration/rigid_sidechain/{theirs}"
        for ours, theirs in {
            "linear_in": "input_projection",
            "linear_initial": "input_projection_1",
            "linear_out": "unnormalized_angles",
            **{f"layers.{i}.linear_{j}": f"resblock{j}{_suffix(i)}" for i in range(8) for j in (1, 2)},
        }.items()
    },
    "aux_heads.plddt.layer_norm": "predicted_lddt_head/input_layer_norm",
    "aux_heads.plddt.linear_1": "predicted_lddt_head/act_0",
    "aux_heads.plddt.linear_2": "predicted_lddt_head/act_1",
    "aux_heads.plddt.linear_3": "predicted_lddt_head/logits",
    "aux_heads.distogram.linear": "distogram_head/half_logits",
    "aux_heads.masked_msa.linear": "masked_msa_head/logits",
    "aux_heads.experimentally_resolved.linear": "experimentally_resolved_head/logits",
    "aux_heads.tm.linear": "predicted_aligned_error_head/logits",
}

_OPENFOLD_STACKS = {
    "evoformer": "evoformer/evoformer_iteration",
    "extra_msa_stack": "evoformer/extra_msa_stack",
    "template_pair_stack": "evoformer/template_embedding/single_template_embedding/",
}

_OPENFOLD_BLOCK_MODULES = {
    "msa_att_row.layer_norm_m": "msa_row_attention_with_pair_bias/query_norm",
    "msa_att_row.layer_norm_z": "msa_row_attention_with_pair_bias/feat_2d_norm",
    "msa_att_row.linear_z": "msa_row_attention_with_pair_bias//feat_2d_weights",
    "msa_att_row.mha": "msa_row_attention_with_pair_bias/attention",
    "msa_att_col.layer_norm_m": "msa_column_attention/query_norm",
    "msa_att_col.mha": "msa_column_attention/attention",
    "msa_att_col.global_attention": "msa_column_global_attention/attention",
    "outer_product_mean.layer_norm": "outer_product_mean/layer_norm_input",
    "outer_product_mean.linear_1": "outer_product_mean/left_projection",
    "outer_product_mean.linear_2": "outer_product_mean/right_projection",
    "outer_product_mean.linear_out": "outer_product_mean//output",
    **{
        f"{step}.{ours}": f"{step}/{theirs}"
        for step in ("msa_transition", "pair_transition")
        for ours, theirs in {
            "layer_norm": "input_layer_norm",
            "linear_1": "transition1",
            "linear_2": "transition2",
        }.items()
    },
    **{
        f"tri_att_{ours}.{layer}": f"triangle_attention_{theirs}{at}"
        for ours, theirs in (("start", "starting_node"), ("end", "ending_node"))
        for layer, at in (
            ("layer_norm", "/query_norm"),
            ("linear", "//feat_2d_weights"),
            ("mha", "/attention"),
        )
    },
    # OpenFold exchanges the two sides of incoming edges.
    **{
        f"tri_mul_{ours}.{layer}": f"triangle_multiplication_{theirs}/{at}"
        for ours, theirs, left, right in (("out", "outgoing", "a", "b"), ("in", "incoming", "b", "a"))
        for layer, at in {
            "layer_norm_in": "layer_norm_input",
            "layer_norm_out": "center_layer_norm",
            f"linear_{left}_p": "left_projection",
            f"linear_{right}_p": "right_projection",
            f"linear_{left}_g": "left_gate",
            f"linear_{right}_g": "right_gate",
            "linear_ab_p": "projection",
            "linear_ab_g": "gate",
            "linear_z": "output_projection",
            "linear_g": "gating_linear",
        }.items()
    },
}

_OPENFOLD_ATTENTION = {
    "linear_q.weight": "query_w",
    "linear_k.weight": "key_w",
    "linear_v.weight": "value_w",
    "linear_g.weight": "gating_w",
    "linear_g.bias": "gating_b",
    "linear_o.weight": "output_w",
    "linear_o.bias": "output_b",
}


def is_openfold(names: Mapping[str, Any]) -> bool:
    """Whether parameter names look like OpenFold's."""
    return any("linear_tf_m" in name for name in names)


def openfold_to_alphafold(
    state: Mapping[str, Tensor], *, origin: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Rename and transpose OpenFold's parameters to official keys.

    Heads and other split axes stay flat: reshape to what :class:`Tie` names.

    Args:
        state: OpenFold state dict, of any release.
        origin: File name for errors.

    Returns:
        Official arrays (blocks stacked), and for each official key OpenFold's name (of its first block).

    Raises:
        WeightsError: A name is not OpenFold's, or a block of a stack lacks a parameter.
    """
    canonical: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        short = name
        for pattern, replacement in _OPENFOLD_SPELLINGS:
            short = re.sub(pattern, replacement, short)
        canonical[short] = (name, tensor)
    multimer = any(name.startswith("structure_module.ipa.linear_k.") for name in canonical)
    fused = any(".linear_ab_p." in name for name in canonical)
    found: dict[str, dict[int | None, np.ndarray]] = {}
    labels: dict[str, str] = {}
    for short, (name, tensor) in canonical.items():
        key, block = _openfold_key(
            short, multimer=multimer, fused=fused, global_column="msa_att_col.g" in short
        )
        if key is None:
            raise WeightsError(f"{origin}: parameter {name} is neither OpenFold's nor known otherwise")
        array = tensor.detach().float().numpy()
        if "triangle_multiplication_incoming/" in key and key.split("//")[0].endswith(
            ("/projection", "/gate")
        ):
            half = array.shape[0] // 2
            array = np.concatenate([array[half:], array[:half]])
        if array.ndim == 2:
            array = (
                array.T
                if array.shape[1] > 1 or not re.search(r"template_pair_embedding_[14567]//", key)
                else array[:, 0]
            )
        found.setdefault(key, {})[block] = array
        labels.setdefault(key, name)
    arrays: dict[str, np.ndarray] = {}
    for key, blocks in found.items():
        if None in blocks:
            arrays[key] = blocks[None]
            continue
        if sorted(blocks) != list(range(len(blocks))):  # type: ignore[type-var]
            raise WeightsError(f"{origin}: {labels[key]} is not there for every block of its stack")
        arrays[key] = np.stack([blocks[i] for i in range(len(blocks))])
    return arrays, labels


def _openfold_key(
    short: str, *, multimer: bool, fused: bool, global_column: bool
) -> tuple[str | None, int | None]:
    """Official key and block index of OpenFold's parameter, or ``(None, None)``."""
    match = re.fullmatch(r"(\w+)\.blocks\.(\d+)\.(.+)", short)
    modules, prefix, block = _OPENFOLD_MODULES, "", None
    if match:
        stack, block, short = match[1], int(match[2]), match[3]
        if stack not in _OPENFOLD_STACKS:
            return None, None
        prefix, modules = _OPENFOLD_STACKS[stack] + "/", _OPENFOLD_BLOCK_MODULES
        if stack == "template_pair_stack":
            inner = (
                "template_embedding_iteration/" if multimer else "template_pair_stack/__layer_stack_no_state/"
            )
            prefix = _OPENFOLD_STACKS[stack] + inner
        if stack == "extra_msa_stack" and short.startswith("msa_att_col.layer_norm_m"):
            global_column = True
    if short == "structure_module.ipa.head_weights":
        return "structure_module/fold_iteration/invariant_point_attention//trainable_point_weights", None
    module, _, leaf = short.rpartition(".")
    if (attention := modules.get(module.rpartition(".")[0])) and attention.endswith("/attention"):
        last = _OPENFOLD_ATTENTION.get(f"{module.rpartition('.')[2]}.{leaf}")
        return (f"{prefix}{attention}//{last}", block) if last else (None, None)
    scope = modules.get(module)
    if scope is None or leaf not in ("weight", "bias"):
        return None, None
    if scope.endswith("//output"):
        return f"{prefix}{scope}_{'w' if leaf == 'weight' else 'b'}", block
    if "//" in scope:
        return prefix + scope, block
    if global_column:
        scope = scope.replace("msa_column_attention", "msa_column_global_attention")
    if fused:
        scope = scope.replace("/layer_norm_input", "/left_norm_input") if "triangle_mult" in scope else scope
        scope = scope.replace("/center_layer_norm", "/center_norm")
    if multimer:
        for monomer_name, multimer_name in (
            ("evoformer/pair_activiations", "evoformer/~_relative_encoding/position_activations"),
            ("/affine_update", "/quat_rigid/rigid"),
            ("/q_scalar", "/q_scalar_projection"),
            ("/q_point_local", "/q_point_projection/point_projection"),
        ):
            scope = multimer_name if scope == monomer_name else scope
            if monomer_name[0] == "/" and scope.endswith(monomer_name):
                scope = scope[: -len(monomer_name)] + multimer_name
    is_norm = "norm" in scope.rpartition("/")[2]
    names = ("scale", "offset") if is_norm else ("weights", "bias")
    return f"{prefix}{scope}//{names[leaf == 'bias']}", block
