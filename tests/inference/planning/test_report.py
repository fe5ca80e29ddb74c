"""What ``fastfold plan`` counts without making a network is what the network has."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.evoformer.model import AlphaFold
from fastfold.inference.planning import report
from fastfold.inference.planning.report import count_parameters
from fastfold.utils.units import GIB
from tests.helpers.networks import oracle_config


@pytest.mark.parametrize("name", ["synthetic_monomer", "synthetic_multimer"])
def test_parameters_are_counted_without_making_them(name: str) -> None:
    config = oracle_config(name)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = 3, 2
    assert count_parameters(config) == sum(p.numel() for p in AlphaFold(config).parameters())
    assert trunk.evoformer_num_block == 3  # the configuration is as it was


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize(("host", "disk"), [(None, None), ("3GiB", "5GiB")])
def test_a_plan_is_reported_with_its_sizes(
    monkeypatch: pytest.MonkeyPatch, precision: str, size: int, host: str | None, disk: str | None
) -> None:
    """A network in float32 tells what fits with half of the parameters' bytes."""

    @dataclass(frozen=True)
    class Sizes:
        config: Any
        element_size: int
        device: str
        costs: Any
        host_memory: int
        disk: int
        parameters: int
        rows: int
        templates: int

        def longest(self, budget: int) -> int:
            return (budget >> 20) + self.parameters // self.element_size

    def plan(planner: Sizes, residues: int, budget: int) -> Any:
        made.append((planner, residues, budget))
        chunks = SimpleNamespace(host=planner.host_memory // 2, disk=planner.disk // 2)
        return SimpleNamespace(unit=GIB // 4, peak=3 * GIB // 2, chunks=chunks, slow_down=1.25)

    made: list[Any] = []
    monkeypatch.setattr(report, "Planner", Sizes)
    monkeypatch.setattr(report, "plan_target", plan)
    monkeypatch.setattr(report, "plan_lines", lambda plan: ["the table"])
    monkeypatch.setattr(report, "measure_costs", lambda device, dtype: dtype)
    monkeypatch.setattr(report, "count_parameters", lambda config: 1000)
    monkeypatch.setattr(report, "host_memory_bytes", lambda device: 8 * GIB)
    options: Any = SimpleNamespace(
        device="cpu", precision=precision, model="model_1", msa=100, extra_msa=23, host_memory=host, disk=disk,
        templates=2, residues=1500,
    )  # fmt: skip
    lines = report.report_fold_plan(options, "2GiB").splitlines()
    ((planner, residues, budget),) = made
    assert (residues, budget, planner.element_size, planner.parameters) == (1500, 2 * GIB, size, 1000 * size)
    assert (planner.rows, planner.templates, planner.device) == (123, 2, "cpu")
    assert planner.costs == (torch.bfloat16 if size == 2 else torch.float32)
    assert (planner.host_memory, planner.disk) == ((8 * GIB, 0) if host is None else (3 * GIB, 5 * GIB))
    expected = [
        f"model_1, 1,500 residues, 123 alignment rows, {precision}, on cpu with 2.00 GiB "
        "(U, the pair tensor: 0.250 GiB)",
        "",
        "the table",
        "",
        "predicted peak      1.50 GiB, 6.00 U",
        f"on the host         {planner.host_memory / 2 / GIB:.2f} GiB",
        *(["on the disk         2.50 GiB"] if disk else []),
        "expected slow-down  1.25 times the time without a memory limit",
        "longest that fits   3,048 residues" + ("; 3,048 with bf16" if size == 4 else ""),
    ]
    assert lines == expected
