"""Products in fewer bits run where a measurement on this processor found them faster, which is made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.evoformer.quantization import least_work as module
from fastfold.evoformer.quantization.least_work import (
    CERTAIN_WORK,
    UNMEASURED_WORK,
    is_faster,
    least_work,
    work_of,
)
from fastfold.inference.planning.planner import folding_policy
from fastfold.utils.machine import user_cache

CONFIG = model_config("mini").model.embeddings_and_evoformer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the user, nothing in memory, and a processor with units."""
    monkeypatch.setattr(module, "has_units", lambda products: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(module, "cache_file", lambda: user_cache() / "least_work.json")
    return tmp_path / "fastfold" / "least_work.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Measurements that were asked for; each gives 1,000."""
    asked: list[Any] = []

    def measure(config: Any, products: str) -> float:
        asked.append((config.msa_channel, products))
        return 1000.0

    monkeypatch.setattr(module, "measure_least_work", measure)
    return asked


def test_a_measurement_is_made_once_for_each_processor_threads_channels_and_precision(
    measured: list[Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = model_config("model_1").model.embeddings_and_evoformer
    for _ in range(2):
        for config, products in ((CONFIG, "bf16"), (CONFIG, "int8"), (wide, "bf16")):
            assert least_work(config, products) == 1000.0  # type: ignore[arg-type]
        module._known.clear()  # another process
    assert len(measured) == 3
    assert len(json.loads(cache.read_text())) == 3
    for name, value in (("processor_name", "another"), ("torch.get_num_threads", 77)):
        monkeypatch.setattr(f"{module.__name__}.{name}", lambda value=value: value)
        least_work(CONFIG, "bf16")
    assert len(measured) == 5
    assert any("another" in key for key in json.loads(cache.read_text()))


@pytest.mark.parametrize("text", ["not JSON", "[1]", '{"a": "b"}'])
def test_a_damaged_cache_is_measured_again_and_replaced(text: str, measured: list[Any], cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert least_work(CONFIG, "bf16") == 1000.0
    assert list(json.loads(cache.read_text()).values()) == [1000.0]


def test_a_cache_that_cannot_be_written_is_left_alone(measured: list[Any], cache: Path) -> None:
    cache.parent.write_text("a file where a folder should be")
    assert [least_work(CONFIG, "bf16") for _ in range(2)] == [1000.0] * 2
    assert len(measured) == 1


def test_only_calls_in_doubt_are_measured(measured: list[Any]) -> None:
    def call(work: float, device: str = "cpu") -> list[Tensor]:
        return [torch.empty(1, 1, 1, device=device).expand(1, round(work), 1)]

    assert is_faster(call(CERTAIN_WORK), CONFIG, "bf16")
    for share in (0.99, 1.0):
        assert is_faster(call(UNMEASURED_WORK * share, "meta"), CONFIG, "bf16") == (share == 1.0)
    assert measured == []
    assert [is_faster(call(work), CONFIG, "bf16") for work in (999, 1000)] == [False, True]
    assert len(measured) == 1
    assert work_of([torch.empty(2, 3, 5), torch.empty(3, 3, 7)]) == 2 * 3 * 5 * 5 + 3 * 3 * 7 * 7


def test_nothing_is_measured_without_units(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_units", lambda products: products == "int8")
    large = [torch.empty(1, 1, 1).expand(1, round(2 * CERTAIN_WORK), 1)]
    assert [is_faster(large, CONFIG, products) for products in ("bf16", "int8")] == [False, True]
    assert not is_faster([torch.empty(1, 2000, 1)], CONFIG, "bf16")
    assert measured == []


def test_the_second_of_two_lengths_that_are_faster_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And random numbers afterwards are as without a measurement."""
    lengths = []

    def times_faster(block: Any, inputs: tuple[Tensor, Tensor], products: str) -> float:
        assert not any(p.requires_grad for p in block.parameters())
        lengths.append(inputs[1].shape[0])
        return 1.06 if len(lengths) in (1, 3, 4) else 1.04

    monkeypatch.setattr(module, "_times_faster", times_faster)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    work = module.measure_least_work(CONFIG, "bf16")
    assert torch.equal(torch.rand(3), expected)
    assert lengths == [16, 24, 32, 48]
    assert work == 64 * 48 * CONFIG.msa_channel**2 + 48**2 * CONFIG.pair_channel**2
    monkeypatch.setattr(module, "_times_faster", lambda *arguments: 0.9)
    assert module.measure_least_work(CONFIG, "bf16") == CERTAIN_WORK


@pytest.mark.long
def test_times_are_those_of_a_block() -> None:
    """A real measurement ends, with a length or with none."""
    assert 1e6 < module.measure_least_work(CONFIG, "bf16") <= CERTAIN_WORK


def test_measured_calls_have_the_policy_of_folds() -> None:
    policy, fold = module.MEASURED_POLICY, folding_policy("cpu")
    assert (policy.block_elements, policy.inplace) == (fold.block_elements, fold.inplace)
