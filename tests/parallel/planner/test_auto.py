"""A plan is chosen for any module from a batch of its inputs, and explained."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from fastfold.errors import ConfigError
from fastfold.parallel import ParallelPlan, parallelize
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.data_parallel.units import checkpointable_blocks
from fastfold.parallel.families.block_stages import block_stages
from fastfold.parallel.pipeline import split_blocks
from fastfold.parallel.planner.auto import (
    Choice,
    _cut,
    _micro_batches,
    _pipelines,
    _traced,
    _workload,
    choose_plan,
)
from fastfold.parallel.planner.cost_model import _exchanged, _expected_exchanges, exchange_seconds, step_cost
from fastfold.parallel.planner.hardware import GENERAL, Rates, rates
from fastfold.parallel.planner.recorder import Operation, Part, Recorder, Trace, TracedRegion
from fastfold.parallel.planner.workload import Repeat
from fastfold.parallel.tensor_parallel import ParallelMLP
from tests.helpers.spawn_ranks import launch
from tests.parallel.gpt_case import largest_differences

WIDTH = 256


class Block(nn.Module):
    """A perceptron with GELU, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """``x [batch, width]`` to the same shape."""
        return x + self.mlp(x)


class Net(nn.Sequential):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)))


CUTS = tuple(f"{number}.mlp" for number in range(4))
PARAMETERS = sum(p.numel() for p in Net().parameters())


def _choose(model: nn.Module, example: Any, ranks: int, **options: Any) -> Choice:
    return choose_plan(model, example, ranks, blocks=checkpointable_blocks(model), **options)


def _with_memory(size: float) -> Rates:
    found = rates("h100", GENERAL)
    return replace(found, sheet=replace(found.sheet, memory=size))


def test_a_plan_is_chosen_and_explained_and_nothing_is_computed() -> None:
    model = Net()
    before = [p.data_ptr() for p in model.parameters()]
    found = choose_plan(model, torch.zeros(64, WIDTH), 8, gpu="h100")
    assert found.plan.dp == 8
    assert found.plan.tp == 1
    text = found.explanation
    assert text.startswith("plan: dp 8")
    assert "the simplest of the fastest among 4 that fit into memory (4 tried)" in text
    assert "of 67 GiB a GPU" in text
    assert "next: dp 8" in text
    assert "tp was not tried: layers= says which layers may be cut" in text
    assert [p.data_ptr() for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


def test_less_memory_shards_more_and_too_little_is_refused() -> None:
    """Sixteen bytes a parameter are whole under stage 0: weight, gradient, and two moments."""
    batch = torch.zeros(8, WIDTH)
    plans = {
        room: choose_plan(Net(), batch, 8, gpu=_with_memory(room * PARAMETERS / GENERAL.memory_share)).plan
        for room in (40.0, 14.0, 9.0)
    }
    assert plans[40.0].zero < 3
    assert plans[14.0].zero >= 1
    assert plans[9.0].zero == 3
    with pytest.raises(ConfigError, match=r"Net fits into no plan of 8 h100: .*give layers= for tensor para"):
        choose_plan(Net(), batch, 8, gpu=_with_memory(PARAMETERS))


def test_layers_that_may_be_cut_add_plans_within_a_machine() -> None:
    """One sample for sixteen ranks leaves tensor parallelism alone, which may not leave a machine of eight GPUs."""
    found = choose_plan(Net(), torch.zeros(1, 64, WIDTH), 8, cuts=CUTS, gpu="h100")
    assert found.plan == ParallelPlan(tp=8)
    assert "tp stays within the 8 GPUs of a machine" in found.explanation
    with pytest.raises(ConfigError, match="16 ranks cannot share a batch of 1 samples"):
        choose_plan(Net(), torch.zeros(1, 64, WIDTH), 16, cuts=CUTS, gpu="h100")


def test_what_cannot_be_planned_says_why() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            found = self.layer(x)
            return found if found.sum() > 0 else -found

    batch = torch.zeros(2, WIDTH)
    with pytest.raises(
        ConfigError, match=r'Deciding cannot be traced on tensors without data .*in place of "auto"'
    ):
        choose_plan(Deciding(), batch, 2, gpu="h100")
    with pytest.raises(ConfigError, match="example= has no tensor"):
        choose_plan(Net(), {"x": 1}, 2, gpu="h100")
    with pytest.raises(ConfigError, match="needs example="):
        parallelize(Net(), "auto")
    with pytest.raises(ConfigError, match="found 'fast'"):
        parallelize(Net(), "fast", example=batch)


class Listed(nn.Module):
    """The four blocks in a list, with a norm after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Net()), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)  # type: ignore[no-any-return]


def _stages(model: nn.Module, count: int) -> list[nn.Module]:
    groups = [nn.Sequential(*blocks) for blocks in split_blocks(list(model.blocks), count)]
    groups[-1].append(model.norm)
    return groups


def test_checkpointing_is_chosen_only_where_activations_do_not_fit() -> None:
    """A large sample: what the blocks keep is many times their weights, and no passes can share it."""
    batch = torch.zeros(2, 32 * 1024, WIDTH)
    roomy = _choose(Listed(), batch, 2, gpu="h100")
    assert not roomy.checkpointing
    kept = 4 * 4 * batch.numel() // 2 * 9  # bytes of a rank: of four blocks about nine times the input
    tight = _choose(Listed(), batch, 2, gpu=_with_memory(kept / 2 / GENERAL.memory_share))
    assert tight.checkpointing
    assert tight.plan.dp == 2
    assert tight.explanation.splitlines()[0].startswith("plan: dp 2")
    assert ", activation checkpointing, the simplest" in tight.explanation
    with pytest.raises(ConfigError, match="Net fits into no plan"):
        choose_plan(Net(), batch, 2, gpu=_with_memory(kept / 2 / GENERAL.memory_share))


def test_gradients_accumulate_before_anything_is_computed_again() -> None:
    """A batch that does not fit at once runs in passes; memory for one sample at a time needs no checkpointing."""
    batch = torch.zeros(2 * 12, 1024, WIDTH)
    one = 4 * 1024 * WIDTH * 9 * 4  # bytes of a sample: of four blocks about nine times the input
    roomy = _choose(Listed(), batch, 2, gpu="h100")
    tight = _choose(Listed(), batch, 2, gpu=_with_memory(6 * one / GENERAL.memory_share))
    assert roomy.passes == 1
    assert "passes" not in roomy.explanation
    assert 2 <= tight.passes <= 6
    assert not tight.checkpointing
    rows = -(-12 // tight.passes)
    assert f"plan: dp 2, {tight.passes} passes of {rows} samples, the simplest" in tight.explanation
    # The passes compute what one does, and load the weights more often.
    assert roomy.seconds <= tight.seconds < 1.3 * roomy.seconds


def test_batch_norm_sees_all_samples_of_a_rank_at_once() -> None:
    """Gradients that add up over passes would have other statistics."""
    model, batch = nn.Sequential(*Net(), nn.BatchNorm1d(WIDTH)), torch.zeros(2 * 4096, WIDTH)
    tight = _with_memory(40 * PARAMETERS / GENERAL.memory_share)
    assert choose_plan(Net(), batch, 2, gpu=tight).passes > 1
    with pytest.raises(ConfigError, match="fits into no plan"):
        choose_plan(model, batch, 2, gpu=tight)
    found = choose_plan(model, batch, 2, gpu="h100")
    assert found.passes == 1
    assert "gradient accumulation was not tried: statistics of batch norm" in found.explanation


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (12, [12, 6, 4, 3, 2, 1]), (7, [7, 4, 3, 2, 1])])
def test_numbers_of_samples_at_once_go_down_to_one(samples: int, expected: list[int]) -> None:
    assert list(_micro_batches(samples)) == expected


def test_autocast_halves_activations_and_keeps_parameters_whole() -> None:
    """Products in bfloat16, as under torch.autocast around the call; a bfloat16 model has half of everything."""
    batch = torch.zeros(2, 4096, WIDTH)
    plain, cast = (
        _memory(choose_plan(Net(), batch, 2, gpu="h100", autocast=d)) for d in (None, torch.bfloat16)
    )
    with torch.autocast("cpu", torch.bfloat16):
        around = _memory(choose_plan(Net(), batch, 2, gpu="h100"))
    half = _memory(choose_plan(Net().bfloat16(), batch.bfloat16(), 2, gpu="h100"))
    assert cast == around
    assert half < cast < plain
    times = [
        choose_plan(Net(), batch, 2, gpu="h100", autocast=dtype).seconds for dtype in (None, torch.bfloat16)
    ]
    assert times[1] < 0.7 * times[0]
    big, small = (
        choose_plan(model, torch.zeros(2, WIDTH, dtype=dtype), 2, gpu="h100")
        for model, dtype in ((Net(), torch.float32), (Net().bfloat16(), torch.bfloat16))
    )
    # Nearly all of it is of parameters: weights, gradients twice, and two moments; to two digits of a GiB.
    assert _memory(small) == pytest.approx(_memory(big) / 2, abs=0.006)
    assert _memory(big) == pytest.approx(20 * PARAMETERS / 2**30, abs=0.02)


def _memory(choice: Choice) -> float:
    """GiB of the plan by its explanation, of a plan without ZeRO."""
    found = re.search(r"; ([\d.]+) of [\d.]+ GiB a GPU", choice.explanation)
    assert found is not None
    assert choice.plan.zero == 0
    return float(found[1])


# Seconds of a step of 480 sequences of 1,024 tokens on 8 GPUs: nanoGPT's README (4 days on A100 of 40 GB for the
# 600,000 steps of config/train_gpt2.py, torch.compile) and llm-foundry's MPT 125M (156,468 tokens/s a GPU of 80 GB,
# scripts/train/benchmarking). Neither was used to fit a constant.
GPT2_STEPS = {"a100-40gb": 4 * 86400 / 600_000, "a100": 480 * 1024 / 8 / 156_468}


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPT2_STEPS)
def test_gpt2_is_planned_as_it_is_trained(gpu: str) -> None:
    """Without checkpointing, in passes where memory is small, within a factor of what others measured."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=50304, context=1024, layers=12, heads=12, width=768))
    tokens = torch.zeros(480, 1024, dtype=torch.int64, device="meta")
    choice = _choose(_WithLoss(model), tokens, 8, gpu=gpu, autocast=torch.bfloat16)
    assert choice.plan.dp == 8
    assert choice.plan.zero <= 1
    assert not choice.checkpointing
    assert choice.passes in ((2, 3, 4, 5) if gpu == "a100-40gb" else (1, 2))
    assert 1 / 1.5 < choice.seconds / GPT2_STEPS[gpu] < 1.5


class _WithLoss(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens).float(), tokens)


def test_pipelines_are_tried_with_stages_alone() -> None:
    """Two stages, with and without checkpointing, in addition to four stages of ZeRO; notes say what is not tried."""
    batch = torch.zeros(2, 64, WIDTH)
    for stages, tried in ((None, 8), (_stages, 10)):
        assert f"({tried} tried)" in _choose(Listed(), batch, 2, stages=stages, gpu="h100").explanation
    eight = _choose(Listed(), torch.zeros(8, 64, WIDTH), 8, stages=_stages, gpu="h100")
    assert "pp 8 was not tried: 4 blocks cannot be split into 8 pipeline stages" in eight.explanation
    assert "sp was not tried" in eight.explanation
    without = choose_plan(Net(), torch.zeros(8, WIDTH), 8, stages=_stages, gpu="h100")
    assert "pp was not tried: the model has no nn.ModuleList of blocks" in without.explanation
    assert "pp was not tried: stages= says" in choose_plan(Net(), batch, 2, gpu="h100").explanation


class Tied(nn.Module):
    """Four blocks between an embedding and an output layer of the same weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """``input_ids [batch, length]`` to ``[batch, length, vocabulary]``."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_tied_embedding_is_piped_and_its_exchange_counts() -> None:
    """The last stage has a copy of the first one's weight: gradient and new values are sent once a step."""
    model, speeds = Tied(512), rates("h100", GENERAL)
    batch = {"input_ids": torch.zeros(8, 64, dtype=torch.int64)}
    stages, blocks = block_stages(model), [f"blocks.{number}" for number in range(4)]
    piped, _ = _pipelines(model, stages, 4, blocks)
    assert piped == dict.fromkeys((2, 4), model.head.weight.nbytes)
    assert "(10 tried)" in _choose(model, batch, 2, stages=stages, gpu=speeds).explanation

    workload, size = _workload(model, 1, 8, blocks), 10**9
    workload._traces[ParallelPlan()] = _traced(model, (), batch, 8, 1, regions=blocks, autocast=None)
    sent = 2 * exchange_seconds(Communication("shift", "pp", 2, size), ParallelPlan(pp=2), speeds)
    for plan, seconds in ((ParallelPlan(pp=2), sent), (ParallelPlan(), 0.0)):
        tied, apart = (step_cost(replace(workload, tied_bytes=x), plan, speeds) for x in (size, 0))
        assert tied.communication - apart.communication == pytest.approx(seconds)


def test_a_checkpointed_plan_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Choice(ParallelPlan(), True, "because")
    monkeypatch.setattr("fastfold.parallel.planner.auto.choose_plan", lambda *_, **__: chosen)
    parallel = parallelize(Listed(), "auto", example=torch.zeros(2, WIDTH))
    assert all("forward" in vars(block) for block in parallel.module.blocks)
    assert parallel.explanation == "because"


def test_regions_inside_of_regions_are_left_out_of_them() -> None:
    model = Listed()
    recorder = Recorder(model)
    recorder.watch("blocks.0", model.blocks[0])
    recorder.watch("blocks.0.mlp", model.blocks[0].mlp)
    with recorder:
        model(torch.zeros(2, WIDTH))
    regions = recorder.result().regions
    assert {name: sum(region.forward.operations.values()) for name, region in regions.items()} == {
        "": sum(regions[""].forward.operations.values()),
        "blocks.0": 1,
        "blocks.0.mlp": 3,
    }
    assert regions[""].forward.operations


@pytest.mark.parametrize("zero", range(4))
def test_expected_exchanges_are_those_that_the_stages_make(zero: int) -> None:
    every_sample, every_step, elements = _exchanged(zero, ParallelPlan(dp=4, tp=2))
    # The ranks also say which parameters they used.
    every_step = tuple(entry for entry in every_step if entry.sent > 100)
    assert _expected_exchanges(zero, 4) == (every_sample, every_step, elements)


def _train(cut: bool) -> tuple[str, float]:
    torch.manual_seed(0)
    plain, layers = Net().double(), {"*.mlp": ParallelMLP.from_plain}
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    model: Any = parallelize(
        copy.deepcopy(plain), "auto", example=x, layers=layers if cut else None, gpu="h100"
    )
    optimizer = model.optimizer(lambda named: torch.optim.SGD(named.values(), lr=0.1))
    model(x[model.rows(4)]).square().mean().backward()
    optimizer.step()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return model.explanation, largest_differences(model.state_dict(), plain.state_dict())


def test_shards_within_machines_are_tried_where_there_are_several() -> None:
    """Of 16 x 1,024 parameters of four bytes seven of eight shards stay within a machine, and one leaves it."""
    found = choose_plan(
        Net(), torch.zeros(16, WIDTH), 16, gpu=_with_memory(9 * PARAMETERS / GENERAL.memory_share)
    )
    assert "(5 tried)" in found.explanation
    assert found.plan.zero == 3
    gather, reduce, total = _expected_exchanges(3, 16, 8)[0]
    assert gather.size == reduce.size == 8
    assert total.size == 2
    assert gather.sent == reduce.sent == 4 * 16 * 1024 * 7 / 8
    assert total.sent == 4 * 16 * 1024 / 8


@pytest.mark.slow
def test_the_plan_trains_as_one_process_does() -> None:
    for explanation, worst in launch(_train, 2, False):
        assert "plan: dp 2" in explanation
        assert worst < 1e-12


def test_a_recorded_module_is_not_kept() -> None:
    """Neither by its recorder nor by the registry of what is done when memory is freed."""
    module = torch.nn.Linear(8, 8)
    recorder = Recorder(module)
    recorder.record(lambda plain: plain(torch.randn(4, 8)).square().sum(), [])
    alive = weakref.ref(module)
    del recorder, module
    gc.collect()
    assert alive() is None


def test_a_cut_layer_has_its_share_of_work_and_two_messages() -> None:
    def part(flops: float) -> Part:
        return Part(Counter({Operation("mm", "float32", flops, 30.0, 2, 9.0): 4}))

    regions = {
        "": TracedRegion(part(1.0), part(2.0), parameters=7),
        "cut": TracedRegion(part(12.0), part(24.0), entering=90, kept=200, parameters=10, calls=1),
        "whole": TracedRegion(part(6.0), part(6.0), kept=40),
    }
    trace = Trace(regions, 1000.0)
    assert _cut(trace, 1, ["cut"]) is trace
    found = _cut(trace, 3, ["cut"])
    assert {name: found.regions[name] for name in ("", "whole")} == {n: regions[n] for n in ("", "whole")}
    one = found.regions["cut"]
    message = [Communication("all_reduce", "tp", 3, pytest.approx(2 * 2 / 3 * 90))]
    assert one.forward == Part(Counter({Operation("mm", "float32", 4.0, 10.0, 2, 3.0): 4}), message)
    assert one.backward == Part(Counter({Operation("mm", "float32", 8.0, 10.0, 2, 3.0): 4}), message)
    assert (one.entering, one.kept, one.parameters, one.calls) == (90, 66, 4, 1)
    assert found.peak == pytest.approx(1000.0 - 200 * 2 / 3)


@pytest.mark.parametrize(("dtype", "element"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_adams_moments_have_the_dtype_of_the_parameters(dtype: torch.dtype, element: int) -> None:
    workload = _workload(Net().to(dtype), 3, 12, ["0", "1"])
    assert (workload.parameter_bytes, workload.sharded_bytes, workload.copied_bytes) == (
        element,
        2 * element,
        0,
    )
    assert (workload.samples, workload.rows(ParallelPlan()), workload.passes) == (12, 3, 0.0)
    assert workload.stacks == {"0": Repeat(1), "1": Repeat(1)}


def test_the_leanest_plan_is_named_where_none_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"no plan of 8 h100: dp 8, zero 3 needs 0\.\d GiB of 0\.0 GiB a GPU"
    ):
        choose_plan(Net(), torch.zeros(8, WIDTH), 8, gpu=_with_memory(PARAMETERS))


def test_of_plans_that_take_the_same_time_the_simplest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within three percent of the fastest: without checkpointing, then fewer stages, less sharding, fewer passes."""
    times: dict[tuple[int, bool], float] = {}

    def cost(workload: Any, plan: ParallelPlan, speeds: Any, *, checkpointing: bool) -> Any:
        found = step_cost(workload, plan, speeds, checkpointing=checkpointing)
        zero = plan.zero + 4 * (plan.dp_shard > 0)
        return replace(
            found, compute=times[zero, checkpointing], communication=0.0, imbalance=0.0, synchronization=0.0
        )

    monkeypatch.setattr("fastfold.parallel.planner.auto.step_cost", cost)
    for changed, zero, checkpointing in (
        ({}, 0, False),
        ({(0, False): 1.029}, 0, False),
        ({(0, False): 1.031}, 1, False),
        ({(0, False): 1.031, (1, False): 1.04}, 2, False),
        ({(n, False): 1.5 for n in range(4)}, 0, True),
        ({(3, False): 0.5}, 3, False),
    ):
        times.update({(n, again): 1.0 for n in range(5) for again in (False, True)} | changed)
        found = _choose(Listed(), torch.zeros(2, 64, WIDTH), 2, gpu="h100")
        assert (found.plan.zero, found.checkpointing) == (zero, checkpointing), changed
        assert found.seconds == times[zero, checkpointing]


def test_each_number_of_stages_is_tried_on_a_copy_without_data() -> None:
    """The function may take the model apart."""
    model, cut, held = Listed(), list[nn.Module](), list[nn.Module]()

    def stages(plain: nn.Module, count: int) -> list[nn.Module]:
        cut.append(plain)
        made = _stages(plain, count)
        held.extend(made)
        plain.blocks, plain.norm = nn.ModuleList(), nn.Identity()
        return made

    found = _choose(model, torch.zeros(4, 64, WIDTH), 4, stages=stages, gpu="h100")
    assert "was not tried: 0 blocks" not in found.explanation
    assert len({id(plain) for plain in [model, *cut]}) == 3
    assert all(p.is_meta for plain in held for p in plain.parameters())
    assert len(model.blocks) == 4
