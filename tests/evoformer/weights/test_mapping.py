"""Parameters of other programs lie where they belong in ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fastfold.errors import WeightsError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import load_model, read_weights
from fastfold.evoformer.weights.mapping import ParamMapping, write_parameters
from fastfold.evoformer.weights.names import alphafold_mappings, numbered
from fastfold.evoformer.weights.openfold_file import OpenFoldParameters
from tests.helpers.networks import folder, oracle_arrays, oracle_config, oracle_features
from tests.helpers.openfold_files import official_arrays, openfold_state

NAMES = ("synthetic_monomer", "synthetic_multimer")
ERAS = [("synthetic_monomer", "v1"), ("synthetic_monomer", "v2"), ("synthetic_multimer", "v2")]


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def from_openfold(tmp_path: Path, name: str, state: dict[str, Tensor]) -> AlphaFold:
    torch.save(state, tmp_path / "openfold.pt")
    return load_model(tmp_path / "openfold.pt", config=oracle_config(name))


# --- Official files --------------------------------------------------------------------------------------------


def test_official_arrays_are_written_back_unchanged(name: str) -> None:
    """Reading loses nothing and mixes nothing up: writing gives every array bit by bit."""
    model = load_model(folder(name) / "params.npz", config=oracle_config(name))
    written = dict(write_parameters(model, alphafold_mappings(model)))
    official = official_arrays(name)
    assert written.keys() == official.keys()
    assert [key for key in official if not np.array_equal(written[key], official[key])] == []


def test_every_parameter_is_tied_exactly_once(name: str) -> None:
    """No element of ours is left as it was allocated, or written twice."""
    with torch.device("meta"):
        model = AlphaFold(oracle_config(name))
    covered = {key: np.zeros(tuple(value.shape), np.int64) for key, value in model.state_dict().items()}
    for mapping in alphafold_mappings(model):
        covered[mapping.name][mapping.rows] += 1
        part = covered[mapping.name][mapping.rows]
        assert mapping.read(np.zeros(mapping.full_shape)).size == part.size, mapping
    assert [key for key, count in covered.items() if not (count == 1).all()] == []


def test_flat_shapes_have_the_same_elements(name: str) -> None:
    """Joined head axes hold what the separate ones hold, inputs before outputs."""
    with torch.device("meta"):
        model = AlphaFold(oracle_config(name))
    parameters = dict(model.named_parameters())
    for mapping in alphafold_mappings(model):
        assert np.prod(mapping.flat_shape) == np.prod(mapping.full_shape)
        if mapping.inputs:
            assert mapping.flat_shape[-2] == parameters[mapping.name].shape[1], mapping


def test_a_tie_reorders_axes_and_takes_parts() -> None:
    """The parts of one official array that two of our parameters share come out in our order of axes."""
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 60)
    view = (2, 3, 4, 5)
    mapping = ParamMapping("ours", "key", (2, 60), view, inputs=1, order=(1, 2, 0), part=slice(1, 3))
    expected = array.reshape(view)[..., 1:3].transpose(0, 2, 3, 1).reshape(2, -1).T
    assert np.array_equal(mapping.read(array), expected)
    back = np.zeros_like(array)
    mapping.write(expected, back)
    assert np.array_equal(back.reshape(view)[..., 1:3], array.reshape(view)[..., 1:3])
    assert not back.reshape(view)[..., [0, 3, 4]].any()


def test_haiku_numbers_repeated_modules_from_the_second_on() -> None:
    assert [numbered("transition", i) for i in range(3)] == ["transition", "transition_1", "transition_2"]


# --- OpenFold --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("name", "era"), ERAS)
def test_openfold_names_of_both_eras_give_the_official_parameters(
    tmp_path: Path, name: str, era: str
) -> None:
    _, official = read_weights(folder(name) / "params.npz", config=oracle_config(name))
    torch.save(openfold_state(name, era), tmp_path / "openfold.pt")
    info, found = read_weights(tmp_path / "openfold.pt", config=oracle_config(name))
    assert info.kind == "openfold"
    assert found.keys() == official.keys()
    assert [key for key in official if not torch.equal(found[key], official[key])] == []


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors run faster so, and several times faster on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_openfold_weights_fold_as_the_official_program_did(tmp_path: Path) -> None:
    """The network of an OpenFold file prints the recorded outputs."""
    name = "synthetic_monomer"
    model = from_openfold(tmp_path, name, openfold_state(name, "v1"))
    with torch.no_grad():
        result = model(oracle_features(name))
    outputs = oracle_arrays(name, "outputs")
    for key in (
        "distogram/logits",
        "predicted_aligned_error/logits",
        "structure_module/final_atom_positions",
    ):
        head, leaf = key.split("/")
        theirs = outputs[key]
        difference = np.linalg.norm(result[head][leaf].numpy() - theirs) / np.linalg.norm(theirs)
        assert difference < 1e-4, key


def test_openfold_tensors_written_down_by_hand() -> None:
    """A few layers of each kind, from OpenFold's own import script and not from our table."""
    o, state = official_arrays("synthetic_monomer"), openfold_state("synthetic_monomer", "v1")
    block, extra = "evoformer/evoformer_iteration", "evoformer/extra_msa_stack"
    template = "evoformer/template_embedding"
    pairs = f"{template}/single_template_embedding/template_pair_stack/__layer_stack_no_state"
    row, outer = f"{block}/msa_row_attention_with_pair_bias", f"{block}/outer_product_mean"
    mul_out, mul_in = f"{block}/triangle_multiplication_outgoing", f"{block}/triangle_multiplication_incoming"
    fold = "structure_module/fold_iteration"
    ipa, angles = f"{fold}/invariant_point_attention", f"{fold}/rigid_sidechain"
    by_hand = {
        "input_embedder.linear_tf_z_i.weight": o["evoformer/left_single//weights"].T,
        "input_embedder.linear_relpos.bias": o["evoformer/pair_activiations//bias"],
        "recycling_embedder.linear.weight": o["evoformer/prev_pos_linear//weights"].T,
        "recycling_embedder.layer_norm_m.weight": o["evoformer/prev_msa_first_row_norm//scale"],
        "extra_msa_embedder.linear.weight": o["evoformer/extra_msa_activations//weights"].T,
        "template_angle_embedder.linear_1.weight": o["evoformer/template_single_embedding//weights"].T,
        "template_angle_embedder.linear_2.bias": o["evoformer/template_projection//bias"],
        "template_pair_embedder.linear.weight": (
            o[f"{template}/single_template_embedding/embedding2d//weights"].T
        ),
        "template_pair_stack.layer_norm.bias": (
            o[f"{template}/single_template_embedding/output_layer_norm//offset"]
        ),
        "template_pair_stack.blocks.1.tri_att_start.mha.linear_o.weight": (
            o[f"{pairs}/triangle_attention_starting_node/attention//output_w"][1].reshape(16, 16).T
        ),
        "template_pointwise_att.mha.linear_v.weight": o[f"{template}/attention//value_w"].reshape(16, 16).T,
        "evoformer.blocks.1.msa_att_row.layer_norm_m.bias": o[f"{row}/query_norm//offset"][1],
        "evoformer.blocks.1.msa_att_row.mha.linear_q.weight": (
            o[f"{row}/attention//query_w"][1].reshape(32, 32).T
        ),
        "evoformer.blocks.1.msa_att_row.mha.linear_g.bias": o[f"{row}/attention//gating_b"][1].reshape(32),
        "evoformer.blocks.2.msa_att_row.linear_z.weight": o[f"{row}//feat_2d_weights"][2].T,
        "evoformer.blocks.0.msa_att_col._msa_att.mha.linear_k.weight": (
            o[f"{block}/msa_column_attention/attention//key_w"][0].reshape(32, 32).T
        ),
        "extra_msa_stack.blocks.1.msa_att_col.global_attention.linear_k.weight": (
            o[f"{extra}/msa_column_global_attention/attention//key_w"][1].T
        ),
        "extra_msa_stack.blocks.0.msa_att_col.layer_norm_m.weight": (
            o[f"{extra}/msa_column_global_attention/query_norm//scale"][0]
        ),
        "evoformer.blocks.2.core.msa_transition.linear_2.weight": (
            o[f"{block}/msa_transition/transition2//weights"][2].T
        ),
        "evoformer.blocks.0.core.outer_product_mean.linear_1.weight": (
            o[f"{outer}/left_projection//weights"][0].T
        ),
        "evoformer.blocks.0.core.outer_product_mean.linear_out.weight": (
            o[f"{outer}//output_w"][0].reshape(64, 24).T
        ),
        "evoformer.blocks.0.core.tri_mul_out.linear_a_p.weight": o[f"{mul_out}/left_projection//weights"][
            0
        ].T,
        "evoformer.blocks.0.core.tri_mul_out.linear_b_g.bias": o[f"{mul_out}/right_gate//bias"][0],
        "evoformer.blocks.0.core.tri_mul_in.linear_a_p.weight": o[f"{mul_in}/right_projection//weights"][0].T,
        "evoformer.blocks.0.core.tri_mul_in.linear_b_g.bias": o[f"{mul_in}/left_gate//bias"][0],
        "evoformer.blocks.0.core.tri_mul_in.linear_z.weight": o[f"{mul_in}/output_projection//weights"][0].T,
        "evoformer.blocks.0.core.tri_att_end.linear.weight": (
            o[f"{block}/triangle_attention_ending_node//feat_2d_weights"][0].T
        ),
        "evoformer.blocks.0.core.pair_transition.layer_norm.weight": (
            o[f"{block}/pair_transition/input_layer_norm//scale"][0]
        ),
        "evoformer.linear.weight": o["evoformer/single_activations//weights"].T,
        "structure_module.layer_norm_s.weight": o["structure_module/single_layer_norm//scale"],
        "structure_module.ipa.linear_kv.weight": o[f"{ipa}/kv_scalar//weights"].T,
        "structure_module.ipa.linear_q_points.weight": o[f"{ipa}/q_point_local//weights"].T,
        "structure_module.ipa.linear_b.bias": o[f"{ipa}/attention_2d//bias"],
        "structure_module.ipa.head_weights": o[f"{ipa}//trainable_point_weights"],
        "structure_module.transition.layers.0.linear_2.weight": o[f"{fold}/transition_1//weights"].T,
        "structure_module.bb_update.linear.weight": o[f"{fold}/affine_update//weights"].T,
        "structure_module.angle_resnet.linear_initial.weight": o[f"{angles}/input_projection_1//weights"].T,
        "structure_module.angle_resnet.layers.1.linear_2.bias": o[f"{angles}/resblock2_1//bias"],
        "aux_heads.plddt.linear_1.weight": o["predicted_lddt_head/act_0//weights"].T,
        "aux_heads.distogram.linear.weight": o["distogram_head/half_logits//weights"].T,
        "aux_heads.tm.linear.bias": o["predicted_aligned_error_head/logits//bias"],
    }
    assert [name for name, array in by_hand.items() if not np.array_equal(state[name].numpy(), array)] == []


def test_openfold_multimer_tensors_written_down_by_hand() -> None:
    o, state = official_arrays("synthetic_multimer"), openfold_state("synthetic_multimer", "v2")
    single = "evoformer/template_embedding/single_template_embedding"
    mul_in = "evoformer/evoformer_iteration/triangle_multiplication_incoming"
    ipa = "structure_module/fold_iteration/invariant_point_attention"
    projection = o[f"{mul_in}/projection//weights"][1]
    pair = "template_embedder.template_pair_embedder"
    by_hand = {
        "input_embedder.linear_relpos.weight": (
            o["evoformer/~_relative_encoding/position_activations//weights"].T
        ),
        f"{pair}.dgram_linear.weight": o[f"{single}/template_pair_embedding_0//weights"].T,
        f"{pair}.pseudo_beta_mask_linear.weight": o[f"{single}/template_pair_embedding_1//weights"][:, None],
        f"{pair}.aatype_linear_1.weight": o[f"{single}/template_pair_embedding_2//weights"].T,
        f"{pair}.aatype_linear_2.weight": o[f"{single}/template_pair_embedding_3//weights"].T,
        f"{pair}.z_linear.bias": o[f"{single}/template_pair_embedding_6//bias"],
        f"{pair}.query_embedding_layer_norm.weight": o[f"{single}/query_embedding_norm//scale"],
        f"{pair}.query_embedding_linear.weight": o[f"{single}/template_pair_embedding_8//weights"].T,
        "template_embedder.linear_t.weight": o["evoformer/template_embedding/output_linear//weights"].T,
        "template_embedder.template_single_embedder.template_projector.weight": (
            o["evoformer/template_projection//weights"].T
        ),
        "evoformer.blocks.1.pair_stack.tri_mul_in.linear_ab_p.weight": (
            np.concatenate([projection[:, 24:], projection[:, :24]], axis=1).T
        ),
        "evoformer.blocks.1.pair_stack.tri_mul_in.layer_norm_out.weight": o[f"{mul_in}/center_norm//scale"][
            1
        ],
        "structure_module.ipa.linear_k.weight": o[f"{ipa}/k_scalar_projection//weights"].reshape(40, -1).T,
        "structure_module.ipa.linear_v_points.linear.weight": (
            o[f"{ipa}/v_point_projection/point_projection//weights"].reshape(40, -1).T
        ),
        "structure_module.bb_update.linear.bias": o["structure_module/fold_iteration/quat_rigid/rigid//bias"],
    }
    assert [name for name, array in by_hand.items() if not np.array_equal(state[name].numpy(), array)] == []


def test_openfold_keys_values_and_points_are_what_openfold_computes(tmp_path: Path) -> None:
    """OpenFold splits keys from values within a head, and stores x, y and z of all points one after the other."""
    state = openfold_state("synthetic_monomer", "v1")
    ours = from_openfold(tmp_path, "synthetic_monomer", state).structure_module.attention
    single, h = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)), ours.heads

    def linear(layer: str) -> Tensor:
        name = f"structure_module.ipa.{layer}"
        return F.linear(single, state[f"{name}.weight"], state[f"{name}.bias"])

    def points(layer: str) -> Tensor:
        return torch.stack(linear(layer).chunk(3, dim=-1), dim=-1).unflatten(-2, (h, -1))

    k, v = linear("linear_kv").unflatten(-1, (h, -1)).split([ours.c_qk, ours.c_v], dim=-1)
    k_points, v_points = points("linear_kv_points").split([ours.p_qk, ours.p_v], dim=-2)
    for found, theirs in (
        (ours.key(single), k.flatten(-2)),
        (ours.value(single), v.flatten(-2)),
        (ours.query_points(single), points("linear_q_points").flatten(-3)),
        (ours.key_points(single), k_points.flatten(-3)),
        (ours.value_points(single), v_points.flatten(-3)),
    ):
        torch.testing.assert_close(found, theirs)


@pytest.mark.parametrize(("name", "era"), ERAS)
@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_openfold_triangle_multiplication_is_what_openfold_computes(
    tmp_path: Path, name: str, era: str, direction: str
) -> None:
    """For incoming edges OpenFold has the two sides exchanged, as separate layers and as halves of a fused one."""
    state = openfold_state(name, era)
    block = from_openfold(tmp_path, name, state).evoformer.blocks[0]
    inner, short = "core" if era == "v1" else "pair_stack", {"outgoing": "out", "incoming": "in"}[direction]
    prefix = f"evoformer.blocks.0.{inner}.tri_mul_{short}"
    pair = torch.randn(7, 7, 24, generator=torch.Generator().manual_seed(0))

    def apply(x: Tensor, layer: str) -> Tensor:
        weight, bias = state[f"{prefix}.{layer}.weight"], state[f"{prefix}.{layer}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias) if "norm" in layer else F.linear(x, weight, bias)

    x = apply(pair, "layer_norm_in")
    if f"{prefix}.linear_ab_p.weight" in state:
        a, b = (torch.sigmoid(apply(x, "linear_ab_g")) * apply(x, "linear_ab_p")).chunk(2, dim=-1)
    else:
        a, b = (
            torch.sigmoid(apply(x, f"linear_{side}_g")) * apply(x, f"linear_{side}_p") for side in ("a", "b")
        )
    equation = "ikc,jkc->ijc" if direction == "outgoing" else "kic,kjc->ijc"
    product = apply(torch.einsum(equation, a, b), "layer_norm_out")
    update = apply(product, "linear_z") * torch.sigmoid(apply(x, "linear_g"))

    with torch.no_grad():
        ours = getattr(block, f"triangle_multiplication_{direction}")(pair.clone(), torch.ones(7, 7))
    torch.testing.assert_close(ours, pair + update, rtol=1e-4, atol=1e-4)


def test_wrapper_prefixes_and_stored_constants_do_not_matter() -> None:
    state = openfold_state("synthetic_monomer", "v2")
    wrapped = {f"module.model.{key}": value for key, value in state.items()}
    wrapped["module.model.structure_module.group_idx"] = torch.zeros(21, 14, dtype=torch.int64)
    wrapped["module.model.structure_module.default_frames"] = torch.zeros(21, 8, 4, 4)
    bare, found = OpenFoldParameters(state, "a.pt"), OpenFoldParameters(wrapped, "b.pt")
    assert found.shapes == bare.shapes


def test_an_unknown_openfold_name_is_named() -> None:
    state = openfold_state("synthetic_monomer", "v1") | {"evoformer.blocks.0.third_track.x": torch.zeros(2)}
    with pytest.raises(
        WeightsError, match=r"a\.pt: parameter evoformer\.blocks\.0\.third_track\.x .*OpenFold"
    ):
        OpenFoldParameters(state, "a.pt")


def test_one_openfold_parameter_in_two_spellings_is_refused() -> None:
    state = openfold_state("synthetic_monomer", "v1")
    state["model.evoformer.linear.bias"] = state["evoformer.linear.bias"]
    with pytest.raises(WeightsError, match=r"evoformer\.linear\.bias and model\.evoformer\.linear\.bias"):
        OpenFoldParameters(state, "a.pt")


def test_a_block_without_a_parameter_is_named() -> None:
    state = openfold_state("synthetic_monomer", "v1")
    del state["evoformer.blocks.1.msa_att_row.linear_z.weight"]
    with pytest.raises(WeightsError, match=r"evoformer\.blocks\.1\.msa_att_row\.linear_z\.weight is missing"):
        OpenFoldParameters(state, "a.pt")


def test_a_block_of_another_shape_is_named() -> None:
    state = openfold_state("synthetic_monomer", "v1")
    state["evoformer.blocks.1.msa_att_row.linear_z.weight"] = torch.zeros(3, 24)
    with pytest.raises(
        WeightsError, match=r"msa_att_row\.linear_z\.weight has different shapes in different blocks"
    ):
        OpenFoldParameters(state, "a.pt")


def test_openfold_errors_name_parameters_and_shapes_as_openfold_does(tmp_path: Path) -> None:
    """Missing, superfluous and misshapen parameters bear OpenFold's names, matrices its order of axes."""
    state = openfold_state("synthetic_monomer", "v1")
    del state["aux_heads.distogram.linear.bias"]
    state["recycling_embedder.linear.weight"] = torch.zeros(24, 14)
    with pytest.raises(WeightsError) as caught:
        from_openfold(tmp_path, "synthetic_monomer", state)
    message = str(caught.value)
    assert "openfold.pt: parameter aux_heads.distogram.linear.bias is missing" in message
    assert "recycling_embedder.linear.weight: expected shape [24, 15], found [24, 14]" in message
    state = openfold_state("synthetic_monomer", "v1")
    for key in [key for key in state if key.startswith("evoformer.blocks.2.")]:
        del state[key]
    with pytest.raises(WeightsError, match=r"expected shape .* in 3 blocks, found .* in 2 blocks"):
        from_openfold(tmp_path, "synthetic_monomer", state)


def test_a_network_with_parts_of_its_own_has_no_official_names() -> None:
    with pytest.raises(WeightsError, match=r"Save it as \.safetensors"):
        alphafold_mappings(AlphaFold(model_config("mini")))


def test_a_network_without_templates_has_official_names() -> None:
    """Also if its configuration does not say how template blocks would be."""
    config = oracle_config("synthetic_monomer")
    template = config.model.embeddings_and_evoformer.template
    whole = {x.name for x in alphafold_mappings(AlphaFold(config))}
    for key in [key for key in template if key not in ("enabled", "max_templates", "embed_torsion_angles")]:
        del template[key]
    template.enabled = template.embed_torsion_angles = False
    found = {x.name for x in alphafold_mappings(AlphaFold(config))}
    assert found == {name for name in whole if not name.startswith("template")}


def test_a_network_that_lacks_a_step_has_no_official_names() -> None:
    config = oracle_config("synthetic_monomer")
    config.model.embeddings_and_evoformer.evoformer.msa_column_attention.enabled = False
    with pytest.raises(WeightsError, match="lacks the extra MSA or steps"):
        alphafold_mappings(AlphaFold(config))
