"""PyTorch's attention is computed as attention over the ranks, here of a group of one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fastfold.errors import ConfigError
from fastfold.parallel import Group
from fastfold.parallel.sequence_parallel.module import _key_mask, _SequenceAttention

POSITIONS, BATCH, HEADS, WIDTH = 7, 2, 3, 12


def over_one_rank(positions: int, method: str) -> _SequenceAttention:
    """Return the replacement of PyTorch's attention of a module on one rank."""
    sequence: Any = SimpleNamespace(
        group=Group(None),
        _sizes=lambda: [positions],
        _comparison=SimpleNamespace(paused=nullcontext),
        is_whole=False,
        method=method,
    )
    return _SequenceAttention(sequence)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("masked", [False, True, "each head"])
@pytest.mark.parametrize("with_batch", [False, True])
def test_multihead_attention_equals_pytorchs(method: str, masked: bool | str, with_batch: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    x = torch.randn(POSITIONS, BATCH, WIDTH, dtype=torch.float64)
    x = x if with_batch else x[:, 0]
    heads = (HEADS * BATCH if with_batch else HEADS,) if masked == "each head" else ()
    hidden = torch.rand(*heads, POSITIONS, POSITIONS) < 0.3
    mask = hidden & ~torch.eye(POSITIONS, dtype=torch.bool) if masked else None
    expected, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    with over_one_rank(POSITIONS, method) as attention:
        result, _ = layer(x, x, x, attn_mask=mask, need_weights=False)
    assert attention.calls == 1
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_scaled_dot_products_equal_pytorchs_with_fewer_heads_of_keys(method: str, is_causal: bool) -> None:
    torch.manual_seed(1)
    q = torch.randn(3, 4, POSITIONS, 5, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, POSITIONS, 5, dtype=torch.float64)

    def attended() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.3, enable_gqa=True)

    expected = attended()
    with over_one_rank(POSITIONS, method):
        result = attended()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_masked_keys_are_those_of_pytorch(is_float: bool, separate: bool) -> None:
    """True, or minus infinity, masks a key; weights of queries, keys and values may be separate."""
    torch.manual_seed(2)
    kinds = {"kdim": 5, "vdim": 5} if separate else {}
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **kinds)
    x = torch.randn(POSITIONS, BATCH, WIDTH, dtype=torch.float64)
    keys = torch.randn(POSITIONS, BATCH, 5, dtype=torch.float64) if separate else x
    padding = torch.zeros(BATCH, POSITIONS, dtype=torch.bool)
    padding[0, 2:4] = True
    mask = torch.zeros(BATCH, POSITIONS, dtype=torch.float64).masked_fill(padding, -torch.inf)
    given = mask if is_float else padding
    expected, _ = layer(x, keys, keys, key_padding_mask=given, need_weights=False)
    with over_one_rank(POSITIONS, "ring"):
        found, weights = layer(x, keys, keys, key_padding_mask=given, need_weights=False)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert weights is None


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("hidden_by", ["padding", "padding and a mask", "padding and order"])
def test_a_query_without_keys_gets_zeros_as_from_pytorch(method: str, hidden_by: str) -> None:
    """The padding of one sequence is whole; in the other it comes first, so that early queries see nothing."""
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
    x = torch.randn(POSITIONS, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(BATCH, POSITIONS, dtype=torch.bool)
    padding[0], padding[1, :3] = True, True
    later = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)
    masks = {"padding": None, "padding and a mask": later, "padding and order": later}
    is_causal = hidden_by == "padding and order"

    def attended() -> tuple[Tensor, Tensor]:
        result, _ = layer(
            *(x, x, x, padding),
            need_weights=False,
            attn_mask=masks[hidden_by],
            is_causal=is_causal,
        )
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        return result, gradient

    expected = attended()
    torch.testing.assert_close(expected[0][:, 0], layer.out_proj.bias.expand(POSITIONS, WIDTH))
    with over_one_rank(POSITIONS, method):
        result = attended()
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "arguments", "message"),
    [
        ({}, {"need_weights": True}, "no rank has all weights"),
        ({"add_bias_kv": True}, {}, "nn.MultiheadAttention with bias_k is not supported"),
        ({"add_zero_attn": True}, {}, "nn.MultiheadAttention with add_zero_attn is not supported"),
        ({}, {"key_padding_mask": [0.0, -torch.inf, -1.0, 0.0]}, "must be 0 or minus infinity"),
        ({}, {"key_padding_mask": [-1.0] * 4}, "must be 0 or minus infinity"),
    ],
)
def test_attention_that_parts_of_a_sequence_cannot_compute_is_refused(
    settings: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    layer, x = nn.MultiheadAttention(WIDTH, HEADS, **settings), torch.randn(4, 1, WIDTH)
    if "key_padding_mask" in arguments:
        arguments = {"key_padding_mask": torch.tensor([arguments["key_padding_mask"]])}
    with pytest.raises(ConfigError, match=message), over_one_rank(4, "ring"):
        layer(x, x, x, **{"need_weights": False, **arguments})


@pytest.mark.parametrize("kind", ["bool", "zero", "large", "half as large", "row", "row of one head"])
def test_masks_of_own_keys_are_the_same_for_all_heads_and_queries(kind: str) -> None:
    used = torch.tensor([[True, True, False, True], [False, True, True, True]])
    mask: Tensor = used[:, None, None]
    lowest = torch.finfo(torch.float32).min
    values = {"zero": -torch.inf, "large": lowest, "half as large": lowest / 2}
    if kind in values:
        mask = torch.zeros(2, 1, 1, 4).masked_fill(~mask, values[kind])
    if kind.startswith("row"):
        mask = used[:1] if kind == "row" else used[:1, None]
    expected = used[0] if kind.startswith("row") else used
    assert _key_mask(mask).shape == expected.shape
    assert torch.equal(_key_mask(mask), expected)


def test_other_masks_of_own_keys_are_refused() -> None:
    for shape in ([2, 3, 1, 4], [3, 1, 4]):
        with pytest.raises(ConfigError) as error:
            _key_mask(torch.ones(shape, dtype=torch.bool))
        assert f"expected [..., 1, 1, keys], found {shape}" in str(error.value)
    for values in ([0.0, -torch.inf, -1.0], [1.0, 1.0, 1.0], [0.0, torch.finfo(torch.float32).min / 2.1]):
        with pytest.raises(ConfigError, match="a mask of own keys must be 0 or minus infinity"):
            _key_mask(torch.tensor(values)[None, None, None])
