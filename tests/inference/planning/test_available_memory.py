"""The estimate of a fold's memory: sensible everywhere, right where it is measured, and what it is used for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fastfold import load_model
from fastfold.errors import ConfigError, InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.precision import Precision, set_precision
from fastfold.inference.planning import fit as fitting
from fastfold.inference.planning.fit import (
    FoldMemory,
    available_bytes,
    check_fit,
    fit_target,
    offload_buffers,
)
from fastfold.inference.planning.planner import Planner, parameter_bytes
from fastfold.inference.planning.time_model import Costs
from fastfold.utils.units import GIB
from tests.conftest import REPOSITORY

CPU = torch.device("cpu")
PRESETS = ("model_1", "model_2_ptm", "model_3", "model_5_ptm", "model_1_multimer_v2", "model_4_multimer_v3")


@pytest.mark.parametrize("preset", PRESETS)
def test_more_residues_rows_and_bytes_need_more(preset: str):
    config = model_config(preset)

    def estimate(residues: int = 500, element_size: int = 4, rows: int | None = 1000) -> int:
        return Planner(config, element_size, rows=rows).smallest(residues)

    assert estimate(501) > estimate(500)
    assert estimate(rows=1001) > estimate(rows=1000)
    assert estimate(rows=1) < estimate(rows=None)
    assert 1.2 < estimate() / estimate(element_size=2) < 2
    # Long targets: the pair tensors decide, and they grow with the square of the length.
    assert estimate(40_000, rows=1) / estimate(20_000, rows=1) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("rows", [1, 500, None])
@pytest.mark.parametrize("budget", [GIB, 24 * GIB, 140 * GIB])
def test_the_longest_that_fits_fits_and_one_residue_more_does_not(budget: int, rows: int | None):
    planner = Planner(model_config("model_1_ptm"), 4, rows=rows)
    longest = planner.longest(budget)
    assert planner.smallest(longest) <= budget < planner.smallest(longest + 1)


def test_nothing_fits_into_nothing():
    assert Planner(model_config("model_1"), 4).longest(0) == 0


@cache
def network(precision: Precision = "fp32") -> AlphaFold:
    """An official network without memory, which tests only read."""
    with torch.device("meta"):
        return set_precision(AlphaFold(model_config("model_1_ptm")), precision)


def test_what_fits_passes_silently():
    fit = fit_target(network(), CPU, 10, None, name="T1", rows=1)
    assert fit.plan.peak <= fit.budget
    assert not fit.plan.blocks


def test_what_does_not_fit_is_refused_with_numbers_and_remedies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting, "available_bytes", lambda device: 16 * GIB)
    model = network()
    with pytest.raises(InputError) as caught:
        fit_target(model, CPU, 5000, None, name="T1")
    planner = Planner(model.config, 4, parameters=parameter_bytes(model))
    needed, fits = planner.smallest(5000) / GIB, planner.longest(16 * GIB)
    assert str(caught.value).startswith(
        f"record 'T1': 5,000 residues would need about {needed:,.0f} GiB of memory; cpu has 16.0 GiB free, enough "
        f"for about {fits:,} residues"
    )
    assert "bf16" not in str(caught.value)


def test_bf16_is_proposed_only_where_it_is_enough(monkeypatch: pytest.MonkeyPatch):
    model = network()
    free = Planner(model.config, 2, parameters=parameter_bytes(model)).smallest(2000) + 1
    monkeypatch.setattr(fitting, "available_bytes", lambda _: free)
    with pytest.raises(InputError, match="use precision='bf16', or use a device"):
        fit_target(model, CPU, 2000, None, name="T1")
    monkeypatch.setattr(fitting, "measure_costs", lambda *_: Costs())
    assert fit_target(network("bf16"), CPU, 2000, None, name="T1").plan.blocks


def test_the_network_counts_where_it_is_not_yet(monkeypatch: pytest.MonkeyPatch):
    """What a network on the device takes is free for its fold; of one elsewhere it has to be found."""
    monkeypatch.setattr(fitting, "available_bytes", lambda device: 4 * GIB)
    elsewhere = network()
    there = load_model("mini", device="cpu")
    assert fit_target(elsewhere, CPU, 10, None, name="T1", rows=1).budget == 4 * GIB
    assert fit_target(there, CPU, 10, None, name="T1", rows=1).budget == 4 * GIB + parameter_bytes(there)


def test_free_memory_is_what_the_machine_has():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_bytes(CPU) <= total


def test_memory_that_pytorch_keeps_of_an_earlier_target_is_free_for_the_next(monkeypatch: pytest.MonkeyPatch):
    """That of the same GPU, and not the part that only a kept CUDA graph can use."""
    segments = [
        {"device": device, "segment_pool_id": pool, "total_size": total * GIB, "allocated_size": used * GIB}
        for device, pool, total, used in (
            (1, (0, 0), 40, 1),
            (1, (0, 0), 30, 0),
            (1, (0, 1), 6, 2),
            (0, (0, 0), 8, 0),
        )
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert available_bytes(torch.device("cuda")) == 72 * GIB
    assert available_bytes(torch.device("cuda:0")) == 11 * GIB


def test_the_host_has_what_the_system_and_its_limits_leave(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting, "host_available_bytes", lambda: 5)
    assert available_bytes(CPU) == 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc for the peak of resident memory")
@pytest.mark.parametrize("plan", ["fastest", "smallest"])
@pytest.mark.parametrize(
    ("preset", "residues", "precision", "rows"),
    [
        ("model_1_ptm", 128, "fp32", 6000),
        ("model_1_ptm", 256, "fp32", 6000),
        ("model_1_ptm", 384, "fp32", 6000),
        ("model_1_ptm", 256, "bf16", 6000),
        ("model_1_ptm", 384, "bf16", 6000),
        ("model_1_ptm", 256, "fp32", 1),
        ("model_1_multimer_v3", 256, "fp32", 3000),
    ],
)
def test_a_plan_is_never_under_what_is_measured_and_never_far_over(preset, residues, precision, rows, plan):
    """Where it fails, the network's memory has changed: fit the constants of ``operator_memory`` again."""
    command = [
        sys.executable,
        "-m",
        "tests.inference.planning.measure_fold",
        preset,
        str(residues),
        precision,
        str(rows),
    ]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [*command, plan], cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert 1.0 <= found["planned"] / found["measured"] <= 1.5


def test_processes_of_one_machine_have_equal_parts_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting, "available_bytes", lambda device: 100 * GIB)
    monkeypatch.setattr(fitting, "_SHARERS", ContextVar("sharers", default=1))
    assert fitting.host_memory_bytes("cuda") == 80 * GIB
    assert fitting.host_memory_bytes("mps") == 0
    fitting.share_host_memory(4)
    assert fitting.host_memory_bytes("cuda") == 20 * GIB
    assert fitting.host_memory_bytes("cpu") == 0
    # What a person allows is for all of them too.
    assert FoldMemory.here(CPU, host_memory=8 * GIB).host == 2 * GIB


def test_processes_that_fold_together_have_parts_of_their_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Of the memory of a CPU, of what was said of the host, and of a disk; a GPU is each process's own."""
    monkeypatch.setattr(fitting, "available_bytes", lambda device: 30 * GIB)
    assert FoldMemory.here(CPU, processes=3) == FoldMemory(10 * GIB)
    found = FoldMemory.here(CPU, host_memory=6 * GIB, offload_dir=tmp_path, processes=3)
    assert (found.free, found.host) == (10 * GIB, 2 * GIB)
    assert 0 < found.disk <= shutil.disk_usage(tmp_path).free
    gpu = FoldMemory.here(torch.device("cuda"), processes=2)
    assert (gpu.free, gpu.host, gpu.disk) == (30 * GIB, 12 * GIB, 0)
    with pytest.raises(ConfigError, match="create it first"):
        FoldMemory.here(CPU, offload_dir=tmp_path / "missing")


def test_what_finds_no_room_on_the_host_goes_to_the_folder(tmp_path: Path):
    host = offload_buffers(100, tmp_path)
    parts = host.split([20, 20], torch.empty(1))
    assert [(where is host, len(memory), count) for where, memory, count in parts] == [
        (True, 20, 1),
        (False, 20, 1),
    ]
    assert offload_buffers(100, None).overflow is None


def test_a_remedy_is_named_only_if_it_is_enough() -> None:
    """To the byte: bf16, and a pass without a graph."""
    for graph in (False, True):
        planner = Planner(model_config("model_1"), 4, "cuda", rows=64, cuda_graph=graph)
        enough = replace(planner, element_size=2).smallest(700)
        for free, is_named in ((enough, True), (enough - 1, False)):
            with pytest.raises(InputError) as caught:
                check_fit(planner, 700, None, free, name="T1")
            assert ("precision='bf16'" in str(caught.value)) == is_named
            assert ("cuda_graphs" in str(caught.value)) == graph
        half = replace(planner, element_size=2)
        check_fit(half, 700, None, enough, name="T1")
        with pytest.raises(InputError) as caught:
            check_fit(half, 700, None, enough - 1, name="T1")
        assert "bf16" not in str(caught.value)
        # A budget that is too small is another error.
        check_fit(half, 700, enough - 1, enough - 1, name="T1")
        with pytest.raises(InputError):
            check_fit(half, 700, enough, enough - 1, name="T1")


def test_nothing_goes_to_a_disk_without_a_folder() -> None:
    assert (FoldMemory.here(CPU).host, FoldMemory.here(CPU).disk) == (0, 0)
