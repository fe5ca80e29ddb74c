"""The whole residual branch of gated attention on both backends equals its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.recording import without_launches
from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import ExecutionPolicy
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.kernels import attention_bias, reference
from fastfold.kernels.common import shared_masks as sharing
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu import products
from fastfold.kernels.ops.attention import eager as attention_blocks
from fastfold.kernels.ops.gated_attention import eager, triton_launch
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    TOLERANCES,
    check_against_definition,
    output_and_gradients,
    relative_error,
)
from tests.helpers.named_operators import gated_attention

CONSTANTS = frozenset({"mask", "dropout"})


def operands(
    rows: int, length: int, batch: tuple[int, ...] = (), leave_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Random arguments in float64: 24 channels, 2 heads of 16; the first row has no keys at all."""
    generator = torch.Generator().manual_seed(rows + 100 * length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(*batch, rows, length, generator=generator) > 0.3).double()
    mask[..., 1:, 0] = 1
    mask[..., 0, :] = 0
    made = {
        "x": normal(*batch, rows, length, 24),
        "bias": normal(*batch, 2, length, length),
        "mask": mask,
        "norm_weight": 1 + 0.2 * normal(24),
        "norm_bias": 0.2 * normal(24),
        **{f"{part}_weight": normal(32, 24) / 5 for part in ("query", "key", "value", "gate")},
        "gate_bias": normal(32),
        "output_weight": normal(24, 32) / 5,
        "output_bias": normal(24),
    }
    return {name: None if name in leave_out else x for name, x in made.items()}


def on_device(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {name: x if x is None else x.to(DEVICE, dtype) for name, x in inputs.items()}


def check(backend: str, inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, backend=backend)

    def definition(**arguments: Tensor) -> Tensor:
        return reference.gated_attention(**arguments, heads=2)

    check_against_definition(run, definition, inputs, dtype, CONSTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "length"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(3, 17, marks=pytest.mark.slow), (2, 33)],
)
def test_output_and_gradients_for_every_dtype(
    backend: str, dtype: torch.dtype, rows: int, length: int
) -> None:
    check(backend, operands(rows, length), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "leave_out", [("bias",), ("mask",), ("gate_weight", "gate_bias")], ids=lambda names: names[0]
)
def test_bias_mask_and_gate_are_optional(backend: str, leave_out: tuple[str, ...]) -> None:
    check(backend, operands(2, 9, leave_out=leave_out))


@pytest.mark.parametrize("by_products", [True, False], ids=["products", "flash"])
@pytest.mark.parametrize("leave_out", [(), ("bias",), ("mask",), ("bias", "mask")], ids="-".join)
def test_bfloat16_on_any_processor(
    leave_out: tuple[str, ...], by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched products and PyTorch's flash kernel, in blocks of rows and of queries."""
    monkeypatch.setattr(eager, "prefers_batched_products", lambda: by_products)
    monkeypatch.setattr(attention_blocks, "BLOCK_ELEMENTS", 600)
    check("torch", operands(3, 17, leave_out=leave_out), torch.bfloat16)


def test_batched_products_are_for_processors_with_bfloat16_units_but_not_amx(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for units, amx, expected in [(False, False, False), (True, False, True), (True, True, False)]:
        monkeypatch.setattr(products, "multiplies_bfloat16", lambda units=units: units)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert products.prefers_batched_products.__wrapped__() == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_leading_axes(backend: str) -> None:
    check(backend, operands(2, 5, batch=(2, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_rows_make_the_whole(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last one shorter, add up to the gradients of bias and parameters."""
    name = {"torch": "eager", "triton": "triton_launch"}[backend]
    module = pytest.importorskip(f"fastfold.kernels.ops.gated_attention.{name}")
    monkeypatch.setattr(module, "row_step", lambda x: 2)
    check(backend, operands(5, 7))


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_are_attended_to_in_transposed_views(backend: str) -> None:
    """As around the ending node: x, mask and bias transposed, and the result laid out like x."""
    inputs = on_device(operands(4, 4))
    views = dict(inputs)
    views["x"] = inputs["x"].transpose(0, 1).contiguous().transpose(0, 1)
    views["bias"], views["mask"] = (inputs[name].mT.contiguous().mT for name in ("bias", "mask"))

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, backend=backend)

    plain, found = (output_and_gradients(run, x, CONSTANTS) for x in (inputs, views))
    assert found["output"].stride() == views["x"].stride()
    for name, value in plain.items():
        assert relative_error(found[name], value) < 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own", [True, False], ids=["x", "another"])
def test_residual_and_dropout(backend: str, own: bool) -> None:
    inputs = operands(2, 7)
    inputs["dropout"] = (torch.arange(24) % 3 > 0).double() * 1.5
    if not own:
        inputs["residual"] = inputs["x"].flip(0).contiguous()

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**({"residual": arguments["x"]} | arguments), heads=2, backend=backend)

    def definition(dropout: Tensor, residual: Tensor | None = None, **arguments: Tensor) -> Tensor:
        update = reference.gated_attention(**arguments, heads=2)
        return (arguments["x"] if residual is None else residual) + dropout * update

    check_against_definition(run, definition, inputs, torch.float32, CONSTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_into_its_input(backend: str) -> None:
    inputs = on_device(operands(3, 7))
    x = inputs["x"]
    exact = x.double() + reference.gated_attention(**operands(3, 7), heads=2).to(DEVICE)
    with torch.no_grad():
        result = gated_attention(**inputs, heads=2, residual=x, out=x, backend=backend)
    assert result.data_ptr() == x.data_ptr()
    assert relative_error(x, exact) < TOLERANCES[torch.float32]
    inputs["query_weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradients"):
        gated_attention(**inputs, heads=2, out=x, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bias", "mask", "gate_weight"])
def test_leaving_out_an_argument_shows(backend: str, name: str) -> None:
    inputs = operands(3, 17)
    left_out = {name, "gate_bias"} if name == "gate_weight" else {name}
    changed = {k: None if k in left_out else x for k, x in inputs.items()}
    found = gated_attention(**on_device(changed), heads=2, backend=backend)
    exact = reference.gated_attention(**inputs, heads=2)
    assert relative_error(found - inputs["output_bias"].to(found), exact - inputs["output_bias"]) > 0.05


@pytest.mark.long
@pytest.mark.parametrize("backend", ["triton", pytest.param("torch", marks=pytest.mark.slow)])
def test_operator_check_of_pytorch(backend: str) -> None:
    inputs = on_device(operands(2, 5))
    leaves = {name: x.requires_grad_(name not in CONSTANTS) for name, x in inputs.items()}
    x, bias, mask, *parameters = leaves.values()
    torch.library.opcheck(
        torch.ops.fastfold.gated_attention.default,
        (x, bias, mask, None, None, parameters),
        {"heads": 2, "add_x": True, "keep": backend == "torch", "backend": backend},
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str) -> None:
    inputs = on_device(operands(2, 5))

    def run(**arguments: Tensor) -> Tensor:
        return gated_attention(**arguments, heads=2, residual=arguments["x"], backend=backend).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    plain = output_and_gradients(run, inputs, CONSTANTS)
    for name, value in output_and_gradients(compiled, inputs, CONSTANTS).items():
        torch.testing.assert_close(value, plain[name], msg=name)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_shapes_that_do_not_belong_together_are_refused(name: str) -> None:
    inputs = operands(2, 5)
    inputs[name] = inputs[name][..., :-1]
    with pytest.raises(InputError, match=f"expected {name}"):
        gated_attention(**inputs, heads=2)


NAMES = eager.GatedAttentionParams._fields


def test_weights_are_arranged_and_their_gradients_brought_back() -> None:
    made = operands(2, 3)
    parameters = eager.GatedAttentionParams(*(made[name] for name in NAMES))
    weights = eager.arrange(parameters, torch.float32)
    assert [x.dtype for x in (weights.norm[0], weights.merged)] == [torch.float32] * 2
    parts = ("query_weight", "key_weight", "value_weight", "gate_weight")
    assert torch.equal(weights.merged, torch.cat([made[name] for name in parts]).float())
    for mine, given in zip(eager.gradients_of(weights), parameters, strict=True):
        assert mine is not None
        assert torch.equal(mine, given.float())
    bare = eager.arrange(parameters._replace(gate_weight=None, gate_bias=None), torch.bfloat16)
    assert (bare.merged.shape, bare.merged.dtype, bare.norm[0].dtype) == (
        (96, 24),
        torch.bfloat16,
        torch.float32,
    )
    back = eager.gradients_of(bare)
    assert (back.gate_weight, back.gate_bias) == (None, None)


@pytest.mark.parametrize("blocks", [eager, triton_launch], ids=["torch", "triton"])
def test_passes_of_a_block_of_rows_are_those_of_the_definition(blocks: Any) -> None:
    """Forward onto the residual, and backward of a first block and of one whose totals hold something already."""
    made = operands(3, 5)
    x, residual = made["x"], torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1)).double()
    dropout = torch.tensor([0.0, 2.0, 1.0]).double().view(3, 1, 1).expand(3, 5, 24)
    leaves = {name: value.requires_grad_(name != "mask") for name, value in made.items()}
    spread = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    normed = spread * leaves["norm_weight"] + leaves["norm_bias"]
    q, k, v = (
        (normed @ leaves[f"{part}_weight"].T).unflatten(-1, (2, 16)) for part in ("query", "key", "value")
    )
    gate = (normed @ leaves["gate_weight"].T + leaves["gate_bias"]).unflatten(-1, (2, 16)).sigmoid()
    logits = torch.einsum("rqhd,rkhd->rhqk", q, k) / 4 + leaves["bias"]
    logits = logits.masked_fill(made["mask"][:, None, None, :] == 0, -1e9)
    attended = torch.einsum("rhqk,rkhd->rqhd", logits.softmax(-1), v) * gate
    update = attended.flatten(-2) @ leaves["output_weight"].T + leaves["output_bias"]
    grad = torch.randn(update.shape, generator=torch.Generator().manual_seed(2)).double()
    wanted = ("x", "bias", *NAMES)
    exact = torch.autograd.grad(dropout * update, [leaves[name] for name in wanted], grad)
    expected = dict(zip(wanted, exact, strict=True))
    small = {name: value.detach().float().to(DEVICE) for name, value in made.items()}
    weights = eager.arrange(eager.GatedAttentionParams(*(small[name] for name in NAMES)), torch.float32)
    bias, mask = blocks.prepare(small["bias"], small["mask"], torch.float32)
    out = residual.float().to(DEVICE)
    rows = eager.RowBlock(small["x"], bias, mask, out, dropout.float().to(DEVICE))
    blocks.forward_step(weights, 2)(out, rows, Scratch(DEVICE))
    assert relative_error(out, residual + dropout * update) < 2e-6
    ones = eager.arrange(
        eager.GatedAttentionParams(*(torch.ones_like(small[n]) for n in NAMES)), torch.float32
    )
    zeros = eager.zeros_like(weights, torch.float32)
    for totals, had in ((None if blocks is triton_launch else zeros, 0.0), (ones, 1.0)):
        grad_bias = torch.full_like(small["bias"], had)
        found, totals = blocks.gradient_step(weights, 2, True)(
            grad.float().to(DEVICE), rows, grad_bias, totals, Scratch(DEVICE)
        )
        assert relative_error(found, expected["x"]) < 2e-6
        assert relative_error(grad_bias - had, expected["bias"]) < 2e-6
        for name, mine in zip(NAMES, eager.gradients_of(totals), strict=True):
            assert mine is not None
            assert relative_error(mine - had, expected[name]) < 5e-6, name


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (5, 1000), (4, 1000), (40, 400), (3, 0), (4096, 4096)])
def test_blocks_of_rows_have_a_row_at_least_and_a_bounded_size(rows: int, length: int) -> None:
    x = torch.empty(rows, length, 1, device="meta")
    assert eager.row_step(x) >= 1
    assert eager.row_step(x) * length <= max(length, 1024)
    narrow = eager.row_step(x.bfloat16())
    assert narrow >= 1
    assert narrow >= rows if rows * length <= 2**20 else narrow * length <= max(length, 2048)
    step = triton_launch.row_step(x)
    assert step >= 1
    assert step * length <= max(length, 2**17)
    assert step == 1 or step * length >= min(rows * length, 2**14) - length


@pytest.mark.parametrize(
    ("rows", "length", "blocks"),
    [
        (512, 256, 1),
        (516, 256, 2),
        (516, 384, 2),
        (384, 384, 2),
        (516, 1024, 5),
        (1024, 1024, 8),
        (3, 1 << 18, 3),
    ],
)
def test_a_gpu_has_equal_blocks_of_rows(rows: int, length: int, blocks: int) -> None:
    """As few as the positions allow, without a small rest that costs the launches of a whole block."""
    step = triton_launch.row_step(torch.empty(rows, length, 1, device="meta"))
    assert -(-rows // step) == blocks
    assert step == -(-rows // blocks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_at_once_make_one_block(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of several blocks; PyTorch's blocks stay as they are."""
    monkeypatch.setattr({"torch": eager, "triton": triton_launch}[backend], "row_step", lambda x: 2)
    inputs = {name: x.detach() for name, x in on_device(operands(5, 7)).items()}
    launches, forward = [], triton_launch.TritonAttentionForward.__call__
    monkeypatch.setattr(
        triton_launch.TritonAttentionForward,
        "__call__",
        lambda *given: launches.append(len(given[1])) or forward(*given),
    )
    found = []
    for at_once in (False, True):
        out = torch.empty_like(inputs["x"])
        found.append(gated_attention(**inputs, heads=2, out=out, at_once=at_once, backend=backend))
    assert relative_error(found[1], found[0]) < 1e-6
    assert launches == ([2, 2, 1, 5] if backend == "triton" else [])


@pytest.mark.parametrize("length", [64, 99])
def test_a_bias_for_many_blocks_is_copied_once(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Triton's path, which wants aligned rows: at most lengths every block would copy all of it."""
    copies: list[bool] = []
    aligned = triton_launch.aligned

    def watched(bias: Tensor) -> Tensor:
        found = aligned(bias)
        copies.append(found is not bias)
        return found

    monkeypatch.setattr(triton_launch, "aligned", watched)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer
    with without_launches(), torch.device("meta"), torch.inference_mode():
        for node in (config.triangle_attention_starting_node, config.triangle_attention_ending_node):
            layer = TriangleAttention(node, 128, zero_init=True).eval()
            layer.policy = ExecutionPolicy(block_elements=9 * length * 128, inplace=True)
            layer(torch.empty(length, length, 128), torch.empty(length, length))
    assert len(copies) == 2 * -(-length // 9)
    assert not any(copies)


def test_a_bias_keeps_its_numbers() -> None:
    bias = torch.randn(2, 3, 7, 7).transpose(-2, -1)
    found = attention_bias(bias, 8, backend="torch")
    assert found.is_contiguous()
    assert torch.equal(found, bias)
    assert attention_bias(found, 8, backend="torch") is found


def test_only_rows_with_room_behind_them_count_as_aligned() -> None:
    """What would be read behind the last row has to be there, and rows have to begin where pieces of 16 do."""
    whole = torch.zeros(2, 9, 112)
    assert triton_launch.aligned(whole[..., :99]).data_ptr() == whole.data_ptr()
    for bias in (whole[..., 13:], whole.flatten()[: -13 + 112 * 18].as_strided((2, 9, 99), (1009, 112, 1))):
        found = triton_launch.aligned(bias)
        assert found.data_ptr() != bias.data_ptr()
        assert torch.equal(found, bias)
        assert triton_launch.aligned(found) is found


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_masks_are_laid_out_once_where_calls_share_them(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same; views of a mask, and masks of later calls, are told apart."""
    module = {"torch": eager, "triton": triton_launch}[backend]
    prepare, laid_out = module.prepare, []

    def watched(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Any:
        laid_out.append(mask is not None)
        return prepare(bias, mask, dtype)

    inputs = on_device(operands(3, 3)) | {"bias": None}
    mask = torch.tensor([[1.0, 0, 1], [1, 1, 0], [0, 1, 1]], device=DEVICE)

    def attended(*masks: Tensor) -> list[Tensor]:
        return [gated_attention(**(inputs | {"mask": m}), heads=2, backend=backend) for m in masks]

    expected = attended(mask, mask.t(), 1 - mask)
    monkeypatch.setattr(module, "prepare", watched)
    with sharing.shared_masks():
        found = attended(mask, mask.t(), mask, mask.t())
    assert sum(laid_out) == 2
    assert all(map(torch.equal, found, (*expected[:2], *expected[:2])))
    mask.sub_(1).neg_()
    with sharing.shared_masks():
        assert torch.equal(attended(mask)[0], expected[2])
    monkeypatch.setattr(sharing, "MAX_SHARED", 8)
    laid_out.clear()
    with sharing.shared_masks():
        attended(mask, mask)
    assert sum(laid_out) == 2
