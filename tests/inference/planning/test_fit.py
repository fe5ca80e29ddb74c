"""A memory budget is all a person sets: what follows from it holds, is printed, and is halved when memory ends."""

from __future__ import annotations

import pickle
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastfold.errors import InputError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import set_policy
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.outer_product_mean import OuterProductMean
from fastfold.evoformer.precision import set_precision
from fastfold.evoformer.triangle_attention import TriangleAttention
from fastfold.evoformer.triangle_multiplication import TriangleMultiplication
from fastfold.inference.folding import network, prediction, predictor
from fastfold.inference.planning.fit import Fit, FoldMemory, _reusable_bytes, fit_target, plan_target
from fastfold.inference.planning.memory_model import channel_groups
from fastfold.inference.planning.planner import FOLDING_POLICY, FoldPlan, Planner
from fastfold.inference.planning.time_model import Costs, measure_costs
from fastfold.kernels.common.launch import LaunchRefused
from fastfold.kernels.cpu.products import multiplies_bfloat16
from fastfold.memory import BudgetError, HostBuffers, SimulatedDevice
from fastfold.utils.units import GIB
from tests.helpers.command_line import CommandLine

CONFIG = model_config("model_1")
PLANNER = Planner(CONFIG, 4)
SEQUENCE = "MKTAYIAKQR"
ERRORS: list[Exception] = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("preset", ["model_1", "model_3_ptm", "model_1_multimer_v3"])
@pytest.mark.parametrize("element_size", [2, 4])
def test_the_smallest_budget_works_and_one_byte_less_does_not(preset: str, element_size: int) -> None:
    planner = Planner(model_config(preset), element_size, rows=100)
    smallest = planner.smallest(700)
    assert planner.plan(700, smallest).peak <= smallest
    with pytest.raises(BudgetError) as caught:
        planner.plan(700, smallest - 1)
    assert caught.value.smallest == smallest


def test_less_memory_means_smaller_blocks_and_more_time_and_never_a_peak_over_the_budget() -> None:
    planner = replace(PLANNER, rows=64)
    smallest = planner.smallest(1024)
    plans = [planner.plan(1024, budget) for budget in (20 * GIB, smallest * 5 // 4, smallest)]
    assert [plan.slow_down == 1.0 for plan in plans] == [True, False, False]
    assert plans[0].policy is FOLDING_POLICY
    assert plans[1].slow_down <= plans[2].slow_down
    assert not plans[2].policy.hold_templates
    for plan, budget in zip(plans, (20 * GIB, smallest * 5 // 4, smallest), strict=True):
        assert plan.peak <= budget


def test_a_thousand_residues_take_two_and_a_half_pair_tensors() -> None:
    """The whole network, templates included, with 32 rows of an alignment."""
    unit = 1024**2 * 128 * 4
    assert replace(PLANNER, rows=32).plan(1024, int(2.5 * unit)).peak <= 2.5 * unit


def test_ten_thousand_residues_in_bfloat16() -> None:
    """Under 60 GB on a device alone and under 40 GB with the host, of which one and a half pair tensors are used."""
    for limit, host in ((60, 0), (40, 100 * GIB)):
        planner = Planner(CONFIG, 2, "cuda", host_memory=host, rows=32)
        plan = replace(planner, templates=0).plan(10_000, limit * 10**9)
        assert (plan.policy.contraction.host is not None) == (host > 0)
        assert plan.chunks.host == (10_000**2 * 128 * 2 if host else 0)
        # With four templates, some of the pair waits on the host too, beside the templates' products.
        plan = planner.plan(10_000, limit * 10**9)
        assert (plan.policy.offload is not None) == (host > 0)
        assert plan.chunks.host <= 3 * plan.unit // 2
        assert (plan.chunks.host > 0) == (host > 0)
    with pytest.raises(BudgetError):
        Planner(CONFIG, 2, "cuda", rows=32, templates=0).plan(10_000, 40 * 10**9)
    with pytest.raises(BudgetError):
        Planner(CONFIG, 2, "cuda", host_memory=15 * 10**9, rows=32).plan(10_000, 40 * 10**9)


@pytest.mark.parametrize("templates", [0, 4])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_smallest_budget_falls_smoothly_with_the_memory_of_the_host(templates: int, ranks: int) -> None:
    """A byte more on the host saves a byte on the device at most, and never costs one, until nothing more can leave."""
    n = 20_000 * (2 if ranks > 1 else 1)
    unit = n * n * 128 * 2 // ranks
    step = unit // 16
    planner = Planner(CONFIG, 2, "cuda", ranks=ranks, rows=64, templates=templates)
    found = [replace(planner, host_memory=k * step).smallest(n) for k in range(28)]
    falls = [before - after for before, after in pairwise(found)]
    assert all(0 <= fall <= 1.01 * step for fall in falls)
    assert found[0] - found[-1] > 0.5 * unit  # and in the whole it is worth it
    assert max(falls[:8]) < 2 * min(falls[:8])  # half of it with half of the memory


def test_a_disk_takes_what_the_host_cannot() -> None:
    """As much of the device is saved, in more time."""
    both, disk, host = (
        Planner(CONFIG, 2, "cuda", host_memory=host * GIB, disk=disk * GIB, rows=64)
        for host, disk in ((20, 80), (0, 100), (100, 0))
    )
    budget = host.smallest(10_000) * 21 // 20
    assert both.smallest(10_000) == disk.smallest(10_000) == host.smallest(10_000)
    plans = [planner.plan(10_000, budget) for planner in (host, both, disk)]
    assert [plan.chunks.seconds for plan in plans] == sorted(plan.chunks.seconds for plan in plans)
    assert plans[0].chunks.seconds < plans[2].chunks.seconds
    assert 0 < plans[1].chunks.host <= 20 * GIB
    assert plans[1].chunks.disk > 0
    assert plans[2].chunks.host == 0


def test_more_ranks_need_less_each_and_what_cannot_be_is_refused() -> None:
    """30,000 residues on 8 GPUs of 80 GB, with 32 GiB of the host for each; not on 4, and not 60,000."""
    planner = Planner(CONFIG, 2, "cuda", host_memory=32 * GIB, parameters=200 * 10**6, ranks=8, rows=64)
    plan = planner.plan(30_000, 80 * 10**9)
    assert plan.peak <= 80 * 10**9
    assert plan.chunks.host <= 32 * GIB
    with pytest.raises(BudgetError):
        replace(planner, ranks=4).plan(30_000, 80 * 10**9)
    with pytest.raises(InputError, match=r"about 3[0-9],[0-9]{3} residues would fit"):
        plan_target(planner, 60_000, 80 * 10**9)
    needed = [replace(planner, ranks=ranks).smallest(10_000) for ranks in (1, 2, 4, 8, 16)]
    assert needed == sorted(needed, reverse=True)


def test_every_process_makes_the_same_plan_of_the_same_request() -> None:
    planner = Planner(CONFIG, 2, "cuda", host_memory=100 * GIB, ranks=4, rows=64)
    plan, host = planner.plan(12_000, 24 * GIB), HostBuffers()
    other = pickle.loads(pickle.dumps(plan.request)).plan(host)
    assert other.chunks == plan.chunks
    assert other.policy.contraction.host is host
    assert replace(other.policy.contraction, host=planner.host) == plan.policy.contraction


def test_ten_thousand_residues_with_a_deep_alignment() -> None:
    """Under 40 GB with the host, with all 5,632 rows that the network takes and four templates."""
    planner = Planner(CONFIG, 2, "cuda", host_memory=40 * 10**9, parameters=200 * 10**6)
    assert planner.plan(10_000, 40 * 10**9).chunks.host <= 40 * 10**9


def test_twenty_thousand_residues_fit_the_largest_gpu() -> None:
    """Of 139 GiB, in a computer with 128 GiB: with four templates, and as a complex, nearly."""
    for preset, longest in (("model_1_ptm", 20_000), ("model_1_multimer_v3", 19_000)):
        room = {"host_memory": 128 * GIB, "parameters": 200 * 10**6}
        plan = Planner(model_config(preset), 2, "cuda", **room, rows=64).plan(longest, 139 * GIB)
        assert plan.chunks.host <= 128 * GIB
        assert plan.policy.contraction.host is not None


def test_the_host_is_used_only_where_the_device_is_too_small() -> None:
    planner = Planner(CONFIG, 2, "cuda", host_memory=100 * GIB, rows=32)
    assert planner.plan(4000, 140 * GIB).policy.contraction.host is None


def _step(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A step of the trunk, and its inputs for 192 residues."""
    c, n = CONFIG.model.embeddings_and_evoformer.evoformer, 192
    kind: dict[str, Any] = {"dtype": torch.bfloat16}
    pair, mask = torch.randn(n, n, 128, **kind), torch.ones(n, n, **kind)
    if name == "outer product mean":
        module: nn.Module = OuterProductMean(c.outer_product_mean, 256, 128, zero_init=True)
        return module, (torch.randn(32, n, 256, **kind), pair, torch.ones(32, n, **kind))
    module = TriangleMultiplication(c.triangle_multiplication_outgoing, 128, zero_init=True)
    return module, (pair, mask)


@pytest.mark.long
@pytest.mark.parametrize("name", ["outer product mean", "triangle multiplication"])
def test_a_step_takes_what_was_predicted_of_it(name: str) -> None:
    """On the simulated device, with the buffers of the operators' own blocks, half a pair tensor here.

    Attention has other blocks on a GPU than here; ``test_simulate`` takes a GPU's way.
    """
    if not multiplies_bfloat16():
        pytest.skip(
            "this processor has no units for bfloat16: it multiplies float32 copies, which a GPU does not make"
        )
    module, inputs = _step(name)
    # Of a GPU: there are no gaps in a heap.
    n, planner = inputs[1].shape[-2], Planner(CONFIG, 2, "cuda", rows=32)
    plan = planner.plan(n, planner.smallest(n) + (8 << 20))
    module = module.bfloat16().eval()
    set_policy(module, plan.policy, plan.blocks)
    device = SimulatedDevice(1 << 40)
    for tensor in inputs:
        device.hold(tensor)
    before = device.used
    with torch.inference_mode(), device.running():
        module(*inputs)
    taken, working = device.peak - before, plan.chunks.chosen[name].working
    assert taken <= working + plan.unit / 2
    assert taken >= 0.5 * working


class _AnyBudget:
    """A planner with a plan for every budget from 100 bytes up."""

    device = "cpu"

    def plan(self, residues: int, budget: int) -> Any:
        return SimpleNamespace(peak=min(budget, 900))

    def smallest(self, residues: int) -> int:
        return 100

    def longest(self, budget: int) -> int:
        return budget


def _within(
    run: Callable[[Any], Any], said: list[str], planner: Any = None, residues: int = 10, budget: int = 5000
) -> Any:
    planner = planner or _AnyBudget()
    plan = plan_target(planner, residues, budget)
    return Fit(planner, plan, budget, residues, "T1").run(run, said.append)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_when_memory_ends_the_budget_is_halved_and_the_fold_goes_on(error: Exception) -> None:
    peaks: list[int] = []
    said: list[str] = []

    def run(plan: Any) -> str:
        peaks.append(plan.peak)
        if len(peaks) < 3:
            raise error
        return "folded"

    assert _within(run, said) == "folded"
    assert peaks == [900, 450, 225]
    assert len(said) == 2
    assert "T1: out of memory with a plan of" in said[0]
    assert "continuing with a budget of" in said[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_memory_of_a_failed_fold_returns_to_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    emptied: list[int] = []
    peaks: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    planner = _AnyBudget()
    planner.device = device

    def run(plan: Any) -> str:
        peaks.append(plan.peak)
        if len(peaks) < 3:
            raise ERRORS[0]
        return "folded"

    assert _within(run, [], planner) == "folded"
    assert len(emptied) == (2 if device == "cuda" else 0)


def test_a_network_in_bfloat16_is_planned_as_one() -> None:
    """Although its normalisations stay in float32."""
    with torch.device("meta"):
        network = AlphaFold(CONFIG)
    memory = FoldMemory(free=40 * GIB)
    found = {
        name: fit_target(
            set_precision(network, name), torch.device("cpu"), 500, None, name="T1", memory=memory
        )
        for name in ("fp32", "bf16")
    }
    assert [found[name].planner.element_size for name in ("fp32", "bf16")] == [4, 2]
    assert found["bf16"].plan.peak < 0.6 * found["fp32"].plan.peak


def test_only_when_the_smallest_plan_fails_does_the_target_fail() -> None:
    peaks: list[int] = []

    def run(plan: Any) -> None:
        peaks.append(plan.peak)
        raise MemoryError

    with pytest.raises(InputError, match=r"record 'T1'.*even with the smallest blocks.*about 50 residues"):
        _within(run, [])
    assert peaks == [900, 450, 225, 112, 100]


def test_other_errors_are_not_taken_for_missing_memory() -> None:
    def run(plan: FoldPlan) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        _within(run, [], PLANNER, 100, 10 * GIB)


def test_a_fold_whose_kernel_cannot_run_begins_again_by_the_same_plan() -> None:
    peaks: list[int] = []
    said: list[str] = []

    def run(plan: Any) -> str:
        peaks.append(plan.peak)
        if len(peaks) == 1:
            raise LaunchRefused("attention needs more than this GPU has")
        return "folded"

    assert _within(run, said) == "folded"
    assert peaks == [900, 900]
    (line,) = said
    assert line.startswith("warning: T1: attention needs more than this GPU has")


def test_a_failed_attempt_is_freed_before_the_next() -> None:
    alive: list[Any] = []

    class Held:
        pass

    def run(plan: FoldPlan) -> int:
        if alive:
            return sum(reference() is not None for reference in alive)
        big = Held()
        alive.append(weakref.ref(big))
        raise MemoryError

    assert _within(run, [], PLANNER, 400, 10 * GIB) == 0


def test_costs_are_measured() -> None:
    costs = measure_costs(torch.device("cpu"), torch.float32, length=16)
    assert costs.rate > 0
    assert costs.bandwidth > 0
    assert costs.per_block >= 0
    assert costs.per_pair >= 0
    assert costs != Costs()


def test_infer_says_what_a_budget_that_is_too_small_would_have_to_be(cli: CommandLine) -> None:
    done = cli.infer(cli.fasta({"T1": SEQUENCE}), "--memory-budget", "1MiB")
    assert done.code == 1
    assert "a memory budget of 0.00 GiB is too small for 10 residues; the smallest that works is" in done.err
    assert cli.infer(cli.fasta({"T1": SEQUENCE}), "--memory-budget", "lots").code == 2


def test_ample_memory_of_a_gpu_holds_all_channels_of_a_product() -> None:
    """Each group of channels reads and normalises the pair again; a CPU's first candidate stays a quarter."""
    planner = Planner(CONFIG, 2, "cuda", rows=64)
    channels = {budget: planner.plan(4096, budget << 30).policy.contraction.channels for budget in (78, 14)}
    assert channels[78] == 128
    assert (channels[14] or 128) < 128
    ample = planner.plan(4096, 78 << 30)
    assert ample.templates.channels == 128
    assert channel_groups(128) == channel_groups(128, 1, "cpu") == [32, 16, 8, 4, 2, 1]
    assert channel_groups(128, 2, "cuda")[0] == 32
    assert channel_groups(128, 1, "cpu", 2)[0] == 128  # operators in 16 bits take as long for each group
    assert channel_groups(128, 2, "cpu", 2)[0] == 32


def test_attention_of_a_gpu_takes_the_memory_that_there_is() -> None:
    """All rows at once where they fit, fewer where not; the blocks of templates stay those of the kernel."""
    planner, n = Planner(CONFIG, 2, "cuda"), 2048
    ample, small = (planner.plan(n, budget << 30) for budget in (78, 10))
    assert (ample.blocks["triangle attention"] or 0) >= n * n * 128
    assert (ample.blocks["MSA attention"] or 0) >= n * 516 * 256
    assert (small.blocks["triangle attention"] or 0) < n * n * 128
    assert small.peak <= 10 << 30
    # Queries, keys, values, gates, attended values and the update of every pair are counted.
    assert ample.peak > 6 * n * n * 128 * 2
    for plan in (ample, small):
        assert plan.policy.attention_at_once
    config = model_config("model_1")
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = (
        trunk.template.template_pair_stack.num_block
    ) = 1
    with torch.device("meta"):
        model = AlphaFold(config)
    policies = ample.policies(model)
    at_once = {
        name: policies[module].attention_at_once
        for name, module in model.named_modules()
        if isinstance(module, TriangleAttention)
    }
    assert at_once == {name: not name.startswith("template") for name in at_once}
    assert len(at_once) == 6
    shared = Planner(CONFIG, 2, "cuda", ranks=2).plan(n, 78 << 30)
    assert not shared.policy.attention_at_once


def test_infer_goes_on_when_memory_ends(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of it in smaller pieces is what it would have been."""
    records = cli.fasta({"T1": SEQUENCE})
    assert cli.infer(records).code == 0
    before = cli.scores("T1")
    run_network, calls = network.run_network, 0

    def fails_once(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_network(*arguments, **options)

    monkeypatch.setattr(predictor, "run_network", fails_once)
    shutil.rmtree(cli.out)
    done = cli.infer(records)
    assert (done.code, calls) == (0, 2)
    assert "T1: out of memory" in done.err
    after = cli.scores("T1")
    assert after["mean_plddt"] == pytest.approx(before["mean_plddt"], abs=0.01)


def test_without_aligned_errors_nothing_of_their_size_is_ever_made(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long targets leave them out unless told otherwise; all other scores are the same."""
    records = cli.fasta({"T1": SEQUENCE})
    assert cli.infer(records, "--pae", "yes").code == 0
    assert any(name.endswith("_pae.json") for name in cli.names())
    expected = cli.scores("T1")

    def never(*_: Any) -> None:
        raise AssertionError("aligned errors of all pairs")

    monkeypatch.setattr(network, "predicted_aligned_error", never)
    monkeypatch.setattr(prediction, "MAX_PAE_RESIDUES", len(SEQUENCE) - 1)
    for options, said in (((), True), (("--pae", "no"), False)):
        cli.out = cli.folder / f"said_{said}"
        done = cli.infer(records, *options)
        assert done.code == 0, done.err
        assert ("aligned errors of all pairs are left out" in done.err) == said
        assert not any(name.endswith("_pae.json") for name in cli.names())
        assert cli.scores("T1") == expected | {"max_pae": None}
    monkeypatch.setattr(prediction, "MAX_PAE_RESIDUES", len(SEQUENCE))
    assert cli.infer(records).code == 1  # wanted again, and so the prediction is made again


def test_plan_prints_peak_blocks_slow_down_and_the_longest_that_fits(cli: CommandLine) -> None:
    flags = ("--memory-budget", "3GiB", "--precision", "fp32", "--device", "cpu")
    done = cli.run("plan", "--residues", "500", "--msa", "32", "--extra-msa", "32", *flags)
    assert done.code == 0, done.err
    for words in (
        "triangle multiplication",
        "channels",
        "predicted peak",
        " U",
        "slow-down",
        "longest that fits",
    ):
        assert words in done.out
    exact, half = re.search(r"longest that fits +([\d,]+) residues; ([\d,]+) with bf16", done.out).groups()
    halved = cli.run(
        "plan", "--residues", "500", "--msa", "32", "--extra-msa", "32", *flags[:3], "bf16", *flags[4:]
    )
    assert f"longest that fits   {half} residues" in halved.out
    assert 1.2 < int(half.replace(",", "")) / int(exact.replace(",", "")) < 2**0.5 + 0.1
    done = cli.run("plan", "--residues", "5000", *flags)
    assert done.code == 1
    assert "the smallest that works is" in done.err


def test_unused_bytes_of_the_common_pool_are_reusable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other devices and of graphs are not."""

    def segment(total: int, device: int = 1, pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
        return {"total_size": total, "allocated_size": 30, "device": device, "segment_pool_id": list(pool)}

    segments = [segment(100), segment(50), segment(1000, device=0), segment(7000, pool=(0, 1))]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert _reusable_bytes(torch.device("cuda", 1)) == 90
    assert _reusable_bytes(torch.device("cuda")) == 970
