"""Configurations are read off parameter shapes as far as shapes tell."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from fastfold.evoformer.config import PRESETS, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.infer_config import (
    has_ptm,
    has_templates,
    infer_config,
    preset_in_name,
    preset_of,
)
from fastfold.evoformer.weights.names import PREFIX, alphafold_mappings
from tests.conftest import require_shared
from tests.helpers.networks import folder, oracle_config

Shapes = dict[str, tuple[int, ...]]

CARRIED = ("synthetic_monomer", "synthetic_multimer")
ELSEWHERE = ("monomer_ptm", "monomer_deep_msa", "multimer_homodimer")

STACKS = ("evoformer_iteration", "extra_msa_stack")

# Leaves of the configuration that decide the shape, or the existence, of a parameter.
STRUCTURAL = {
    *("evoformer_num_block", "extra_msa_stack_num_block", "num_block", "num_residual_block"),
    *("msa_channel", "pair_channel", "seq_channel", "extra_msa_channel", "num_channel", "num_channels"),
    *("num_head", "gating", "key_dim", "value_dim", "num_intermediate_factor", "num_intermediate_channel"),
    *("num_outer_channel", "fuse_projection_weights", "num_bins", "num_output", "enabled"),
    *(
        "embed_torsion_angles",
        "multimer_mode",
        "max_relative_feature",
        "max_relative_idx",
        "max_relative_chain",
    ),
    *("num_point_qk", "num_point_v", "num_scalar_qk", "num_scalar_v", "num_layer_in_transition"),
    *("recycle_pos", "recycle_features"),
}


def shapes_of(config: ConfigDict, *, flat: bool = False) -> Shapes:
    """Shapes of a network's parameters by official key."""
    with torch.device("meta"):
        mappings = alphafold_mappings(AlphaFold(config))
    return {mapping.key: mapping.flat_shape if flat else mapping.full_shape for mapping in mappings}


_OFFICIAL_SHAPES: dict[tuple[Any, ...], Shapes] = {}


def official_shapes(preset: str, *, flat: bool = False) -> Shapes:
    """Shapes of an official network; networks that differ in nothing structural share them."""
    leaves = (flat, *structure(model_config(preset)))
    if leaves not in _OFFICIAL_SHAPES:
        _OFFICIAL_SHAPES[leaves] = shapes_of(model_config(preset), flat=flat)
    return _OFFICIAL_SHAPES[leaves]


@functools.cache
def _oracle_shapes() -> Shapes:
    return shapes_of(oracle_config())


def oracle_shapes() -> Shapes:
    """Shapes of the small monomer network, to be changed."""
    return dict(_oracle_shapes())


def structure(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Structural leaves of the parts that are there."""
    for name, value in tree.items():
        if name == "predicted_aligned_error":
            yield f"{path}{name}", bool(value["weight"])
        if isinstance(value, ConfigDict):
            unused = (
                (name == "template" and not value.enabled)
                or (name == "predicted_aligned_error" and not value["weight"])
                or (name == "prev_pos" and not tree.recycle_pos)
            )
            if not unused:
                yield from structure(value, f"{path}{name}.")
        elif name in STRUCTURAL and f"{path}{name}" != "model.heads.predicted_aligned_error.num_channels":
            yield f"{path}{name}", value


@pytest.mark.parametrize("name", [*CARRIED, *ELSEWHERE])
def test_the_recorded_networks_are_recognised(name: str) -> None:
    """All that affects shapes is as in the configuration that the official program ran with."""
    directory = folder(name) if name in CARRIED else require_shared("oracles", name)
    theirs = ConfigDict(json.loads((directory / "config.json").read_text()))
    with np.load(directory / "params.npz") as archive:
        shapes = {key.removeprefix(PREFIX): archive[key].shape for key in archive.files}
    ours = infer_config(shapes)
    assert shapes_of(ours) == shapes
    assert dict(structure(ours)) == dict(structure(theirs))


@pytest.mark.long
@pytest.mark.parametrize("preset", PRESETS)
def test_every_official_network_is_recognised_with_its_name(preset: str) -> None:
    """Shapes and the file's name together give the whole configuration back."""
    config = model_config(preset)
    assert infer_config(official_shapes(preset), name_hint=f"params_{preset}.npz") == config
    assert preset_of(config, f"params_{preset}.npz") == preset


@pytest.mark.long
@pytest.mark.parametrize(
    "preset", ["model_1", "model_3", "model_3_ptm", "model_1_ptm", "model_1_multimer_v3"]
)
@pytest.mark.parametrize("flat", [False, True])
def test_without_a_name_the_first_official_network_of_these_shapes_is_meant(preset: str, flat: bool) -> None:
    """With joined head axes too, as in OpenFold's files."""
    config = infer_config(official_shapes(preset, flat=flat))
    assert config == model_config(preset)
    assert preset_of(config) == preset


def test_joined_head_axes_are_counted_on_the_bias_layers() -> None:
    """Small networks whose heads differ from every official one."""
    for name in CARRIED:
        shapes = shapes_of(oracle_config(name), flat=True)
        config = infer_config(shapes)
        assert shapes_of(config, flat=True) == shapes
        block = config.model.embeddings_and_evoformer.evoformer
        assert block.msa_row_attention_with_pair_bias.num_head == 4
        assert block.msa_column_attention.num_head == 4
        assert block.triangle_attention_starting_node.num_head == 2


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("params_model_1.npz", "model_1"),
        ("params_model_5_ptm.npz", "model_5_ptm"),
        ("MODEL_2_PTM.npz", "model_2_ptm"),
        ("params_model_4_multimer.npz", "model_4_multimer"),
        ("params_model_4_multimer_v1.npz", "model_4_multimer"),
        ("my_model_3_multimer_v2_bf16.safetensors", "model_3_multimer_v2"),
        ("model_12.npz", None),
        ("remodel_1.npz", None),
        ("model_6.npz", None),
        ("model_1_ptmx.npz", "model_1"),
        ("finetuning_ptm_2.pt", None),
        ("", None),
        (None, None),
    ],
)
def test_official_names_are_found_in_file_names(name: str | None, preset: str | None) -> None:
    assert preset_in_name(name) == preset


def test_the_name_decides_what_shapes_cannot_tell() -> None:
    """Model 2 has the shapes of model 1 and other MSA sizes."""
    shapes = oracle_shapes()
    assert infer_config(shapes, name_hint="params_model_1_ptm.npz").data.common.max_extra_msa == 5120
    assert infer_config(shapes, name_hint="params_model_2_ptm.npz").data.common.max_extra_msa == 1024


@pytest.mark.parametrize("wrong", ["model_1_multimer_v3", "model_1", "model_3_ptm", "model_4"])
def test_a_name_that_the_shapes_contradict_is_not_believed(wrong: str) -> None:
    shapes = oracle_shapes()
    assert infer_config(shapes, name_hint=f"{wrong}.npz") == infer_config(shapes)


def test_templates_and_aligned_errors_are_there_if_their_parameters_are() -> None:
    shapes = oracle_shapes()
    config = infer_config(shapes)
    assert has_templates(config)
    assert has_ptm(config)
    without = {key: shape for key, shape in shapes.items() if "template" not in key and "aligned" not in key}
    config = infer_config(without, name_hint="model_1_ptm.npz")
    assert not has_templates(config)
    assert not has_ptm(config)
    assert not config.data.common.use_templates
    assert shapes_of(config) == without


def test_templates_without_torsion_rows_are_recognised() -> None:
    shapes = {k: v for k, v in oracle_shapes().items() if "template_projection" not in k}
    shapes = {k: v for k, v in shapes.items() if "template_single_embedding" not in k}
    config = infer_config(shapes)
    assert has_templates(config)
    assert shapes_of(config) == shapes


@st.composite
def configs(draw: st.DrawFn) -> ConfigDict:
    """Small networks in which sizes that are equal in official ones differ."""

    def small(low: int = 1, high: int = 3) -> int:
        return draw(st.integers(low, high))

    config = oracle_config(draw(st.sampled_from(CARRIED)))
    multimer = bool(config.model.global_config.multimer_mode)
    trunk, heads = config.model.embeddings_and_evoformer, config.model.heads
    row, triangle, template = small(), small(), small()
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = small(), small()
    trunk.msa_channel, trunk.extra_msa_channel = row * small(), row * small()
    trunk.pair_channel, trunk.seq_channel = triangle * small(), small(1, 9)
    trunk.prev_pos.num_bins = small(2, 9)
    trunk.recycle_pos, trunk.recycle_features = draw(st.booleans()), draw(st.booleans())
    trunk["max_relative_idx" if multimer else "max_relative_feature"] = small(0, 9)
    block, stack = trunk.evoformer, trunk.template.template_pair_stack
    for node in (block.msa_row_attention_with_pair_bias, block.msa_column_attention):
        node.num_head, node.gating = row, draw(st.booleans())
    block.msa_transition.num_intermediate_factor = small()
    block.outer_product_mean.num_outer_channel = small(1, 9)
    channels = template * small()
    for steps, h, c in ((block, triangle, trunk.pair_channel), (stack, template, channels)):
        for node in (steps.triangle_attention_starting_node, steps.triangle_attention_ending_node):
            node.num_head, node.gating = h, draw(st.booleans())
            if "value_dim" in node:
                node.key_dim = node.value_dim = c
        steps.pair_transition.num_intermediate_factor = small()
        fused = draw(st.booleans())
        for node in (steps.triangle_multiplication_outgoing, steps.triangle_multiplication_incoming):
            node.fuse_projection_weights, node.num_intermediate_channel = fused, small(1, 9)
    if multimer:
        trunk.template.num_channels = channels
    else:
        attention = trunk.template.attention
        attention.num_head = small()
        attention.key_dim = attention.value_dim = attention.num_head * small()
        trunk.template.embed_torsion_angles = draw(st.booleans())
    stack.num_block = small()
    trunk.template.dgram_features.num_bins = small(2, 9)
    heads.distogram.num_bins, heads.predicted_lddt.num_bins = small(2, 9), small(2, 9)
    heads.predicted_lddt.num_channels, heads.predicted_aligned_error.num_bins = small(1, 9), small(2, 9)
    heads.masked_msa.num_output = small(2, 30)
    heads.predicted_aligned_error.weight = draw(st.sampled_from([0.0, 0.1]))
    node = heads.structure_module
    for name in ("num_channel", "num_head", "num_point_qk", "num_point_v", "num_scalar_qk", "num_scalar_v"):
        node[name] = small(1, 5)
    node.num_layer_in_transition, node.sidechain.num_residual_block = small(), small()
    node.sidechain.num_channel = small(1, 9)
    return config


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(configs(), st.booleans())
def test_any_small_network_is_recognised(config: ConfigDict, flat: bool) -> None:
    """Every size by itself, with heads apart or joined."""
    shapes = shapes_of(config, flat=flat)
    inferred = infer_config(shapes)
    if flat and not config.model.global_config.multimer_mode:
        # Template attention has no layer that tells its heads.
        inferred.model.embeddings_and_evoformer.template.attention.num_head = (
            config.model.embeddings_and_evoformer.template.attention.num_head
        )
    assert shapes_of(inferred, flat=flat) == shapes
    expected = {key: value for key, value in structure(config) if key != "model.heads.masked_msa.num_output"}
    found = {key: value for key, value in structure(inferred) if key != "model.heads.masked_msa.num_output"}
    assert found == expected


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("evoformer/evoformer_iteration/pair_transition/transition1//bias", (10**9, 4)),
        ("evoformer/extra_msa_stack/pair_transition/transition1//bias", (513, 96)),
        ("evoformer/preprocess_msa//weights", (49, 10**12)),
        ("evoformer/preprocess_msa//weights", ()),
        ("evoformer/left_single//weights", (0, 0)),
        ("evoformer/pair_activiations//weights", (64, 24)),
        ("structure_module/fold_iteration/invariant_point_attention//trainable_point_weights", (7,)),
        ("structure_module/fold_iteration/invariant_point_attention/kv_scalar//bias", (1,)),
        ("evoformer/template_embedding/single_template_embedding/embedding2d//weights", (3, 16)),
    ],
)
def test_impossible_shapes_are_left_for_the_comparison(key: str, shape: tuple[int, ...]) -> None:
    """A network of moderate size comes out, and its shapes contradict the file's where that made no sense."""
    shapes = oracle_shapes()
    assert key in shapes
    shapes[key] = shape
    found = shapes_of(infer_config(shapes))
    assert found != shapes
    assert all(found[f"evoformer/{stack}/pair_transition/transition1//bias"][0] <= 48 for stack in STACKS)
    assert sum(prod(size) for size in found.values()) < 10**9


def test_nothing_at_all_gives_an_official_network() -> None:
    """The comparison can then say what is missing."""
    assert shapes_of(infer_config({}))
