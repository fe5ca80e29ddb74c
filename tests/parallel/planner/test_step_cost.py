"""Time and memory of a step from a trace of known numbers, added up again in closed form."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fastfold.kernels.common.cost import OperatorCost
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner import cost_model, recorder
from fastfold.parallel.planner.cost_model import Cost, least_seconds, step_cost
from fastfold.parallel.planner.hardware import TRAINING, Rates, rates
from fastfold.parallel.planner.recorder import Operation, Part, Recorder, Trace, TracedRegion
from fastfold.parallel.planner.search import plan_table
from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts

SPEEDS = rates(
    "h200",
    replace(
        TRAINING,
        launch_seconds=1e-9,
        kernel_seconds=2e-3,
        latency_seconds=1e-2,
        hidden_share=0.25,
        hidden_synchronization=0.0,
        imbalance=1.5,
        additive=0.125,
    ),
)
LAYERS, CALLS, PASSES, ENTERING, KEPT, PEAK = 6, 3, 1.5, 10**9, 4 * 10**9, 5 * 10**10
FORWARD, BACKWARD = 0.5, 1.25  # seconds of one traced layer
OUTSIDE = 2.0  # of the model outside of the layers, each way


def _part(seconds: float, sent: float = 0.0) -> Part:
    """Work of one operator without memory traffic, and a message."""
    flops = (seconds - SPEEDS.assumptions.kernel_seconds) * SPEEDS.matrix["float32"]
    messages = [Communication("shift", "dap", 8, sent)] if sent else []
    return Part(Counter({Operation("mm", "float32", flops, 0.0, 1): 1}), messages)


def _workload(**settings: Any) -> Workload:
    workload = Workload(
        name="two stacks",
        build=lambda mesh: pytest.fail("is not built"),
        loss=lambda model: pytest.fail("is not run"),
        stacks={"layers": Repeat(LAYERS), "recurrent": Repeat(CALLS, layers=False)},
        layouts=standard_layouts(),
        **({"samples": 24, "stages": 6, "passes": PASSES} | settings),
    )
    for dap in (1, 8):
        # With several ranks a message of two seconds forward and one back.
        link = SPEEDS.link if dap > 1 else 0.0
        regions = {
            "": TracedRegion(_part(OUTSIDE), _part(OUTSIDE), parameters=700),
            "layers": TracedRegion(
                _part(FORWARD, 2 * link), _part(BACKWARD, link), ENTERING, KEPT, parameters=1001, calls=1
            ),
            "recurrent": TracedRegion(_part(0.25), _part(0.75), 10**8, 3 * 10**8, parameters=50, calls=1),
        }
        workload._traces[ParallelPlan(dap=dap)] = Trace(regions, PEAK)
    return workload


def _cost(plan: ParallelPlan, *, host: float = 0.0, checkpointing: bool = False, **settings: Any) -> Cost:
    return step_cost(_workload(**settings), plan, SPEEDS, checkpointing=checkpointing, host=host)


def _stage(layers: float, rest: float, stages: int, largest: float) -> float:
    """Seconds of the slowest stage: the part that cannot be cut, an even share, or one layer."""
    return layers + rest if stages == 1 else max(rest, (layers + rest) / stages, largest)


@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize(("dp", "dap", "pp"), [(1, 1, 1), (3, 8, 1), (1, 8, 3), (4, 8, 6), (5, 1, 2)])
def test_seconds_are_those_of_passes_messages_and_stages(dp: int, dap: int, pp: int, again: int) -> None:
    plan = ParallelPlan(dp=dp, dap=dap, pp=pp)
    found = _cost(plan, checkpointing=bool(again))
    count = math.ceil(24 / dp)
    forwards = PASSES + 1
    layer = (forwards + again) * FORWARD + BACKWARD
    rest = CALLS * (forwards * 0.25 + 0.75) + (forwards + 1) * OUTSIDE
    compute = _stage(LAYERS * layer, rest, pp, layer)
    latency = 1e-2
    # A quarter of the messages of layers hides behind the computation.
    message = 0.75 * ((forwards + again) * (2 + latency) + 1 + latency) if dap > 1 else 0.0
    communication = _stage(LAYERS * message, 0.0, pp, message)
    if pp > 1:
        # Ranks of one pipeline are `dap` apart: on one machine of eight, or on several.
        busy = ENTERING / (SPEEDS.link if dap * pp <= 8 else SPEEDS.network)
        communication += (2 + PASSES) * (busy + latency)
    parameters = 750 + math.ceil(LAYERS * 1001 / pp)
    optimizer = parameters * (3 * 4 + 2 * 8) / SPEEDS.bandwidth
    assert found.compute == pytest.approx(count * compute + optimizer)
    assert found.communication == pytest.approx(count * communication)
    assert found.waiting == pytest.approx((pp - 1) * (compute + communication))
    turns = count + pp - 1
    late = 0.5 if plan.ranks > 1 else 0.0
    assert found.imbalance == pytest.approx(late * turns * (compute + communication))
    total = found.compute + found.communication + found.waiting + found.imbalance + found.synchronization
    assert found.seconds == pytest.approx(total)
    assert found.communication_share == pytest.approx((found.communication + found.synchronization) / total)
    speed = SPEEDS.matrix["float32"]
    operations = count * dp * dap * speed
    kernel = 2e-3
    forward, backward = FORWARD - kernel, BACKWARD - kernel
    flops = LAYERS * ((forwards + again) * forward + backward)
    flops += CALLS * (forwards * (0.25 - kernel) + 0.75 - kernel) + (forwards + 1) * (OUTSIDE - kernel)
    assert found.flops == pytest.approx(operations * flops)
    once = LAYERS * forward + CALLS * (0.25 - kernel) + OUTSIDE - kernel
    assert found.model_flops == pytest.approx(operations * (PASSES + 3) * once)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_that_recomputes_by_itself_is_traced_so(recomputed: bool) -> None:
    plain, again = (
        _cost(ParallelPlan(), checkpointing=value, recomputed=recomputed).compute for value in (False, True)
    )
    assert again - plain == pytest.approx(0.0 if recomputed else 24 * LAYERS * FORWARD)


@pytest.mark.parametrize(
    ("plan", "alike", "sum_shards"),
    [
        (ParallelPlan(), 1, 1),
        (ParallelPlan(dp=4), 4, 1),
        (ParallelPlan(dp=4, dap=8, zero=1), 32, 1),
        (ParallelPlan(dp=4, dap=8, zero=2), 32, 8),
        (ParallelPlan(dp=4, dap=8, zero=3), 32, 32),
        (ParallelPlan(dp=8, zero=3, dp_shard=2), 2, 2),
        (ParallelPlan(dp=2, pp=3, zero=1), 2, 1),
    ],
)
def test_bytes_are_those_of_stages_and_shards(plan: ParallelPlan, alike: int, sum_shards: int) -> None:
    parameters = 750 + math.ceil(LAYERS * 1001 / plan.pp)
    found = _cost(plan, parameter_bytes=2, copied_bytes=3, sharded_bytes=12).memory
    # A block at a time is whole.
    whole = 2 * parameters / alike + 2 * 1001 if plan.zero == 3 else 2 * parameters
    assert found["parameters"] == found["gradients"] == pytest.approx(whole)
    assert found["summed gradients"] == pytest.approx(2 * parameters / sum_shards)
    assert found["optimizer"] == pytest.approx(12 * parameters / (alike if plan.zero else 1))
    assert found["averages"] == 3 * parameters
    frozen = _cost(plan, frozen=True)
    assert set(frozen.memory) == {"parameters", "activations", "working"}
    assert frozen.memory["parameters"] == 4 * parameters
    assert frozen.synchronization == 0.0
    assert frozen.compute < _cost(plan).compute


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("pp", "samples"), [(1, 24), (3, 24), (3, 2)])
def test_activations_are_those_of_the_micro_batches_in_flight(
    pp: int, samples: int, checkpointing: bool
) -> None:
    found = _cost(ParallelPlan(pp=pp), samples=samples, checkpointing=checkpointing).memory
    held = min(pp, samples) * LAYERS / pp
    each = ENTERING + (0 if checkpointing else KEPT)
    # Calls of one module share its input; the trace has one layer and one call.
    assert found["activations"] == pytest.approx((held - 1) * each + (CALLS - 1) * 3 * 10**8)
    assert found["working"] == PEAK


def test_several_traced_layers_of_a_stack_are_recomputed_one_at_a_time() -> None:
    workload = _workload()
    trace = workload.trace(ParallelPlan())
    regions = trace.regions | {"layers": replace(trace.regions["layers"], kept=4 * KEPT, calls=4)}
    workload._traces[ParallelPlan()] = Trace(regions, PEAK)
    plain, again = (
        step_cost(workload, ParallelPlan(), SPEEDS, checkpointing=value).memory["working"]
        for value in (False, True)
    )
    assert (plain, again) == (PEAK, PEAK - 3 * KEPT)


@pytest.mark.parametrize("host", [10**8, 2 * 10**9, 10**12])
def test_inputs_of_blocks_wait_on_the_host_but_for_two(host: int) -> None:
    plain, found = (_cost(ParallelPlan(), checkpointing=True, host=room) for room in (0, host))
    inputs = plain.memory["activations"]
    away = min(host, inputs - 2 * ENTERING)
    assert found.host == pytest.approx(away)
    assert found.memory["activations"] == pytest.approx(inputs - away)
    # They go and come while the pass computes.
    assert found.waiting == plain.waiting == 0.0
    assert _cost(ParallelPlan(), host=host).host == 0.0


def test_copies_to_the_host_that_last_longer_than_a_pass_are_waited_for() -> None:
    slow = replace(SPEEDS, host_link=1e8)
    found = step_cost(_workload(), ParallelPlan(), slow, checkpointing=True, host=1e12)
    optimizer = cost_model._optimizer_seconds(_workload(), ParallelPlan(), slow, 750 + LAYERS * 1001)
    one_pass = (found.compute - optimizer) / 24
    assert found.waiting == pytest.approx(24 * (2 * found.host / 1e8 - one_pass))
    assert found.waiting > 0


def test_a_tied_parameter_goes_to_its_stage_and_comes_back() -> None:
    plan = ParallelPlan(pp=3)
    plain, tied = (_cost(plan, tied_bytes=size).communication for size in (0, 10**9))
    assert tied - plain == pytest.approx(2 * (10**9 / SPEEDS.link + 1e-2))
    assert _cost(ParallelPlan(), tied_bytes=10**9).communication == _cost(ParallelPlan()).communication


def test_a_table_of_plans_has_their_numbers() -> None:
    plans = [ParallelPlan(dp=4, zero=1), ParallelPlan(dap=8)]
    seconds = {"compute": 0.25, "communication": 0.0625, "waiting": 0.03125, "imbalance": 0.03125}
    costs = [
        Cost(
            plan,
            checkpointing=plan.dp > 1,
            **{name: value * scale for name, value in seconds.items()},
            synchronization=0.125 * scale,
            memory={"a": 1.5 * 2**30, "b": 2**30},
            flops=9e15,
            model_flops=8e15,
            calibrated=plan.dp > 1,
        )
        for plan, scale in zip(plans, (1, 4), strict=True)
    ]
    head, *rows = plan_table(costs).splitlines()
    assert re.split(" {2,}", head.strip()) == [
        "time/step",
        "memory/GPU",
        "communication",
        "TFLOP/s/GPU",
        "settings",
    ]
    assert [re.split(" {2,}", row.strip()) for row in rows] == [
        [
            "1",
            "500 ms",
            "2.5 GiB",
            "37.5%",
            "4e+03",
            "parallel.dp=4 parallel.zero=1 memory.checkpointing=true",
        ],
        ["2", "2 s (uncalibrated)", "2.5 GiB", "37.5%", "500", "parallel.dap=8 memory.checkpointing=false"],
    ]
    # Columns end below their names.
    for name in ("memory/GPU", "communication", "TFLOP/s/GPU"):
        end = head.index(name) + len(name)
        assert all(row[end - 1] != " " and row[end] == " " for row in rows)


def _seconds(
    products: float, traffic: float, exponentials: float = 0.0, ranks: int = 1, **shares: Any
) -> float:
    """Seconds of an operator of so many seconds of products and traffic, of three kernels."""
    speeds = replace(SPEEDS, assumptions=replace(SPEEDS.assumptions, **shares))
    flops, nbytes = products * speeds.matrix["float32"], traffic * speeds.bandwidth
    one = Operation("op", "float32", flops, nbytes, 3, exponentials * speeds.scores)
    return cost_model._operation_seconds(one, speeds, ranks)


def test_an_operator_takes_the_longer_of_products_and_traffic_and_a_share_of_the_other() -> None:
    kernels = 3 * 2e-3
    assert _seconds(4.0, 1.0) == pytest.approx(4.0 + 0.125 * 1.0 + kernels)
    assert _seconds(1.0, 4.0) == pytest.approx(4.0 + 0.125 * 1.0 + kernels)
    assert _seconds(4.0, 1.0, ranks=2) == pytest.approx((4.0 + 0.125) / 2 + kernels)
    # A softmax has its own rate of products, and takes no less than its exponentials.
    share = SPEEDS.assumptions.matrix_share / SPEEDS.assumptions.attention_share
    assert _seconds(4.0, 0.0, 1e-3) == pytest.approx(4.0 * share + kernels)
    assert _seconds(4.0, 0.0, 100.0) == pytest.approx(100.0 + kernels)
    assert _seconds(0.0, 0.0, launch_seconds=7.0) == pytest.approx(21.0)
    assert _seconds(0.0, 0.0, launch_seconds=7.0, graphed=True) == pytest.approx(kernels)


def test_no_layout_is_faster_than_evenly_split_operators() -> None:
    forwards, kernel, operations = PASSES + 1, 2e-3, 0.0
    for times, count in (
        (forwards * FORWARD + BACKWARD, LAYERS),
        (forwards * 0.25 + 0.75, CALLS),
        ((forwards + 1) * OUTSIDE, 1),
    ):
        work = times - (forwards + 1) * kernel
        operations += count * (work / 4 + (forwards + 1) * kernel)
    # Three samples after the other on four ranks each, of which two are stages.
    plan = ParallelPlan(dp=8, dap=2, pp=2)
    assert least_seconds(_workload(), plan, SPEEDS) == pytest.approx(3 * operations / 2 * 1.5)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_exchanges_of_replicas_are_those_of_their_parameters(zero: int) -> None:
    speeds: Rates = replace(SPEEDS, assumptions=replace(SPEEDS.assumptions, latency_seconds=0.0))
    plan = ParallelPlan(dp=8, zero=zero)
    of_pass, of_step = cost_model.synchronization_seconds(_workload(), plan, speeds, 10**9)
    # Each rank sends its share to the seven others, and again; one number more is small.
    assert of_pass + of_step == pytest.approx(2 * 7 / 8 * 4e9 / speeds.link, rel=2e-4)
    assert cost_model.synchronization_seconds(_workload(), ParallelPlan(pp=3), speeds, 10**9) == (0.0, 0.0)


def test_parameters_of_zero_3_are_gathered_for_every_pass() -> None:
    speeds: Rates = replace(SPEEDS, assumptions=replace(SPEEDS.assumptions, latency_seconds=0.0))
    one = 7 / 8 * 4e9 / speeds.link
    for plan in (ParallelPlan(dp=8, zero=3), ParallelPlan(dp=8, zero=3, dp_shard=8)):
        of_pass, of_step = cost_model.synchronization_seconds(_workload(), plan, speeds, 10**9)
        assert (of_pass, of_step) == pytest.approx(((PASSES + 2 + 1) * one, 0.0))
    # Two groups of eight on two machines: each sums its shards with the other's.
    plan = ParallelPlan(dp=16, zero=3, dp_shard=8)
    of_pass, _ = cost_model.synchronization_seconds(_workload(), plan, speeds, 10**9)
    assert of_pass == pytest.approx((PASSES + 3) * one + 2 * 1 / 2 * 4e9 / 8 / speeds.network)


def test_memory_of_operators_is_counted_to_the_byte() -> None:
    """Float32 tensors of ten: two, one freed, one of twenty; a view takes none, and inputs are left out."""
    given = torch.ones(10)
    with Recorder(nn.Identity()) as recorder:
        recorder.leave_out([given])
        first = torch.ones(10)
        second = first + given
        del first
        both = torch.cat([second, second])
        half = both[:5]
        third = half.to(torch.bfloat16)
        del second, both
        fourth = third + third
    trace = recorder.result()
    # The twenty, of which half is used, and five of bfloat16, after the ten that they are made of.
    assert trace.peak == 40 + 80 + 10
    traffic = {
        (one.name, one.dtype): (one.traffic, one.launches) for one in trace.regions[""].forward.operations
    }
    assert traffic["aten::add", "float32"] == (40 + 40 + 40, 1)
    assert traffic["aten::cat", "float32"] == (2 * 40 + 80, 1)
    assert traffic["aten::_to_copy", "float32"] == (20 + 10, 1)
    assert traffic["aten::add", "bfloat16"] == (3 * 10, 1)
    assert fourth.shape == (5,)


def test_an_expanded_tensor_is_read_once() -> None:
    one = torch.ones(1, 10)
    with Recorder(nn.Identity()) as recorder:
        recorder.leave_out([one])
        found = one.expand(4, 10) * 2.0
    (product,) = (o for o in recorder.result().regions[""].forward.operations if o.name == "aten::mul")
    assert product.traffic == 40 + found.nbytes
    assert recorder.result().peak == found.nbytes


def test_traffic_and_workspace_of_an_operator_are_added_to_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = OperatorCost(5.0, traffic=7.0, workspace=1000.0, launches=3, exponentials=2.0)
    monkeypatch.setattr(recorder, "operator_cost", lambda *_: own)
    x = torch.ones(10)
    with Recorder(nn.Identity()) as recording:
        recording.leave_out([x])
        x + x
        y = x * 2.0
    trace = recording.result()
    assert (
        Operation("aten::add", "float32", 5.0, 3 * 40 + 7.0, 3, 2.0) in trace.regions[""].forward.operations
    )
    assert trace.peak == y.nbytes + 1000.0
