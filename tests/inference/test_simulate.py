"""A whole fold of sizes alone, on a device that raises beyond what the plan has: the plan is right at full size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.simulation.fold import Simulated, simulate
from fastfold.evoformer.config import is_multimer, model_config
from fastfold.inference.planning.memory_model import CUDA_BLOCK
from fastfold.inference.planning.planner import Planner
from fastfold.memory import BudgetError, DeviceFull
from fastfold.protein.rigid import _CONSTANTS
from fastfold.utils.units import GIB

GB = 10**9


MONOMER, MULTIMER = "model_1_ptm", "model_1_multimer_v3"


def _config(preset: str = MONOMER, templates: int = 4) -> Any:
    """A network with one block in each stack and two layers of structure: further ones use the same memory again."""
    config = model_config(preset)
    config.model.embeddings_and_evoformer.template.max_templates = templates
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block = trunk.extra_msa_stack_num_block = 1
    trunk.template.template_pair_stack.num_block = 1
    config.model.heads.structure_module.num_layer = 2
    return config


def _short(preset: str = MONOMER) -> Any:
    """Of two templates: the first and the last one, in whose memory are those between."""
    return _config(preset, templates=2)


def _features(config: Any, n: int, clusters: int, extra: int) -> dict[str, Tensor]:
    multimer = is_multimer(config)
    s, e, t = (clusters, n), (extra, n), (config.model.embeddings_and_evoformer.template.max_templates, n)
    shapes = {
        "seq_mask": (n,),
        "target_feat": (n, 21 if multimer else 22),
        "msa_feat": (*s, 49),
        "msa_mask": s,
        "extra_has_deletion": e,
        "extra_deletion_value": e,
        "extra_msa_mask": e,
        "template_mask": t[:1],
        "template_all_atom_positions": (*t, 37, 3),
        f"template_all_atom_mask{'' if multimer else 's'}": (*t, 37),
        "template_pseudo_beta": (*t, 3),
        "template_pseudo_beta_mask": t,
    }
    names = ("aatype", "residue_index", *(("asym_id", "entity_id", "sym_id") if multimer else ()))
    whole: dict[str, tuple[int, ...]] = dict.fromkeys(names, (n,))
    whole |= {"extra_msa": e, "template_aatype": t}
    found = {name: torch.ones(shape) for name, shape in shapes.items()}
    return found | {name: torch.ones(shape, dtype=torch.int32) for name, shape in whole.items()}


def _simulate(
    n: int, budget: int, *, config: Any = None, clusters: int = 32, extra: int = 32, **options: Any
) -> Simulated:
    config = config or _config()
    features = _features(config, n, clusters, extra)
    return simulate(config, lambda *_: dict(features), n, budget, rows=clusters + extra, **options)


def _small_budget(n: int, config: Any, **room: int) -> int:
    """Little more than the smallest that works, so that there are many blocks and what can leave does."""
    planner = Planner(config, 2, "cuda", parameters=15 * 10**6, rows=64, **room)
    return planner.smallest(n) + n * n * 32 // room.get("ranks", 1)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "host"), [(60, 0), (40, 30), (30, 100)])
def test_ten_thousand_residues_take_what_is_planned(limit: int, host: int) -> None:
    """In bfloat16 with four templates and one recycle, under 60 GB, and under 40 GB and 30 GB with the host."""
    found = _simulate(10_000, limit * GB, host_memory=host * GB)
    assert (found.plan.policy.contraction.host is not None) == (host > 0)
    assert found.peak <= found.planned < found.plan.peak < limit * GB
    assert found.peak >= 0.97 * found.planned  # blocks, which fill what is left, are counted from above
    # First the pair, while templates are embedded, and beside it, where the device is too small for them, products of
    # theirs, which are half as large; after that, in the same memory, products of the pair's own size.
    assert found.host == found.plan.chunks.host <= min(host * GB, 3 * found.plan.unit // 2)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "host"), [(65, 0), (40, 100)])
def test_ten_thousand_residues_with_a_deep_alignment_take_what_is_planned(limit: int, host: int) -> None:
    """With all the rows that ``model_1_ptm`` takes; without the host, over the limit of a shallow one."""
    found = _simulate(10_000, limit * GB, clusters=512, extra=5120, host_memory=host * GB)
    assert 0.97 * found.planned <= found.peak <= found.planned < found.plan.peak < limit * GB


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "host"), [(67, 0), (42, 30), (40, 40)])
def test_ten_thousand_residues_of_a_complex_take_what_is_planned(limit: int, host: int) -> None:
    """The multimer network, which holds the sum of all templates beside each of them."""
    found = _simulate(10_000, limit * GB, config=_config(MULTIMER), host_memory=host * GB)
    assert (found.plan.policy.contraction.host is not None) == (host > 0)
    assert 0.97 * found.planned <= found.peak <= found.planned < limit * GB
    assert found.host == found.plan.chunks.host <= host * GB


@pytest.mark.slow
def test_twenty_thousand_residues_fit_a_gpu_of_139_gib_beside_a_host_of_128() -> None:
    found = _simulate(20_000, 139 * GIB, host_memory=128 * GIB)
    assert 0.98 * found.planned <= found.peak <= found.planned < 139 * GIB
    assert found.host == found.plan.chunks.host <= 128 * GIB


@pytest.mark.long
@pytest.mark.parametrize("host", [0.08, 0.2])
def test_padded_products_find_room_on_the_host_at_odd_lengths(host: float) -> None:
    """Rows that wait are padded like those on the GPU, and nothing takes more of the host than it may."""
    config, room = _short(), {"host_memory": int(host * GB)}
    found = _simulate(1001, _small_budget(1001, config, **room), config=config, **room)
    assert 0 < found.host == found.plan.chunks.host <= host * GB


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "host", "disk", "n"),
    [
        (8, 0.05, 0.0, 1024),
        pytest.param(8, 0.02, 0.05, 1023, marks=pytest.mark.slow),
        pytest.param(2, 0.0, 0.0, 1023, marks=pytest.mark.slow),
        pytest.param(2, 0.1, 0.2, 1001, marks=pytest.mark.slow),
        pytest.param(3, 0.1, 0.0, 1001, marks=pytest.mark.slow),
        pytest.param(16, 0.01, 0.0, 1024, marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_several_takes_what_is_planned(ranks: int, host: float, disk: float, n: int) -> None:
    """Under the smallest budgets, even shards and others, with some of what waits on the host and some on a disk."""
    room = {"host_memory": int(host * GB), "disk": int(disk * GB), "ranks": ranks}
    config = _short()
    found = _simulate(n, _small_budget(n, config, **room), config=config, **room)
    # The largest block of attention is longer than a whole shard here.
    assert found.planned - 2 * CUDA_BLOCK - (64 << 20) <= found.peak <= found.planned
    assert found.host <= found.plan.chunks.host <= room["host_memory"]
    assert found.disk <= found.plan.chunks.disk <= room["disk"]
    assert (found.disk > 0) == (disk > 0)
    assert found.sent > 0


@pytest.mark.slow
def test_thirty_thousand_residues_fit_eight_gpus_of_80_gb() -> None:
    """Each with 32 GiB of the host's memory."""
    found = _simulate(30_000, 80 * GB, host_memory=32 * GIB, ranks=8)
    assert 0.97 * found.planned <= found.peak <= found.planned < 80 * GB
    assert 0 < found.host <= found.plan.chunks.host <= 32 * GIB


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "preset"),
    [
        pytest.param(0, MONOMER, marks=pytest.mark.slow),
        pytest.param(100, MONOMER, marks=pytest.mark.slow),
        pytest.param(0, MULTIMER, marks=pytest.mark.slow),
        (100, MULTIMER),
    ],
)
def test_the_peak_of_a_shorter_target_is_what_is_planned(host: int, preset: str) -> None:
    """The same code at 1,024 residues, whose blocks are less than the largest ones that the plan has room for."""
    config = _short(preset)
    budget = _small_budget(1024, config, host_memory=host * GB)
    found = _simulate(1024, budget, config=config, host_memory=host * GB)
    assert (
        (found.plan.policy.contraction.host is not None)
        == (found.plan.policy.offload is not None)
        == (host > 0)
    )
    assert found.planned - 2 * CUDA_BLOCK - (32 << 20) <= found.peak <= found.planned
    assert found.host == found.plan.chunks.host <= (3 * found.plan.unit // 2 if host else 0)
    assert (found.copied > 0) == (host > 0)


@pytest.mark.long
@pytest.mark.parametrize("host", [0, pytest.param(100, marks=pytest.mark.slow)])
def test_the_recycled_pair_takes_no_memory_of_its_own(host: int) -> None:
    """It is the pair of the next cycle, and waits on the host with that while templates are embedded."""
    config, room = _short(), {"host_memory": host * GB}
    budget = _small_budget(192, config, **room)
    # The first fold of a process makes tables of constants, which stay.
    _, once, twice = (_simulate(192, budget, config=config, num_recycles=k, **room) for k in (0, 0, 1))
    assert (twice.plan.policy.offload is not None) == (host > 0)
    # The structure module's first call leaves the constants of its rotations on the device.
    constants = _CONSTANTS["rotation terms", torch.device("meta")].nbytes
    assert once.peak <= twice.peak <= once.peak + constants
    assert once.host == twice.host


@pytest.mark.slow
@pytest.mark.parametrize("members", [2, 3])
def test_members_of_an_ensemble_take_what_is_planned(members: int) -> None:
    """The pair of the cycle before, the sum of the members and the pair of the one that is embedded."""
    config = _config()
    config.data.eval.num_ensemble = members
    found = _simulate(2048, 10**12, config=config)
    alone = _simulate(2048, 10**12)
    more = (members - 1) * found.plan.unit
    assert more <= found.peak - alone.peak <= found.planned - alone.planned <= 1.15 * more


@pytest.mark.slow
def test_left_out_blocks_change_no_peak() -> None:
    config = _config()
    budget = _small_budget(384, config)
    few, every = (_simulate(384, budget, config=config, every_block=every) for every in (False, True))
    assert (few.plan.blocks["templates"] or 0) * 5 < 384**2 * 64
    assert few.peak == every.peak


def test_what_takes_more_than_planned_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is hard: a plan that forgets some of what is resident is found out."""
    plan = Planner.plan

    def optimistic(*args: Any, **options: Any) -> Any:
        found = plan(*args, **options)
        operators = tuple(replace(o, resident=o.resident * 7 // 10) for o in found.chunks.operators)
        return replace(found, chunks=replace(found.chunks, operators=operators))

    monkeypatch.setattr(Planner, "plan", optimistic)
    with pytest.raises(DeviceFull):
        _simulate(1000, 3 * GB)


def test_a_budget_without_a_plan_is_refused() -> None:
    with pytest.raises(BudgetError):
        _simulate(1000, GB // 2)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_expandable_segments_hold_little_more_than_the_tensors(ranks: int) -> None:
    """All within what the plan leaves to gaps, at a length that no kernel likes."""
    room = {"host_memory": GB // ranks, "ranks": ranks}
    config = _short()
    budget = _small_budget(1023, config, **room)
    found = _simulate(1023, budget, config=config, allocator="expandable", **room)
    assert found.peak < found.reserved <= found.plan.peak <= budget


@pytest.mark.slow
def test_ten_thousand_residues_need_expandable_segments_in_40_gb() -> None:
    """Segments of fixed sizes leave gaps: memory ends where enough of it is free."""
    found = _simulate(9_999, 40 * GB, host_memory=30 * GB, allocator="expandable")
    assert found.reserved <= 40 * GB
    with pytest.raises(DeviceFull, match="with free blocks of the allocator"):
        _simulate(9_999, 40 * GB, host_memory=30 * GB, allocator="segments")
