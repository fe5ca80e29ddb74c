"""PyTorch's calls of attention on three ranks with parts of different lengths, against calls on whole sequences."""

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
from fastfold.parallel.sequence_parallel.module import SequenceParallel, _SequenceAttention
from tests.helpers.thread_ranks import on_one_line

SIZES = [3, 1, 2]
N, B, H, D = 6, 2, 4, 5
WIDTH = 12


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _attention(group: Group, method: str = "ring") -> _SequenceAttention:
    sequence: Any = SimpleNamespace(
        group=group,
        _sizes=lambda: SIZES,
        _comparison=SimpleNamespace(paused=nullcontext),
        is_whole=False,
        method=method,
    )
    return _SequenceAttention(sequence)


def _own(group: Group) -> slice:
    start = sum(SIZES[: group.rank])
    return slice(start, start + SIZES[group.rank])


def _agree(found: list[list[Tensor]], expected: list[Tensor], dim: int) -> None:
    """Compare the parts of three ranks, one after another along an axis, with whole tensors."""
    for parts, whole in zip(zip(*found, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(parts, dim), whole.detach(), rtol=1e-10, atol=1e-10)


SEEN = _normal(B, H, N, N, seed=5) > -0.5
SEEN[0, 1, 2] = False  # a query that sees no key
KEYS = torch.tensor([[True, False, True, True, False, True], [False, True, True, False, True, True]])
FINITE = torch.where(SEEN, _normal(B, H, N, N, seed=6), -torch.inf)
LOWEST = torch.finfo(torch.float64).min
MASKS: dict[str, Tensor | None] = {
    "none": None,
    "of queries": SEEN[0, 0],
    "of heads": SEEN,
    "bias": FINITE,
    "bias of one head": FINITE[:, :1],
    "keys": KEYS[:, None, None],
    "keys of one sequence": KEYS[:1, None, None],
    "row of keys": KEYS[:1],
    "added to keys": torch.zeros(B, 1, 1, N).double().masked_fill(~KEYS[:, None, None], -torch.inf),
    "lowest added to keys": torch.zeros(B, 1, 1, N).double().masked_fill(~KEYS[:, None, None], LOWEST),
}


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("kind", "is_own"),
    [(kind, own) for kind in MASKS for own in ([False, True] if "keys" in kind else [False])],
)
def test_masked_products_equal_pytorchs(kind: str, is_own: bool, method: str) -> None:
    """Masks have rows for own queries, or one row for all keys or for own keys."""
    mask = MASKS[kind]
    q, k, v = (_normal(B, H, N, D, seed=i).requires_grad_() for i in range(3))
    exact = scaled_dot_product_attention(q, k, v, mask, scale=0.4)
    grad = _normal(B, H, N, D, seed=4)
    expected = torch.autograd.grad(exact, (q, k, v), grad)

    def run(group: Group) -> list[Tensor]:
        own, leaves = _own(group), [x[:, :, _own(group)].detach().requires_grad_() for x in (q, k, v)]
        part = mask
        if mask is not None:
            part = mask[..., own] if is_own else mask if "keys" in kind else mask[..., own, :]
        with _attention(group, method):
            found = scaled_dot_product_attention(*leaves, part, scale=0.4)
        return [found.detach(), *torch.autograd.grad(found, leaves, grad[:, :, own])]

    _agree(on_one_line(3, run), [exact, *expected], 2)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("padding", [None, "all keys", "own keys"])
@pytest.mark.parametrize("order", [None, "mask", "mask of each head", "causal"])
def test_layers_of_attention_equal_pytorchs(order: str | None, padding: str | None, method: str) -> None:
    """Early queries of a sequence whose first key is padding see no key."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, H, dtype=torch.float64)
    x = _normal(N, B, WIDTH, seed=7).requires_grad_()
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    mask = {None: None, "mask": later, "mask of each head": ~SEEN.flatten(0, 1), "causal": later}[order]
    settings: dict[str, Any] = {"need_weights": False, "is_causal": order == "causal"}
    keys = None if padding is None else ~KEYS
    exact, _ = layer(x, x, x, keys, attn_mask=mask, **settings)
    grad = _normal(N, B, WIDTH, seed=8)
    (expected,) = torch.autograd.grad(exact, x, grad)

    def run(group: Group) -> list[Tensor]:
        own, leaf = _own(group), x[_own(group)].detach().requires_grad_()
        part = None if mask is None else mask[..., own, :]
        of_keys = keys[:, own] if keys is not None and padding == "own keys" else keys
        with _attention(group, method):
            found, _ = layer(leaf, leaf, leaf, of_keys, attn_mask=part, **settings)
        return [found.detach(), *torch.autograd.grad(found, leaf, grad[own])]

    _agree(on_one_line(3, run), [exact, expected], 0)


@pytest.mark.parametrize(
    ("shapes", "settings"),
    [
        (((H, N, D), (H, N, D), (H, N, D)), {"dropout_p": 0.1}),
        (((H, N, D), (H, N, D), (H, N, D + 1)), {}),
        (((H, N, D + 1), (H, N, D), (H, N, D)), {}),
    ],
    ids=["dropout", "channels of values", "channels of queries"],
)
def test_dropout_and_other_channels_are_refused(
    shapes: tuple[tuple[int, ...], ...], settings: dict[str, Any]
) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ConfigError, match="expects no dropout of its weights, and keys and values with"):
        _attention(Group(None)).attend(q, k, v, **settings)


def test_a_layer_that_drops_weights_is_refused_in_training_alone() -> None:
    layer, x = nn.MultiheadAttention(WIDTH, H, dropout=0.5).double(), _normal(N, B, WIDTH)
    with _attention(Group(None)), pytest.raises(ConfigError, match="expects no dropout of its weights"):
        layer(x, x, x, need_weights=False)
    expected, _ = layer.eval()(x, x, x, need_weights=False)

    def run(group: Group) -> list[Tensor]:
        own = x[_own(group)]
        with _attention(group):
            return [layer(own, own, own, need_weights=False)[0].detach()]

    _agree(on_one_line(3, run), [expected], 0)


@pytest.mark.parametrize("shape", [(3, 3), (6, 6), (5, 6), (3, 5), (1, 2)])
def test_masks_of_other_queries_or_keys_are_refused(shape: tuple[int, int]) -> None:
    group: Any = SimpleNamespace(rank=0, size=3)
    q = torch.zeros(H, 3, D)
    with pytest.raises(ConfigError, match=r"expected a mask \[\.\.\., 3, 6\] for own queries and all keys"):
        _attention(group).attend(q, q, q, torch.zeros(shape))


def test_a_module_with_one_parallel_layer_is_refused() -> None:
    layer = nn.MultiheadAttention(WIDTH, H)
    layer.sequence = None  # type: ignore[assignment]
    model = nn.Sequential(nn.MultiheadAttention(WIDTH, H), layer)
    with pytest.raises(ConfigError, match="parallel already"):
        SequenceParallel(model, Group(None), attention=nn.MultiheadAttention)


def test_positions_of_a_part_begin_after_the_earlier_parts() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(N, D), "attention": nn.MultiheadAttention(WIDTH, H)})
    table: Any = model["table"]

    def run(group: Group) -> Tensor:
        sequence = SequenceParallel(
            nn.ModuleDict({"table": table, "attention": nn.MultiheadAttention(WIDTH, H)}),
            group,
            attention=nn.MultiheadAttention,
        )
        part = sequence.shard(torch.arange(N)[None])
        assert part.tolist() == [list(range(sequence.first, sequence.first + part.shape[-1]))]
        assert sequence.shard(torch.arange(N)[:, None], 0).flatten().tolist() == part[0].tolist()
        with sequence._laid_out(None):
            assert sequence.first == 0
        with sequence._laid_out(SIZES):
            assert sequence.first == sum(SIZES[: group.rank])
        return part

    assert torch.cat(on_one_line(3, run), 1).tolist() == [list(range(N))]
