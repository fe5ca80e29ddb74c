"""The arithmetic that the losses share, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.losses.masked import (
    binary_cross_entropy,
    cross_entropy,
    full_precision,
    masked_mean,
    within_resolution,
)
from tests.helpers.definitions import close, random


def test_halves_become_float32_wherever_they_are_and_nothing_else_changes() -> None:
    whole, number = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32)
    tree = {"a": {"b": torch.ones(2, dtype=torch.bfloat16)}, "c": whole, "d": number, "e": "text"}
    found = full_precision(tree)
    assert found["a"]["b"].dtype == torch.float32
    assert found["c"] is whole
    assert found["d"] is number
    assert found["e"] == "text"
    assert full_precision(torch.ones(2, dtype=torch.float16)).dtype == torch.float32


def test_a_mean_counts_what_the_mask_shows() -> None:
    value = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 60.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(mask, value, 1).tolist() == pytest.approx([1.5, 4.0])
    assert masked_mean(mask, value, 2).item() == pytest.approx(7 / 3)
    assert masked_mean(torch.tensor([1, 0, 1]), value, 1).tolist() == pytest.approx([2.0, 32.0])
    assert masked_mean(torch.tensor([1, 0, 0]), value, 2).item() == pytest.approx(2.5)
    assert masked_mean(torch.tensor([[1], [0]]), value, 2).item() == pytest.approx(2.0)
    assert masked_mean(torch.zeros(2, 3), value, 2).item() == 0.0
    assert masked_mean(mask, value, 1, eps=1.0).tolist() == pytest.approx([1.0, 2.0])


def test_cross_entropies_are_logarithms_of_probabilities() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    target = torch.tensor([1.0, 0.0])  # features hold indices as floats
    assert cross_entropy(logits, target).tolist() == pytest.approx([-math.log(0.75), math.log(2.0)])
    labels = torch.tensor([1, 0])
    found = binary_cross_entropy(torch.tensor([math.log(3.0), math.log(3.0)]), labels)
    assert found.tolist() == pytest.approx([-math.log(0.75), -math.log(0.25)])


class _Rows:
    """Rows 1 to 3 of 5 are here; joining puts zeros where the others are."""

    own = slice(1, 3)

    def join(self, x: Tensor, dim: int = -2) -> Tensor:
        assert dim == -2
        whole = x.new_zeros(*x.shape[:-2], 5, x.shape[-1])
        whole[..., self.own, :] = x
        return whole


def test_rows_that_are_here_are_compared_here() -> None:
    logits, target = random(5, 4, 6), torch.arange(20).view(5, 4) % 6
    whole = cross_entropy(logits, target)
    found = cross_entropy(logits[1:3], target, _Rows())
    close(found[1:3], whole[1:3])
    assert not found[[0, 3, 4]].any()


def test_resolutions_outside_of_the_range_are_left_out() -> None:
    resolution = torch.tensor([0.0, 0.1, 3.0, 3.1])
    config = SimpleNamespace(filter_by_resolution=True, min_resolution=0.1, max_resolution=3.0)
    assert within_resolution(resolution, config).tolist() == [0.0, 1.0, 1.0, 0.0]
    config.filter_by_resolution = False
    assert within_resolution(resolution, config).tolist() == [1.0] * 4
