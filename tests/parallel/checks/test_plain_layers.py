"""A layer is cut only if its part does all that the whole does; anything more is refused by its path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from fastfold.errors import ConfigError
from fastfold.parallel import ParallelMesh, ParallelPlan, parallelize
from fastfold.parallel.checks.plain_layers import check_restored, signature
from fastfold.parallel.planner.fake_run import fake_mesh
from fastfold.parallel.tensor_parallel import (
    ParallelAttention,
    ParallelEmbedding,
    ParallelLayerNorm,
    ParallelLinear,
    ParallelMLP,
)


class _LowRank(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 8)
        self.down, self.up = nn.Parameter(torch.ones(1, 6)), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class _Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


class _OwnNorm(nn.LayerNorm):
    pass


class _OwnAttention(nn.MultiheadAttention):
    pass


def _mlp(first: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(first or nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def _hooked() -> nn.Module:
    mlp = _mlp()
    mlp[1].register_forward_hook(lambda *_: None)
    return mlp


def _gradient_hook() -> nn.Module:
    mlp = _mlp()
    mlp[0].weight.register_hook(lambda gradient: gradient * 2)
    return mlp


def _own_forward() -> nn.Module:
    mlp = _mlp()
    mlp[2].forward = torch.sin
    return mlp


def _pruned() -> nn.Module:
    mlp = _mlp()
    prune.random_unstructured(mlp[0], "weight", 0.5)
    return mlp


def _more_parameters() -> nn.Module:
    linear = nn.Linear(6, 8)
    linear.register_parameter("scale", nn.Parameter(torch.ones(8)))
    return linear


def _more_buffers() -> nn.Module:
    norm = nn.LayerNorm(6)
    norm.register_buffer("count", torch.zeros(1))
    return norm


class _Owner(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.part = layer


@pytest.mark.parametrize(
    ("layer", "maker", "message"),
    [
        (lambda: _mlp(_LowRank()), ParallelMLP, "exactly torch.nn.Linear, found .*_LowRank"),
        (lambda: _Scaled(11, 6), ParallelEmbedding, "exactly torch.nn.Embedding, found .*_Scaled"),
        (lambda: _Residual(*_mlp()), ParallelMLP, "exactly torch.nn.Sequential, found .*_Residual"),
        (lambda: _OwnNorm(6), ParallelLayerNorm, "exactly torch.nn.LayerNorm"),
        (lambda: _OwnAttention(6, 2, batch_first=True), ParallelAttention, "exactly torch.nn.MultiheadAtt"),
        (lambda: _mlp(parametrizations.weight_norm(nn.Linear(6, 8))), ParallelMLP, "0 .* has a parametriz"),
        (lambda: _mlp(parametrizations.spectral_norm(nn.Linear(6, 8))), ParallelMLP, "a parametrization"),
        (_pruned, ParallelMLP, "Linear 0 inside of it has a forward pre-hook"),
        (_hooked, ParallelMLP, "GELU 1 inside of it has a forward hook"),
        (_gradient_hook, ParallelMLP, "Linear 0 inside of it has a hook on a parameter"),
        (_own_forward, ParallelMLP, r"Linear 2 inside of it has a forward\(\) of its own instance"),
        (_more_parameters, ParallelLinear, "does not keep scale: expected .*, found nothing"),
        (_more_buffers, ParallelLayerNorm, "does not keep count: expected .*, found nothing"),
    ],
)
def test_a_layer_that_does_more_than_its_part_would_is_refused(
    layer: Callable[[], nn.Module], maker: Any, message: str
) -> None:
    with fake_mesh(ParallelPlan(tp=2)) as mesh, pytest.raises(ConfigError, match=f"cuts part: .*{message}"):
        parallelize(_Owner(layer()), mesh, layers={"part": maker.from_plain})


def test_a_layer_that_pytorch_reads_itself_is_refused() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1)
    with (
        fake_mesh(ParallelPlan(tp=2)) as mesh,
        pytest.raises(
            ConfigError, match=r"layers\.0\.self_attn: it belongs to torch\.nn\.TransformerEncoderLayer"
        ),
    ):
        parallelize(encoder, mesh, layers={"layers.*.self_attn": ParallelAttention.from_plain})


def test_attention_is_called_as_the_plain_layer_is() -> None:
    """With masks in PyTorch's meaning; other keys, weights and masks for each head are refused."""
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    cut = ParallelAttention.from_plain(attention, ParallelMesh(ParallelPlan()))
    for masks in (
        {},
        {"attn_mask": future},
        {"attn_mask": future, "is_causal": True},
        {"attn_mask": future, "is_causal": True, "key_padding_mask": padding},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(5, 5, dtype=torch.float64)},
    ):
        expected = attention(x, x, x, need_weights=False, **masks)[0]
        found, weights = cut(x, x, x, need_weights=False, **masks)
        assert weights is None
        torch.testing.assert_close(found, expected)
    for message, call in {
        "one tensor as query, key and value": lambda: cut(x, x + 1, x, need_weights=False),
        "need_weights=False": lambda: cut(x, x, x),
        "attn_mask with is_causal": lambda: cut(x, x, x, need_weights=False, is_causal=True),
        "of shape .L, L., found .6, 5, 5.": lambda: cut(
            x, x, x, need_weights=False, attn_mask=future.expand(6, 5, 5)
        ),
    }.items():
        with pytest.raises(ConfigError, match=message):
            call()


def test_a_part_without_its_way_back_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear needs a method to_plain\(\)"):
        check_restored(signature(nn.Linear(2, 2)), nn.Linear(2, 2))


def test_what_is_frozen_stays_frozen() -> None:
    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    attention.in_proj_weight.requires_grad_(False)
    attention.out_proj.bias.requires_grad_(False)
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        parallel = parallelize(_Owner(attention), mesh, layers={"part": ParallelAttention.from_plain})
        trains = {name for name, p in parallel.module.named_parameters() if p.requires_grad}
        assert trains == {"part.inputs.bias", "part.output.weight"}
        plain = parallel.module.part.to_plain()
    assert not plain.in_proj_weight.requires_grad
    assert plain.out_proj.weight.requires_grad


def test_a_pattern_that_matches_layers_and_their_parts_cuts_the_layers() -> None:
    blocks = _Owner(nn.ModuleList([_mlp(), _mlp()]))
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        parallel = parallelize(blocks, mesh, layers={"part.*": ParallelMLP.from_plain})
    assert [type(block) for block in parallel.module.part] == [ParallelMLP, ParallelMLP]


def test_ids_outside_of_the_vocabulary_are_refused() -> None:
    with fake_mesh(ParallelPlan(tp=2)) as mesh:
        table = ParallelEmbedding.from_plain(nn.Embedding(11, 6), mesh)
        table(torch.tensor([0, 10]))
        for wrong in (11, -1):
            with pytest.raises(IndexError, match=f"ids from 0 to 10 of the vocabulary, found {wrong}"):
                table(torch.tensor([3, wrong]))
