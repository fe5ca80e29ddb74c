"""What a plan costs: operations counted right, bytes on the right links, memory by what ZeRO shards, waiting stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from fastfold import kernels
from fastfold.errors import ConfigError, InputError
from fastfold.kernels import reference
from fastfold.kernels.common.cost import OPERATOR_COSTS
from fastfold.parallel.comm.collectives import all_reduce, all_reduce_gradient
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.mesh import ParallelMesh
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner import cost_model
from fastfold.parallel.planner.cost_model import compute_seconds, exchange_seconds, step_cost
from fastfold.parallel.planner.fake_run import fake_mesh, trace
from fastfold.parallel.planner.hardware import TRAINING, Rates, accelerator, rates, read_measured
from fastfold.parallel.planner.recorder import Operation, Part
from fastfold.parallel.planner.workload import Repeat, Workload, standard_layouts
from tests.helpers import named_operators

WIDTH, HIDDEN, ROWS = 24, 40, 16


class Layer(nn.Module):
    """A block of an MLP whose hidden sum goes over the ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.group = mesh.group("tp")

    def forward(self, x: Tensor) -> Tensor:
        x = all_reduce_gradient(x, self.group)
        return x + all_reduce(self.down(self.up(x).relu()), self.group)


class Network(nn.Module):
    """One such layer between two others."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, WIDTH), Layer(mesh), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


def _loss(network: nn.Module) -> Tensor:
    return network(torch.ones(ROWS, 8)).sum()


def _workload(**settings: Any) -> Workload:
    return Workload(
        name="layers",
        build=Network,
        loss=_loss,
        stacks={"layer": Repeat(6)},
        layouts=standard_layouts(tp=4),
        **({"samples": 8, "stages": 6} | settings),
    )


def _rates(**assumptions: float) -> Rates:
    """Of an H200, with nothing added to an operator's work, and with ranks alike, but for what is given."""
    return rates("h200", replace(TRAINING, **({"kernel_seconds": 0.0, "imbalance": 1.0} | assumptions)))


@pytest.fixture
def traced() -> Iterator[Any]:
    with fake_mesh(ParallelPlan(tp=4)) as mesh:
        yield trace(Network, _loss, mesh, regions=["layer"])


def _counted(function: Any, *tensors: Tensor, **named: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        function(*tensors, **named)
    return float(counter.get_total_flops())


def _formula(function: Any, *tensors: Tensor, **named: Any) -> tuple[float, float]:
    """FLOPs of a fused operator's forward and backward pass as the recorder counts them."""

    def anew(x: Any) -> Any:
        return torch.zeros(x.shape, requires_grad=x.requires_grad) if isinstance(x, Tensor) else x

    def loss(_: nn.Module) -> Tensor:
        return function(*map(anew, tensors), **{name: anew(x) for name, x in named.items()}).sum()

    with fake_mesh(ParallelPlan()) as mesh:
        found = trace(lambda _: nn.Identity(), loss, mesh).regions[""]
    return found.forward.flops, found.backward.flops


def _random(*shape: int) -> Tensor:
    return torch.zeros(*shape, requires_grad=True)


def _operators() -> Iterator[tuple[str, Any, Any, tuple[Tensor, ...], dict[str, Any]]]:
    n, s, c, h = 12, 5, 8, 2
    z, msa, mask = _random(n, n, c), _random(s, n, c), torch.ones(n, n)
    width = 6
    names = [
        ("norm_in_weight", (c,)),
        ("norm_in_bias", (c,)),
        ("proj_weight", (2 * width, c)),
        ("proj_bias", (2 * width,)),
        ("gate_weight", (2 * width, c)),
        ("gate_bias", (2 * width,)),
        ("norm_out_weight", (width,)),
        ("norm_out_bias", (width,)),
        ("out_weight", (c, width)),
        ("out_bias", (c,)),
        ("out_gate_weight", (c, c)),
        ("out_gate_bias", (c,)),
    ]
    triangle = {name: _random(*shape) for name, shape in names}
    for outgoing in (True, False):
        named = triangle | {"outgoing": outgoing}
        plain, fused = reference.triangle_multiplication, named_operators.triangle_multiplication
        yield f"triangle multiplication, outgoing {outgoing}", plain, fused, (z, mask), named
    attention = {
        "norm_weight": _random(c),
        "norm_bias": _random(c),
        "query_weight": _random(6, c),
        "key_weight": _random(6, c),
        "value_weight": _random(6, c),
        "gate_weight": _random(6, c),
        "gate_bias": _random(6),
        "output_weight": _random(c, 6),
        "output_bias": _random(c),
        "heads": h,
    }
    inputs = (msa, _random(h, n, n), torch.ones(s, n))
    yield "gated attention", reference.gated_attention, named_operators.gated_attention, inputs, attention
    without = attention | {"gate_weight": None, "gate_bias": None}
    yield (
        "gated attention, no gate",
        reference.gated_attention,
        named_operators.gated_attention,
        inputs,
        without,
    )
    q, k, v = _random(s, n, h, 4), _random(s, 7, h, 4), _random(s, 7, h, 4)
    yield "attention", reference.attention, kernels.attention, (q, k, v, None, None), {}
    sizes = {"norm_weight": (c,), "norm_bias": (c,), "w1": (20, c), "b1": (20,), "w2": (c, 20), "b2": (c,)}
    layers = {name: _random(*size) for name, size in sizes.items()}
    yield "transition", reference.transition, named_operators.transition, (z,), layers
    left, right = _random(s, n, 3), _random(s, 9, 3)
    outer = (left, right, torch.ones(s, n), torch.ones(s, 9), _random(c, 9), _random(c))
    yield "outer product mean", reference.outer_product_mean, kernels.outer_product_mean, outer, {}
    bias = (z, _random(c), _random(c), _random(h, c))
    yield "pair bias", reference.pair_bias, kernels.pair_bias, bias, {}


OPERATORS = list(_operators())


@pytest.mark.parametrize(
    ("plain", "fused", "tensors", "named"), [o[1:] for o in OPERATORS], ids=[o[0] for o in OPERATORS]
)
def test_formula_of_a_fused_operator_counts_what_its_definition_multiplies(
    plain: Any, fused: Any, tensors: tuple[Any, ...], named: dict[str, Any]
) -> None:
    counted = _counted(plain, *tensors, **named)
    forward, backward = _formula(fused, *tensors, **named)
    # The mask's share of the outer product mean is small, and no formula has it.
    assert forward == pytest.approx(counted, rel=0.07 if plain is reference.outer_product_mean else 1e-12)
    # Twice the forward pass for the gradients, and most of it again to recompute what was not kept.
    assert 2 * counted * 0.93 <= backward <= 3.2 * counted


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_of_pytorch_multiplies_with_keys_and_values(is_causal: bool, share: float) -> None:
    """Two products forward; five backward, one of them again. Half of the scores if it is causal."""
    q, k, v = _random(2, 4, 12, 8), _random(2, 4, 10, 8), _random(2, 4, 10, 8)
    product = 2 * 2 * 4 * 12 * 10 * 8
    flops = _formula(nn.functional.scaled_dot_product_attention, q, k, v, is_causal=is_causal)
    assert flops == (share * 2 * product, share * 5 * product)


def test_every_operator_of_ours_has_a_formula() -> None:
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if "fastfold::" in name
    }
    assert {"gated_attention", "triangle_multiplication_backward"} <= names
    assert names <= set(OPERATOR_COSTS)


def test_a_trace_sorts_operations_messages_and_memory_by_region_and_direction(traced: Any) -> None:
    layer, rest = traced.regions["layer"], traced.regions[""]
    one, outside = 2 * ROWS * WIDTH * HIDDEN, 2 * ROWS * WIDTH * 8
    assert (layer.forward.flops, layer.backward.flops) == (2 * one, 4 * one)
    # The first layer's input needs no gradient.
    assert (rest.forward.flops, rest.backward.flops) == (2 * outside, 3 * outside)
    activation = 4 * ROWS * WIDTH
    for part in (layer.forward, layer.backward):
        assert [(e.op, e.size, e.sent) for e in part.sent] == [("all_reduce", 4, 1.5 * activation)]
    assert not rest.forward.sent
    assert not rest.backward.sent
    # What enters is kept anyway; the hidden activations are kept once, by the ReLU and the layer after it.
    assert (layer.entering, layer.kept) == (activation, 4 * ROWS * HIDDEN)
    assert layer.parameters == 2 * WIDTH * HIDDEN + WIDTH + HIDDEN
    assert rest.parameters == 2 * WIDTH * 8 + WIDTH + 8
    assert layer.calls == 1
    # At least what is kept, and not much more than everything that is made.
    assert activation + layer.kept < traced.peak < 12 * activation + 6 * layer.kept


def test_time_of_operators_is_the_slowest_of_arithmetic_traffic_and_launches() -> None:
    speeds = _rates(launch_seconds=1e-5)
    tera = speeds.matrix["bfloat16"]
    part = Part()
    part.operations[Operation("mm", "bfloat16", 2e-3 * tera, 10.0, 1)] += 3
    part.operations[Operation("copy", "bfloat16", 0.0, 1e-3 * speeds.bandwidth, 1)] += 1
    part.operations[Operation("small", "float32", 10.0, 10.0, 2)] += 5
    assert compute_seconds(part, speeds) == pytest.approx(3 * 2e-3 + 1e-3 + 5 * 2e-5)


def test_a_graph_is_launched_once_and_its_kernels_take_their_time_on_the_device() -> None:
    part = Part()
    part.operations[Operation("mm", "float32", 0.0, 0.0, 2)] += 10
    seconds = {"launch_seconds": 1e-5, "kernel_seconds": 2e-6}
    assert compute_seconds(part, _rates(**seconds)) == pytest.approx(20 * 1e-5)
    assert compute_seconds(part, _rates(**seconds, graphed=True)) == pytest.approx(20 * 2e-6)
    # No graph is launched faster than one kernel, and a region that does nothing is no graph.
    assert compute_seconds(part, _rates(launch_seconds=1e-3, graphed=True)) == pytest.approx(1e-3)
    assert compute_seconds(Part(), _rates(launch_seconds=1e-3, graphed=True)) == 0
    work = Operation("copy", "float32", 0.0, 1e-3 * _rates().bandwidth, 2)
    part.operations[work] += 1
    assert compute_seconds(part, _rates(**seconds, graphed=True)) == pytest.approx(1e-3 + 22 * 2e-6)


def test_several_ranks_wait_for_the_slowest() -> None:
    even, uneven = _rates(), _rates(imbalance=1.25)
    alone, found = (step_cost(_workload(), ParallelPlan(dp=n), uneven) for n in (1, 8))
    same = step_cost(_workload(), ParallelPlan(dp=8), even)
    assert alone.imbalance == same.imbalance == 0
    assert found.imbalance > 0.2 * (found.compute + found.communication)
    assert found.seconds == pytest.approx(same.seconds + found.imbalance)


def test_operations_that_checkpointing_repeats_are_none_of_the_models() -> None:
    plain, again = (
        step_cost(_workload(passes=1.5), ParallelPlan(dp=8), _rates(), checkpointing=value)
        for value in (False, True)
    )
    forward = 6 * 2 * (2 * ROWS * WIDTH * HIDDEN) + 2 * (2 * ROWS * WIDTH * 8)
    assert plain.model_flops == again.model_flops == 8 * (1.5 + 3) * forward
    assert again.flops > plain.flops


def test_bytes_go_over_the_links_that_a_group_passes() -> None:
    speeds = _rates(latency_seconds=0.0)
    link, network = speeds.link, speeds.network
    plan = ParallelPlan(dp=4, dap=16)

    def seconds(op: str, group: str, size: int) -> float:
        return exchange_seconds(Communication(op, group, size, 1e9), plan, speeds)

    # 16 neighbours are two machines of 8: a ring passes their border on 8 ports, a pair alone on its own port.
    assert seconds("all_gather", "dap", 16) == pytest.approx(1e9 / min(link, 8 * network))
    assert seconds("all_to_all", "dap", 16) == pytest.approx(1e9 * 8 / 15 / network)
    # One of each of four groups: every rank on a machine of its own.
    assert seconds("all_reduce", "dp", 4) == pytest.approx(1e9 / network)
    inside = exchange_seconds(Communication("all_to_all", "dap", 8, 1e9), ParallelPlan(dap=8), speeds)
    assert inside == pytest.approx(1e9 / link)
    slow = _rates(latency_seconds=1e-3)
    late = exchange_seconds(Communication("all_reduce", "dap", 8, 0.0), ParallelPlan(dap=8), slow)
    assert late == pytest.approx(3e-3)


def test_zero_shards_memory_by_its_stages() -> None:
    workload, speeds = _workload(copied_bytes=4), _rates()
    parameters = 6 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) + 2 * WIDTH * 8 + WIDTH + 8
    sizes = {zero: step_cost(workload, ParallelPlan(dp=8, zero=zero), speeds).memory for zero in (0, 1, 2, 3)}
    block = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    for zero, memory in sizes.items():
        assert memory["parameters"] == pytest.approx(
            4 * parameters / 8 + block if zero == 3 else 4 * parameters
        )
        assert memory["optimizer"] == 8 * parameters / (8 if zero else 1)
        assert memory["averages"] == 4 * parameters
    halves = step_cost(workload, ParallelPlan(dp=4, pp=2), speeds).memory
    assert halves["parameters"] == pytest.approx(2 * parameters, rel=0.05)


def test_checkpointing_keeps_inputs_and_computes_again() -> None:
    workload, speeds = _workload(), _rates(launch_seconds=0.0)
    plain, again = (
        step_cost(workload, ParallelPlan(dp=8), speeds, checkpointing=value) for value in (False, True)
    )
    activation, hidden = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN
    assert plain.memory["activations"] == 5 * (activation + hidden)
    assert again.memory["activations"] == 5 * activation
    forward = 6 * 2 * (2 * ROWS * WIDTH * HIDDEN)
    assert again.flops - plain.flops == 8 * forward


def test_a_pipeline_waits_for_all_its_stages_but_one() -> None:
    workload, speeds = _workload(samples=24), _rates(latency_seconds=0.0, link_share=1e6)
    cost = step_cost(workload, ParallelPlan(dp=2, pp=3), speeds)
    # 12 micro-batches through 3 stages: 14 turns.
    assert cost.waiting / (cost.seconds - cost.synchronization) == pytest.approx(2 / 14, rel=0.02)
    assert step_cost(workload, ParallelPlan(dp=6), speeds).waiting == 0


def test_recycling_passes_cost_a_forward_pass_each() -> None:
    speeds = _rates(launch_seconds=1e-3)
    once, more = (
        step_cost(_workload(passes=passes), ParallelPlan(tp=4, dp=2), speeds, checkpointing=False)
        for passes in (0.0, 1.5)
    )
    one = 6 * 2 * (2 * ROWS * WIDTH * HIDDEN) + 2 * (2 * ROWS * WIDTH * 8)
    assert more.flops - once.flops == 1.5 * one * 4 * 8
    assert more.communication > once.communication * 1.5


def test_hidden_communication_is_not_waited_for() -> None:
    workload, plan = _workload(), ParallelPlan(tp=4, dp=2)
    shown, half = (step_cost(workload, plan, _rates(hidden_share=share)) for share in (0.0, 0.5))
    assert half.communication == pytest.approx(shown.communication / 2)
    assert half.compute == shown.compute


def test_measured_rates_stand_in_for_tabulated_ones(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text('{"gpu": "h200", "matrix_rates": {"bfloat16": 6e14}, "link": 3e11}')
    found, table = rates("h200", measured=file), accelerator("h200")
    assert (found.matrix["bfloat16"], found.link) == (6e14, 3e11)
    assert found.origin["matrix_rates.bfloat16"] == found.origin["link"] == "measured (h200.json)"
    assert found.bandwidth == table.bandwidth * found.assumptions.bandwidth_share
    assert "tabulated" in found.origin["bandwidth"]
    assert found.calibration == "uncalibrated: not all rates were measured on this GPU"
    assert rates("h200").calibration == "uncalibrated: no rate was measured on this GPU"
    assert "data sheet" in found.origin["matrix_rates.float32"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"gpu": "h100"}', "expected rates of 'h200'"),
        ('{"gpu": "h200", "matrix": 3}', "expected a JSON object with"),
        ('{"gpu": "h200", "bandwidth": "fast"}', "expected rates above 0, found 'fast'"),
        ('{"gpu": "h200", "bandwidth": -1}', "expected rates above 0, found -1"),
        ('{"gpu": "h200", "matrix_rates": {"fp8": 1e15}}', "expected bfloat16 and float32, found fp8"),
        ("[", "rates.json:1: is not valid JSON"),
    ],
)
def test_measurements_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(text)
    with pytest.raises((ConfigError, InputError), match=message):
        rates("h200", measured=file)


KERNELS = """operator,shape,implementation,tflops,of_product,gbs,of_copy
attention,a,fastfold,300,0.5,900,0.2
attention,b,fastfold,400,0.6,900,0.2
attention,c,fastfold,500,0.7,900,0.2
attention,c,eager,50,0.1,100,0.05
layer_norm,a,fastfold,1,0.01,3600,0.9
transition,a,fastfold,nan,nan,nan,nan
"""


def test_the_kernel_benchmark_calibrates_the_compute_side(tmp_path: Path) -> None:
    file = tmp_path / "kernels_nvidia_h200_bfloat16.csv"
    file.write_text(KERNELS)
    found = rates("h200", measured=file)
    assert (found.matrix["bfloat16"], found.bandwidth) == (400e12, 3600e9)
    assert "tabulated" in found.origin["link"]
    with pytest.raises(ConfigError, match="expected a table of 'h100'"):
        rates("h100", measured=file)
    file.write_text(KERNELS.replace("fastfold,300", "fastfold,fast"))
    with pytest.raises(ConfigError, match="csv:2: expected a line of the kernels' benchmark"):
        rates("h200", measured=file)


@pytest.mark.parametrize(
    ("name", "rows", "products", "bandwidth"),
    [
        ("kernels_h200_float32", ["a,fastfold,300,0.5,900,0.5", "b,fastfold,500,0.7,9,0.2"], 400e12, None),
        ("KERNELS_H200_x_Float32", ["a,fastfold,300,0.5,900,0.2", "b,fastfold,5,0.2,90,0.3"], 300e12, 90e9),
        ("kernels_h200_float32", ["a,fastfold,300,0.5,900,0.2", "b,fastfold,5,nan,90,nan"], 300e12, None),
    ],
)
def test_medians_are_of_operators_bound_by_products_or_by_copies(
    tmp_path: Path, name: str, rows: list[str], products: float, bandwidth: float | None
) -> None:
    header = "operator,shape,implementation,tflops,of_product,gbs,of_copy"
    file = tmp_path / f"{name}.csv"
    file.write_text("\n".join([header, *(row.replace(",fastfold", ",x,fastfold") for row in rows), ""]))
    found = read_measured(file, "h200")
    assert found == {"matrix_rates": {"float32": products}} | ({"bandwidth": bandwidth} if bandwidth else {})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("kernels_h200", "x\n1\n", "expected a table of 'h200', named kernels_"),
        ("kernels_h100_float32", "x\n1\n", "expected a table of 'h200', named kernels_"),
        ("kernels_h200_float32", "", "expected measurements of FastFold's operators, found none"),
        ("kernels_h200_float32", "implementation\neager\n", "found none"),
        (
            "kernels_h200_float32",
            "implementation,tflops\nfastfold,1\n",
            ":2: expected a line of the kernels'",
        ),
    ],
)
def test_other_tables_of_kernels_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / f"{name}.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_measured(file, "h200")


def test_a_trace_leaves_no_process_group_behind_and_refuses_to_run_beside_one() -> None:
    with fake_mesh(ParallelPlan(dap=4)) as mesh:
        assert mesh.group("dap").size == 4
        with (
            pytest.raises(ConfigError, match="before the processes of a run join"),
            fake_mesh(ParallelPlan()),
        ):
            pass
    assert not torch.distributed.is_initialized()


def test_exchanges_of_a_step_overlap_with_its_last_pass_alone() -> None:
    """Of eight passes whose gradients add up; ZeRO 3 exchanges in every pass."""
    speeds = _rates(latency_seconds=0.0, hidden_synchronization=0.5, link_share=1e-6)
    for zero, times in ((0, 1), (3, 8)):
        one, eight = (
            step_cost(_workload(samples=8 * n), ParallelPlan(dp=8, zero=zero), speeds, checkpointing=False)
            for n in (1, 8)
        )
        # A pass computes the same, whatever follows; the optimizer's step is once in both.
        of_pass = (eight.compute - one.compute) / 7
        whole = one.synchronization + 0.5 * of_pass
        assert one.synchronization > 0
        assert eight.synchronization == pytest.approx(times * whole - 0.5 * of_pass * times, rel=1e-6)


@pytest.mark.parametrize(
    ("of_pass", "of_step", "seconds"),
    [(1.0, 2.0, 2.0 - 0.5), (2.0, 3.0, 4 * 0.5 + 3.0), (0.5, 0.75, 0.0), (1.5, 0.0, 0.0)],
)
def test_a_step_is_hidden_by_what_its_last_pass_leaves(
    of_pass: float, of_step: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a pass of three seconds hides exchanges: first its own, then those of the step."""
    monkeypatch.setattr(cost_model, "synchronization_seconds", lambda *_: (of_pass, of_step))
    exposed = cost_model._exposed_synchronization(
        _workload(), ParallelPlan(dp=8), _rates(hidden_synchronization=0.5), 1000, 4, 3.0
    )
    assert exposed == seconds


@pytest.mark.parametrize(("zero", "share"), [(0, 1), (1, 4)])
def test_an_optimizer_reads_and_writes_parameters_and_moments_once(zero: int, share: int) -> None:
    """Three passes over a parameter, its gradient included, and two over moments and copies."""
    moved = _workload(parameter_bytes=4, sharded_bytes=8, copied_bytes=1)
    plan, speeds = ParallelPlan(dp=4, zero=zero), _rates()
    seconds = cost_model._optimizer_seconds(moved, plan, speeds, 1000)
    assert seconds * speeds.bandwidth == pytest.approx((3 * 4 + 2 * 8) * 1000 / share + 2 * 1 * 1000)
    assert cost_model._optimizer_seconds(replace(moved, frozen=True), plan, speeds, 1000) == 0.0


def test_exchanged_bytes_have_the_size_of_parameters() -> None:
    speeds = _rates(latency_seconds=0.0, hidden_synchronization=0.0)
    half, whole = (
        step_cost(_workload(parameter_bytes=size), ParallelPlan(dp=8), speeds).synchronization
        for size in (2, 4)
    )
    assert half == pytest.approx(whole / 2)


@pytest.mark.parametrize("small", [False, True])
def test_a_small_module_is_made_of_real_parameters_and_traced_without_data(small: bool) -> None:
    """Its initialisation may read them."""
    seen: dict[str, bool] = {}

    def build(mesh: ParallelMesh) -> nn.Module:
        network = Network(mesh)
        seen["made"] = isinstance(network.first.weight, FakeTensor)
        return network

    def loss(network: nn.Module) -> Tensor:
        assert isinstance(network, Network)
        seen["run"] = isinstance(network.first.weight, FakeTensor)
        return _loss(network)

    with fake_mesh(ParallelPlan(tp=4)) as mesh:
        found = trace(build, loss, mesh, regions=["layer"], small=small)
    assert seen == {"made": not small, "run": True}
    assert found.regions["layer"].forward.flops == 2 * 2 * ROWS * WIDTH * HIDDEN
