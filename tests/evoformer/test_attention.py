"""Attention between two sets of rows, as templates and multimers use it; within one set see ``test_msa_attention``."""

from __future__ import annotations

import pytest
import torch

from fastfold.evoformer.attention import Attention, GlobalAttention, kernel_parameters, self_attention
from fastfold.evoformer.execution import Block, ExecutionPolicy
from fastfold.evoformer.primitives import LayerNorm
from tests.helpers.definitions import attention, close, linear, norm, random, randomized

R, N_Q, N_K, C_Q, C_KV, C_OUT, HEADS, C = 3, 5, 7, 6, 4, 9, 2, 8


def _cross(gating: bool) -> Attention:
    return randomized(Attention(C_Q, C_KV, C_OUT, heads=HEADS, c_hidden=C, gating=gating, zero_init=False))


@pytest.mark.parametrize("gating", [True, False])
def test_queries_of_one_input_attend_to_keys_of_another(gating: bool) -> None:
    """Row by row, head by head and query by query; a bias is added and what the mask hides is not seen."""
    layer, x_q, x_kv = _cross(gating), random(R, N_Q, C_Q), random(R, N_K, C_KV, seed=1)
    bias, mask = random(HEADS, N_Q, N_K, seed=2), torch.ones(R, N_K).double()
    mask[0, 2], mask[2, :4] = 0.0, 0.0
    width = C // HEADS
    expected = torch.empty(R, N_Q, C_OUT).double()
    for r in range(R):
        q, k, v = linear(layer.query, x_q[r]), linear(layer.key, x_kv[r]), linear(layer.value, x_kv[r])
        for i in range(N_Q):
            mixed = torch.zeros(C).double()
            for h in range(HEADS):
                part = slice(h * width, (h + 1) * width)
                weights = (k[:, part] @ q[i, part] / width**0.5 + bias[h, i]).exp() * mask[r]
                mixed[part] = weights / weights.sum() @ v[:, part]
            gate = torch.sigmoid(linear(layer.gate, x_q[r, i])) if gating else 1.0
            expected[r, i] = linear(layer.output, gate * mixed)
    close(layer(x_q, x_kv, bias, mask), expected)
    assert (layer.gate is None) == (not gating)


def test_bias_and_mask_may_be_left_out() -> None:
    layer, x_q, x_kv = _cross(True), random(R, N_Q, C_Q), random(R, N_K, C_KV, seed=1)
    nothing, all_seen = torch.zeros(HEADS, N_Q, N_K).double(), torch.ones(R, N_K).double()
    close(layer(x_q, x_kv, None, None), layer(x_q, x_kv, nothing, all_seen))


def test_a_block_of_self_attention_adds_its_update_times_dropout() -> None:
    """``x + dropout * attention(norm(x))``, written where the block says."""
    layer = randomized(Attention(C_Q, C_Q, C_Q, heads=HEADS, c_hidden=C, gating=True, zero_init=False))
    before = randomized(LayerNorm(C_Q), seed=3)
    x, bias, mask = random(R, N_Q, C_Q), random(HEADS, N_Q, N_Q, seed=2), torch.ones(R, N_Q).double()
    mask[1, 3] = 0.0
    dropout, out = torch.tensor([0.0, 2.0, 1.0]).double().view(R, 1, 1), torch.empty_like(x)
    with torch.no_grad():
        parameters = kernel_parameters(before, layer)
        found = self_attention(parameters, HEADS, Block(x, slice(None), dropout, out, mask=mask), bias)
        close(out, x + dropout * attention(layer, norm(before, x), bias, mask))
        assert found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("keep", [True, False])
def test_a_block_says_if_projections_are_kept_for_the_backward_pass(keep: bool) -> None:
    layer = randomized(Attention(C_Q, C_Q, C_Q, heads=HEADS, c_hidden=C, gating=True, zero_init=False))
    parameters, mask = kernel_parameters(randomized(LayerNorm(C_Q)), layer), torch.ones(R, N_Q).double()
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x):
        policy = ExecutionPolicy(keep_projections=keep)
        block = Block(random(R, N_Q, C_Q).requires_grad_(), slice(None), None, None, policy, mask)
        self_attention(parameters, HEADS, block, None)
    assert ((4 * R * N_Q * C,) in saved) == keep


def test_initial_layers_are_silent_or_open_as_the_supplement_says() -> None:
    """Section 1.11.4: the last layer is zero where asked for, and gates start with weights 0 and biases 1."""
    for make in (
        lambda zero: Attention(C, C, C, heads=HEADS, c_hidden=C, gating=True, zero_init=zero),
        lambda zero: GlobalAttention(C, heads=HEADS, gating=True, zero_init=zero),
    ):
        silent, loud = make(True), make(False)
        assert not silent.output.weight.any()
        assert loud.output.weight.any()
        assert not silent.gate.weight.any()
        assert (silent.gate.bias == 1).all()
        assert silent.query.bias is None


def test_global_attention_without_a_gate_gives_every_position_the_same() -> None:
    layer = randomized(GlobalAttention(C, heads=HEADS, gating=False, zero_init=False))
    x, mask = random(R, N_K, C), torch.ones(R, N_K).double()
    mask[1, 2:] = 0.0
    found = layer(x, mask)
    close(found, found[:, :1].expand_as(found))
    q = linear(layer.query, x[1, :2].mean(0)).view(HEADS, -1)
    k, v = linear(layer.key, x[1, :2]), linear(layer.value, x[1, :2])
    attended = torch.softmax(q @ k.T / (C // HEADS) ** 0.5, -1) @ v
    close(found[1, 0], linear(layer.output, attended.flatten()), 1e-8)
