"""The outer product mean equals its definition on both backends, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.evoformer.config import model_config
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.kernels import reference
from fastfold.kernels.common.shared_masks import shared_masks
from fastfold.kernels.cpu import linear
from fastfold.kernels.ops.outer_product_mean import eager as outer_product_mean_torch
from fastfold.kernels.ops.outer_product_mean import triton_bwd, triton_fwd
from tests.helpers.forced_blocks import force_blocks
from tests.helpers.kernel_checks import (
    BACKENDS,
    DEVICE,
    DTYPES,
    check_against_definition,
    far_apart,
    output_and_gradients,
    relative_error,
)
from tests.helpers.outer_products import added_to_residual, with_strides_and_residual

MASKS = {"left_mask", "right_mask"}


def _inputs(
    sequences: int, rows: int, columns: int, c: int = 4, c_z: int = 12, batch: tuple[int, ...] = ()
) -> dict[str, Any]:
    torch.manual_seed(sequences + rows)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64)

    def mask(*size: int) -> Tensor:
        return (torch.rand(*size) > 0.3).double()

    return {
        "left": randn(*batch, sequences, rows, c),
        "right": randn(*batch, sequences, columns, c),
        "left_mask": mask(*batch, sequences, rows),
        "right_mask": mask(*batch, sequences, columns),
        "weight": randn(c_z, c * c) / c,
        "bias": randn(c_z),
    }


def _lists(inputs: Iterable[Tensor]) -> list[list[Tensor]]:
    """Sides, masks and parameters, the operator's lists."""
    left, right, left_mask, right_mask, weight, bias = inputs
    return [[left, right], [left_mask, right_mask], [weight, bias]]


def _on(backend: str, **rest: Any) -> Callable[..., Tensor]:
    return lambda **inputs: kernels.outer_product_mean(**inputs, **rest, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), pytest.param((5, 17, 3), marks=pytest.mark.slow), (33, 3, 9)])
def test_output_and_gradients(
    shape: tuple[int, int, int], dtype: torch.dtype, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8, BS=16, BK=16)
    check_against_definition(_on(backend), reference.outer_product_mean, _inputs(*shape), dtype, MASKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_columns_do_not_overflow_float16(backend: str) -> None:
    """Pairs without common sequences add nothing to gradients, although their factor is a thousand."""
    inputs = _inputs(5, 4, 7)
    inputs["weight"] *= 16
    inputs["left_mask"][:, 2:] = inputs["right_mask"][:, 5:] = 0.0
    check_against_definition(_on(backend), reference.outer_product_mean, inputs, torch.float16, MASKS)


@pytest.mark.parametrize("channels", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_tiles_of_channels_do_not_matter(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither if they divide the channels, nor if the last one is not full."""
    force_blocks(monkeypatch, BI=4, BJ=8, BA=2, BE=4, BS=16, BK=16)
    inputs = _inputs(6, 5, 9, c=channels, c_z=20)
    check_against_definition(_on("triton"), reference.outer_product_mean, inputs, torch.float32, MASKS)


def test_what_lies_beside_the_inputs_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with channels, columns or sequences past the end would be dropped later; NaN would not."""
    force_blocks(monkeypatch, BI=4, BJ=8, BA=2, BE=4, BS=16, BK=16)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 5, 4, c=3).items()}
    expected = reference.outer_product_mean(**inputs)
    for key in ("left", "right"):
        wide = torch.full((5, 16, 8), torch.nan, device=DEVICE)
        part = tuple(slice(size) for size in inputs[key].shape)
        wide[part] = inputs[key]
        inputs[key] = wide[part].requires_grad_()
    out = _on("triton")(**inputs)
    assert relative_error(out, expected) < 1e-6
    for grad in torch.autograd.grad(out.sum(), (inputs["left"], inputs["right"])):
        assert torch.isfinite(grad).all()


def test_more_tiles_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=4, BJ=4, BA=4, BE=4, BS=16, BK=16)
    monkeypatch.setattr("fastfold.kernels.common.normalized_rows.WEIGHT_PROGRAMS", 2)
    inputs = _inputs(3, 9, 9)
    check_against_definition(_on("triton"), reference.outer_product_mean, inputs, torch.float32, MASKS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sequences", [40, outer_product_mean_torch.DEEP + 1])
def test_sums_that_float16_cannot_hold(backend: str, sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 900 to 8,100 add up to more than 65,504 over the sequences, and their mean does not."""
    force_blocks(monkeypatch, BS=512)
    inputs = _inputs(sequences, 3, 2)
    inputs |= {name: 30 + 60 * torch.rand_like(inputs[name]) for name in ("left", "right")}
    check_against_definition(_on(backend), reference.outer_product_mean, inputs, torch.float16, MASKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_residual_batches_and_strides(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8)
    inputs = with_strides_and_residual(_inputs(3, 5, 4, batch=(2, 1)))
    check_against_definition(_on(backend), added_to_residual, inputs, torch.float32, MASKS)


@pytest.mark.parametrize("sequences", [5, 24, 64])
def test_bfloat16_without_units_for_it(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``bf16-products`` runs it, whose representations are in float32 and sides in bfloat16."""
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: False)
    torch.manual_seed(0)
    config = model_config("model_1").model.embeddings_and_evoformer.evoformer.outer_product_mean
    layer = OuterProductMean(config, 64, 32, zero_init=False)
    msa, pair, mask = torch.randn(sequences, 20, 64), torch.randn(20, 20, 32), torch.ones(sequences, 20)
    with torch.no_grad():
        exact = layer(msa, torch.zeros_like(pair), mask)
        with linear.reduced_products("bf16"):
            reduced = layer(msa, pair.clone(), mask) - pair
    error = (reduced - exact).abs().max() / exact.abs().max()
    assert 1e-5 < error < 2e-2


@pytest.mark.parametrize(
    "wanted", [{"left"}, {"right"}, {"left", "right"}, {"left", "right", "weight", "bias"}]
)
def test_gradients_of_bfloat16_with_units_for_it(wanted: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of pairs, whose gradients of both sides are products with one matrix."""
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(outer_product_mean_torch, "BLOCK_ELEMENTS", 16 * 5 * 3)
    inputs = {name: x.bfloat16() for name, x in _inputs(9, 7, 5).items()}
    grad = torch.randn(7, 5, 12).bfloat16()
    found = outer_product_mean_torch.backward(
        grad, outer_product_mean_torch.OuterProductParams(**inputs), 1e-3, wanted
    )
    leaves = {name: x.double().requires_grad_(name not in MASKS) for name, x in inputs.items()}
    exact = reference.outer_product_mean(**leaves)
    names = ("left", "right", "weight", "bias")
    expected = torch.autograd.grad(exact, [leaves[name] for name in names], grad.double())
    for name, ours, theirs in zip(names, found, expected, strict=True):
        assert name not in wanted or relative_error(ours, theirs) < 1e-2, name


@pytest.mark.parametrize("sequences", [outer_product_mean_torch.DEEP - 1, outer_product_mean_torch.DEEP])
def test_deep_alignments(sequences: int) -> None:
    """Many tiles, the last ones smaller, with the products of each column alone and of many at once."""
    inputs = _inputs(sequences, 70, 37, c=32, c_z=4)
    check_against_definition(_on("torch"), reference.outer_product_mean, inputs, torch.float32, MASKS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_place(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=4, BJ=8)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 5, 9).items()}
    pair = torch.randn(5, 9, 12, device=DEVICE)
    expected = pair + reference.outer_product_mean(**inputs)
    result = kernels.outer_product_mean(**inputs, residual=pair, out=pair, backend=backend)
    assert result is pair
    assert relative_error(pair, expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_in_blocks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, in place, with the left side of the block alone and the right side in parts."""
    force_blocks(monkeypatch, BI=4, BJ=8)
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 5, 9, batch=(2,)).items()}
    pair = torch.randn(2, 5, 9, 12, device=DEVICE)
    expected = pair + reference.outer_product_mean(**inputs)
    fixed = (inputs["right_mask"], inputs["weight"], inputs["bias"])
    updates = kernels.OuterProductRows(iter(inputs["right"].split(2, 1)), *fixed, backend=backend)
    for block in (slice(0, 2), slice(2, 5)):
        rows, left = pair[:, block], inputs["left"][:, :, block]
        assert updates.write(rows, left, inputs["left_mask"][:, :, block], rows) is rows
    assert relative_error(pair, expected) < 1e-6


def test_rows_in_blocks_record_no_gradients() -> None:
    inputs = {k: x.float() for k, x in _inputs(3, 5, 9).items()}
    fixed = ([inputs["right"]], inputs["right_mask"], inputs["weight"], inputs["bias"])
    with pytest.raises(RuntimeError, match="records no gradients"):
        kernels.OuterProductRows([inputs["right"].clone().requires_grad_()], *fixed[1:])
    updates, left = kernels.OuterProductRows(*fixed), inputs["left"].requires_grad_()
    with pytest.raises(RuntimeError, match="records no gradients"):
        updates.write(torch.empty(5, 9, 12), left, inputs["left_mask"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wanted", ["left", "right", "weight", "bias"])
def test_one_gradient_alone(wanted: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8)
    inputs = _inputs(3, 5, 4)
    constants = set(inputs) - {wanted}
    check_against_definition(_on(backend), reference.outer_product_mean, inputs, torch.float32, constants)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pairs_without_common_sequences_are_finite(backend: str) -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(3, 4, 4).items()}
    inputs["left_mask"].zero_()
    out = _on(backend)(**inputs)
    assert relative_error(out, (inputs["bias"] / 1e-3).expand_as(out)) < 1e-6


@pytest.mark.parametrize("constants", [MASKS, MASKS | {"weight", "bias"}])
def test_boolean_masks_keep_the_precision_of_float64(constants: set[str]) -> None:
    inputs = _inputs(5, 6, 7)
    boolean = inputs | {key: inputs[key] != 0 for key in MASKS}
    exact = output_and_gradients(reference.outer_product_mean, inputs, constants)
    for key, x in output_and_gradients(kernels.outer_product_mean, boolean, constants).items():
        assert relative_error(x, exact[key]) < 1e-13, key


def test_more_pair_channels_take_the_torch_path() -> None:
    inputs = {k: x.float().to(DEVICE) for k, x in _inputs(2, 3, 3, c_z=257).items()}
    assert torch.equal(_on("triton")(**inputs), _on("torch")(**inputs))


@pytest.mark.parametrize("axis", [0, 1])
def test_alignments_beyond_two_to_the_31_elements(
    axis: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8)
    inputs = {k: x.to(DEVICE, torch.bfloat16) for k, x in _inputs(3, 3, 2).items()}
    expected = reference.outer_product_mean(**{k: x.double() for k, x in inputs.items()})
    near = dict(inputs)
    for name in ("left", "right"):
        x = inputs[name].transpose(0, axis)
        rows = far_apart(x.flatten(1), tmp_path / name)
        inputs[name] = rows.unflatten(1, x.shape[1:]).transpose(0, axis)
    assert relative_error(_on("triton")(**inputs), expected) < 5e-3
    pairs = torch.randn(expected.shape, dtype=torch.float64).to(DEVICE, torch.bfloat16).transpose(0, axis)
    grad = far_apart(pairs.flatten(1), tmp_path / "grad").unflatten(1, pairs.shape[1:]).transpose(0, axis)
    rest = (1e-3, [True] * 4, "triton")
    backward = torch.ops.fastfold.outer_product_mean_backward
    close = backward(grad.contiguous(), *_lists(near.values()), *rest)
    for found, value in zip(backward(grad, *_lists(inputs.values()), *rest), close, strict=True):
        assert torch.equal(found, value)
    for name in ("left", "right", "grad"):
        (tmp_path / name).unlink(missing_ok=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_registered_properly(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8)
    plain = _lists(x.float().to(DEVICE) for x in _inputs(2, 3, 4).values())
    sides, masks, parameters = plain
    sides, parameters = ([x.clone().requires_grad_() for x in group] for group in (sides, parameters))
    residual = torch.randn(3, 4, 12, device=DEVICE)
    inputs = (sides, masks, parameters, residual, 1e-3, backend)
    torch.library.opcheck(torch.ops.fastfold.outer_product_mean.default, inputs)
    needs = [True, False, True, True]
    backward = torch.ops.fastfold.outer_product_mean_backward.default
    torch.library.opcheck(backward, (residual, *plain, 1e-3, needs, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_as_one_graph(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BI=8, BJ=8)
    inputs = {k: x.float().to(DEVICE).requires_grad_(k not in MASKS) for k, x in _inputs(2, 3, 4).items()}
    leaves = [x for x in inputs.values() if x.requires_grad]

    def step(**tensors: Tensor) -> Tensor:
        return _on(backend)(**tensors).square().sum()

    eager = torch.autograd.grad(step(**inputs), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    for found, expected in zip(torch.autograd.grad(compiled, leaves), eager, strict=True):
        torch.testing.assert_close(found, expected)


def test_kernels_are_those_of_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions of Triton alone, in tiles smaller than everything; the forward pass onto the residual."""
    force_blocks(monkeypatch, BI=2, BJ=4, BS=16, BK=16)
    made = _inputs(5, 7, 3)
    leaves = [made[name].requires_grad_() for name in ("left", "right", "weight", "bias")]
    left, right = (made[side] * made[f"{side}_mask"][..., None] for side in ("left", "right"))
    products = torch.einsum("sia,sjb->ijab", left, right).flatten(-2) @ made["weight"].T + made["bias"]
    exact = products / (torch.einsum("si,sj->ij", made["left_mask"], made["right_mask"]) + 0.01)[..., None]
    grad, residual = torch.randn(2, 7, 3, 12, dtype=torch.float64)
    expected = torch.autograd.grad(exact, leaves, grad)
    x = outer_product_mean_torch.OuterProductParams(
        *(
            made[name].detach().float().to(DEVICE)
            for name in outer_product_mean_torch.OuterProductParams._fields
        )
    )
    out = residual.float().to(DEVICE)
    shared = triton_fwd.RightSide(triton_fwd.masked(x.right, x.right_mask), *x[3:])
    triton_fwd.forward(shared, 0.01, out, x.left, x.left_mask, out)
    assert relative_error(out, exact + residual) < 2e-6
    names = ("left", "right", "weight", "bias")
    found = triton_bwd.backward(grad.float().to(DEVICE), x, 0.01, names)
    for name, mine, theirs in zip(names, found, expected, strict=True):
        assert relative_error(mine, theirs) < 2e-6, name
    for number, name in enumerate(names[:2]):  # the gradient of one side alone
        alone = triton_bwd.backward(grad.float().to(DEVICE), x, 0.01, (name,))
        assert torch.equal(alone[number], found[number])
    nothing = triton_bwd.backward(grad[:0].float().to(DEVICE), x._replace(left=x.left[:, :0]), 0.01, names)
    assert not any(part.any() for part in nothing)


def test_sequences_of_columns_are_counted_once_where_calls_share_masks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inputs = [x.float().to(DEVICE) for x in _inputs(4, 5, 3).values()]
    left, right, left_mask, right_mask, *parameters = inputs
    calls: list[Tensor] = []
    counts_of = triton_fwd.counts_of
    monkeypatch.setattr(triton_fwd, "counts_of", lambda a, b: calls.append(a) or counts_of(a, b))

    def run(x: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
        return kernels.outer_product_mean(x, right, *masks, *parameters, backend="triton")

    own, others = (left_mask, right_mask), (1 - left_mask, right_mask)
    expected = [run(left, own), run(2 * left, own), run(left, others)]
    calls.clear()
    with shared_masks():
        found = [run(left, own), run(2 * left, own), run(left, others)]
    assert len(calls) == 2
    assert all(map(torch.equal, found, expected))
