"""Bytes that plans count for a step of a fold: those of a list of the tensors that are there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

from fastfold.data.features.pipeline import featurize
from fastfold.data.msa.msa import Msa
from fastfold.data.targets import target_from_sequence
from fastfold.evoformer.config import model_config
from fastfold.evoformer.structure.distogram_descent import descent_bytes
from fastfold.inference.planning import memory_model
from fastfold.inference.planning.layer_costs import (
    ATTENTION,
    MSA,
    OUTER_PRODUCT,
    LayerSizes,
    embedding_bytes,
    evoformer_costs,
    point_attention_bytes,
    template_bytes,
)
from fastfold.inference.planning.memory_model import (
    Fold,
    OffloadRoom,
    alignment_feature_bytes,
    channel_groups,
    operators,
)
from fastfold.inference.planning.planner import Planner
from fastfold.inference.planning.time_model import Costs
from fastfold.kernels.ops.triangle_multiplication.passes import contraction_bytes
from fastfold.memory.block_sizes import BlockedOperator
from fastfold.parallel.axial.shards import contraction_exchange_bytes, gather_bytes

MIB, N, C_Z, C_M, C_EXTRA, PARAMETERS = 1 << 20, 50, 128, 256, 64, 12_345
MONOMER, MULTIMER = "model_1_ptm", "model_1_multimer_v3"
CASES = {
    "one row": (MONOMER, 1, {"element_size": 4, "rows": 1, "templates": 0}),
    "deep": (MONOMER, 1, {"element_size": 2, "rows": 900, "templates": 1}),
    "two samples": (MONOMER, 2, {"element_size": 4, "rows": 6000, "templates": 4}),
    "four samples": (MULTIMER, 4, {"element_size": 2, "rows": 600}),
    "three CPUs": (MULTIMER, 1, {"element_size": 4, "rows": 600, "ranks": 3}),
    "GPU": (MONOMER, 1, {"element_size": 2, "rows": 600, "device": "cuda"}),
    "two GPUs": (MONOMER, 3, {"element_size": 2, "rows": 600, "device": "cuda", "ranks": 2}),
    "graph": (MULTIMER, 2, {"element_size": 4, "rows": 600, "device": "cuda", "cuda_graph": True}),
}


def _config(preset: str, samples: int = 1) -> ConfigDict:
    config = model_config(preset)
    if preset == MULTIMER:
        config.model.num_ensemble_eval = samples
    else:
        config.data.eval.num_ensemble = samples
    return config


def _case(name: str) -> tuple[Planner, Fold, dict[str, BlockedOperator]]:
    preset, samples, settings = CASES[name]
    planner = Planner(_config(preset, samples), parameters=PARAMETERS, **settings)
    fold = planner.fold(N)
    room = OffloadRoom()
    return planner, fold, {o.name: o for o in operators(planner.config, fold, Costs(), room=room)}


@pytest.fixture(autouse=True)
def _buffers_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that depend on the processor and its threads."""
    monkeypatch.setattr(memory_model, "onednn_bytes", lambda: 1 << 40)
    monkeypatch.setattr(memory_model, "lanes_bytes", lambda residues, channels: (residues * channels) << 41)


@pytest.mark.parametrize("preset", [MONOMER, MULTIMER])
def test_features_of_an_alignment_have_the_bytes_that_plans_count(preset: str) -> None:
    config = _config(preset)
    rng = np.random.default_rng(0)
    rows = ["".join(rng.choice(list("ARNDCQEGHILKMFPSTWYV"), 9)) for _ in range(8)]
    msa = Msa(tuple(rows), np.zeros((8, 9), np.int32), tuple(map(str, range(8))))
    if preset == MULTIMER:
        config.model.embeddings_and_evoformer.num_msa = 5
    else:
        config.data.eval.max_msa_clusters = 5
    sampler = featurize(target_from_sequence(rows[0]).chains, [([msa], [])], config, seed=0)
    features = sampler.sample(0)
    counted = alignment_feature_bytes()
    both = {name: x for name, x in features.items() if name in counted}
    assert len(both) >= 8
    assert {k: np.asarray(x).nbytes for k, x in both.items()} == {
        k: counted[k] * math.prod(np.asarray(x).shape[:2]) for k, x in both.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_tensors_that_stay_during_a_step_are_counted(name: str) -> None:
    planner, fold, found = _case(name)
    preset, samples, _ = CASES[name]
    e, ranks, extra = fold.element_size, planner.ranks, fold.extra
    msa_rows = fold.clusters + fold.templates
    own = math.ceil(N / ranks)
    # The largest shard of rows, or of columns.
    msa, extra_msa = (
        max(math.ceil(rows / ranks) * N, rows * own) * channels * e
        for rows, channels in ((msa_rows, C_M), (extra, C_EXTRA))
    )
    pair, mask = own * N * C_Z * e, N * N * e
    each = alignment_feature_bytes()
    of_extra = sum(n for key, n in each.items() if key.startswith("extra_")) * extra * N
    of_clusters = sum(n for key, n in each.items() if not key.startswith("extra_")) * fold.clusters * N
    features = of_extra + of_clusters
    if planner.device == "cuda":
        fixed = (480 + 2 * 32 + 256 + (1024 if ranks > 1 else 0)) * MIB
        fixed += memory_model.GPU_POSITIONS * 1024 * e
    else:
        # Letters and deletions of an alignment, in two forms; those of a complex once, with two float masks.
        fixed = 40 * MIB + fold.rows * N * (13 if preset == MULTIMER else 2 * (1 + 4))
        fixed += (1 << 40) + (N * C_M << 41)
    bins = 64
    ensemble = {1: 0, 2: 1, 3: 2, 4: 2}[samples] * pair + (samples - 1) * features
    always = fixed + PARAMETERS + pair + mask + ensemble
    if planner.cuda_graph:
        graph = PARAMETERS + samples * features + 2 * pair + 2 * N * N * 4 + 3 * 4 * own * N * bins
        always += graph
    stack = always + msa + extra_msa + (extra + msa_rows) * N * e
    stack += fold.clusters * N * (of_clusters // (fold.clusters * N) - each["msa_feat"])
    # Backbone atoms, side chains and activations of eight iterations.
    after = always - mask - ensemble + N * 4 * 8 * (384 + 8 * 14 * 3)
    expected = {
        "embedding": always + msa + features,
        **dict.fromkeys((MSA, OUTER_PRODUCT, ATTENTION, "triangle multiplication"), stack),
        "structure module": after,
        "heads": after,
    }
    if ranks > 1:
        expected["exchange"] = stack
    if fold.templates:
        expected["templates"] = always + msa + of_extra
    assert {key: o.resident for key, o in found.items()} == expected


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_a_step_take_its_buffers_and_gaps(name: str) -> None:
    """Rows are halved down to one; on a CPU the heap has gaps of five tensors of a block, or three of float32."""
    planner, fold, found = _case(name)
    c, heads = planner.config.model.embeddings_and_evoformer, planner.config.model.heads
    e, ranks, n_msa = fold.element_size, planner.ranks, fold.clusters + fold.templates
    own = math.ceil(N / ranks)
    main, extra = (
        LayerSizes(rows, N, own, channels, C_Z, e, ranks, planner.device == "cuda" and ranks == 1)
        for rows, channels in ((n_msa, C_M), (fold.extra, C_EXTRA))
    )
    layers = evoformer_costs(c.evoformer, main) + evoformer_costs(c.evoformer, extra, global_column=True)
    times = Costs().of(planner.config, fold)

    def errors(elements: int) -> int:
        """Logits, probabilities and terms of aligned errors, and copies to other ranks, in float32."""
        return 2 * 4 * N * N + 4 * elements * (3 + (ranks + 2 if ranks > 1 else 0))

    steps = {
        "embedding": (N * C_Z, lambda size: embedding_bytes(c, main, size)),
        "structure module": (N * C_Z, lambda size: point_attention_bytes(heads.structure_module, main, size)),
        "heads": (N * 64, errors),
    }
    for step in (MSA, OUTER_PRODUCT, ATTENTION):
        row = max(fold.extra * C_EXTRA, n_msa * C_M) if step == MSA else N * C_Z
        both = [one.nbytes for one in layers if one.step == step]
        steps[step] = (row, lambda size, both=both: max(nbytes(size) for nbytes in both))
    most = 2**22 if planner.device == "cpu" else 2**26
    for step, (row, nbytes) in steps.items():
        gaps = 0
        if planner.device == "cpu":
            gaps = e * (3 if step in ("embedding", "structure module") else 5)
        at_once = step in (MSA, ATTENTION) and planner.device == "cuda" and ranks == 1
        sizes = [own if at_once else min(own, most // row)]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        assert [candidate.size for candidate in found[step].candidates] == sizes, step
        assert found[step].unit == "rows"
        for candidate in found[step].candidates:
            elements = candidate.size * row
            assert candidate.working == nbytes(elements) + gaps * elements, step
            blocks = math.ceil(own / candidate.size)
            seconds = times.work[step] + blocks * times.per_block[step]
            assert candidate.seconds == pytest.approx(seconds), step
    if ranks > 1:
        shard = max(
            own * N * C_Z * e,
            fold.msa_positions(n_msa) * C_M * e,
            fold.msa_positions(fold.extra) * C_EXTRA * e,
        )
        assert [(o.size, o.working, o.seconds) for o in found["exchange"].candidates] == [
            (blocks, math.ceil(5 * shard / blocks), blocks * times.per_exchange) for blocks in (4, 8, 16, 32)
        ]


def test_a_descent_on_the_distogram_takes_memory_with_the_heads() -> None:
    planner = Planner(_config(MONOMER), 4)
    fold, plain = planner.fold(N), planner._operators(planner.fold(N))[-1]
    with planner.config.unlocked():
        planner.config.model.heads.structure_module.distogram_descent = {}
    descending = operators(planner.config, fold, Costs(), room=OffloadRoom())[-1]
    assert descending.name == plain.name == "heads"
    more = [b.working - a.working for a, b in zip(plain.candidates, descending.candidates, strict=True)]
    assert set(more) == {descent_bytes(N, N, 64)}
    assert more[0] > 0


@pytest.mark.parametrize(
    ("channels", "settings", "groups"),
    [
        (128, {}, [32, 16, 8, 4, 2, 1]),
        (128, {"element_size": 2}, [128, 64, 32, 16, 8, 4, 2, 1]),
        (8, {"device": "cuda"}, [8, 4, 2, 1]),
        (128, {"ranks": 4}, [32, 16, 8, 4]),
        (128, {"ranks": 4, "device": "cuda", "element_size": 2}, [32, 16, 8, 4]),
        (8, {"ranks": 16}, [8]),
        (1, {}, [1]),
    ],
)
def test_channels_are_halved_down_to_one_for_each_rank(
    channels: int, settings: dict[str, Any], groups: list[int]
) -> None:
    assert channel_groups(channels, **settings) == groups


def _product(fold: Fold, c: int, channels: int, kept: float) -> int:
    """Bytes of a triangle multiplication: its product, factors, messages, and blocks on their way."""
    n, e, own = fold.residues, fold.element_size, fold.own
    if fold.ranks == 1:
        width = math.ceil(n / 8) * 8 if fold.device == "cuda" else n
        streamed = kept < 1.0
        mask = n * n
        return mask + contraction_bytes(n, c, e, channels=channels, streamed=streamed, kept=kept, width=width)
    group, product = channels * own * n * e, c * own * n * e
    contracting = 3 * group + contraction_exchange_bytes(n, e, channels=channels, ranks=fold.ranks)
    if kept == 1.0:
        return product + contracting
    # The shard lies along rows, then along columns.
    rows = max(math.ceil(n * kept - 1e-9) * own, math.ceil(own * kept - 1e-9) * n)
    return rows * c * e + max(contracting, 2 * group) + 2 * group * channels // c


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("host", "disk"), [(0, 0), (400_000, 0), (100_000, 150_000), (10**9, 10**9)])
def test_products_take_what_stays_and_what_is_under_way(
    device: str, ranks: int, host: int, disk: int
) -> None:
    config = _config(MONOMER)
    planner = Planner(config, 2, device, ranks=ranks, templates=0, host_memory=host, disk=disk)
    fold = planner.fold(N)
    (multiplication,) = (o for o in planner._operators(fold) if o.name == "triangle multiplication")
    trunk = Costs().of(config, fold).trunk
    width = N
    if device == "cuda":
        width = math.ceil(N / 8) * 8
    row = C_Z * (width if ranks == 1 else fold.own) * 2
    every = set()
    for one in multiplication.candidates:
        kept = one.settings["kept"]
        away = round((1.0 - kept) * N)
        every.add(away)
        assert one.working == _product(fold, C_Z, one.size, kept)
        nbytes, group = away * row, one.size * fold.own * N * 2
        # Beyond the host all goes to the disk, with the group that the host has no room for whole.
        on_disk = min(nbytes, nbytes - host + group) if nbytes > host else 0
        assert (one.host, one.disk) == (min(nbytes, host), on_disk)
        assert one.disk <= disk
        seconds = trunk.seconds(math.ceil(C_Z / one.size), away=away / N, on_disk=on_disk / (row * N))
        assert one.seconds == pytest.approx(seconds)
    assert {0, min(N, host // row)} <= every or disk


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "n"), [(1, 50), (3, 50), (2, 700), (12, 700)])
@pytest.mark.parametrize(
    ("preset", "room"), [(MONOMER, 0), (MONOMER, 200_000), (MULTIMER, 0), (MULTIMER, 10**9)]
)
def test_templates_take_the_kept_ones_and_the_current_one(
    preset: str, room: int, ranks: int, n: int, count: int
) -> None:
    config, multimer = _config(preset), preset == MULTIMER
    c = 64
    planner = Planner(config, 4, ranks=ranks, templates=count, host_memory=room, disk=room // 2)
    fold = planner.fold(n)
    count = fold.templates
    (templates,) = (o for o in planner._operators(fold) if o.name == "templates")
    own, times = fold.own, Costs().of(config, fold)
    one, shard = own * n * c * 4, own * n * C_Z * 4
    node = config.model.embeddings_and_evoformer.template
    scores = 0 if multimer else 4 * count * 4 * own * n
    sizes = LayerSizes(count, n, own, C_M, C_Z, 4, ranks)
    block = template_bytes(node, sizes, min(2**20, own * n * C_Z), multimer=multimer)
    if ranks > 1:
        block = max(block, gather_bytes(4, n, own, 4), math.ceil(5 * one / 4))
    sizes_of_kept = set()
    for found in templates.candidates:
        channels = found.settings["channels"]
        kept_bytes = one if multimer else (count - 1) * one + scores
        if found.size == 0:
            kept_bytes = scores
        sizes_of_kept.add(found.size)
        product = _product(fold, c, channels, found.settings["product"]) + own * n
        working = kept_bytes + one + max(product, block)
        rows = round((1.0 - found.settings["pair"]) * own)
        moved = rows * (shard // own)
        # The pair is freed when its kept rows have memory of their own.
        stays = shard - moved
        expected = max(stays, working - moved) if rows else working
        assert found.working == expected
        away = round((1.0 - found.settings["product"]) * n) * c * own * 4 + moved
        on_disk = min(away, away - room + channels * own * n * 4) if away > room else 0
        assert (found.host, found.disk) == (min(away, room), on_disk)
        assert found.disk <= room // 2
        share = on_disk / max(1, away)
        seconds = times.templates.seconds(
            math.ceil(c / channels),
            away=1.0 - found.settings["product"],
            on_disk=share * (1.0 - found.settings["product"]),
        )
        seconds *= 1 if found.size else 2
        # Out, back, and reads and writes of each template.
        copies = (4 + count if multimer else 2 + 3 * count) * times.unit_copy * (1.0 - found.settings["pair"])
        seconds += copies * (1.0 + (times.templates.disk - 1.0) * share)
        assert found.seconds == pytest.approx(seconds)
    assert sizes_of_kept == ({1} if multimer or count == 1 else {0, 1})
