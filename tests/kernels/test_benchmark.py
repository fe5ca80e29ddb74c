"""The kernels' benchmark is ready to run: everything but the GPU is tried out here, and nothing is measured."""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastfold.evoformer.config import model_config
from fastfold.kernels import reference
from fastfold.kernels.common.tuning import LaunchConfig
from tests.helpers.kernel_checks import check_against_definition


@pytest.fixture
def load() -> Any:
    """Imports a module of the kernels' benchmark."""

    def loaded(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.kernels.{name}")

    return loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", [[], ["--check"], ["--tune"], ["--tune", "--device", "cpu"]])
def test_it_refuses_to_measure_without_a_gpu(
    load: Any, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        load("run").main(option)
    assert stop.value.code == 2
    assert "GPU" in capsys.readouterr().err


@pytest.mark.long
def test_a_trial_writes_table_and_plots_that_say_what_they_are(load: Any, tmp_path: Path) -> None:
    operators = ["layer_norm", "triangle_attention"]
    arguments = ["--device", "cpu", "--sizes", "16", "--out", str(tmp_path), "--operators", *operators]
    assert load("run").main(arguments) == 0
    rows = list(csv.DictReader((tmp_path / "kernels_cpu_bfloat16.csv").open()))
    assert {row["operator"] for row in rows} == set(operators)
    for operator in operators:
        names = {row["implementation"] for row in rows if row["operator"] == operator}
        assert names >= {"fastfold", "eager", "compile"}
        assert (tmp_path / f"kernels_cpu_bfloat16_{operator}.png").read_bytes().startswith(b"\x89PNG")
    assert {"sdpa", "flex"} <= {
        row["implementation"] for row in rows if row["operator"].endswith("attention")
    }
    ours = [row for row in rows if row["implementation"] == "fastfold"]
    assert len(ours) == 2 * len(operators)
    assert all(float(row["milliseconds"]) > 0 for row in ours)
    heading = (tmp_path / "kernels_cpu_bfloat16.md").read_text().splitlines()[0]
    assert "measures nothing" in heading


def test_what_there_is_no_time_for_is_left_out_from_the_least_important_on(load: Any) -> None:
    kernel_runs, measuring = load("runs"), load("measuring")
    meter = measuring.Meter(torch.device("cpu"), 0.0)
    found = load("cases").cases((16, 1024), ((4, 16),))
    planned = kernel_runs.runs(found, ((4, 16),), meter, measuring.Ceilings(1, 1), torch.float32)
    assert (planned[0].operator, planned[0].residues, planned[0].implementation) == (
        *("triangle_attention", 1024),
        "fastfold",
    )
    first_rival = next(i for i, run in enumerate(planned) if run.implementation == "eager")
    assert {run.operator for run in planned[:first_rival] if run.residues == 1024} == {
        case.operator for case in found if case.residues == 1024
    }
    rows, left_out = kernel_runs.carry_out(planned, time.monotonic() - 1)
    assert rows == []
    assert left_out == planned


@pytest.mark.long
@pytest.mark.parametrize("name", ["trifast", "fastfold"])
def test_what_fails_is_noted_and_ours_is_not_forgiven(
    name: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, kernel_runs = load("run"), load("runs")

    def measure() -> Any:
        yield kernel_runs.Row("pair_bias", "N=1", 1, "forward", name, 1.0)
        raise ValueError("no | such\nshape")

    planned = [kernel_runs.Run("pair_bias", "N=1", 1, name, 0, measure)]
    monkeypatch.setattr(kernels, "runs", lambda *_: planned)
    code = kernels.main(["--device", "cpu", "--sizes", "8", "--out", str(tmp_path)])
    assert code == (name == "fastfold")
    rows = list(csv.DictReader((tmp_path / "kernels_cpu_bfloat16.csv").open()))
    assert [(row["direction"], row["note"]) for row in rows] == [
        ("forward", ""),
        ("forward+backward", "ValueError: no / such shape"),
    ]


@pytest.mark.long
def test_eager_operators_are_the_same_operators(load: Any) -> None:
    """What we are compared with computes what we compute."""
    rivals = load("rivals")
    device = torch.device("cpu")
    for case in load("cases").cases((9,), ((4, 9),)):
        inputs = case.make(device, torch.float32)
        ours, *others = rivals.implementations(case.operator, device)
        assert ours.name == "fastfold"
        expected = ours.function(**inputs)
        for other in others:
            if other.name == "compile":
                continue  # the eager one, compiled: nothing to find out for so many seconds
            torch.testing.assert_close(
                other.function(**inputs), expected, rtol=1e-4, atol=1e-4, msg=other.name
            )


@pytest.mark.parametrize("keys", [5, 129])
def test_the_fused_softmax_gives_attention_and_its_gradients(
    load: Any, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition in float64, with a masked row, chunks of two rows, and queries past a block."""
    monkeypatch.setattr(load("fused_softmax"), "_PROGRAMS", 8)
    torch.manual_seed(keys)
    inputs = {name: torch.randn(7, keys, 2, 8).double() for name in "qkv"}
    inputs |= {"bias": torch.randn(2, keys, keys).double(), "mask": (torch.rand(7, keys) > 0.3).double()}
    inputs["mask"][0] = 0
    attention = load("fused_softmax").attention
    check_against_definition(attention, reference.attention, inputs, torch.float32, {"mask"})


def test_the_block_is_the_official_one(load: Any) -> None:
    """Its few numbers stand in the benchmark, which must run where no configurations are installed."""
    official = model_config("model_1").model.embeddings_and_evoformer.evoformer
    for step, numbers in load("block").block_config().items():
        for name, value in numbers.items():
            assert official[step][name] == value, (step, name)


@pytest.mark.parametrize(
    "operator", ["layer_norm", "residual_update", "triangle_multiplication", "outer_product_mean"]
)
def test_the_check_at_large_sizes_notices_what_is_wrong(
    load: Any, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--device", "cpu", "--check", "--sizes", "24", "--dtype", "float32"]
    kernels = load("run")
    assert kernels.main([*arguments, "--operators", operator]) == 0
    right = load("rivals")._OURS[operator]

    def wrong(**inputs: torch.Tensor) -> torch.Tensor:
        name = next(iter(inputs))
        return right(**inputs) + 1e-4 * inputs[name].square().mean()

    monkeypatch.setitem(load("rivals")._OURS, operator, wrong)
    assert kernels.main([*arguments, "--operators", operator]) == 1


def test_candidates_differ_from_a_configuration_and_from_each_other(load: Any) -> None:
    candidates = load("candidates")
    config = LaunchConfig({"BM": 16, "BH": 32, "BK": 128}, 8, 3)
    single = candidates.neighbors(config)
    changes = [
        sum(size != config.blocks[name] for name, size in found.blocks.items())
        + (found.num_warps != config.num_warps)
        + (found.num_stages != config.num_stages)
        for found in single
    ]
    assert changes == [1] * 10
    first = candidates.first_candidates(config)
    assert len({str(found) for found in first}) == len(first) > 64
    assert config not in first
    assert all(found in first for found in single)
    large = [found for found in first if found.blocks["BM"] >= 64 and found.blocks["BK"] == 128]
    assert {(found.blocks["BM"], found.num_warps) for found in large} == {
        (64, 4),
        (64, 8),
        (128, 4),
        (128, 8),
    }
    assert len(candidates.first_candidates(LaunchConfig(dict.fromkeys("abcdef", 16)))) == 64


def test_tuning_writes_configurations_that_the_kernels_then_take(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTFOLD_KERNELS", "triton")
    tuning, measuring = load("tuning"), load("measuring")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (case,) = [c for c in load("cases").cases((4,), ()) if c.operator == "layer_norm"]
    meter = measuring.Meter(device, 0.0)
    taken: dict[str, int] = {}

    # Anything is 10% faster with 8 warps, and nothing else matters.
    def cost(step: Any, sets: Any, kernel: str) -> float:
        with load("recording").launches_observed(kernel, lambda run: note(kernel, run)):
            step(sets[0])
        return 0.9 if taken[kernel] == 8 else 1.0

    def note(kernel: str, run: Any) -> None:
        taken[kernel] = run.keywords["num_warps"]
        run()

    monkeypatch.setattr(meter, "kernel_time", cost)
    best, trials = tuning.tune([case], meter, torch.float32, time.monotonic() + 600)
    assert {kernel for kernel, _ in best} == {"layer_norm_forward", "layer_norm_backward"}
    assert best["layer_norm_forward", "128"].num_warps == 8
    rows = list(csv.DictReader(tuning.trials_table(trials).splitlines()))
    assert len(rows) == len(trials) > 20
    assert rows[0]["kernel"] == "layer_norm_forward"
    assert (rows[0]["warps"], float(rows[0]["milliseconds"])) == ("8", 0.9)
    for path in tuning.TABLES.glob("*.json"):
        shutil.copy(path, tmp_path)
    written = tuning.write_tables(best, device, tmp_path)
    assert [path.name for path in written] == ["layer_norm.json"]
    table = json.loads(written[0].read_text())
    from fastfold.kernels.common.tuning import chip_class

    assert table["layer_norm_forward"][chip_class(device)]["128"]["num_warps"] == 8
