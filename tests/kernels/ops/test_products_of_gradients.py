"""Products of backward passes: none for frozen parameters, and none twice where there is room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastfold import kernels
from fastfold.kernels import TransitionParams
from fastfold.kernels.common.cost import OPERATOR_COSTS
from fastfold.kernels.cpu.linear import can_keep, reduced_products
from fastfold.kernels.cpu.products import multiplies_bfloat16
from fastfold.kernels.ops.attention.eager import has_few_weights
from fastfold.kernels.ops.gated_attention import eager as attention_blocks
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams, Kept, kept_elements
from fastfold.kernels.ops.gated_attention.passes import compute_gradients
from fastfold.kernels.ops.transition import op as transition_blocks
from fastfold.kernels.ops.triangle_multiplication import eager
from fastfold.kernels.ops.triangle_multiplication import passes as triangle
from fastfold.kernels.ops.triangle_multiplication.params import TriangleParams
from tests.helpers.kernel_checks import BACKENDS, DEVICE, relative_error
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


def _transition() -> list[Tensor]:
    """Return the parameters of a transition, with WIDTH hidden channels, on the CPU."""
    shapes = [(CHANNELS,), (CHANNELS,), (WIDTH, CHANNELS), (WIDTH,), (CHANNELS, WIDTH), (CHANNELS,)]
    return [_normal(*shape).cpu() / 3 for shape in shapes]


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
    call: dict[str, Any] = {"z": z, "out": [], "mask": mask, "dropout": None, "parameters": parameters}
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
    call: dict[str, Any] = {"z": z, "out": [], "mask": mask, "dropout": None, "parameters": parameters}
    call |= {"outgoing": True, "add_z": True, "backend": "torch", "needs": [True] * 13}
    kept = triangle.backward(z, **call)
    flops = _flops(triangle.backward, z, **call)
    monkeypatch.setattr(eager, "_KEPT", 4 * WIDTH * LENGTH**2 - 1)
    assert _flops(triangle.backward, z, **call) - flops == 2 * z.numel() * 4 * WIDTH
    for a, b in zip(kept, triangle.backward(z, **call), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("outgoing", [True, False])
def test_kept_projections_of_triangles_give_the_same_gradients(
    outgoing: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks, the last one smaller; masked pairs, dropout and a residual; otherwise some channels at a time."""
    monkeypatch.setattr(eager, "channel_group", lambda c, positions: c // 4)
    n = 67
    z = _normal(n, n, CHANNELS).cpu().to(dtype).requires_grad_()
    mask = (_normal(n, n) > -1).cpu().to(dtype)
    dropout = 1.5 * (_normal(1, n, CHANNELS) > -1).cpu().to(dtype)
    parameters = TriangleParams(*(p.cpu().to(dtype).requires_grad_() for p in _triangle()))
    results = []
    for keep, kept_within in ((False, 0), (False, 2**25), (True, 0)):
        monkeypatch.setattr(eager, "_KEPT", kept_within)
        out = kernels.triangle_multiplication(
            *(z, mask, parameters),
            outgoing=outgoing,
            residual=z,
            dropout=dropout,
            keep=keep,
            backend="torch",
        )
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [z, *parameters])])
    for plain, *kept in zip(*results, strict=True):
        for found in kept:
            torch.testing.assert_close(found, plain)


def test_kept_projections_of_triangles_are_not_multiplied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a backward pass would keep none; those of several pair representations are not kept."""
    monkeypatch.setattr(eager, "_KEPT", 0)
    z, mask = torch.randn(LENGTH, LENGTH, CHANNELS), torch.ones(LENGTH, LENGTH)
    parameters = TriangleParams(*(p.cpu() for p in _triangle()))
    options: dict[str, Any] = {"outgoing": True, "add_z": True, "backend": "torch"}
    operator = torch.ops.fastfold.triangle_multiplication
    _, kept = operator(z, mask, None, None, parameters, **options, keep=True)
    assert kept.shape == (4 * WIDTH * LENGTH**2,)
    call = {"z": z, "mask": mask, "dropout": None, "parameters": parameters, "needs": [True] * 13, **options}
    outs: tuple[list[Tensor], ...] = ([], [kept])
    plain, saved = (_flops(triangle.backward, z, **call | {"out": out}) for out in outs)
    # Projections are computed twice without memory: for the product, and for their gradients.
    of_projections = 2 * z.numel() * 4 * WIDTH
    assert plain - saved == 2 * of_projections
    monkeypatch.setattr(eager, "_KEPT", 2**25)
    plain, saved = (_flops(triangle.backward, z, **call | {"out": out}) for out in outs)
    assert plain - saved == of_projections
    cost = OPERATOR_COSTS["triangle_multiplication_backward"]
    flops = [cost(call | {"out": out}).flops for out in outs]
    assert flops[0] - flops[1] == of_projections
    batch = torch.randn(2, LENGTH, LENGTH, CHANNELS, requires_grad=True)
    saved_sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved_sizes.append(x.numel()) or x, lambda x: x):
        for one in (batch, batch[0]):
            ones = torch.ones(one.shape[:-1])
            kernels.triangle_multiplication(one, ones, parameters, outgoing=True, keep=True, backend="torch")
    assert saved_sizes.count(kept.numel()) == 1
    assert 2 * kept.numel() not in saved_sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("gated", [True, False])
def test_kept_values_of_attention_give_the_same_gradients(
    gated: bool, batch: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks of rows, a masked row, dropout and a residual."""
    monkeypatch.setattr(attention_blocks, "row_step", lambda x: 2)
    group = GatedAttentionParams.of([p.cpu() for p in _attention().present()])
    if not gated:
        group = group._replace(gate_weight=None, gate_bias=None)
    data = {
        "x": torch.randn(*batch, ROWS, LENGTH, CHANNELS),
        "bias": torch.randn(*batch, HEADS, LENGTH, LENGTH),
    }
    mask = (torch.rand(*batch, ROWS, LENGTH) > 0.3).float()
    mask[..., 0, :] = 0
    dropout = 1.5 * (torch.rand(*batch, 1, LENGTH, CHANNELS) > 0.3)

    def run(keep: bool, dtype: torch.dtype) -> list[Tensor]:
        """Return the result, and gradients of data and parameters that are rounded to bfloat16 before."""
        x, bias, *leaves = (
            t.bfloat16().to(dtype).requires_grad_() for t in (*data.values(), *group.present())
        )
        own = GatedAttentionParams.of(leaves)
        out = kernels.gated_attention(
            *(x, bias, mask.to(dtype), own),
            heads=HEADS,
            residual=x,
            dropout=dropout.to(dtype),
            keep=keep,
            backend="torch",
        )
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, bias, *leaves])]

    for exact, plain, kept in zip(
        run(False, torch.float64), run(False, dtype), run(True, dtype), strict=True
    ):
        if dtype == torch.bfloat16:  # weights that are kept have other rounding errors
            assert relative_error(kept, exact) < 2 * relative_error(plain, exact) + 1e-3
        else:
            torch.testing.assert_close(kept, plain)


WITH_WEIGHTS = pytest.mark.skipif(not multiplies_bfloat16(), reason="no units for bfloat16")


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=WITH_WEIGHTS)], ids=["float32", "bfloat16"]
)
def test_kept_values_of_attention_are_not_multiplied_again(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Projections are kept, and in bfloat16 the weights of short rows too."""
    monkeypatch.setattr(attention_blocks, "row_step", lambda x: 2)
    x = torch.randn(ROWS, LENGTH, CHANNELS, dtype=dtype)
    parameters = [p.cpu().to(dtype) for p in _attention().present()]
    _, memory = torch.ops.fastfold.gated_attention(
        x, None, None, None, None, parameters, heads=HEADS, add_x=False, keep=True, backend="torch"
    )
    kept, has_weights = (
        Kept.of(memory, x, GatedAttentionParams.of(parameters), HEADS),
        dtype == torch.bfloat16,
    )
    assert kept.projected.shape == (4, ROWS, HEADS, LENGTH, WIDTH // HEADS)
    assert (kept.weights is not None) == has_weights
    if kept.weights is not None:
        assert kept.weights.shape == (ROWS, HEADS, LENGTH, LENGTH)
        torch.testing.assert_close(
            kept.weights.float().sum(-1), torch.ones(ROWS, HEADS, LENGTH), rtol=0, atol=0.02
        )
    call: dict[str, Any] = {
        "out": [],
        "bias": None,
        "mask": None,
        "dropout": None,
        "parameters": parameters,
    }
    call |= {"heads": HEADS, "add_x": False, "backend": "torch", "needs": [True, False, True]}
    outs: tuple[list[Tensor], ...] = ([], [memory])
    plain, saved = (_flops(compute_gradients, x, x, **call | {"out": out}) for out in outs)
    of_projections, of_weights = 2 * ROWS * LENGTH * CHANNELS * 4 * WIDTH, 2 * ROWS * LENGTH**2 * WIDTH
    # PyTorch does not count oneDNN's products, which are those of projections in bfloat16.
    assert plain - saved == (of_weights if has_weights else of_projections)
    costs = [OPERATOR_COSTS["gated_attention_backward"](call | {"x": x, "out": out}) for out in outs]
    assert costs[0].flops - costs[1].flops == of_projections + has_weights * of_weights
    assert costs[1].exponentials == (0 if has_weights else costs[0].exponentials)


@WITH_WEIGHTS
def test_weights_of_attention_are_kept_if_they_are_no_larger_than_projections() -> None:
    assert has_few_weights(length=128, heads=8, channels=32)
    assert not has_few_weights(length=129, heads=8, channels=32)
    assert not has_few_weights(length=512, heads=8, channels=128)
    for length, weights in ((64, HEADS * 64 * 64), (65, 0)):
        x = torch.randn(1, length, CHANNELS).bfloat16()
        assert kept_elements(x, _attention(), HEADS) == (4 * length * WIDTH, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_kept_intermediate_of_a_transition_gives_the_same_gradients(dtype: torch.dtype) -> None:
    """Rows that are columns of a tensor, in several blocks, with and without a residual."""
    parameters = [p.to(dtype).requires_grad_() for p in _transition()]
    whole = torch.randn(700, 3, CHANNELS, dtype=dtype, requires_grad=True)
    x, other = whole.transpose(0, 1), torch.randn(3, 700, CHANNELS, dtype=dtype)
    for residual in (None, x, other):
        results = []
        for keep in (False, True):
            out = kernels.transition(
                x, TransitionParams(*parameters), residual=residual, keep=keep, backend="torch"
            )
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), [whole, *parameters])])
        for plain, kept in zip(*results, strict=True):
            torch.testing.assert_close(kept, plain)


def test_a_kept_intermediate_of_a_transition_is_not_multiplied_again() -> None:
    x, parameters = torch.randn(ROWS, LENGTH, CHANNELS), _transition()
    operator = torch.ops.fastfold.transition
    _, kept = operator(x, None, False, parameters, True, "torch")
    assert kept.shape == (ROWS * LENGTH, WIDTH)
    normed = torch.nn.functional.layer_norm(x, (CHANNELS,), parameters[0], parameters[1])
    torch.testing.assert_close(kept, (normed.flatten(0, 1) @ parameters[2].T + parameters[3]).relu())
    assert operator(x, None, False, parameters, False, "torch")[1].numel() == 0
    call = (x, x, TransitionParams(*parameters), False, [True] * 7)
    plain, saved = (_flops(transition_blocks.backward, *call, *out) for out in ([], [kept]))
    of_hidden = 2 * ROWS * LENGTH * CHANNELS * WIDTH
    assert plain - saved == of_hidden
    cost = OPERATOR_COSTS["transition_backward"]
    costs = [cost({"x": x, "parameters": parameters, "out": out}).flops for out in ([], [kept])]
    assert costs[0] - costs[1] == of_hidden


def test_projections_are_kept_in_the_dtype_of_data_while_gradients_are_recorded() -> None:
    x = torch.randn(ROWS, LENGTH, CHANNELS, requires_grad=True)
    assert can_keep(x)
    assert can_keep(x.bfloat16()) == multiplies_bfloat16()
    assert not can_keep(x.half())
    with torch.no_grad():
        assert not can_keep(x)
    with reduced_products("bf16"):
        assert not can_keep(x)
