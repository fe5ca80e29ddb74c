"""What a step of a fold has freed is the system's again before the next large step begins."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fastfold.evoformer.model import AlphaFold
from fastfold.inference.folding import network
from fastfold.inference.folding.network import NetworkPasses, prepared_network, trim_malloc
from fastfold.inference.planning.planner import Planner
from tests.helpers.networks import oracle_config, oracle_features, random_model

MIB = 1 << 20


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(sys.platform != "linux" or network.heap_trim() is None, reason="needs glibc, and /proc")
def test_freed_blocks_do_not_stay_in_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beneath a small one that lives, blocks of a size that the C library keeps; all of it goes back but for that."""
    torch.empty(24 * MIB, dtype=torch.uint8).fill_(1)  # from here on blocks of this size come from the heap
    model = random_model(oracle_config())
    monkeypatch.setattr(network, "_large_steps", lambda _: [model.single_projection])
    with trim_malloc(model):
        before = _resident()
        blocks = [torch.empty(16 * MIB, dtype=torch.uint8).fill_(1) for _ in range(8)]
        last = torch.ones(20_000)
        del blocks
        model.single_projection(torch.zeros(1, model.single_projection.in_features))
        assert _resident() - before < 24 * MIB
        assert last.sum() == 20_000


@pytest.mark.parametrize(("room", "expected"), [(2, [(-1, 64 * MIB), (-3, 32 * MIB)]), (1, [])])
def test_a_fold_with_room_keeps_freed_memory(
    monkeypatch: pytest.MonkeyPatch, room: int, expected: list[tuple[int, int]]
) -> None:
    set_options: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *option: set_options.append(option))
    network.heap_trim()  # cached before the library is replaced
    monkeypatch.setattr(network.ctypes, "CDLL", lambda _: library)
    network.keep_freed_memory.cache_clear()
    model = random_model(oracle_config())
    plan = Planner(model.config, 4).plan(10, room * Planner(model.config, 4).plan(10, 1 << 40).peak)
    for _ in range(2):
        with prepared_network(model, NetworkPasses(num_recycles=0), plan, distogram=False):
            pass
    assert set_options == expected


def test_the_heap_is_trimmed_before_each_large_step_of_a_fold_and_not_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(network, "heap_trim", lambda: trimmed.append)
    model, features = random_model(oracle_config()), oracle_features()
    with torch.inference_mode(), trim_malloc(model):
        model(features, num_recycles=1)
    stacks = (model.extra_msa_stack, model.evoformer)
    assert isinstance(model.template_embedder, nn.Module)
    blocks = 3 * sum(
        len(stack.blocks) for stack in stacks
    )  # two triangle multiplications, an outer product mean
    shown = int(features["template_mask"][0].sum())
    templates = 2 * len(model.template_embedder.stack.blocks) * shown  # type: ignore[union-attr, arg-type]
    assert len(trimmed) == 2 * (4 + blocks + templates)
    with torch.inference_mode():
        model(features, num_recycles=0)
    assert len(trimmed) == 2 * (4 + blocks + templates)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "heap_trim", lambda: None)
    model = random_model(oracle_config())
    with trim_malloc(model):
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_is_trimmed_for_a_network_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        network, "heap_trim", lambda: lambda _: pytest.fail("the heap holds none of its tensors")
    )
    with torch.device("meta"):
        model = AlphaFold(oracle_config())
    with trim_malloc(model):
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_fold_with_room_does_not_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(network, "heap_trim", lambda: trimmed.append)
    model = random_model(oracle_config())
    peak = Planner(model.config, 4).plan(10, 1 << 40).peak
    for budget, is_trimmed in ((2 * peak, False), (2 * peak - 1, True)):
        plan = Planner(model.config, 4).plan(10, budget)
        with prepared_network(model, NetworkPasses(num_recycles=0), plan, distogram=False):
            model(oracle_features(), num_recycles=0)
        assert bool(trimmed) == is_trimmed
