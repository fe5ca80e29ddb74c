"""Backward passes in bfloat16 point where the exact gradients point, by operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, linear

from fastfold.kernels import reference
from fastfold.kernels.common.scratch import Scratch
from fastfold.kernels.cpu.linear import add_products, gradient_dtype
from fastfold.kernels.cpu.products import multiplies_bfloat16
from tests.kernels.test_operators import Case, case_of, gradients_of

COSINES = {
    "attention": 0.9999,
    "gated_attention": 0.9998,
    "layer_norm": 0.99999,
    "outer_product_mean": 0.99998,
    "pair_bias": 0.99998,
    "residual_update": 0.99998,
    "transition": 0.997,
    "triangle_multiplication_outgoing": 0.9998,
    "triangle_multiplication_incoming": 0.9998,
    "triangle_factors": 0.9999,
    "triangle_update": 0.9999,
}
"""Minimum cosine of any gradient with that of the definition in float64, for positions of 12 channels."""

units = pytest.mark.skipif(not multiplies_bfloat16(), reason="this processor has no units for bfloat16")


def _check(found: dict[str, Tensor], exact: dict[str, Tensor], cosine: float) -> None:
    scale = max(float(value.norm()) for value in exact.values())
    assert found.keys() == exact.keys()
    for key, value in exact.items():
        if float(value.norm()) < 1e-9 * scale:  # gradients that cancel to nothing
            assert float(found[key].norm()) < 1e-2 * scale, key
            continue
        assert cosine_similarity(found[key].double().flatten(), value.flatten(), 0) > cosine, key
        assert float(found[key].norm()) == pytest.approx(float(value.norm()), rel=2e-2), key


@units
@pytest.mark.parametrize("n", [17, 129])
@pytest.mark.parametrize("name", COSINES)
def test_cosine_of_every_gradient_with_the_exact_one(name: str, n: int) -> None:
    case = case_of(name, n)
    exact = gradients_of(case.definition, case, torch.float64, torch.bfloat16)
    _check(gradients_of(case.operator, case, torch.bfloat16), exact, COSINES[name])


def _rounded_transition(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, **layers: Any) -> Tensor:
    """The transition's definition with normalised rows as bfloat16 has them."""
    normed = reference.layer_norm(x, norm_weight, norm_bias)
    normed = normed + (normed.detach().float().bfloat16() - normed.detach())
    hidden = linear(normed, layers["w1"], layers["b1"]).relu()
    return linear(hidden, layers["w2"], layers["b2"])


@units
def test_hidden_units_are_on_the_side_of_the_relu_on_which_the_forward_pass_had_them() -> None:
    """Most of a transition's error is that of sides; given them, gradients are as exact as other operators'."""
    case = case_of("transition", 129)
    case = Case(case.operator, _rounded_transition, case.inputs, case.constants)
    exact = gradients_of(case.definition, case, torch.float64, torch.bfloat16)
    _check(gradients_of(case.operator, case, torch.bfloat16), exact, 0.9999)


@units
def test_only_bfloat16_data_have_gradients_in_bfloat16() -> None:
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    found = [gradient_dtype(torch.empty(1, dtype=dtype)) for dtype in dtypes]
    assert found == [torch.float64, torch.float32, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_added_to_a_total_in_an_exact_dtype(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(*batch, 4, 5), torch.randn(*batch, 5, 6)
    total = torch.randn(*batch, 4, 6)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        added = total.clone()
        add_products(added, a.to(dtype), b.to(dtype), Scratch(dtype=dtype))
        assert added.dtype == torch.float32
        torch.testing.assert_close(added, total + a @ b, rtol=tolerance, atol=tolerance)
