"""Seconds that plans count for a step of a fold, and bytes of a rank's layers: closed forms of their parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.inference.planning import time_model
from fastfold.inference.planning.layer_costs import (
    ATTENTION,
    MSA,
    OUTER_PRODUCT,
    LayerSizes,
    aligned_error_bytes,
    embedding_bytes,
    evoformer_costs,
    point_attention_bytes,
    template_bytes,
)
from fastfold.inference.planning.planner import SMALL_PAIR, FoldPlan, Planner
from fastfold.inference.planning.report import (
    FoldTime,
    copied_bytes,
    fold_costs,
    fold_time,
    inference_elements,
)
from fastfold.inference.planning.time_model import Costs, Products, measure_costs
from fastfold.kernels.ops.triangle_multiplication.passes import ContractionPlan
from fastfold.memory.block_sizes import BlockCost
from fastfold.parallel.axial.matmul import choose_contraction
from fastfold.parallel.comm.groups import Communication
from fastfold.parallel.plan import ParallelPlan
from fastfold.parallel.planner.cost_model import exchange_seconds
from fastfold.parallel.planner.hardware import FOLDING, rates

MONOMER, MULTIMER = "model_1_ptm", "model_1_multimer_v3"
N, C_Z, C_M, C_EXTRA, BLOCKS, EXTRA_BLOCKS = 50, 128, 256, 64, 48, 4


def test_a_step_with_products_takes_its_work_its_groups_and_the_copies_that_wait() -> None:
    """Copies overlap the contraction; with those to a disk the rest of them is waited for."""
    step = Products(work=100.0, per_group=3.0, count=7, copies=4.0, contraction=1.0, latency=0.5, disk=5.0)
    assert step.seconds(1) == 100.0
    assert step.seconds(4) == 100.0 + 3 * 3.0
    assert step.seconds(1, away=0.125) == 100.0 + 7 * 0.5  # half a second of copies, hidden
    assert step.seconds(2, away=0.5) == 100.0 + 3.0 + 7 * (4.0 * 0.5 - 1.0 + 0.5)
    assert step.seconds(2, away=0.5, on_disk=0.25) == 100.0 + 3.0 + 7 * (4.0 * (0.5 + 4 * 0.25) - 1.0 + 0.5)


def _operations(config: ConfigDict, planner: Planner) -> dict[str, float]:
    """Multiplications and additions of the trunk's steps, twice the products' sizes."""
    fold = planner.fold(N)
    total = dict.fromkeys((MSA, OUTER_PRODUCT, ATTENTION, "triangle multiplication"), 0.0)
    msa_rows = fold.clusters + fold.templates
    for blocks, rows, c, is_extra in (
        (BLOCKS, msa_rows, C_M, False),
        (EXTRA_BLOCKS, fold.extra, C_EXTRA, True),
    ):
        # Five projections and two products of attention in rows, and in columns unless it is global.
        attention = rows * N * (5 * 2 * c * c + 4 * N * c)
        if not is_extra:
            attention += N * rows * (5 * 2 * c * c + 4 * rows * c)
        total[MSA] += blocks * (attention + 2 * 2 * rows * N * c * 4 * c)
        total[OUTER_PRODUCT] += blocks * (
            2 * 2 * rows * N * c * 32 + 2 * rows * N * N * 32**2 + 2 * N * N * 32**2 * C_Z
        )
        pair = N * N * (5 * 2 * C_Z**2 + 4 * N * C_Z)
        total[ATTENTION] += blocks * (2 * pair + 2 * 2 * N * N * C_Z * 4 * C_Z)
        # Two projections with gates, the product, the output and its gate.
        multiplication = N * N * (2 * 4 * C_Z * C_Z + 2 * N * C_Z + 2 * 2 * C_Z * C_Z)
        total["triangle multiplication"] += blocks * 2 * multiplication
    return total


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("preset", "templates"), [(MONOMER, 0), (MONOMER, 3), (MULTIMER, 4)])
def test_steps_take_the_time_of_their_operations(preset: str, templates: int, ranks: int) -> None:
    config = model_config(preset)
    planner = Planner(config, 2, "cuda", rows=600, templates=templates, ranks=ranks)
    costs = Costs(rate=1e9, per_block=1e-3, per_pair=1e-7, bandwidth=1e8, disk=2e7)
    fold = planner.fold(N)
    assert fold.templates == templates
    times, work = costs.of(config, fold), _operations(config, planner)
    layers, heads, points = 8, 12, N * N
    expected = {
        "embedding": 20 * points * C_Z,
        "structure module": layers * points * (heads * (4 * C_Z + 400) + 8 * C_Z),
        "heads": 2 * points * C_Z * 64,
        **{name: work[name] for name in (MSA, OUTER_PRODUCT, ATTENTION)},
    }
    assert times.work == pytest.approx({name: x / 1e9 / ranks for name, x in expected.items()})
    both = BLOCKS + EXTRA_BLOCKS
    runs = {"embedding": 1, MSA: 3 * both, OUTER_PRODUCT: both, ATTENTION: 3 * both, "heads": 2}
    assert times.per_block == pytest.approx(
        {k: 1e-3 * x for k, x in (runs | {"structure module": 8}).items()}
    )
    own = math.ceil(N / ranks) * N
    assert times.unit_copy == pytest.approx(own * C_Z * 2 / 1e8)
    assert times.per_exchange == (pytest.approx(4 * both * 1e-3) if ranks > 1 else 0.0)

    c_t = 64
    # Blocks of a template: two multiplications, two attentions and a transition of twice the channels.
    one = 2 * points * (8 * c_t * c_t + 2 * N * c_t + 4 * c_t * c_t)
    one += 2 * points * (10 * c_t * c_t + 4 * N * c_t) + 4 * points * c_t * 2 * c_t
    for found, count, c, operations in (
        (times.trunk, both, C_Z, work["triangle multiplication"]),
        (times.templates, 2 * templates, c_t, 2 * templates * one),
    ):
        assert found == Products(
            work=pytest.approx(operations / 1e9 / ranks),
            per_group=pytest.approx(count * 2 * own * 1e-7),
            count=count * 2,
            copies=pytest.approx(2 * own * c * 2 / 1e8),
            contraction=pytest.approx(2 * N**3 * c / 1e9 / ranks),
            latency=2e-3,
            disk=5.0,
        )


def test_steps_that_only_move_memory_take_the_time_of_its_bandwidth() -> None:
    config = model_config(MONOMER)
    fold = Planner(config, 2, "cuda", rows=600, templates=3, ranks=3).fold(N)
    times = Costs(rate=1e30, memory=1e6).of(config, fold)
    one, both = math.ceil(N / 3) * N * C_Z * 2 / 1e6, BLOCKS + EXTRA_BLOCKS
    # Reads and writes of the pair: two attentions with a transition; a multiplication, of which there are two.
    assert times.work == pytest.approx(
        {
            "embedding": 6 * one,
            MSA: 0.0,
            OUTER_PRODUCT: 2 * both * one,
            ATTENTION: (2 * (4 * 2 + 2 + 2) + 2 + 2) * both * one,
            "structure module": 0.0,
            "heads": 0.0,
        },
        abs=1e-6,
    )
    assert times.trunk.work == pytest.approx(2 * both * 9 * one)
    assert times.templates.work == pytest.approx(2 * 2 * 3 * 9 * one / 2)


@pytest.mark.parametrize("is_extra", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("e", [2, 4])
@pytest.mark.parametrize("few", [False, True])
def test_layers_of_a_rank_hold_what_they_gather_and_send(
    few: bool, e: int, ranks: int, at_once: bool, is_extra: bool
) -> None:
    config = model_config(MONOMER).model.embeddings_and_evoformer.evoformer
    rows, c = (600, C_EXTRA) if is_extra else (90, C_M)
    rows = 3 if few else rows
    own, padded = math.ceil(N / ranks), 64
    sizes = LayerSizes(rows, N, own, c, C_Z, e, ranks, at_once)
    found = {one.layer: one for one in evoformer_costs(config, sizes, global_column=is_extra)}

    def attention(heads: int, channels: int, copies: int, elements: int) -> int:
        nbytes = copies * heads * N * padded * e
        if at_once:
            nbytes += int(6.05 * elements) * e + heads * (elements // channels) * 4
        # A shard of a bias, what arrives of it, and all of it.
        return max(nbytes, heads * N * (own + N + N) * e) if ranks > 1 else nbytes

    for elements in (c * N, 20 * C_Z * N, rows * c * N):
        assert found["msa_row_attention"].nbytes(elements) == attention(8, c, 1, elements)
        assert found["msa_column_attention"].nbytes(elements) == (4 * e * elements if is_extra else 0)
        for name in ("starting", "ending"):
            assert found[f"triangle_attention_{name}"].nbytes(elements) == attention(4, C_Z, 2, elements)
        side, mask = rows * own * 32 * e, rows * own * 4
        # Rows of the MSA that fit a block are normalised and projected.
        part = min(elements, rows * N * c) * e + side * min(rows, elements // (N * c)) // rows
        block_rows = elements / (N * C_Z)
        row = block_rows * (rows * c * e + (side + mask) / N + 2 * 4 * N)
        passing = 4 * side if ranks > 1 else 0
        outer = found["outer_product_mean"].nbytes(elements)
        assert outer == pytest.approx(side + mask + max(part, passing + row), abs=1)
        for name in ("msa_transition", "pair_transition", "triangle_multiplication_outgoing"):
            assert found[name].nbytes(elements) == 0


def test_layers_that_a_network_leaves_out_cost_nothing() -> None:
    config = model_config(MONOMER).model.embeddings_and_evoformer.evoformer
    sizes = LayerSizes(90, N, N, C_M, C_Z, 4)
    full = {one.layer: one for one in evoformer_costs(config, sizes)}
    with config.unlocked():
        config.msa_column_attention.enabled = config.triangle_attention_starting_node.enabled = False
    rest = {one.layer: one for one in evoformer_costs(config, sizes)}
    left_out = {"msa_column_attention", "triangle_attention_starting"}
    assert {name for name in full if full[name].flops != rest[name].flops} == left_out
    assert all(rest[name].flops == 0 == rest[name].nbytes(10**6) for name in left_out)


@pytest.mark.parametrize("bins", [39, 200])
@pytest.mark.parametrize("e", [2, 4])
def test_blocks_of_embeddings_and_heads_hold_the_tensors_of_a_pair(e: int, bins: int) -> None:
    """Bytes for each pair of residues."""
    of = {name: model_config(name).model for name in (MONOMER, MULTIMER)}
    sizes, pairs = LayerSizes(90, N, N, C_M, C_Z, e), 3 * N
    elements = pairs * C_Z
    for name, terms in ((MONOMER, 5), (MULTIMER, 7)):
        # Terms of the sum, and five numbers of int64.
        found = embedding_bytes(of[name].embeddings_and_evoformer, sizes, elements)
        assert found == pairs * (terms * C_Z * e + 5 * 8)
    c_t, keys, heads = 64, 64, 4
    classes = 8 * (bins + 2) + 4 * bins
    features = max(classes, e * (bins + 5 + 2 * (bins + 49))) + c_t * e
    expected = {
        MONOMER: max(features, 4 * (3 * keys + 2 * heads), 2 * (64 + C_Z) * e),
        MULTIMER: max(classes, 4 * (bins + 6) + e * (C_Z + 3 * c_t)),
    }
    for name, per_pair in expected.items():
        template = of[name].embeddings_and_evoformer.template
        template.dgram_features.num_bins = bins
        found = template_bytes(template, sizes, elements, multimer=name == MULTIMER)
        assert found == pairs * per_pair
    # The pair and its mask and norm, in float32; a copy of it, or nine terms of each of twelve heads.
    copied = C_Z if e == 2 else 0
    points = point_attention_bytes(of[MONOMER].heads.structure_module, sizes, elements)
    assert points == pairs * 4 * (C_Z + 1 + 1 + max(copied, 9 * 12))
    assert aligned_error_bytes(64 * pairs) == 3 * 64 * pairs * 4


def test_costs_of_a_gpu_are_those_of_its_data_sheet() -> None:
    speeds = rates("h100", FOLDING)
    for size, dtype in ((2, "bfloat16"), (4, "float32")):
        costs = fold_costs(speeds, size)
        assert costs.rate == speeds.matrix[dtype]
        assert costs.per_block == pytest.approx(20 * speeds.assumptions.launch_seconds)
        assert costs.per_pair == pytest.approx(128 * size / speeds.bandwidth)
        assert (costs.bandwidth, costs.memory) == (speeds.host_link, speeds.bandwidth)


@pytest.mark.parametrize("ranks", [2, 3, 32])
def test_ranks_send_gathers_reshards_and_products(ranks: int) -> None:
    """Elements that all ranks send in a block, by the shapes of the messages."""
    rows, share = 90, (ranks - 1) / ranks
    biases, left = (8 + 4 + 4) * N * N, rows * N * 32
    resharded = 4 * (rows * N * C_M / 2 + N * N * C_Z / 2) / ranks
    # Matrices change their layout and back: two factors and a product; otherwise a factor is passed on.
    by_channels = choose_contraction("auto", N, N, N, C_Z, ranks) == "channels"
    products = 2 * (3 * N * N * C_Z / ranks if by_channels else N * N * C_Z)
    found = inference_elements(ranks, N, rows)
    assert found == pytest.approx(share * (biases + left + resharded + products))


def _plan(ranks: int, templates: int, *, offloads: bool) -> tuple[Planner, FoldPlan]:
    """Return a plan without a limit, or one that offloads parts of all that can be offloaded."""
    host = 10**9 if offloads else 0
    planner = Planner(
        model_config(MONOMER), 2, "cuda", rows=600, templates=templates, ranks=ranks, host_memory=host
    )
    plan = planner.plan(200, 1 << 40)
    if not offloads:
        return planner, plan
    chosen = {
        o.name: min(
            o.candidates, key=lambda c: (*(abs(share - 0.4) for share in c.settings.values()), c.size)
        )
        for o in plan.chunks.operators
    }
    return planner, replace(plan, chunks=replace(plan.chunks, chosen=chosen))


@pytest.mark.parametrize("templates", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_time_and_traffic_of_passes_are_those_of_the_plan(ranks: int, templates: int) -> None:
    n, speeds = 200, rates("h100", FOLDING)
    planner, plan = _plan(ranks, templates, offloads=True)
    fold, own = planner.fold(n), math.ceil(n / ranks)
    chosen = plan.chunks.chosen
    kept = chosen["triangle multiplication"].settings["kept"]
    assert 0.0 < kept < 1.0

    def away(share: float, channels: int) -> int:
        """Bytes of a product that leave and return, in rows of a shard along either axis."""
        return (
            ((n - math.ceil(n * share - 1e-9)) * own + (own - math.ceil(own * share - 1e-9)) * n)
            * channels
            * 2
        )

    copied = 2 * (BLOCKS + EXTRA_BLOCKS) * away(kept, C_Z)
    if templates:
        one = chosen["templates"]
        assert all(0.0 < one.settings[name] < 1.0 for name in ("pair", "product"))
        times = templates * (2 if one.size == 0 and templates > 1 else 1)
        copied += 2 * times * 2 * away(one.settings["product"], 64)
        rows = own - math.ceil(own * one.settings["pair"] - 1e-9)
        copied += (2 + 3 * templates) * rows * n * C_Z * 2
    assert copied_bytes(planner.config, fold, plan) == copied
    sent = sending = 0.0
    for blocks, msa_rows, c in (
        (BLOCKS, fold.clusters + templates, C_M),
        (EXTRA_BLOCKS, fold.extra, C_EXTRA),
    ):
        if ranks > 1:
            nbytes = 2 * inference_elements(ranks, n, msa_rows, c_m=c, c_z=C_Z)
            one_block = exchange_seconds(
                Communication("all_gather", "dap", ranks, nbytes), ParallelPlan(dap=ranks), speeds
            )
            sent += 4 * blocks * nbytes
            sending += 4 * blocks * (one_block + 24 * speeds.assumptions.latency_seconds)
    found = fold_time(planner.config, fold, plan, speeds, 4)
    computing = 4 * plan.chunks.seconds
    assert found == FoldTime(
        pytest.approx(computing), pytest.approx(sending), 4 * copied, pytest.approx(sent)
    )
    assert found.seconds == pytest.approx(computing + sending)


def test_a_plan_with_room_copies_nothing() -> None:
    planner, plan = _plan(1, 3, offloads=False)
    assert copied_bytes(planner.config, planner.fold(200), plan) == 0


def test_costs_are_those_of_two_measured_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transition in blocks of rows, and a triangle multiplication in groups of channels; both with 64 channels."""
    measured, shapes, groups = [], list[tuple[int, ...]](), list[int]()

    def measure(run: Callable[[int], None], blocks: Sequence[int], *, synchronize: Any) -> BlockCost:
        synchronize()
        for count in blocks:
            run(count)
        measured.append(tuple(blocks))
        return BlockCost(2.0, 0.5) if len(measured) == 1 else BlockCost(3.0, 0.25)

    def transition(x: Tensor, params: Any, **_: Any) -> None:
        shapes.append((*x.shape, *params.w1.shape, *params.w2.shape))

    def multiplication(x: Tensor, mask: Tensor, params: Any, *, plan: ContractionPlan, **_: Any) -> None:
        groups.append(plan.channels)

    monkeypatch.setattr(time_model, "measure_blocks", measure)
    monkeypatch.setattr(time_model.kernels, "transition", transition)
    monkeypatch.setattr(time_model.kernels, "triangle_multiplication", multiplication)
    monkeypatch.setattr(time_model, "_bandwidth", lambda like, wait: 7.0)
    costs = measure_costs(torch.device("cpu"), torch.float32, length=16)
    assert measured == [(1, 4), (1, 8)]
    assert shapes == [(16, 16, 64, 256, 64, 64, 256)] + 4 * [(4, 16, 64, 256, 64, 64, 256)]
    assert groups == [64, 8]
    assert costs == Costs(
        rate=4 * 16 * 16 * 64 * 256 / 2.0, per_block=0.5, per_pair=0.25 / 256, bandwidth=7.0
    )


def test_the_bandwidth_is_that_of_the_fastest_of_three_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(time_model.time, "perf_counter", lambda: next(ticks))
    assert time_model._bandwidth(torch.zeros(1), lambda: None) == 2**20 / 2.0
    assert next(ticks, None) is None


def test_freed_memory_stays_in_the_process_with_twice_what_a_small_pair_needs() -> None:
    plan = Planner(model_config(MONOMER), 4, rows=8).plan(16, 1 << 40)
    for unit, budget, expected in (
        (SMALL_PAIR - 1, 2 * plan.peak, True),
        (SMALL_PAIR - 1, 2 * plan.peak - 1, False),
        (SMALL_PAIR, 2 * plan.peak, False),
    ):
        one = replace(plan, unit=unit, request=replace(plan.request, budget=budget))
        assert one.is_roomy == expected
