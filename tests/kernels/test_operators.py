"""Every operator equals its plain definition: outputs and each gradient, by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from fastfold import kernels
from fastfold.kernels import reference
from tests.helpers import named_operators
from tests.helpers.exact_gradients import exact_gradients


@dataclass(frozen=True)
class Case:
    """An operator with inputs of one size; names in ``constants`` receive no gradient."""

    operator: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    inputs: dict[str, Any]
    constants: frozenset[str]


def _mask(*shape: int) -> Tensor:
    mask = (torch.rand(*shape) > 0.3).double()
    if mask.numel():
        mask.reshape(-1, shape[-1])[0] = 0.0  # a row that is masked completely
    return mask


def _norm(c: int, prefix: str = "norm") -> dict[str, Tensor]:
    return {f"{prefix}_weight": 1 + 0.2 * _randn(c), f"{prefix}_bias": 0.2 * _randn(c)}


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def case_of(name: str, n: int, batch: tuple[int, ...] = ()) -> Case:
    torch.manual_seed(n + len(batch))
    if name == "layer_norm":
        inputs: dict[str, Any] = {"x": _randn(*batch, n, 12), "weight": _randn(12), "bias": _randn(12)}
        return Case(kernels.layer_norm, reference.layer_norm, inputs, frozenset())
    if name == "attention":
        inputs = {key: _randn(*batch, 3, n, 2, 8) for key in "qkv"}
        inputs |= {
            "bias": _randn(*batch, 2, n, n),
            "mask": _mask(*batch, 3, n),
            "gate": _randn(*batch, 3, n, 2, 8),
        }
        return Case(kernels.attention, reference.attention, inputs, frozenset({"mask"}))
    if name == "gated_attention":
        inputs = {"x": _randn(*batch, 3, n, 12), "bias": _randn(*batch, 2, n, n), "mask": _mask(*batch, 3, n)}
        inputs |= _norm(12) | {
            f"{part}_weight": _randn(16, 12) / 3 for part in ("query", "key", "value", "gate")
        }
        inputs |= {"gate_bias": _randn(16), "output_weight": _randn(12, 16) / 3, "output_bias": _randn(12)}
        return Case(
            named_operators.gated_attention,
            reference.gated_attention,
            inputs | {"heads": 2},
            frozenset({"mask"}),
        )
    if name == "outer_product_mean":
        inputs = {"left": _randn(*batch, 5, n, 4), "right": _randn(*batch, 5, n + 2, 4)}
        inputs |= {"left_mask": _mask(*batch, 5, n), "right_mask": _mask(*batch, 5, n + 2)}
        inputs |= {"weight": _randn(6, 16), "bias": _randn(6)}
        masks = frozenset({"left_mask", "right_mask"})
        return Case(kernels.outer_product_mean, reference.outer_product_mean, inputs, masks)
    if name == "pair_bias":
        inputs = {"z": _randn(*batch, n, n, 12)} | _norm(12) | {"weight": _randn(2, 12)}
        return Case(kernels.pair_bias, reference.pair_bias, inputs, frozenset())
    if name == "residual_update":
        inputs = {key: _randn(*batch, 3, n, 12) for key in ("x", "residual", "gate")} | {"bias": _randn(12)}
        inputs["dropout"] = 2.0 * (_randn(*batch, 1, n, 12) > 0)
        constants = frozenset({"dropout"})
        return Case(kernels.residual_update, reference.residual_update, inputs, constants)
    if name == "transition":
        inputs = {"x": _randn(*batch, n, 12)} | _norm(12)
        inputs |= {"w1": _randn(48, 12) / 3, "b1": _randn(48), "w2": _randn(12, 48) / 6, "b2": _randn(12)}
        return Case(named_operators.transition, reference.transition, inputs, frozenset())
    if name == "triangle_factors":
        inputs = {"z": _randn(*batch, n, n + 2, 12), "mask": _mask(*batch, n, n + 2)} | _norm(12)
        inputs |= {"proj_weight": _randn(16, 12) / 3, "proj_bias": _randn(16)}
        inputs |= {"gate_weight": _randn(16, 12) / 3, "gate_bias": _randn(16)}
        return Case(named_operators.triangle_factors, reference.triangle_factors, inputs, frozenset({"mask"}))
    if name == "triangle_update":
        inputs = {"product": _randn(*batch, 8, n, n + 2), "z": _randn(*batch, n, n + 2, 12)}
        inputs |= _norm(12) | _norm(8, "norm_out") | {"out_weight": _randn(12, 8) / 3, "out_bias": _randn(12)}
        inputs |= {"out_gate_weight": _randn(12, 12) / 3, "out_gate_bias": _randn(12)}
        return Case(named_operators.triangle_update, reference.triangle_update, inputs, frozenset())
    inputs = (
        {"z": _randn(*batch, n, n, 12), "mask": _mask(*batch, n, n)}
        | _norm(12, "norm_in")
        | _norm(8, "norm_out")
    )
    inputs |= {"proj_weight": _randn(16, 12) / 3, "proj_bias": _randn(16)}
    inputs |= {"gate_weight": _randn(16, 12) / 3, "gate_bias": _randn(16)}
    inputs |= {"out_weight": _randn(12, 8) / 3, "out_bias": _randn(12)}
    inputs |= {"out_gate_weight": _randn(12, 12) / 3, "out_gate_bias": _randn(12)}
    inputs["outgoing"] = name.endswith("outgoing")
    return Case(
        named_operators.triangle_multiplication,
        reference.triangle_multiplication,
        inputs,
        frozenset({"mask"}),
    )


NAMES = [
    "layer_norm",
    "attention",
    "gated_attention",
    "outer_product_mean",
    "pair_bias",
    "residual_update",
    "transition",
    "triangle_multiplication_outgoing",
    "triangle_multiplication_incoming",
    "triangle_factors",
    "triangle_update",
]
RESIDUAL = {"gated_attention": "x", "transition": "x", "triangle_multiplication_outgoing": "z"}


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def gradients_of(
    function: Callable[..., Tensor], case: Case, dtype: torch.dtype, rounded: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output and gradients of a weighted sum of it, by name; inputs and weights are rounded to ``rounded`` first."""
    inputs = _cast(_cast(case.inputs, rounded or dtype), dtype)
    leaves = {
        k: v.requires_grad_() for k, v in inputs.items() if isinstance(v, Tensor) and k not in case.constants
    }
    out = function(**(inputs | leaves))
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = weight.to(rounded or dtype).to(dtype)
    (out * weight).sum().backward()
    return {"output": out.detach()} | {
        key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None
    }


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 17, 129])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-6), (torch.bfloat16, 5e-3)]
)
def test_output_and_gradients_equal_the_definition(
    name: str, n: int, dtype: torch.dtype, tolerance: float
) -> None:
    case = case_of(name, n)
    # The inputs are rounded for both: what is compared is the arithmetic.
    exact = gradients_of(case.definition, case, torch.float64, dtype)
    with exact_gradients():
        found = gradients_of(case.operator, case, dtype)
    if dtype is torch.float32:
        # Gradients of weights are sums over up to n · (n + 2) positions. Some processors add them one after another,
        # and the error of such a sum grows with the root of their number.
        tolerance = max(tolerance, 2**-24 * (n + 1))
    scale = max(float(value.norm()) for value in exact.values())
    assert found.keys() == exact.keys()
    for key, value in exact.items():
        # Gradients that cancel to nothing are measured against the largest one.
        close = float((found[key].double() - value).norm()) <= 1e-12 * scale
        assert close or _error(found[key], value) < tolerance, key


@pytest.mark.parametrize("name", NAMES)
def test_leading_dimensions_and_strides_do_not_matter(name: str) -> None:
    case = case_of(name, 7, batch=(2, 3))
    strided = {
        k: v.transpose(-1, -2).contiguous().transpose(-1, -2) if isinstance(v, Tensor) and v.dim() > 1 else v
        for k, v in case.inputs.items()
    }
    torch.testing.assert_close(
        case.operator(**strided), case.definition(**case.inputs), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("name", list(RESIDUAL))
def test_residual_dropout_and_out(name: str) -> None:
    case = case_of(name, 9)
    x = case.inputs[RESIDUAL[name]]
    update = case.definition(**case.inputs)
    torch.testing.assert_close(case.operator(**case.inputs, residual=x), x + update, rtol=1e-11, atol=1e-11)
    out = x.clone()
    inputs = case.inputs | {RESIDUAL[name]: out}
    with torch.no_grad():
        result = case.operator(**inputs, residual=out, out=out)
    assert result.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, x + update, rtol=1e-11, atol=1e-11)
    if name != "transition":
        dropout = (torch.rand(x.shape[-1:]) > 0.5).double() * 2
        torch.testing.assert_close(
            case.operator(**case.inputs, residual=x, dropout=dropout),
            x + dropout * update,
            rtol=1e-11,
            atol=1e-11,
        )


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_no_operator(name: str) -> None:
    """Forward and backward pass, with and without PyTorch's dispatcher: the dtypes of the tensors decide."""
    case = case_of(name, 9)
    plain = gradients_of(case.operator, case, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_of(case.operator, case, torch.float32)
    assert found.keys() == plain.keys()
    for key, value in plain.items():
        assert torch.equal(found[key], value), key
    inputs = _cast(case.inputs, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(case.operator(**inputs), plain["output"])
        if "out" in inspect.signature(case.operator).parameters:
            out = torch.empty_like(plain["output"])
            assert torch.equal(case.operator(**inputs, out=out), plain["output"])


@pytest.mark.parametrize(
    ("name", "key"), [("attention", "bias"), ("attention", "mask"), ("attention", "gate")]
)
def test_leaving_out_an_argument_shows(name: str, key: str) -> None:
    """The comparison with the definition would notice a bias, mask or gate that is dropped."""
    case = case_of(name, 17)
    changed = case.operator(**(case.inputs | {key: None}))
    assert _error(changed, case.definition(**case.inputs)) > 0.05


def test_a_row_without_keys_gives_the_mean_of_its_values() -> None:
    case = case_of("attention", 17)
    inputs = case.inputs | {"gate": None}
    out = kernels.attention(**inputs)
    torch.testing.assert_close(out[0], inputs["v"][0].mean(0).expand_as(out[0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_operators_work_under_activation_checkpointing(name: str, reentrant: bool) -> None:
    case = case_of(name, 9)
    keys = [k for k, v in case.inputs.items() if isinstance(v, Tensor)]
    rest = {k: v for k, v in case.inputs.items() if k not in keys}

    def recomputed(**inputs: Any) -> Tensor:
        def positional(*values: Tensor) -> Tensor:
            return case.operator(**dict(zip(keys, values, strict=True)), **rest)

        return checkpoint(positional, *(inputs[k] for k in keys), use_reentrant=reentrant)

    plain = gradients_of(case.operator, case, torch.float64)
    found = gradients_of(recomputed, case, torch.float64)
    assert found.keys() == plain.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, plain[key], msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_derivatives_of_forward_mode_are_refused_for_each_input(name: str) -> None:
    """PyTorch would return zeros for a custom operator."""
    case = case_of(name, 5)
    for key, value in case.inputs.items():
        if not isinstance(value, Tensor):
            continue

        def of_input(x: Tensor, key: str = key) -> Tensor:
            return case.operator(**case.inputs | {key: x})

        with pytest.raises(RuntimeError, match=r"forward mode.*fastfold\.kernels\.reference"):
            torch.func.jvp(of_input, (value,), (torch.ones_like(value),))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward mode"):
            of_input(forward_ad.make_dual(value, torch.ones_like(value)))


def test_operators_on_constants_run_within_a_derivative_of_forward_mode() -> None:
    case = case_of("layer_norm", 5)
    constant = case.operator(**case.inputs)
    _, tangent = torch.func.jvp(
        lambda t: t * case.operator(**case.inputs), (torch.ones(()),), (torch.ones(()),)
    )
    torch.testing.assert_close(tangent, constant)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inference", [False, True])
def test_transforms_of_functions_are_right_or_refused(name: str, inference: bool) -> None:
    case = case_of(name, 3)
    key, x = next(iter(case.inputs.items()))

    def result(function: Callable[..., Tensor], x: Tensor) -> Tensor:
        return function(**case.inputs | {key: x})

    mapped = torch.func.vmap(functools.partial(result, case.operator))
    batch = torch.stack([x, x / 2])
    with torch.inference_mode(inference):
        if name in ("layer_norm", "residual_update"):  # PyTorch maps operators without lists
            expected = torch.stack([result(case.definition, x) for x in batch])
            torch.testing.assert_close(mapped(batch), expected)
        else:
            with pytest.raises(RuntimeError, match=r"instead of vmap.*fastfold\.kernels\.reference"):
                mapped(batch)
    if not inference:
        with pytest.raises(RuntimeError, match=r"torch\.autograd\.grad.*fastfold\.kernels\.reference"):
            torch.func.grad(lambda x: result(case.operator, x).sum())(x)


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_refused_and_the_definition_has_them(name: str) -> None:
    case = case_of(name, 3)
    key = next(k for k, v in case.inputs.items() if isinstance(v, Tensor) and k not in case.constants)
    x = case.inputs[key].clone().requires_grad_()
    for function in (case.operator, case.definition):
        (gradient,) = torch.autograd.grad(
            function(**case.inputs | {key: x}).square().sum(), x, create_graph=True
        )
        if function is case.operator:
            with pytest.raises(RuntimeError, match=r"second derivatives.*fastfold\.kernels\.reference"):
                gradient.square().sum().backward()
        else:
            gradient.square().sum().backward()
            assert x.grad is not None
            assert bool(x.grad.isfinite().all())
