"""Groups of parameters and of gradients, and the numbers that operators share."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common import layout
from fastfold.kernels.common.parameters import (
    Totals,
    cast_grads,
    empty_grads,
    grads_or_none,
    in_dtype,
    like_first,
    needed_names,
    with_exact_norms,
    zeros_of,
)


class _Group(NamedTuple):
    norm_weight: Tensor
    weight: Tensor
    normal: Tensor


GROUP = _Group(torch.ones(3), torch.ones(3, 2).t(), torch.ones(2))


def test_weights_are_read_in_a_dtype_and_norms_exactly() -> None:
    found = in_dtype(GROUP, torch.bfloat16)
    assert isinstance(found, _Group)
    assert [x.dtype for x in found] == [
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]  # by the name's beginning
    assert all(x.is_contiguous() for x in found)
    assert torch.equal(found.weight.float(), GROUP.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("given_norms", [torch.bfloat16, torch.float32, torch.float64])
def test_pytorchs_parameters_are_cast_only_if_one_has_to_be(
    dtype: torch.dtype, given: torch.dtype, given_norms: torch.dtype
) -> None:
    group = _Group(
        torch.ones(3, dtype=given_norms), torch.ones(2, dtype=given), torch.ones(2, dtype=given_norms)
    )
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    found = with_exact_norms(group, dtype)
    assert [x.dtype for x in found] == [exact, dtype, exact]
    assert (found is group) == ([x.dtype for x in group] == [exact, dtype, exact])


def test_totals_begin_at_zero() -> None:
    found = zeros_of(GROUP, torch.float64)
    assert isinstance(found, _Group)
    assert all(x.dtype == torch.float64 and x.shape == y.shape for x, y in zip(found, GROUP, strict=True))
    assert not any(x.any() for x in found)
    assert all(x.data_ptr() != y.data_ptr() for x, y in zip(found, GROUP, strict=True))


def test_gradients_of_blocks_are_added_to_those_of_the_first() -> None:
    totals, first = Totals(), torch.full((3, 2), 2.0)
    totals.add(weight=first)
    totals.add(weight=torch.ones(3, 2))
    norm, weight, normal = totals.of(GROUP, {"weight", "norm_weight"})
    assert weight is first
    assert torch.equal(first, torch.full((3, 2), 3.0))
    assert norm is not None
    assert (norm.dtype, norm.tolist(), normal) == (torch.float32, [0.0] * 3, None)


def test_gradients_that_nobody_needs_are_empty_and_then_none() -> None:
    """Of an operator's list, by shapes alone as with data, and what autograd gets of it."""
    inputs = [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4), torch.ones(5)]
    needs = [True, False, False]
    grads = cast_grads([torch.full((2, 3), 0.5), None, torch.ones(5)], inputs, needs)
    assert [(x.shape, x.dtype) for x in grads] == [
        ((2, 3), torch.bfloat16),
        ((0,), torch.float32),
        ((0,), torch.float32),
    ]
    assert (grads[0] == 0.5).all()
    assert [(x.shape, x.dtype) for x in empty_grads(inputs, needs)] == [(x.shape, x.dtype) for x in grads]
    first, *others = grads_or_none(grads, needs)
    assert first is grads[0]
    assert others == [None, None]
    assert needed_names(("a", "b", "c"), (True, False, True)) == {"a", "c"}


def test_an_operator_like_its_first_argument_has_its_shape() -> None:
    x = torch.ones(2, 3, dtype=torch.float16, device="meta")
    found = like_first(x, None, 3, backend="torch")
    assert (found.shape, found.dtype, found.device.type) == (x.shape, x.dtype, "meta")


def test_a_masked_logit_has_no_weight_beside_others_and_the_same_among_its_own() -> None:
    """In every dtype that logits have, and it survives the addition of a bias in float32."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        masked = torch.tensor(layout.MASKED_LOGIT, dtype=dtype)
        assert masked.isfinite()
        assert torch.softmax(torch.stack([masked, torch.tensor(-1e4, dtype=dtype)]), -1).tolist() == [
            0.0,
            1.0,
        ]
    alone = torch.full((4,), layout.MASKED_LOGIT)
    assert torch.softmax(alone, -1).tolist() == [0.25] * 4


def test_heads_fit_into_one_product() -> None:
    """A matrix product of Triton takes 16 columns at least: more heads than that would need a second block."""
    assert layout.MAX_HEADS == 16
