"""Of few sequences the outer product mean multiplies one side by the output weight first, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastfold import kernels
from fastfold.kernels import reference
from fastfold.kernels.cpu import linear
from fastfold.kernels.cpu.linear import Products, reduced_products
from fastfold.kernels.ops.outer_product_mean import eager
from fastfold.kernels.ops.outer_product_mean.eager import (
    OuterProductParams,
    PremultipliedRows,
    premultiplying_pays,
    premultiplying_pays_backward,
    side_gradients,
)
from fastfold.kernels.ops.outer_product_mean.op import EPS
from tests.helpers.kernel_checks import DTYPES, check_against_definition, relative_error

MASKS = {"left_mask", "right_mask"}
PARAMETERS = {"weight", "bias"}
SIDES = frozenset({"left", "right"})


def _inputs(
    sequences: int, rows: int = 5, columns: int = 37, c: int = 32, c_z: int = 128, batch: tuple[int, ...] = ()
) -> dict[str, Any]:
    torch.manual_seed(sequences)

    def mask(positions: int) -> Tensor:
        return (torch.rand(*batch, sequences, positions) > 0.3).double()

    return {
        "left": torch.randn(*batch, sequences, rows, c, dtype=torch.float64),
        "right": torch.randn(*batch, sequences, columns, c, dtype=torch.float64),
        "left_mask": mask(rows),
        "right_mask": mask(columns),
        "weight": torch.randn(c_z, c * c, dtype=torch.float64) / c,
        "bias": torch.randn(c_z, dtype=torch.float64),
    }


def _pays(inputs: dict[str, Any], dtype: torch.dtype = torch.float32) -> bool:
    return premultiplying_pays(inputs["right"].to(dtype), inputs["right_mask"], inputs["weight"])


def _operator(**inputs: Tensor) -> Tensor:
    return kernels.outer_product_mean(**inputs, backend="torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequences", [1, 4, 19, 20])
def test_output_and_gradients_on_both_sides_of_the_crossover(sequences: int, dtype: torch.dtype) -> None:
    inputs = _inputs(sequences)
    assert _pays(inputs, dtype) == (sequences < 20 and dtype != torch.float16)
    check_against_definition(_operator, reference.outer_product_mean, inputs, dtype, MASKS)


def _multiply_adds(kind: Any, inputs: dict[str, Any]) -> int:
    left, right, left_mask, right_mask, weight, bias = inputs.values()
    with FlopCounterMode(display=False) as counter:
        out = left.new_empty(left.shape[-2], right.shape[-2], len(bias))
        kind(right, [right], right_mask, weight, bias, 1e-3)(out, left, left_mask, None)
    return counter.get_total_flops() // 2


def test_the_crossover_is_where_the_multiply_adds_are_as_many() -> None:
    """With those of the norm, which are the same in both."""
    for sequences, columns in ((19, 37), (20, 37), (41, 2000), (42, 2000)):
        inputs = _inputs(sequences, rows=1, columns=columns)
        fewer = _multiply_adds(PremultipliedRows, inputs) < _multiply_adds(eager.ProductRows, inputs)
        assert _pays(inputs) == fewer == (sequences in (19, 41)), sequences
    single = _inputs(1, rows=1, columns=2000)
    assert _multiply_adds(PremultipliedRows, single) * 30 < _multiply_adds(eager.ProductRows, single)


def test_an_operator_takes_the_one_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[type] = []
    for kind in (eager.ProductRows, PremultipliedRows):
        create = kind.__init__

        def counted(self: Any, *arguments: Any, create: Any = create) -> None:
            made.append(type(self))
            create(self, *arguments)

        monkeypatch.setattr(kind, "__init__", counted)
    for sequences in (19, 20):
        _operator(**{k: x.float() for k, x in _inputs(sequences).items()})
    assert made == [PremultipliedRows, eager.ProductRows]


@pytest.mark.parametrize("block", [1, 700, 5000])
def test_blocks_batches_strides_and_parts(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch in place, the right side in parts, in blocks of one pair, some columns and some rows."""
    inputs = {k: x.float() for k, x in _inputs(3, rows=7, columns=33, c=4, c_z=24, batch=(2, 1)).items()}
    assert _pays(inputs)
    pair = torch.randn(2, 1, 33, 7, 24).transpose(2, 3)
    expected = pair + reference.outer_product_mean(**inputs)
    monkeypatch.setattr(eager, "BLOCK", block)
    parts = iter(inputs["right"].split(2, -3))
    rows = PremultipliedRows(
        inputs["left"], parts, inputs["right_mask"], inputs["weight"], inputs["bias"], EPS
    )
    for part in (slice(0, 3), slice(3, 7)):
        out = pair[:, :, part]
        rows(out, inputs["left"][..., part, :], inputs["left_mask"][..., part], out)
    assert relative_error(pair, expected) < 1e-6
    largest = max(x.numel() for x in rows._scratch.buffers.values())
    assert largest <= max(block, 3 * 4 * 24)  # no less than one row's weights


def test_pairs_without_common_sequences_are_finite() -> None:
    inputs = {k: x.float() for k, x in _inputs(3).items()}
    inputs["left_mask"].zero_()
    assert _pays(inputs)
    out = _operator(**inputs)
    assert relative_error(out, (inputs["bias"] / 1e-3).expand_as(out)) < 1e-6


def test_without_sequences_or_positions() -> None:
    for sizes in ((0, 5, 37), (2, 0, 37), (2, 5, 0)):
        inputs = {k: x.float() for k, x in _inputs(*sizes).items()}
        out = _operator(**inputs)
        assert out.shape == (sizes[1], sizes[2], 128)
        assert torch.allclose(out, reference.outer_product_mean(**inputs))


@pytest.mark.parametrize(
    ("products", "units", "most"), [("int8", False, 15), ("int8", True, 4), ("bf16", True, 4)]
)
def test_products_in_less_than_float32(
    products: Products, units: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folding has to be faster by more then; it is as exact as in float32; and float64 data are left alone."""
    monkeypatch.setattr(linear, "multiplies_bfloat16", lambda: units)
    few = _inputs(most)
    with reduced_products(products):
        assert _pays(few)
        assert not _pays(_inputs(most + 1))
        assert _pays(_inputs(19), torch.float64)
        found = _operator(**{k: x.float() for k, x in few.items()})
    assert relative_error(found, reference.outer_product_mean(**few)) < 2e-6


def test_premultiplying_has_to_beat_the_products_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "onednn_multiplies", lambda: True)
    few = _inputs(10)
    assert _pays(few)
    assert not _pays(_inputs(11))
    assert _pays(_inputs(19), torch.float64)
    for inputs in (few, _inputs(11)):
        found = _operator(**{k: x.float() for k, x in inputs.items()})
        assert relative_error(found, reference.outer_product_mean(**inputs)) < 2e-6


def test_a_rows_weights_are_no_more_than_a_block() -> None:
    """With more channels of a column than of a pair the multiply-adds are always fewer."""
    assert _pays(_inputs(8192, rows=1, columns=9, c=8, c_z=4))
    assert not _pays(_inputs(8193, rows=1, columns=9, c=8, c_z=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequences", [1, 3])
def test_gradients_of_the_sides_alone(sequences: int, dtype: torch.dtype) -> None:
    inputs = _inputs(sequences)
    check_against_definition(_operator, reference.outer_product_mean, inputs, dtype, MASKS | PARAMETERS)


@pytest.mark.parametrize("block", [1, 700, 5000])
def test_gradients_in_blocks_of_a_batch(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, with a gradient that is not contiguous, in blocks of one pair and of several rows and columns."""
    inputs = _inputs(3, rows=7, columns=33, c=4, c_z=24, batch=(2, 1))
    for name in SIDES:
        inputs[name].requires_grad_()
    grad = torch.randn(2, 1, 33, 7, 24, dtype=torch.float64).transpose(2, 3)
    expected = torch.autograd.grad(
        reference.outer_product_mean(**inputs), [inputs["left"], inputs["right"]], grad
    )
    monkeypatch.setattr(eager, "BLOCK", block)
    found = side_gradients(grad, OuterProductParams(**{k: x.detach() for k, x in inputs.items()}), EPS)
    for one, wanted in zip(found, expected, strict=True):
        assert relative_error(one, wanted) < 1e-12


def test_gradients_are_premultiplied_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def pays(sequences: int, needed: frozenset[str] = SIDES, dtype: torch.dtype = torch.float32) -> bool:
        inputs = {k: x.to(dtype) for k, x in _inputs(sequences, rows=37).items()}
        return premultiplying_pays_backward(OuterProductParams(**inputs), needed)

    assert pays(1)
    assert not pays(1, SIDES | {"weight"})
    assert not pays(1, SIDES | {"bias"})
    for sequences in range(1, 40):
        # Multiply-adds of all 37 rows and columns: two products of pairs, and two of columns with the weight.
        premultiplied = 2 * sequences * (37 * 37 * 32 * 128 + 37 * 32 * 32 * 128)
        products = 37 * 37 * 32 * 32 * (2 * sequences + 128)
        assert pays(sequences) == (premultiplied < products), sequences
    called: list[int] = []
    monkeypatch.setattr(
        "fastfold.kernels.ops.outer_product_mean.op.side_gradients",
        lambda *call: called.append(1) or side_gradients(*call),
    )
    for names in (SIDES, SIDES | {"weight"}):
        inputs = {k: x.float() for k, x in _inputs(1).items()}
        for name in names:
            inputs[name].requires_grad_()
        _operator(**inputs).sum().backward()
    assert called == [1]
