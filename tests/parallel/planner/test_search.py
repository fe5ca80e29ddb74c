"""The best plans are the best of all, fit into memory, and what is impossible is refused with the arithmetic."""

from __future__ import annotations

from dataclasses import replace
from inspect import getclosurevars
from typing import Any

import pytest
from torch import nn

from examples.gpt.gpt import GPTConfig
from examples.gpt.plan import gpt_workload
from fastfold.cli import main
from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.parallel import best_plans
from fastfold.parallel.alphafold import workload as alphafold_module
from fastfold.parallel.alphafold.workload import alphafold_workload
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner import workload
from fastfold.parallel.planner.cost_model import step_cost
from fastfold.parallel.planner.fake_run import trace
from fastfold.parallel.planner.hardware import TRAINING, rates
from fastfold.parallel.planner.recorder import Trace
from fastfold.parallel.planner.search import overrides, plan_table
from fastfold.parallel.planner.workload import Workload, standard_layouts

GPT = GPTConfig(vocabulary=50257, context=256, layers=4, heads=2, width=1024)


@pytest.fixture(scope="module")
def gpt() -> Workload:
    """Traced once."""
    return gpt_workload(GPT, samples=12)


SIZES = {"residues": 64, "msa": 16, "extra_msa": 32}  #: A small crop, for a network without templates
TRACES: dict[Any, Trace] = {}  #: Of AlphaFold, by layout and sizes


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """AlphaFold is traced once for all tests: a trace depends on layout and sizes alone."""

    def trace_once(build: Any, loss: Any, mesh: ParallelMesh, **options: Any) -> Trace:
        sizes = {name: x for name, x in getclosurevars(loss).nonlocals.items() if isinstance(x, int)}
        assert sizes.keys() == SIZES.keys()
        key = mesh.plan, *sizes.items()
        if key not in TRACES:
            TRACES[key] = trace(build, loss, mesh, **options)
        return TRACES[key]

    monkeypatch.setattr(workload, "trace", trace_once)


@pytest.fixture
def alphafold(traced_once: None) -> Workload:
    return alphafold_workload(model_config("model_5"), samples=1, **SIZES)


@pytest.mark.parametrize(("precision", "devices"), [("bf16", ["cpu"]), ("fp32", [])])
def test_the_traced_trunk_has_the_precision_of_the_step(
    precision: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(alphafold_module, "AlphaFold", lambda _: nn.Module())
    monkeypatch.setattr(alphafold_module, "shard", lambda network, _: network)
    monkeypatch.setattr(alphafold_module, "autocast_trunk", lambda _, device: seen.append(device))
    work = alphafold_workload(model_config("model_5"), samples=1, precision=precision, **SIZES)
    work.build(ParallelMesh(ParallelPlan()))
    assert seen == devices


@pytest.mark.long
def test_the_best_plan_is_the_best_of_all_that_fit(gpt: Workload) -> None:
    speeds = rates("h100")
    found = best_plans(gpt, gpus=4, gpu=speeds, count=3)
    every = [
        step_cost(gpt, plan, speeds, checkpointing=checkpointing)
        for plan in gpt.plans(4)
        for checkpointing in (False, True)
    ]
    fitting = [cost for cost in every if cost.total_memory <= speeds.usable_memory]
    assert found[0].seconds == min(cost.seconds for cost in fitting)
    assert [cost.seconds for cost in found] == sorted(cost.seconds for cost in found)
    assert len({replace(cost.plan, zero=0) for cost in found}) == len(found) == 3
    assert all(cost.plan.ranks == 4 for cost in found)
    # Every axis that a GPT has was tried.
    tried = [cost.plan for cost in every]
    assert {plan.tp for plan in tried} == {1, 2}
    assert {plan.sp for plan in tried} == {1, 2}
    assert {plan.zero for plan in tried} == {0, 1, 2, 3}
    assert max(plan.pp for plan in tried) == 4


def test_less_memory_makes_other_plans_the_best_and_too_little_is_refused(gpt: Workload) -> None:
    speeds = rates("h100")
    roomy = best_plans(gpt, gpus=4, gpu=speeds, count=1)[0]
    tight = replace(speeds, sheet=replace(speeds.sheet, memory=0.7 * roomy.total_memory / 0.9))
    lean = best_plans(gpt, gpus=4, gpu=tight, count=1)[0]
    assert lean.total_memory <= tight.usable_memory < roomy.total_memory
    assert lean.seconds > roomy.seconds
    message = r"needs [\d.]+ GiB per GPU, [\d.]+ GiB more than the [\d.]+ GiB that may be filled"
    with pytest.raises(ConfigError, match=message):
        best_plans(gpt, gpus=4, gpu=replace(speeds, sheet=replace(speeds.sheet, memory=1e8)))


def test_no_plan_leaves_a_replica_without_a_sample(gpt: Workload) -> None:
    assert all(plan.dp <= 12 for plan in gpt.plans(48))
    with pytest.raises(ConfigError, match="29 GPUs cannot share 12 samples of gpt"):
        best_plans(gpt, gpus=29, gpu="h100")


@pytest.mark.long
def test_more_gpus_than_samples_share_proteins(alphafold: Workload) -> None:
    best = best_plans(alphafold, gpus=2, gpu="h200", count=2)
    assert all(cost.plan.dap == 2 for cost in best)
    for cost in best:
        assert 0 <= cost.communication_share < 1
        settings = dict(setting.split("=") for setting in overrides(cost))
        plan = {
            name.removeprefix("parallel."): value if value.isalpha() else int(value)
            for name, value in settings.items()
            if name.startswith("parallel.")
        }
        assert ParallelPlan.from_dict(plan) == cost.plan
    lines = plan_table(best).splitlines()
    assert len(lines) == 1 + len(best)
    assert "time/step" in lines[0]
    assert "memory/GPU" in lines[0]
    assert "communication" in lines[0]


@pytest.mark.long
def test_a_shared_protein_takes_less_memory_of_each_gpu(alphafold: Workload) -> None:
    speeds = rates("h200")
    one, two = (step_cost(alphafold, plan, speeds) for plan in (ParallelPlan(), ParallelPlan(dap=2)))
    assert two.memory["activations"] < 0.7 * one.memory["activations"]
    # At this size most of what a step works with is no pair tensor.
    assert two.memory["working"] < one.memory["working"]


def test_slow_links_make_plans_that_send_less_the_best(gpt: Workload) -> None:
    slow = rates("h100", replace(TRAINING, link_share=1e-4))
    best = best_plans(gpt, gpus=4, gpu=slow, count=1)[0]
    assert (best.plan.tp, best.plan.sp) == (1, 1)


def test_layouts_are_all_factorisations_and_as_square_a_grid_as_there_is() -> None:
    found = list(standard_layouts(dap=8, tp=4, tp_modes=("1d", "2d"), grid=True)(8))
    assert all(plan.ranks == 8 for plan in found)
    assert ParallelPlan(dap=8) in found
    assert ParallelPlan(dap=8, dap_mode="grid", dap_rows=2) in found
    assert ParallelPlan(dap=2, tp=4, tp_mode="2d") in found
    assert ParallelPlan(dap=4, dap_mode="grid", tp=2) in found
    assert len(found) == len(set(found))


FLAGS = [f"--{name.replace('_', '-')}={size}" for name, size in SIZES.items()] + ["--model", "model_5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "8", "--gpu", "h20O"], "the table of GPUs lacks 'h20O'; did you mean h200?"),
        (
            ["--gpus", "8", "--gpu", "h200", "--model", "model_7"],
            "expected the name of a model, found 'model_7'; did you mean",
        ),
        (["--gpus", "8"], "fastfold plan needs --gpu"),
    ],
)
def test_the_command_refuses_what_is_unknown_with_the_nearest_that_is(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--gpus", "0"), ("--residues", "-3"), ("--count", "0")])
def test_the_command_refuses_numbers_out_of_range_by_their_options(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--gpus", "8", "--gpu", "h200", option, value])
    assert f"argument {option}: {value!r} is not a whole number from 1" in capsys.readouterr().err


def test_the_command_prints_plans_with_their_settings_and_the_origin_of_every_rate(
    capsys: pytest.CaptureFixture[str], traced_once: None
) -> None:
    assert main(["plan", *FLAGS, "--gpus", "2", "--gpu", "h200", "--global-batch", "2", "--count", "1"]) == 0
    out = capsys.readouterr().out
    assert "parallel.dp=2" in out
    assert "data.crop_size=64" in out
    assert out.count("tabulated (NVIDIA H200 data sheet") == 5
    plan = next(line for line in out.splitlines() if "parallel.dp=2" in line)
    assert "ms (uncalibrated)" in plan
    assert "uncalibrated: no rate was measured on this GPU; the constants are fitted to" in out
    assert "5 µs in addition to its work, no less than 10 µs to be launched" in out


def test_the_command_counts_graphs_in_the_place_of_kernels(
    capsys: pytest.CaptureFixture[str], traced_once: None
) -> None:
    """And refuses them of a fold, whose plan knows nothing of them."""
    options = ["plan", *FLAGS, "--gpus", "1", "--gpu", "h200", "--global-batch", "1", "--count", "1"]
    seconds = []
    for graphs in ([], ["--cuda-graphs"]):
        assert main([*options, *graphs]) == 0
        out = capsys.readouterr().out
        assert ("a CUDA graph of a block's kernels no less than 10 µs" in out) == bool(graphs)
        number, unit = next(line.split()[1:3] for line in out.splitlines() if "checkpointing=" in line)
        assert unit == "ms"
        seconds.append(float(number))
    assert 0.3 * seconds[0] < seconds[1] < 0.9 * seconds[0]
    assert main(["plan", "--fold", *options[1:], "--cuda-graphs"]) == 2
    assert "--cuda-graphs is for a training step" in capsys.readouterr().err
