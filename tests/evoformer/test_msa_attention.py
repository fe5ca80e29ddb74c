"""Attention within the MSA against Algorithms 7, 8 and 19."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import ConfigError
from fastfold.evoformer.evoformer import EvoformerBlock
from fastfold.evoformer.msa_attention import MSAColumnAttention, MSAColumnGlobalAttention, MSARowAttention
from tests.helpers.definitions import attention, close, linear, norm, random, randomized
from tests.helpers.networks import oracle_config

S, N, C_M, C_Z = 6, 9, 16, 12


def _config() -> Any:
    return oracle_config().model.embeddings_and_evoformer.evoformer


def _mask() -> Tensor:
    """A quarter is hidden; every sequence and every residue is seen somewhere."""
    mask = (random(S, N, seed=1) > -0.7).double()
    mask[0], mask[:, 0] = 1.0, 1.0
    return mask


def _row() -> MSARowAttention:
    return randomized(MSARowAttention(_config().msa_row_attention_with_pair_bias, C_M, C_Z, zero_init=False))


def _column() -> MSAColumnAttention:
    return randomized(MSAColumnAttention(_config().msa_column_attention, C_M, zero_init=False))


def _global() -> MSAColumnGlobalAttention:
    return randomized(MSAColumnGlobalAttention(_config().msa_column_attention, C_M, zero_init=False))


def test_rows_attend_with_the_pair_as_bias() -> None:
    """Algorithm 7."""
    layer, msa, pair, mask = _row(), random(S, N, C_M), random(N, N, C_Z, seed=2), _mask()
    bias = linear(layer.pair_bias, norm(layer.pair_norm, pair)).permute(2, 0, 1)
    expected = msa + attention(layer.attention, norm(layer.norm, msa), bias, mask)
    close(layer(msa, pair, mask), expected)
    close(layer(msa, torch.zeros_like(pair), mask, layer.bias(pair)), expected)


def test_columns_attend_along_the_sequences() -> None:
    """Algorithm 8."""
    layer, msa, mask = _column(), random(S, N, C_M), _mask()
    update = attention(layer.attention, norm(layer.norm, msa).transpose(0, 1), None, mask.T)
    close(layer(msa, mask), msa + update.transpose(0, 1))


def test_global_columns_have_one_query_for_all_sequences() -> None:
    """Algorithm 19, residue by residue and head by head."""
    layer, msa, mask = _global(), random(S, N, C_M), _mask()
    inner, x = layer.attention, norm(layer.norm, msa)
    heads, expected = inner.heads, torch.empty_like(msa)
    for i in range(N):
        seen = mask[:, i] > 0
        q = linear(inner.query, x[:, i]).unflatten(-1, (heads, -1))[seen].mean(0)
        k, v = linear(inner.key, x[:, i]), linear(inner.value, x[:, i])
        logits = (q @ k.T / k.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        gate = torch.sigmoid(linear(inner.gate, x[:, i]))
        expected[:, i] = linear(inner.output, gate * (torch.softmax(logits, -1) @ v).flatten())
    close(layer(msa, mask), msa + expected, 1e-8)


LAYERS = {"row": _row, "column": _column, "global column": _global}


def test_absent_masks_are_refused() -> None:
    with pytest.raises(ConfigError, match="msa_mask must be a tensor, found None"):
        _global()(random(S, N, C_M), None)
    block = EvoformerBlock(_config(), C_M, C_Z)
    with pytest.raises(ConfigError, match="msa_mask and pair_mask must be tensors, found None"):
        block(random(S, N, C_M), random(N, N, C_Z), None, torch.ones(N, N))


@pytest.mark.parametrize("name", LAYERS)
def test_only_what_the_mask_shows_is_seen(name: str) -> None:
    """What is hidden reaches no other position; what is shown reaches those of its row or column, and no others."""
    layer, msa, mask = LAYERS[name](), random(S, N, C_M), _mask()
    hidden, shown = (2, int((mask[2] == 0).nonzero()[0])), (3, int(mask[3, 1:].argmax()) + 1)
    assert mask[shown] == 1

    def changed(place: tuple[int, int]) -> Tensor:
        other = msa.clone()
        other[place] += random(C_M, seed=9)
        return (_apply(layer, other, mask) - _apply(layer, msa, mask)).abs().amax(-1) > 1e-9

    alone = torch.zeros(S, N, dtype=torch.bool)
    alone[hidden] = True
    assert torch.equal(changed(hidden), alone)
    reached = torch.zeros(S, N, dtype=torch.bool)
    reached[shown[0] if name == "row" else (slice(None), shown[1])] = True
    assert torch.equal(changed(shown), reached)


@pytest.mark.parametrize("name", LAYERS)
def test_dropout_is_shared_along_the_axis_that_the_update_goes_over(name: str) -> None:
    layer, msa, mask = LAYERS[name](), random(S, N, C_M), torch.ones(S, N).double()
    update = _apply(layer, msa, mask) - msa
    layer.dropout.rate = 0.5
    torch.manual_seed(0)
    factors = (_apply(layer.train(), msa, mask) - msa) / update
    one = factors[:1] if name == "row" else factors[:, :1]
    close(factors, one.expand_as(factors), 1e-6)
    assert set(one.round().unique().tolist()) == {0.0, 2.0}


def _apply(layer: nn.Module, msa: Tensor, mask: Tensor) -> Tensor:
    more = (random(N, N, C_Z, seed=2),) if isinstance(layer, MSARowAttention) else ()
    found: Tensor = layer(msa, *more, mask)
    return found
