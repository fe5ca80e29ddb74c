"""Layers of the Evoformer under a budget, and a whole block next to the plan that was made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.autochunk import by_hand
from fastfold.evoformer import EvoformerBlock
from fastfold.evoformer.config import model_config
from fastfold.kernels.decompositions import decompositions
from fastfold.memory import BudgetError, autochunk
from fastfold.memory.chunking.graph import export_graph
from fastfold.memory.chunking.search import Search
from fastfold.memory.chunking.steps import measure_memory

_N, _S, _C_M, _C_Z = 18, 6, 16, 8


def _block(c_m: int, c_z: int) -> EvoformerBlock:
    config = copy.deepcopy(model_config("model_1").model.embeddings_and_evoformer.evoformer)
    return EvoformerBlock(config, c_m, c_z, zero_init=False).eval()


def _tensors(n: int, s: int, c_m: int, c_z: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    msa, pair = torch.randn(s, n, c_m, dtype=dtype), torch.randn(n, n, c_z, dtype=dtype)
    return msa, pair, torch.ones(s, n, dtype=dtype), torch.ones(n, n, dtype=dtype)


_LAYERS: dict[str, tuple[Callable[[EvoformerBlock], nn.Module | None], tuple[int, ...]]] = {
    "row attention": (lambda block: block.msa_row_attention, (0, 1, 2)),
    "outer product mean": (lambda block: block.outer_product_mean, (0, 1, 2)),
    "triangle multiplication": (lambda block: block.triangle_multiplication_outgoing, (1, 3)),
    "incoming triangle multiplication": (lambda block: block.triangle_multiplication_incoming, (1, 3)),
    "triangle attention": (lambda block: block.triangle_attention_ending, (1, 3)),
    "transition": (lambda block: block.pair_transition, (1,)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", _LAYERS)
def test_a_layer_in_half_its_memory_is_equal(name: str) -> None:
    choose, which = _LAYERS[name]
    module = choose(_block(_C_M, _C_Z).double())
    assert module is not None
    tensors = _tensors(_N, _S, _C_M, _C_Z, torch.float64)
    args = tuple(tensors[i] for i in which)
    own: dict[str, Any] = {"decompositions": decompositions()}
    with pytest.raises(BudgetError) as refused:
        autochunk(module, args, 1, **own)
    chunked = autochunk(module, args, int(refused.value.smallest * 1.2), **own)
    assert chunked.plan.regions
    assert chunked.plan.peak <= 1.2 * refused.value.smallest < 0.5 * chunked.plan.peak_before
    with torch.no_grad():
        torch.testing.assert_close(chunked(*args), module(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_a_block_is_planned_in_a_tenth_of_its_memory() -> None:
    """Too few refined regions end the search above it."""
    block, n = _block(32, 16), 40
    with torch.enable_grad():
        graph = export_graph(block, _tensors(n, 8, 32, 16, torch.float32), {}, decompositions())
    search = Search(measure_memory(graph), donate=True)
    chosen = search.choose(search.unchunked().profile.peak // 10)
    assert chosen.fits


@pytest.mark.slow
def test_a_block_is_within_a_fifth_of_the_plan_made_by_hand() -> None:
    """Both in place; and what it computes is equal."""
    block = _block(256, 128)
    tensors = _tensors(160, 16, 256, 128, torch.float32)
    hand = min(by_hand(block, tensors, 1 << 17, channels) for channels in (1, 8))
    chunked = autochunk(block, tensors, int(1.2 * hand), donate=True, decompositions=decompositions())
    assert chunked.plan.peak <= 1.2 * hand
    small = _tensors(24, 6, 256, 128, torch.float64)
    block = block.double()
    budget = 4 * small[1].nbytes
    chunked = autochunk(block, small, budget, donate=True, decompositions=decompositions())
    assert chunked.plan.peak <= budget < chunked.plan.peak_before / 3
    with torch.no_grad():
        expected = block(*small)
        found = chunked(*(tensor.clone() for tensor in small))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
