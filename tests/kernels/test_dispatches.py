"""The host's work for a block: no more operators than the table says, none of them waits for a number."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fastfold
from benchmarks.kernels.dispatches import PASS, Count, count, counts, counts_of_passes, read
from fastfold import kernels
from fastfold.evoformer import EvoformerBlock
from fastfold.evoformer.config import model_config
from fastfold.kernels.common.backend import runs_directly


def test_a_block_dispatches_no_more_operators_than_the_table_says() -> None:
    _check(counts(), [one for one in read() if not one.name.startswith(PASS)])


@pytest.mark.long
def test_a_pass_of_100_residues_dispatches_at_most_7000_operators() -> None:
    found = counts_of_passes()
    _check(found, [one for one in read() if one.name.startswith(PASS)])
    assert 6_000 < found[0].dispatches <= 7_000


def _check(counted: list[Count], table: list[Count]) -> None:
    for found, written in zip(counted, table, strict=True):
        assert found[:3] == written[:3]
        assert found.dispatches <= written.dispatches, f"{found}; rewrite the table if it has to be so"
        assert found.launches <= written.launches, f"{found}; rewrite the table if it has to be so"


def test_views_and_operators_are_counted_and_so_is_what_they_call() -> None:
    x = torch.ones(4, 8, device="meta", dtype=torch.bfloat16)
    assert sum(count(lambda: x.t().t())[0].values()) == 2

    found, launches = count(lambda: kernels.layer_norm(x, None, None))
    assert found == {"fastfold::layer_norm": 1, "aten.empty.memory_format": 1}
    assert launches == 1


def test_folds_on_a_cpu_run_operators_without_the_dispatcher() -> None:
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    with torch.inference_mode():
        assert runs_directly(x)
        assert not runs_directly(weight.to("meta"))
        with FakeTensorMode():
            assert not runs_directly(torch.empty(3))
        direct = kernels.layer_norm(x, weight, None)
    assert not runs_directly(x)
    torch.testing.assert_close(direct, kernels.layer_norm(x, weight, None), rtol=0, atol=0)


def test_a_small_block_calls_few_functions_of_few_files() -> None:
    """Python's work of a fold's blocks on a CPU; fewer are welcome, more need a reason."""
    package = str(Path(fastfold.__file__).parent)
    node = model_config("model_1").model.embeddings_and_evoformer.evoformer
    block = EvoformerBlock(node, 32, 16).eval()
    inputs = torch.randn(3, 5, 32), torch.randn(5, 5, 16), torch.ones(3, 5), torch.ones(5, 5)
    calls: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    with torch.inference_mode():
        block(*inputs)
        sys.setprofile(watch)
        try:
            block(*inputs)
        finally:
            sys.setprofile(before)
    assert 100 < calls.total() <= 301
    assert len(calls) <= 27
