"""Products of backward passes: none for frozen parameters, and none twice where there is room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastfold import kernels
from fastfold.kernels.common.cost import OPERATOR_COSTS
from fastfold.kernels.cpu.linear import reduced_products
from fastfold.kernels.cpu.products import multiplies_bfloat16
from fastfold.kernels.ops.gated_attention import eager as attention_blocks
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.gated_attention.passes import can_keep, compute_gradients
from fastfold.kernels.ops.triangle_multiplication import eager
from fastfold.kernels.ops.triangle_multiplication import passes as triangle
from fastfold.kernels.ops.triangle_multiplication.params import TriangleParams
from tests.helpers.kernel_checks import BACKENDS, DEVICE
from tests.helpers.named_operators import gated_attention, triangle_multiplication

ROWS, LENGTH, CHANNELS, HEADS, WIDTH = 3, 5, 24, 2, 32


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def _attention() -> GatedAttentionParams:
    return GatedAttentionParams(
        norm_weight=1 + 0.2 * _normal(CHANNELS),
        norm_bias=_normal(CHANNELS),
        query_weight=_normal(WIDTH, CHANNELS) / 5,
        key_weight=_normal(WIDTH, CHANNELS) / 4,
        value_weight=_normal(WIDTH, CHANNELS) / 3,
        gate_weight=_normal(WIDTH, CHANNELS) / 2,
        gate_bias=_normal(WIDTH),
        output_weight=_normal(CHANNELS, WIDTH),
        output_bias=_normal(CHANNELS),
    )


def _triangle() -> TriangleParams:
    c, c_z = WIDTH, CHANNELS
    shapes = [(c_z,), (c_z,), (2 * c, c_z), (2 * c,), (2 * c, c_z), (2 * c,), (c,), (c,), (c_z, c), (c_z,)]
    return TriangleParams(*(_normal(*shape) / 3 for shape in (*shapes, (c_z, c_z), (c_z,))))


def _data_gradients(
    operator: Any, inputs: dict[str, Any], parameters: Any, trained: set[str]
) -> list[Tensor]:
    """Gradients of the inputs, and of the trained parameters as they appear."""
    leaves = {name: x.detach().requires_grad_(name in trained) for name, x in parameters._asdict().items()}
    data = {name: x.detach().requires_grad_(name != "mask") for name, x in inputs.items()}
    operator(**data, **leaves).square().sum().backward()
    assert {name for name, x in leaves.items() if x.grad is not None} == trained
    return [x.grad for x in (*data.values(), *leaves.values()) if x.grad is not None]


@pytest.mark.parametrize("backend", BACKENDS)
def test_gated_attention_with_frozen_parameters_has_the_same_gradients_of_data(backend: str) -> None:
    inputs = {"x": _normal(ROWS, LENGTH, CHANNELS), "bias": _normal(HEADS, LENGTH, LENGTH)}
    inputs["mask"] = (_normal(ROWS, LENGTH) > -1).float()
    parameters = _attention()

    def operator(**arguments: Any) -> Tensor:
        return gated_attention(**arguments, heads=HEADS, backend=backend)

    trained = _data_gradients(operator, inputs, parameters, set(parameters._fields))
    frozen = _data_gradients(operator, inputs, parameters, set())
    assert len(frozen) == 2
    assert all(torch.equal(a, b) for a, b in zip(frozen, trained, strict=False))
    one = _data_gradients(operator, inputs, parameters, {"key_weight"})
    assert torch.equal(one[2], trained[2 + parameters._fields.index("key_weight")])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "half", [{"gate_weight"}, {"out_gate_bias"}, {"norm_in_bias", "norm_out_weight"}, set()]
)
def test_triangle_multiplication_with_frozen_parameters_has_the_same_gradients(
    half: set[str], backend: str
) -> None:
    inputs = {"z": _normal(LENGTH, LENGTH, CHANNELS), "mask": (_normal(LENGTH, LENGTH) > -1).float()}
    parameters = _triangle()

    def operator(**arguments: Any) -> Tensor:
        return triangle_multiplication(**arguments, outgoing=True, backend=backend)

    trained = _data_gradients(operator, inputs, parameters, set(parameters._fields))
    partly = _data_gradients(operator, inputs, parameters, half)
    expected = [
        trained[0],
        *(g for g, name in zip(trained[1:], parameters._fields, strict=True) if name in half),
    ]
    assert len(partly) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(partly, expected, strict=True))


def _flops(compute: Any, *arguments: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        compute(*arguments, **options)
    return counter.get_total_flops()


def test_products_for_gradients_of_attention_weights_are_left_out_and_not_counted() -> None:
    x = torch.randn(ROWS, LENGTH, CHANNELS)
    parameters = [p.cpu() for p in _attention().present()]
    call: dict[str, Any] = {"x": x, "out": [], "bias": None, "mask": None, "dropout": None}
    call |= {"parameters": parameters, "heads": HEADS, "add_x": False, "backend": "torch"}
    needs = [[True, False] + [trained] * len(parameters) for trained in (True, False)]
    trained, frozen = (_flops(compute_gradients, x, **call, needs=n) for n in needs)
    of_weights = 2 * ROWS * LENGTH * CHANNELS * (4 + 1) * WIDTH
    assert trained - frozen == of_weights
    costs = [OPERATOR_COSTS["gated_attention_backward"](call | {"needs": n}).flops for n in needs]
    assert costs[0] - costs[1] == of_weights


def test_products_for_gradients_of_triangle_weights_are_left_out_and_not_counted() -> None:
    z, mask = torch.randn(LENGTH, LENGTH, CHANNELS), torch.ones(LENGTH, LENGTH)
    parameters = TriangleParams(*(p.cpu() for p in _triangle()))
    call: dict[str, Any] = {"z": z, "mask": mask, "dropout": None, "parameters": parameters}
    call |= {"outgoing": False, "add_z": False, "backend": "torch"}
    needs = {
        half: [True, *(half in ("both", own) for own in ["first"] * 6 + ["second"] * 6)]
        for half in ("both", "first", "second", "none")
    }
    flops = {half: _flops(triangle.backward, z, **call, needs=needs[half]) for half in needs}
    costs = {
        half: OPERATOR_COSTS["triangle_multiplication_backward"](call | {"needs": needs[half]}).flops
        for half in needs
    }
    pairs = LENGTH * LENGTH
    first, second = 2 * pairs * CHANNELS * 4 * WIDTH, 2 * pairs * CHANNELS * (WIDTH + CHANNELS)
    for counted in (flops, costs):
        assert counted["both"] - counted["second"] == counted["first"] - counted["none"] == first
        assert counted["both"] - counted["first"] == counted["second"] - counted["none"] == second


def test_small_projections_of_triangles_are_multiplied_once_in_a_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z, mask = torch.randn(2, LENGTH, LENGTH, CHANNELS), torch.ones(2, LENGTH, LENGTH)
    parameters = TriangleParams(*(p.cpu() for p in _triangle()))
    call: dict[str, Any] = {"z": z, "mask": mask, "dropout": None, "parameters": parameters}
    call |= {"outgoing": True, "add_z": True, "backend": "torch", "needs": [True] * 13}
    kept = triangle.backward(z, **call)
    flops = _flops(triangle.backward, z, **call)
    monkeypatch.setattr(eager, "_KEPT", 4 * WIDTH * LENGTH**2 - 1)
    assert _flops(triangle.backward, z, **call) - flops == 2 * z.numel() * 4 * WIDTH
    for a, b in zip(kept, triangle.backward(z, **call), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("gated", [True, False])
def test_kept_projections_of_attention_give_the_same_gradients(
    gated: bool, batch: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of rows, a masked row, dropout and a residual."""
    monkeypatch.setattr(attention_blocks, "row_step", lambda x: 2)
    group = GatedAttentionParams(*(None if p is None else p.cpu().to(dtype) for p in _attention()))
    if not gated:
        group = group._replace(gate_weight=None, gate_bias=None)
    leaves = [p.requires_grad_() for p in group.present()]
    x = torch.randn(*batch, ROWS, LENGTH, CHANNELS, dtype=dtype, requires_grad=True)
    bias = torch.randn(*batch, HEADS, LENGTH, LENGTH, dtype=dtype, requires_grad=True)
    mask = (torch.rand(*batch, ROWS, LENGTH) > 0.3).to(dtype)
    mask[..., 0, :] = 0
    dropout = 1.5 * (torch.rand(*batch, 1, LENGTH, CHANNELS) > 0.3).to(dtype)
    results = []
    for keep in (False, True):
        out = kernels.gated_attention(
            x, bias, mask, group, heads=HEADS, residual=x, dropout=dropout, keep=keep, backend="torch"
        )
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, bias, *leaves])])
    for plain, kept in zip(*results, strict=True):
        torch.testing.assert_close(kept, plain)


def test_kept_projections_of_attention_are_not_multiplied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "row_step", lambda x: 2)
    x, parameters = torch.randn(ROWS, LENGTH, CHANNELS), [p.cpu() for p in _attention().present()]
    _, kept = torch.ops.fastfold.gated_attention(
        x, None, None, None, None, parameters, heads=HEADS, add_x=False, keep=True, backend="torch"
    )
    assert kept.shape == (4, ROWS, HEADS, LENGTH, WIDTH // HEADS)
    call: dict[str, Any] = {
        "out": [],
        "bias": None,
        "mask": None,
        "dropout": None,
        "parameters": parameters,
    }
    call |= {"heads": HEADS, "add_x": False, "backend": "torch", "needs": [True, False, True]}
    plain, saved = (_flops(compute_gradients, x, x, **call | {"out": out}) for out in ([], [kept]))
    of_projections = 2 * ROWS * LENGTH * CHANNELS * 4 * WIDTH
    assert plain - saved == of_projections
    costs = [
        OPERATOR_COSTS["gated_attention_backward"](call | {"x": x, "out": out}).flops for out in ([], [kept])
    ]
    assert costs[0] - costs[1] == of_projections


def test_projections_are_kept_in_the_dtype_of_data_while_gradients_are_recorded() -> None:
    x = torch.randn(ROWS, LENGTH, CHANNELS, requires_grad=True)
    assert can_keep(x)
    assert can_keep(x.bfloat16()) == multiplies_bfloat16()
    assert not can_keep(x.half())
    with torch.no_grad():
        assert not can_keep(x)
    with reduced_products("bf16"):
        assert not can_keep(x)
