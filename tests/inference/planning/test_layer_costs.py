"""Bytes and operations that plans count for layers: those of a simulated device and of a trace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks.kernels.recording import without_launches
from fastfold.evoformer.config import model_config
from fastfold.evoformer.embedders.input import InputEmbedder
from fastfold.evoformer.embedders.multimer_templates import MultimerTemplateEmbedder
from fastfold.evoformer.embedders.templates import TemplateEmbedder
from fastfold.evoformer.evoformer import EvoformerBlock, TemplatePairStack
from fastfold.evoformer.execution import ExecutionPolicy, PolicyModule, set_policy
from fastfold.evoformer.msa_attention import MSARowAttention
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.structure.structure_module import StructureModule
from fastfold.evoformer.transition import Transition
from fastfold.inference.planning.layer_costs import (
    MULTIPLICATION,
    LayerSizes,
    aligned_error_bytes,
    embedding_bytes,
    evoformer_costs,
    point_attention_bytes,
    template_bytes,
)
from fastfold.kernels.ops.gated_attention import passes, triton_launch
from fastfold.memory import SimulatedDevice
from fastfold.parallel.alphafold.workload import dummy_features, one_block_config
from fastfold.parallel.axial.shards import gather_bytes
from fastfold.parallel.planner.recorder import Recorder

MONOMER, MULTIMER = "model_1_ptm", "model_1_multimer_v3"
N, C_Z, ROWS = 509, 128, 128
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _one_row_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the attention operator, whose buffers layers do not declare, compute one row."""
    row_blocks = passes.row_blocks
    monkeypatch.setattr(triton_launch, "row_step", lambda x: 1)
    monkeypatch.setattr(passes, "row_blocks", lambda x, step: itertools.islice(row_blocks(x, step), 1))


def taken(build: Callable[[], tuple[PolicyModule, Sequence[Any]]], elements: int, dtype: torch.dtype) -> int:
    """Return the bytes that a pass of a layer takes in place, in blocks, beside its inputs."""
    device = SimulatedDevice(1 << 40, "meta")
    with device.running(), without_launches(), torch.inference_mode(), torch.device("meta"):
        layer, inputs = build()
        set_policy(layer.to(dtype), ExecutionPolicy(elements, inplace=True))
        before = device.used
        device.mark()
        layer(*inputs)
        return device.mark() - before


def _layer_and_inputs(
    block: EvoformerBlock, name: str, sequences: int, residues: int, c_m: int, dtype: torch.dtype
) -> tuple[PolicyModule, Sequence[Any]]:
    """Return a layer of a block by its name, and empty inputs for it."""
    layer = block.get_submodule(name)
    assert isinstance(layer, PolicyModule)
    msa = torch.empty(sequences, residues, c_m, dtype=dtype)
    pair = torch.empty(residues, residues, C_Z, dtype=dtype)
    msa_mask, pair_mask = msa[..., 0].clone(), pair[..., 0].clone()
    if isinstance(layer, (MSARowAttention, OuterProductMean)):
        return layer, (msa, pair, msa_mask)
    x, mask = (msa, msa_mask) if name.startswith("msa") else (pair, pair_mask)
    return layer, (x,) if isinstance(layer, Transition) else (x, mask)


@pytest.mark.parametrize(
    ("sequences", "c_m", "is_extra", "dtype"), [(128, 256, False, BF16), (1024, 64, True, FP32)]
)
def test_steps_of_a_block_take_the_bytes_that_plans_count(
    sequences: int, c_m: int, is_extra: bool, dtype: torch.dtype
) -> None:
    config, e = model_config(MONOMER).model.embeddings_and_evoformer.evoformer, dtype.itemsize
    sizes = LayerSizes(sequences, N, N, c_m, C_Z, e)
    for one in evoformer_costs(config, sizes, global_column=is_extra):
        if one.step == MULTIPLICATION:
            continue  # its bytes are those of a contraction

        def build(name: str = one.layer) -> tuple[PolicyModule, Sequence[Any]]:
            block = EvoformerBlock(config, c_m, C_Z, global_column=is_extra, zero_init=False)
            return _layer_and_inputs(block, name, sequences, N, c_m, dtype)

        elements = ROWS * (sequences * c_m if one.layer.startswith("msa") else N * C_Z)
        declared = one.nbytes(elements)
        found, one_row = taken(build, elements, dtype), 12 * max(N, sequences) * max(c_m, C_Z) * e
        assert 0.75 * declared <= found <= declared + one_row, one.layer


def test_steps_declare_the_operations_of_their_products() -> None:
    """Those of a bias and of global attention, which is cheap, are left out."""
    config, sizes = (
        model_config(MONOMER).model.embeddings_and_evoformer.evoformer,
        LayerSizes(80, 96, 96, 256, C_Z, 4),
    )
    with torch.device("meta"):
        block = EvoformerBlock(config, sizes.c_m, C_Z, zero_init=False)
    costs = evoformer_costs(config, sizes)
    assert [one.layer for one in costs] == [name for name, _ in block.named_children()]
    for one in costs:
        with torch.device("meta"):
            layer, inputs = _layer_and_inputs(block, one.layer, 80, 96, sizes.c_m, FP32)
        with Recorder(layer) as recorder:
            layer(*inputs)
        found = recorder.result().regions[""].forward.flops
        assert one.flops == pytest.approx(found, rel=0.01), one.layer


@pytest.mark.parametrize(("preset", "dtype"), [(MONOMER, BF16), (MULTIMER, FP32)])
def test_blocks_of_the_embedding_take_the_bytes_that_plans_count(preset: str, dtype: torch.dtype) -> None:
    config = model_config(preset)
    trunk, multimer = config.model.embeddings_and_evoformer, preset == MULTIMER

    def build() -> tuple[PolicyModule, Sequence[Any]]:
        layer = InputEmbedder(trunk, c_target=21 if multimer else 22, multimer=multimer)
        features = {key: x[0, 0] for key, x in dummy_features(config, N, 1, 1).items()}
        previous = {
            "prev_pos": torch.empty(N, 37, 3),
            "prev_msa_first_row": torch.empty(N, trunk.msa_channel, dtype=dtype),
            "prev_pair": torch.empty(N, N, C_Z, dtype=dtype),
        }
        return layer, (features, previous)

    few, many = (taken(build, rows * N * C_Z, dtype) for rows in (ROWS, 2 * ROWS))
    sizes = LayerSizes(1, N, N, trunk.msa_channel, C_Z, dtype.itemsize)
    declared = embedding_bytes(trunk, sizes, ROWS * N * C_Z)
    assert 0.95 * declared <= many - few <= declared


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("embedder", [TemplateEmbedder, MultimerTemplateEmbedder])
def test_blocks_of_template_features_take_the_bytes_that_plans_count(
    embedder: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(MULTIMER if embedder is MultimerTemplateEmbedder else MONOMER)
    template = config.model.embeddings_and_evoformer.template
    template.template_pair_stack.num_block = 1
    monkeypatch.setattr(TemplatePairStack, "forward", lambda self, pair, mask: pair)

    def build() -> tuple[PolicyModule, Sequence[Any]]:
        layer = embedder(template, C_Z, zero_init=False)
        layer.norm = torch.nn.Identity()
        features = {key: x[0, 0] for key, x in dummy_features(config, N, 1, 1).items()}
        one = {k: x[:1] if k.startswith("template_") else x for k, x in features.items()}
        # In training the mask, which has no values here, is not read.
        return layer.train(), (torch.empty(N, N, C_Z, dtype=dtype), one, torch.empty(N, N, dtype=dtype))

    few, many = (taken(build, rows * N * C_Z, dtype) for rows in (ROWS, 2 * ROWS))
    sizes = LayerSizes(1, N, N, 1, C_Z, dtype.itemsize)
    declared = template_bytes(template, sizes, ROWS * N * C_Z, multimer=embedder is MultimerTemplateEmbedder)
    assert 0.9 * declared <= many - few <= declared


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_blocks_of_point_attention_take_the_bytes_that_plans_count(dtype: torch.dtype) -> None:
    config = one_block_config(model_config(MONOMER)).model.heads.structure_module

    def build() -> tuple[PolicyModule, Sequence[Any]]:
        layer = StructureModule(config, 384, C_Z, multimer=False, zero_init=False)
        features = torch.empty(N, 384), torch.empty(N, N, C_Z, dtype=dtype), torch.empty(N, dtype=torch.int64)
        return layer, (*features, torch.empty(N))

    few, many = (taken(build, rows * N * C_Z, FP32) for rows in (ROWS, 2 * ROWS))
    sizes = LayerSizes(1, N, N, 1, C_Z, dtype.itemsize)
    declared = point_attention_bytes(config, sizes, ROWS * N * C_Z)
    assert 0.9 * declared <= many - few <= declared


def _bytes(*shapes: tuple[tuple[int, ...], int]) -> int:
    """Return the bytes of tensors from their shapes and bytes per element."""
    return sum(math.prod(shape) * size for shape, size in shapes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_an_outer_product_holds_one_side_and_a_part_of_the_msa_or_rows_of_the_pair(
    ranks: int, rows: int
) -> None:
    """Ranks pass four left sides on; each row has the norms of its pairs and 4 more bytes a pair."""
    depth, n, c_m, c, e = 8, 12, 16, 4, 2
    own = n // ranks
    config = model_config(MONOMER).model.embeddings_and_evoformer.evoformer
    config.outer_product_mean.num_outer_channel = c
    sizes = LayerSizes(depth, n, own, c_m, C_Z, e, ranks)
    cost = next(one for one in evoformer_costs(config, sizes) if one.layer == "outer_product_mean")
    elements = rows * n * C_Z
    msa_rows = min(depth, elements // (n * c_m))
    normalized = min(elements, depth * n * c_m)
    part = _bytes(((normalized,), e), ((msa_rows, own, c), e))
    row = _bytes(((depth, c_m), e), ((n, 2), 4)) + _bytes(((depth, own, c), e), ((depth, own), 4)) / n
    passed = _bytes(((4, depth, own, c), e)) if ranks > 1 else 0
    side = _bytes(((depth, own, c), e), ((depth, own), 4))
    assert cost.nbytes(elements) == side + max(part, passed + int(row * rows))


@pytest.mark.parametrize("is_at_once", [False, True])
@pytest.mark.parametrize("n", [16, 17, 30])
def test_attention_holds_its_bias_in_padded_rows_and_buffers_of_a_whole_block(
    n: int, is_at_once: bool
) -> None:
    config, e = model_config(MONOMER).model.embeddings_and_evoformer.evoformer, 2
    sizes = LayerSizes(8, n, n, 256, C_Z, e, at_once=is_at_once)
    costs = {one.layer: one for one in evoformer_costs(config, sizes)}
    padded = 16 * math.ceil(n / 16)
    for layer, heads, channels, copies in (
        ("msa_row_attention", 8, 256, 1),
        ("triangle_attention_starting", 4, C_Z, 2),
        ("triangle_attention_ending", 4, C_Z, 2),
    ):
        elements = 3 * n * channels
        buffers = _bytes(((int(6.05 * elements),), e), ((heads, 3 * n), 4)) if is_at_once else 0
        assert costs[layer].nbytes(elements) == _bytes(((copies, heads, n, padded), e)) + buffers, layer
    many = LayerSizes(8, 4096, 4096 // 4, 256, C_Z, e, 4)
    rows = {one.layer: one for one in evoformer_costs(config, many)}["msa_row_attention"]
    bias = _bytes(((8, 4096, 4096), e))
    assert rows.nbytes(1) == max(bias, gather_bytes(8, 4096, 1024, e))


@pytest.mark.parametrize("e", [2, 4])
def test_blocks_hold_the_tensors_of_their_terms(e: int) -> None:
    """Numbers of the official networks, for one pair and for seven."""
    config = model_config(MONOMER).model
    trunk, sizes = config.embeddings_and_evoformer, LayerSizes(1, N, N, 256, C_Z, e)
    multimer = model_config(MULTIMER).model.embeddings_and_evoformer
    head = config.heads.structure_module
    for pairs in (1, 7):
        elements = pairs * C_Z
        assert embedding_bytes(trunk, sizes, elements) == _bytes(((5, pairs, C_Z), e), ((5, pairs), 8))
        assert embedding_bytes(multimer, sizes, elements) == _bytes(((7, pairs, C_Z), e), ((5, pairs), 8))
        # Features of 88 channels twice and their bins, and the embeddings of the block before.
        features = _bytes(((pairs, 39 + 5 + 2 * (39 + 49)), e), ((pairs, 64), e))
        assert template_bytes(trunk.template, sizes, elements, multimer=False) == max(
            features,
            _bytes(((pairs, 39 + 2), 8), ((pairs, 39), 4), ((pairs, 64), e)),
            _bytes(((pairs, 3 * 64 + 2 * 4), 4)),
            _bytes(((2, pairs, 64 + C_Z), e)),
        )
        assert template_bytes(multimer.template, sizes, elements, multimer=True) == max(
            _bytes(((pairs, 39 + 2), 8), ((pairs, 39), 4)),
            _bytes(((pairs, 39 + 6), 4), ((pairs, C_Z + 3 * 64), e)),
        )
        terms = max(C_Z if e == 2 else 0, 9 * 12)
        assert point_attention_bytes(head, sizes, elements) == _bytes(((pairs, C_Z + 2 + terms), 4))
        assert aligned_error_bytes(elements) == _bytes(((3, pairs, C_Z), 4))
