"""The two halves of triangle multiplication, on both backends, and how their parameters are arranged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.kernels.common.parameters import in_dtype
from fastfold.kernels.ops.triangle_multiplication import eager, passes, triton_factors, triton_update
from fastfold.kernels.ops.triangle_multiplication.params import FactorParams, TriangleParams, UpdateParams
from tests.helpers.kernel_checks import BACKENDS, DEVICE, relative_error

R, N, C_Z, C = 3, 5, 12, 10
CLOSE = 5e-6


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64
    )


def _factor_params() -> FactorParams:
    weights = (_normal(2 * C, C_Z), _normal(2 * C), _normal(2 * C, C_Z, seed=1), _normal(2 * C, seed=1))
    return FactorParams(1 + _normal(C_Z) / 5, _normal(C_Z, seed=1), *weights)


def _update_params() -> UpdateParams:
    norms = (1 + _normal(C_Z) / 5, _normal(C_Z, seed=1), 1 + _normal(C) / 5, _normal(C, seed=1))
    return UpdateParams(*norms, _normal(C_Z, C), _normal(C_Z), _normal(C_Z, C_Z), _normal(C_Z, seed=2))


def _norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    spread = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    return spread * scale + shift


def _factors(z: Tensor, mask: Tensor, p: FactorParams) -> Tensor:
    """Algorithm 11, lines 1 and 2, channels first: ``[2 c, R, N]``, those of the left factor before the right's."""
    x = _norm(z, p.norm_weight, p.norm_bias)
    gated = (x @ p.gate_weight.T + p.gate_bias).sigmoid() * (x @ p.proj_weight.T + p.proj_bias)
    return (gated * mask[..., None]).permute(2, 0, 1)


def _update(product: Tensor, z: Tensor, p: UpdateParams) -> Tensor:
    """Algorithm 11, lines 3 and 4, behind the sum of line 4."""
    x = _norm(z, p.norm_weight, p.norm_bias)
    y = _norm(product.permute(1, 2, 0), p.norm_out_weight, p.norm_out_bias)
    return (x @ p.out_gate_weight.T + p.out_gate_bias).sigmoid() * (y @ p.out_weight.T + p.out_bias)


def _small(x: Any) -> Any:
    """On the device in float32; groups of parameters as the kernels read them."""
    if isinstance(x, Tensor):
        return x.detach().float().to(DEVICE)
    return in_dtype(type(x)(*map(_small, x)), torch.float32)


Z, MASK, PRODUCT = _normal(R, N, C_Z), (_normal(R, N) > -0.5).double(), _normal(C, R, N)
DROPOUT = torch.tensor([0.0, 2.0, 1.0]).double().view(R, 1, 1).expand(R, N, C_Z)


def test_parameters_are_grouped_by_the_half_that_reads_them() -> None:
    values = {name: torch.full((C_Z, C), float(i)) for i, name in enumerate(TriangleParams._fields)}
    whole = TriangleParams(**values)
    assert whole.channels == C
    for half, renamed in ((whole.factors, "norm_in"), (whole.update, "norm_in")):
        for name, value in half._asdict().items():
            full = name.replace("norm_", f"{renamed}_") if name in ("norm_weight", "norm_bias") else name
            assert value is values[full]


def test_arranged_weights_hold_a_factor_s_projection_before_its_gate() -> None:
    """And their gradients come back in the order of the parameters."""
    p = _factor_params()
    found = eager.arrange_factors(p, torch.float32)
    expected = [p.proj_weight[:C], p.gate_weight[:C], p.proj_weight[C:], p.gate_weight[C:]]
    assert torch.equal(found.projections, torch.cat(expected).float())
    assert torch.equal(found.projections_bias[:C], p.proj_bias[:C].float())
    assert found.norm[0].dtype == torch.float32
    for mine, given in zip(eager.factor_gradients(found), p, strict=True):
        assert torch.equal(mine, given.float())
    some = eager.of_channels(found, 3, 2)
    assert torch.equal(some.projections, torch.cat([x[3:5] for x in expected]).float())
    assert torch.equal(some.projections_bias[2:4], p.gate_bias[3:5].float())
    everything = eager.of_channels(found, 0, C)
    assert torch.equal(everything.projections, found.projections)


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_directions_of_the_first_half(backend: str, others: bool) -> None:
    """Rows alone, as another process has the rest of the pair; an element of a batch of one.

    Others than the factors may have used the normalised pair and the pair: their gradients are added.
    """
    leaves = [x.detach().requires_grad_() for x in (Z, *_factor_params())]
    exact = _factors(leaves[0], MASK, FactorParams(*leaves[1:]))
    grad, of_normed, of_z = (
        _normal(2 * C, R, N, seed=5),
        _normal(R, N, C_Z, seed=6),
        _normal(R, N, C_Z, seed=7),
    )
    used = (exact, _norm(*leaves[:3]), leaves[0]) if others else (exact,)
    expected = torch.autograd.grad(used, leaves, (grad, of_normed, of_z)[: len(used)])
    z, mask, p = _small(Z)[None], _small(MASK)[None], _small(_factor_params())
    out = torch.full((1, 2 * C, R, N), torch.nan, device=DEVICE)
    passes.factors(out, z, mask, p, backend=backend)
    assert relative_error(out[0], exact) < CLOSE
    grad_normed, add = (_small(x)[None] if others else None for x in (of_normed, of_z))
    found = passes.factors_backward(
        *(_small(grad)[None], z, mask, p), grad_normed=grad_normed, add=add, needed=p._fields, backend=backend
    )
    for name, mine, theirs in zip(("z", *p._fields), (found[0][0], *found[1:]), expected, strict=True):
        assert relative_error(mine, theirs) < CLOSE, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_directions_of_the_second_half(backend: str) -> None:
    """The gradient of the normalised pair may be asked for in the place of the pair's own."""
    leaves = [x.detach().requires_grad_() for x in (PRODUCT, Z, *_update_params())]
    params = UpdateParams(*leaves[2:])
    exact = DROPOUT * _update(leaves[0], leaves[1], params)
    grad = _normal(R, N, C_Z, seed=5)
    expected = torch.autograd.grad(exact, leaves, grad)
    product, z, p = _small(PRODUCT)[None], _small(Z)[None], _small(_update_params())
    dropout, out = _small(DROPOUT)[None], z.clone()
    passes.update(out, product, out, p, dropout=dropout, add_z=True, backend=backend)
    assert relative_error(out[0], exact + Z) < CLOSE
    given = (_small(grad)[None], product, z, p)
    found = passes.update_backward(*given, dropout=dropout, normed=False, needed=p._fields, backend=backend)
    values = (found[0][0], found[1][0], *found[2:])
    for name, mine, theirs in zip(("product", "z", *p._fields), values, expected, strict=True):
        assert relative_error(mine, theirs) < CLOSE, name
    assert relative_error(product[0], PRODUCT) < 1e-6  # its gradient went elsewhere
    normed = passes.update_backward(*given, dropout=dropout, normed=True, needed=p._fields, backend=backend)[
        1
    ]
    through_norm = torch.autograd.grad(_norm(*leaves[1:4]), leaves[1], normed[0].double().cpu())[0]
    assert relative_error(through_norm, expected[1]) < CLOSE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("outgoing", [True, False])
def test_the_halves_and_the_contraction_make_the_whole(backend: str, outgoing: bool) -> None:
    """Algorithms 11 and 12 (its factors as the official code has them), in a batch of two, onto the pair."""
    z, mask = _normal(2, N, N, C_Z), (_normal(2, N, N) > -0.5).double()
    first, second = _factor_params(), _update_params()
    second = second._replace(norm_weight=first.norm_weight, norm_bias=first.norm_bias)
    whole = TriangleParams(*first, *second[2:])
    out = _small(z)
    passes.forward(
        *(out, out, _small(mask), TriangleParams(*map(_small, whole))),
        residual=out,
        dropout=None,
        outgoing=outgoing,
        backend=backend,
    )
    for i in range(2):
        left, right = _factors(z[i], mask[i], first).chunk(2)
        product = torch.einsum("cik,cjk->cij" if outgoing else "ckj,cki->cij", left, right)
        assert relative_error(out[i], z[i] + _update(product, z[i], second)) < CLOSE


def test_kernels_of_the_first_half_fill_some_channels_and_add_to_a_gradient() -> None:
    z, mask, p = _small(Z), _small(MASK), _small(_factor_params())
    found = torch.full((4, R, N), torch.nan, device=DEVICE)
    triton_factors.project(found, z, mask, p, 3, 2)
    exact = _factors(Z, MASK, _factor_params())
    assert relative_error(found, exact[[3, 4, C + 3, C + 4]]) < CLOSE
    grad, add, share = _normal(2 * C, R, N, seed=5), _normal(R, N, C_Z, seed=6), _normal(R, N, C_Z, seed=7)
    leaf, parameters = Z.clone().requires_grad_(), _factor_params()
    normed = _norm(leaf, parameters.norm_weight, parameters.norm_bias)
    (expected,) = torch.autograd.grad([_factors(leaf, MASK, parameters), normed], leaf, [grad, share])
    grad_z = _small(share)
    triton_factors.projection_backward(_small(grad), z, mask, _small(add), grad_z, p)
    assert relative_error(grad_z, expected + add) < CLOSE
    leaves = [x.requires_grad_() for x in parameters[2:]]
    of_weights = torch.autograd.grad(_factors(Z, MASK, parameters), leaves, grad)
    for mine, theirs in zip(
        triton_factors.projection_weights_backward(_small(grad), z, mask, p), of_weights, strict=True
    ):
        assert relative_error(mine, theirs) < CLOSE


def test_a_gradient_beyond_float16_where_nothing_is_used_is_no_matter() -> None:
    z, mask, grad = (_small(x).half() for x in (Z, MASK, _normal(2 * C, R, N, seed=5)))
    p = in_dtype(_small(_factor_params()), torch.float16)
    assert (mask == 0).any()
    found = []
    for _ in range(2):
        of_z = torch.zeros_like(z)
        of_weights = triton_factors.projection_weights_backward(grad, z, mask, p)
        of_norm = triton_factors.projection_backward(grad, z, mask, None, of_z, p)
        found.append([*of_weights, *of_norm, of_z])
        grad[:, mask == 0] = torch.inf
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_kernels_of_the_second_half_leave_gradients_where_their_inputs_were() -> None:
    z, product, p = _small(Z), _small(PRODUCT), _small(_update_params())
    out = _small(_normal(R, N, C_Z, seed=9))
    triton_update.write_update(out, product, z, p, out, None)
    assert relative_error(out, _normal(R, N, C_Z, seed=9) + _update(PRODUCT, Z, _update_params())) < CLOSE
    grad, leaf, parameters = _normal(R, N, C_Z, seed=5), PRODUCT.clone().requires_grad_(), _update_params()
    leaves = [leaf, *(x.requires_grad_() for x in parameters[2:])]
    expected = torch.autograd.grad(_update(leaf, Z, parameters), leaves, grad)
    of_weights = triton_update.output_weights_backward(product, z, _small(grad), None, p)
    for mine, theirs in zip(of_weights, expected[3:], strict=True):
        assert relative_error(mine, theirs) < CLOSE
    grad_x = torch.full_like(z, torch.nan)
    norm = triton_update.output_backward(product, z, _small(grad), grad_x, None, p)
    for mine, theirs in zip((product, *norm), expected[:3], strict=True):
        assert relative_error(mine, theirs) < CLOSE
    y = _norm(PRODUCT.permute(1, 2, 0), parameters.norm_out_weight, parameters.norm_out_bias)
    x = _norm(Z, parameters.norm_weight, parameters.norm_bias).requires_grad_()
    gate = (x @ parameters.out_gate_weight.T + parameters.out_gate_bias).sigmoid()
    shown = gate * (y @ parameters.out_weight.T + parameters.out_bias)
    assert relative_error(grad_x, torch.autograd.grad(shown, x, grad)[0]) < CLOSE


def test_a_mask_of_ones_is_left_out() -> None:
    assert eager.unless_ones(torch.ones(2, 3)) == ()
    (mask,) = eager.unless_ones(torch.tensor([[1.0, 0.5]]))
    assert mask.tolist() == [[[1.0], [0.5]]]


def test_gradients_are_added_up_over_elements_and_a_mask_hides_them() -> None:
    """PyTorch's second half twice is twice the gradient of its parameters; without channels to hide it is as before."""
    p = _update_params()
    steps = eager.TriangleGradients(None, p, Z, p._fields)
    once = []
    for _ in range(2):
        grad_z, product = torch.empty_like(Z), PRODUCT.clone()
        steps.update_backward(grad_z, product, _normal(R, N, C_Z, seed=5), Z, None)
        once.append([x.clone() for x in steps.update_grads()[2:]])
    for first, second in zip(*once, strict=True):
        torch.testing.assert_close(second, 2 * first)
    assert eager.channel_group(10, 300**2) == 2
    assert eager.channel_group(3, 500**2) == 1
    assert eager.channel_group(10, 20**2) == 10
    assert steps.contraction_groups(64) == (128, 128)
