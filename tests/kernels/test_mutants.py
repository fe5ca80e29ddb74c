"""A mask, a bias or a guard of a tail that is dropped from a kernel does not go unnoticed.

Every mutant is the source of a module of kernels with one line changed, in place of that module. What notices is the
comparison with the definition that the other tests make, on inputs with NaN beside them in memory: what a kernel reads
beyond its input it cannot make disappear.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold import kernels
from fastfold.kernels.common.backend import interpreted
from tests.helpers.forced_blocks import WHOLE, force_blocks
from tests.helpers.kernel_checks import DEVICE, check_against_definition
from tests.kernels.test_operators import NAMES, case_of

BESIDE = 2**15
"""Elements of NaN before and behind an input: more than any block that hangs over."""


@dataclass(frozen=True)
class Mutant:
    """A change of a kernel that the comparison of an operator with its definition has to notice."""

    operator: str
    module: str
    old: str
    new: str
    what: str


MUTANTS = [
    Mutant(
        "layer_norm",
        "layer_norm.triton_fwd",
        "tl.where(m_channel[None, :], b_x - b_mean[:, None], 0.0)",
        "b_x - b_mean[:, None]",
        "tail of channels",
    ),
    Mutant(
        "layer_norm",
        "layer_norm.triton_fwd",
        "b_out += tl.load(p_bias",
        "b_out += 0.0 * tl.load(p_bias",
        "bias",
    ),
    Mutant(
        "layer_norm",
        "layer_norm.triton_bwd",
        "b_x = tl.load(p_x + o_x[:, None] + o_channel[None, :], mask=m_x,",
        "b_x = tl.load(p_x + o_x[:, None] + o_channel[None, :], mask=m_channel[None, :] & (o_row >= 0)[:, None],",
        "tail of rows",
    ),
    Mutant(
        "pair_bias",
        "pair_bias.triton_fwd",
        "b_z = tl.load(p_z + o_z[:, None] + o_channel[None, :], mask=m_z,",
        "b_z = tl.load(p_z + o_z[:, None] + o_channel[None, :], mask=m_row[:, None] & (o_channel >= 0)[None, :],",
        "tail of channels",
    ),
    Mutant(
        "pair_bias",
        "pair_bias.triton_fwd",
        "b_norm_bias = tl.load(",
        "b_norm_bias = 0.0 * tl.load(",
        "bias of the norm",
    ),
    Mutant(
        "residual_update",
        "residual_update.triton_fwd",
        "b_out *= load_rows(",
        "b_out += 0.0 * load_rows(",
        "dropout",
    ),
    Mutant(
        "residual_update",
        "residual_update.triton_fwd",
        "b_out += tl.load(p_bias",
        "b_out += 0.0 * tl.load(p_bias",
        "bias",
    ),
    Mutant(
        "residual_update",
        "residual_update.triton_fwd",
        "tl.load(p_rows, mask=m_x, other=0.0)",
        "tl.load(p_rows, mask=(o_row >= 0)[:, None] & (o_channel >= 0)[None, :], other=0.0)",
        "tails",
    ),
    Mutant(
        "transition",
        "transition.triton_fwd",
        "weights.w1, weights.b1,",
        "weights.w1, weights.norm_bias,",
        "bias",
    ),
    Mutant(
        "transition",
        "transition.triton_fwd",
        "b_out += tl.load(weights.b2",
        "b_out += 0.0 * tl.load(weights.b2",
        "second bias",
    ),
    Mutant(
        "transition",
        "transition.triton_bwd",
        "load_normalized(p_x, o_c * x_strides[1], norm, o_c, m_m,",
        "load_normalized(p_x, o_c * x_strides[1], norm, o_c, o_m >= 0,",
        "tail of rows, backward",
    ),
    Mutant(
        "transition",
        "transition.triton_bwd",
        "tl.where(b_hidden > 0.0, b_grad_hidden, 0.0)",
        "b_grad_hidden",
        "step of the ReLU",
    ),
    Mutant(
        "outer_product_mean",
        "outer_product_mean.triton_fwd",
        "factors = mask.to(x.dtype).unsqueeze(-1)",
        "factors = torch.ones_like(mask).to(x.dtype).unsqueeze(-1)",
        "mask",
    ),
    Mutant(
        "outer_product_mean",
        "outer_product_mean.triton_fwd",
        "m_s = (o_s < sequences - i_s)[:, None]",
        "m_s = (o_s >= 0)[:, None]",
        "tail of rows",
    ),
    Mutant(
        "outer_product_mean",
        "outer_product_mean.triton_fwd",
        "b_out += b_scale[:, None] * b_bias",
        "b_out += 0.0 * b_scale[:, None] * b_bias",
        "bias",
    ),
    Mutant(
        "outer_product_mean",
        "outer_product_mean.triton_bwd",
        "b_grad *= share * tl.load(p_mask, mask=m_grad, other=0.0).to(tl.float32)",
        "b_grad *= share",
        "mask, backward",
    ),
    Mutant(
        "attention",
        "attention.triton_fwd",
        "b_bias = plus(b_bias, b_hidden[None, :])",
        "b_bias = plus(b_bias, 0.0 * b_bias)",
        "mask",
    ),
    Mutant(
        "attention",
        "attention.triton_fwd",
        'tl.where((o_k < left)[None, :], b_s, -float("inf"))',
        "b_s",
        "tail of keys",
    ),
    Mutant(
        "attention",
        "attention.triton_fwd",
        "tl.trans(b_k), b_bias.to(tl.float32), PRECISION)",
        "tl.trans(b_k), 0.0 * b_bias.to(tl.float32), PRECISION)",
        "bias",
    ),
    Mutant(
        "attention",
        "attention.triton_fwd",
        "b_out *= tl.sigmoid(tl.load(p_gate, mask=m_qd, other=0.0).to(tl.float32))",
        "b_out *= 1.0",
        "gate",
    ),
    Mutant(
        "attention",
        "attention.triton_bwd",
        "b_grad_k = tl.where(m_used[:, None], b_grad_k, 0.0)",
        "b_grad_k += 0.0",
        "mask, backward",
    ),
    Mutant(
        "attention",
        "attention.triton_bwd",
        "m_q = o_q < left",
        "m_q = o_q >= 0",
        "tail of queries, backward",
    ),
    Mutant(
        "gated_attention",
        "gated_attention.triton_launch",
        "TritonOperands(q, k, v, bias, hidden,",
        "TritonOperands(q, k, v, bias, None,",
        "mask",
    ),
    Mutant(
        "gated_attention",
        "gated_attention.triton_launch",
        "TritonOperands(q, k, v, bias, hidden,",
        "TritonOperands(q, k, v, None, hidden,",
        "bias",
    ),
    Mutant(
        "gated_attention",
        "gated_attention.triton_launch",
        "residual, weights.output_bias",
        "residual, None",
        "last bias",
    ),
    Mutant(
        "triangle_multiplication_outgoing",
        "triangle_multiplication.triton_factors",
        "b_projection *= b_gate * b_mask[:, None]",
        "b_projection *= b_gate",
        "mask",
    ),
    Mutant(
        "triangle_multiplication_outgoing",
        "triangle_multiplication.triton_factors",
        "weights.proj_weight, weights.proj_bias,",
        "weights.proj_weight, weights.gate_bias,",
        "bias",
    ),
    Mutant(
        "triangle_multiplication_incoming",
        "triangle_multiplication.triton_update",
        "weights.out_weight, weights.out_bias, o_z,",
        "weights.out_weight, weights.out_gate_bias, o_z,",
        "last bias",
    ),
    Mutant(
        "triangle_multiplication_incoming",
        "triangle_multiplication.triton_factors",
        "b_grad.to(tl.float32) * b_mask[:, None]",
        "b_grad.to(tl.float32)",
        "mask, backward",
    ),
    Mutant(
        "triangle_multiplication_outgoing",
        "triangle_multiplication.triton_factors",
        "o_j * strides[1], mask=m_m, other=0.0)",
        "o_j * strides[1], mask=m_m, other=1.0)",
        "zeros past the pair",
    ),
    Mutant(
        "triangle_multiplication_incoming",
        "triangle_multiplication.triton_update",
        "b_grad = tl.load(p_grad[:, None] + o_o[None, :] * grad_c, mask=m_grad, other=0.0)",
        "b_grad = tl.load(p_grad[:, None] + o_o[None, :] * grad_c, mask=m_grad, other=1.0)",
        "zeros past the pair, backward",
    ),
]


def test_no_mutant_is_lost() -> None:
    assert len({(m.operator, m.what) for m in MUTANTS}) == len(MUTANTS) == 31


def _among_nan(x: Any) -> Any:
    """The same numbers in float32, with NaN before and behind them in memory."""
    if not isinstance(x, Tensor):
        return x
    memory = torch.full((x.numel() + 2 * BESIDE,), torch.nan, device=DEVICE)
    return memory[BESIDE:-BESIDE].view(x.shape).copy_(x)


def _compare(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_blocks(monkeypatch, BM=32, BH=64, BO=64, BI=8, BJ=8, BK=WHOLE)
    case = case_of(operator, 5)
    function = functools.partial(case.operator, backend="triton")
    inputs = {k: _among_nan(x) for k, x in case.inputs.items()}
    check_against_definition(function, case.definition, inputs, torch.float32, case.constants)


def _replace(mutant: Mutant, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the changed module wherever the original, or anything of it, is used."""
    name = f"fastfold.kernels.ops.{mutant.module}"
    # Whatever is imported while the mutant stands in would keep it.
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
    original = importlib.import_module(name)
    assert original.__file__ is not None
    source = Path(original.__file__).read_text(encoding="utf-8")
    assert mutant.old in source, "the kernel has changed: change the mutant with it"
    path = folder / f"{mutant.module}_mutant.py"
    path.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{name}_mutant", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    modules = [m for key, m in list(sys.modules.items()) if key.startswith("fastfold.kernels")]
    for user in modules:
        if user is not original:
            _exchange(user, original, changed, monkeypatch)
    monkeypatch.setitem(sys.modules, name, changed)


def _exchange(
    user: ModuleType, original: ModuleType, changed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute, value in list(vars(user).items()):
        if value is original:
            monkeypatch.setattr(user, attribute, changed)
        elif callable(value) and vars(original).get(attribute) is value and hasattr(changed, attribute):
            monkeypatch.setattr(user, attribute, getattr(changed, attribute))


@pytest.mark.skipif(not interpreted(), reason="mutants are for the interpreter: on a GPU they may hang it")
@pytest.mark.parametrize("operator", NAMES)
def test_what_lies_beside_the_inputs_is_not_read(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(operator, monkeypatch)


@pytest.mark.skipif(not interpreted(), reason="mutants are for the interpreter: on a GPU they may hang it")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.operator}: {m.what}")
def test_a_mutant_is_noticed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace(mutant, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        _compare(mutant.operator, monkeypatch)
