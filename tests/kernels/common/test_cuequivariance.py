"""cuEquivariance as a backend: its conventions are met, and a request that cannot be served is refused.

The package needs a GPU, so a module with the definitions that it documents replaces it.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from fastfold import kernels
from fastfold.errors import ConfigError
from fastfold.kernels.common import cuequivariance
from fastfold.kernels.common.backend import choose_backend
from fastfold.kernels.ops.gated_attention import op as attention_op
from fastfold.kernels.ops.gated_attention.eager import GatedAttentionParams
from fastfold.kernels.ops.gated_attention.op import gated_attention_definition
from fastfold.kernels.ops.triangle_multiplication.op import triangle_multiplication_definition
from fastfold.kernels.ops.triangle_multiplication.params import TriangleParams
from tests.helpers import named_operators

N, C, HEADS = 7, 8, 2


def triangle_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Queries ``[B, N, H, Q, D]``, bias ``[B, 1, H, Q, K]`` and mask ``[B, N, 1, 1, K]``."""
    logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias
    if mask is not None:
        logits = logits.masked_fill(~mask, -1e9)
    return logits.softmax(-1) @ v


def triangle_multiplicative_update(
    x: Tensor, direction: str, *, mask: Tensor, eps: float, **w: Tensor
) -> Tensor:
    """The first half of the channels is ``a``, the second ``b``."""
    normed = layer_norm(x, x.shape[-1:], w["norm_in_weight"], w["norm_in_bias"], eps)
    gate = linear(normed, w["g_in_weight"], w["g_in_bias"]).sigmoid()
    a, b = (mask[..., None] * gate * linear(normed, w["p_in_weight"], w["p_in_bias"])).chunk(2, -1)
    equation = "bikd,bjkd->bijd" if direction == "outgoing" else "bkid,bkjd->bijd"
    product = torch.einsum(equation, a, b)
    product = layer_norm(product, product.shape[-1:], w["norm_out_weight"], w["norm_out_bias"], eps)
    out = linear(product, w["p_out_weight"], w["p_out_bias"])
    return out * linear(normed, w["g_out_weight"], w["g_out_bias"]).sigmoid()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(cuequivariance.PACKAGE)
    module.__spec__ = importlib.machinery.ModuleSpec(cuequivariance.PACKAGE, None)
    for function in (triangle_attention, triangle_multiplicative_update):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, cuequivariance.PACKAGE, module)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention_parameters(gate: bool) -> dict[str, Any]:
    weights = {name: random(C, C) for name in ("query_weight", "key_weight", "value_weight", "output_weight")}
    gates = {"gate_weight": random(C, C) if gate else None, "gate_bias": random(C) if gate else None}
    return weights | gates | {name: random(C) for name in ("norm_weight", "norm_bias", "output_bias")}


def triangle_parameters() -> dict[str, Tensor]:
    shapes = {"proj": (2 * C, C), "gate": (2 * C, C), "out": (C, C), "out_gate": (C, C)}
    weights = {f"{name}_weight": random(*shape) for name, shape in shapes.items()}
    biases = {f"{name}_bias": random(shape[0]) for name, shape in shapes.items()}
    norms = {f"norm_{side}_{part}": random(C) for side in ("in", "out") for part in ("weight", "bias")}
    return weights | biases | norms


def gradients(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("gate", [True, False])
def test_attention_is_ours(lead: tuple[int, ...], gate: bool) -> None:
    torch.manual_seed(0)
    w = attention_parameters(gate)
    mask = torch.rand(*lead, 5, N) > 0.3
    mask[..., 0, :] = False
    tensors = [random(*lead, 5, N, C), random(*lead, HEADS, N, N)]
    found = gradients(
        lambda x, b: cuequivariance.gated_attention(x, b, mask, GatedAttentionParams(**w), HEADS), tensors
    )
    wanted = gradients(lambda x, b: gated_attention_definition(x, b, mask, heads=HEADS, **w), tensors)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("outgoing", [True, False])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_triangle_multiplication_is_ours(lead: tuple[int, ...], outgoing: bool) -> None:
    torch.manual_seed(0)
    w = triangle_parameters()
    mask = (torch.rand(*lead, N, N) > 0.3).double()
    z = [random(*lead, N, N, C)]
    found = gradients(
        lambda z: cuequivariance.triangle_multiplication(z, mask, TriangleParams(**w), outgoing), z
    )
    wanted = gradients(lambda z: triangle_multiplication_definition(z, mask, outgoing=outgoing, **w), z)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("installed")
def test_the_device_of_the_tensors_is_current_while_the_package_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernels launch on the current one of several GPUs."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(cuequivariance, "current_device", current_device)
    seen: list[list[torch.device]] = []
    for function in (triangle_attention, triangle_multiplicative_update):
        monkeypatch.setattr(
            sys.modules[cuequivariance.PACKAGE],
            function.__name__,
            lambda *a, function=function, **o: seen.append([*current]) or function(*a, **o),
        )
    w, z = attention_parameters(gate=True), random(N, N, C)
    cuequivariance.gated_attention(z, random(HEADS, N, N), None, GatedAttentionParams(**w), HEADS)
    mask = torch.ones(N, N, dtype=torch.float64)
    cuequivariance.triangle_multiplication(z, mask, TriangleParams(**triangle_parameters()), True)
    assert seen == [[z.device]] * 2


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("in_place", [True, False])
def test_public_operators_add_residual_and_dropout(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    checked: list[Tensor] = []
    monkeypatch.setattr(cuequivariance, "check_support", checked.append)
    z, mask, bias = random(N, N, C), torch.ones(N, N, dtype=torch.float64), random(HEADS, N, N)
    dropout = torch.randint(0, 2, (N, 1, 1)) / 0.5
    out = torch.empty_like(z) if in_place else None
    more: dict[str, Any] = {"residual": z, "dropout": dropout, "out": out, "backend": "cueq"}
    w, t = attention_parameters(gate=True), triangle_parameters()
    attended = named_operators.gated_attention(z, bias, mask, heads=HEADS, **w, **more)
    wanted = z + dropout * gated_attention_definition(z, bias, mask, heads=HEADS, **w)
    torch.testing.assert_close(attended, wanted)
    assert (attended is out) == in_place
    multiplied = named_operators.triangle_multiplication(z, mask, outgoing=True, **t, **more)
    wanted = z + dropout * triangle_multiplication_definition(z, mask, outgoing=True, **t)
    torch.testing.assert_close(multiplied, wanted)
    assert [x is z for x in checked] == [True, True]


def test_it_is_never_chosen_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTFOLD_KERNELS", raising=False)
    x = torch.ones(3)
    assert {choose_backend(x, backend, cueq=True) for backend in (None, "auto", "torch")} == {"torch"}
    monkeypatch.setenv("FASTFOLD_KERNELS", "cueq")
    assert [choose_backend(x, backend, cueq=True) for backend in ("torch", None)] == ["torch", "cueq"]
    with pytest.raises(ConfigError, match="cuequivariance_torch is not installed"):
        cuequivariance.check_support(x)


@pytest.mark.usefixtures("installed")
def test_a_cpu_is_refused_and_other_operators_are_as_with_auto() -> None:
    z, mask = torch.ones(N, N, C), torch.ones(N, N)
    w = {name: p.float() for name, p in triangle_parameters().items()}
    with pytest.raises(ConfigError, match="expected a tensor on an NVIDIA GPU, found cpu"):
        named_operators.triangle_multiplication(z, mask, outgoing=True, **w, backend="cueq")
    x = torch.randn(4, 5)
    torch.testing.assert_close(kernels.residual_update(x, x, backend="cueq"), 2 * x)


def test_only_calls_that_it_serves_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention without a bias is not among them, and tensors without contents are FastFold's own."""
    x, meta = torch.ones(3), torch.ones(3, device="meta")
    assert [choose_backend(x, "cueq", cueq=serves) for serves in (True, False)] == ["cueq", "torch"]
    assert choose_backend(meta, "cueq", cueq=True) == "torch"
    served: list[bool] = []

    def choose(x: Tensor, backend: str, *, fits: bool, cueq: bool) -> str:
        served.append(cueq)
        return "torch"

    monkeypatch.setattr(attention_op, "choose_backend", choose)
    z, w = random(N, N, C), attention_parameters(gate=True)
    for bias in (None, random(HEADS, N, N)):
        named_operators.gated_attention(z, bias, None, heads=HEADS, **w, backend="cueq")
    assert served == [False, True]
