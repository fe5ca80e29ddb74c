"""The descent on the distogram: its forces are gradients, and it moves residues to where the distogram puts them."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.config import model_config
from fastfold.evoformer.execution import ExecutionPolicy, LazyRows, of_sample, rows_of
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.structure import distogram_descent, distogram_potential
from fastfold.evoformer.structure.distogram_descent import descend, descent_bytes
from fastfold.evoformer.structure.distogram_embedding import embedding_bytes
from fastfold.evoformer.structure.distogram_potential import (
    Distances,
    Overlaps,
    PointPairs,
    Springs,
    pair_blocks,
)
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.compactness import near_neighbors
from fastfold.protein.rigid import quaternion_to_rotation

CONFIG = model_config("mini").model.heads.structure_module.distogram_descent
EDGES = torch.linspace(2.3125, 21.6875, 63)
LENGTH = 60


def helix(length: int) -> Tensor:
    """Return frames ``[N, 7]`` of an ideal alpha helix."""
    turn = torch.deg2rad(torch.arange(length) * 100.0)
    x = torch.stack([2.3 * turn.cos(), 2.3 * turn.sin(), 1.5 * torch.arange(length)], -1)
    half = torch.stack([(turn / 2).cos(), 0 * turn, 0 * turn, (turn / 2).sin()], -1)
    return torch.cat([half, x], -1)


def bent(affines: Tensor, at: int, angle: float = 2.5) -> Tensor:
    """Return a chain whose second part is turned about the residue ``at``."""
    c, s = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    rotation = torch.tensor([[1.0, 0, 0], [0, c, -s], [0, s, c]])
    found = affines.clone()
    found[at:, 4:] = (
        (affines[at:, 4:] - affines[at, 4:]) @ rotation.T + affines[at, 4:] + torch.tensor([0.0, 9.0, 0])
    )
    w, x, y, z = affines[at:, :4].unbind(-1)
    a, b = torch.cos(torch.tensor(angle / 2)), torch.sin(torch.tensor(angle / 2))
    found[at:, :4] = torch.stack([a * w - b * x, a * x + b * w, a * y - b * z, a * z + b * y], -1)
    return found


def beta(affines: Tensor) -> Tensor:
    """Return CB positions ``[N, 3]`` of alanines."""
    local = torch.as_tensor(rc.restype_atom14_rigid_group_positions[rc.restype_order["A"], 4]).float()
    return (quaternion_to_rotation(affines[:, :4]) * local).sum(-1) + affines[:, 4:]


def certain(points: Tensor) -> Tensor:
    """Return logits ``[N, N, 64]`` that are nearly sure of the distances between points."""
    centers = 2.3125 - 0.15625 + 0.3125 * torch.arange(64)
    distance = torch.cdist(points, points).clamp(max=float(centers[-1]))
    return -((distance[..., None] - centers) / 0.8).square()


def run(affines: Tensor, logits: Tensor, **arguments: object) -> Tensor:
    length = len(affines)
    given = {
        "aatype": torch.full((length,), rc.restype_order["A"]),
        "residue_index": torch.arange(length),
        "seq_mask": torch.ones(length),
        "predicted": torch.zeros(length, 2),
        "config": CONFIG,
    }
    return descend(affines, logits, EDGES, **(given | arguments))  # type: ignore[arg-type]


def potential(first: Tensor, second: Tensor, energy: Tensor) -> Distances:
    """Return a potential with bins of 0.5 Å from 2 Å on, whose reference is uniform."""
    reference = torch.zeros(1, energy.shape[-1], dtype=energy.dtype)
    pairs = pair_blocks(first, second, int(second.max()) + 1)
    return Distances(pairs, torch.zeros_like(first), energy, reference, 2.0, 0.5)


def test_forces_are_the_gradient_of_a_smooth_potential():
    torch.manual_seed(0)
    points = (8 * torch.rand(12, 3, dtype=torch.float64)).requires_grad_()
    first, second = torch.triu_indices(12, 12, 1)
    energy = torch.randn(len(first), 20, dtype=torch.float64)
    distances = potential(first, second, energy)
    found = (points[first] - points[second]).square().sum(-1).add(1e-6).sqrt()
    position = (found - 2.0) / 0.5
    # The quadratic B-spline of each bin, written as a function of the distance to its middle.
    apart = (position[:, None] - torch.arange(20)).abs()
    spline = torch.where(apart < 0.5, 0.75 - apart**2, 0.5 * (1.5 - apart).clamp(min=0) ** 2)
    inside = (position > 0.5) & (position < 18.5)
    ((spline * energy).sum(-1) * inside).sum().backward()
    assert inside.sum() > 30
    assert points.grad is not None
    torch.testing.assert_close(distances.forces(points.detach()), points.grad, rtol=1e-9, atol=1e-9)
    clamped = position.detach().clamp(0.5, 18.499)
    apart = (clamped[:, None] - torch.arange(20)).abs()
    spline = torch.where(apart < 0.5, 0.75 - apart**2, 0.5 * (1.5 - apart).clamp(min=0) ** 2)
    torch.testing.assert_close(distances.total(points.detach()), (spline * energy).sum())


def test_springs_and_overlaps_are_gradients():
    torch.manual_seed(1)
    points = (5 * torch.rand(9, 3, dtype=torch.float64)).requires_grad_()
    first, second = torch.triu_indices(9, 9, 1)
    length, weight = torch.rand(2, len(first), dtype=torch.float64)
    found = (points[first] - points[second]).square().sum(-1).add(1e-6).sqrt()
    (gradient,) = torch.autograd.grad((weight * (found - length).square()).sum(), points, retain_graph=True)
    springs = Springs(PointPairs(first, second, 9), length, weight)
    torch.testing.assert_close(springs.forces(points.detach()), gradient)
    torch.testing.assert_close(
        springs.total(points.detach()), (weight * (found - length).square()).sum().detach()
    )
    (gradient,) = torch.autograd.grad(3 * torch.relu(4.0 - found).square().sum(), points)
    distances = potential(first, second, torch.zeros(len(first), 20))
    overlaps = Overlaps(distances.blocks, 4.0, 9)
    torch.testing.assert_close(overlaps.forces(points.detach(), 3.0), gradient)
    moved = points.detach() + 1.5 * torch.randn_like(points)  # farther than the list has room for
    again = Overlaps(distances.blocks, 4.0, 9).forces(moved, 3.0)
    assert torch.equal(overlaps.forces(moved, 3.0), again)
    overlap = 3 * torch.relu(4.0 - found.detach()).square().sum()
    torch.testing.assert_close(distances.overlap(points.detach(), 4.0, 3.0), overlap)


def test_the_expected_lddt_counts_distances_that_meet_the_thresholds():
    middles = 2.0 + 0.5 * torch.arange(40, dtype=torch.float64)
    logits = torch.full((1, 2, 40), -40.0)
    logits[0, 1, 10] = 0.0  # 7 Å for certain
    logits = torch.cat([logits, logits.flip(1)])
    edges = 2.25 + 0.5 * torch.arange(39)
    present, index = torch.ones(2).bool(), torch.tensor([0, 5])
    found = Distances.from_logits(logits, edges, index, present, 0, lambda x: x)
    assert found.energy.shape == (1, 40)
    found.add_expected_scores(0.0, 2.0, 0.0)
    for at, share in ((10, 1.0), (12, 0.625), (13, 0.5), (16, 0.25), (20, 0.0)):
        error = abs(float(middles[at]) - 7.0)
        smooth = sum(1 / (1 + math.exp((error - limit) / 0.3)) for limit in (0.5, 1.0, 2.0, 4.0)) / 4
        assert float(found.energy[0, at]) == pytest.approx(-2 * smooth, abs=1e-4)
        assert smooth == pytest.approx(share, abs=0.1)


def test_the_agreement_counts_what_the_separation_does_not_tell():
    """One pair at 7 Å, one beyond the last bin, and their mean as the reference; two pairs without a difference."""
    bins = torch.full((2, 40), -40.0)
    bins[0, 10] = bins[1, 39] = 0.0
    classes, middles = torch.zeros(2).long(), 2.0 + 0.5 * torch.arange(40)
    for logits, factors in ((bins, (0.5, -0.5)), (bins[:1].repeat(2, 1), (0.0, 0.0))):
        reference = (logits.softmax(-1).mean(0, keepdim=True) + 1e-6).log()
        energy = reference - logits.log_softmax(-1)
        blocks = pair_blocks(torch.tensor([0, 0]), torch.tensor([1, 2]), 3)
        found = Distances(blocks, classes, energy, reference, 2.0, 0.5)
        found.add_expected_scores(0.0, 0.0, 4.0)
        for row, factor in zip(found.energy, factors, strict=True):
            expected = -factor * 4.0 / (1 + (middles - 7.0).square())
            torch.testing.assert_close(row, expected, rtol=0, atol=1e-3)


def test_a_bent_chain_moves_to_the_distances_of_the_distogram():
    target, start = helix(LENGTH), bent(helix(LENGTH), 30)
    wanted = torch.cdist(target[:, 4:], target[:, 4:])
    sure = (wanted < 20) & (torch.arange(LENGTH) < 30) & (torch.arange(LENGTH)[:, None] >= 30)

    def error(affines: Tensor) -> float:
        return float((torch.cdist(affines[:, 4:], affines[:, 4:]) - wanted)[sure].abs().mean())

    moved = run(start, certain(beta(target)))
    assert error(start) > 1.0
    assert error(moved) < 0.5 * error(start)
    torch.testing.assert_close(moved[:, :4].norm(dim=-1), torch.ones(LENGTH))


def test_a_collapsed_chain_loses_its_overlaps():
    target = helix(LENGTH)
    start = target.clone()
    start[30:, 4:] = target[:30, 4:].flip(0) + torch.tensor([0.5, 0.5, 0.0])
    flat = torch.zeros(LENGTH, LENGTH, 64)
    before, after = (near_neighbors(x[:, 4:], torch.ones(LENGTH)) for x in (start, run(start, flat)))
    assert before > 0.5
    assert after < 0.1 * before


def test_padding_neither_moves_nor_counts():
    target, start = helix(LENGTH), bent(helix(LENGTH), 30)
    logits = certain(beta(target))
    padded = torch.randn(LENGTH + 7, LENGTH + 7, 64)
    padded[:LENGTH, :LENGTH] = logits
    filler = torch.zeros(7, 7)
    filler[:, 0] = 1.0
    mask = torch.cat([torch.ones(LENGTH), torch.zeros(7)])
    moved = run(torch.cat([start, filler]), padded, seq_mask=mask)
    alone = run(start, logits)
    torch.testing.assert_close(moved[:LENGTH, 4:], alone[:, 4:], rtol=0, atol=1e-3)
    found, expected = (
        quaternion_to_rotation(x[:, :4]) for x in (moved[:LENGTH], alone)
    )  # quaternions have either sign
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert torch.equal(moved[LENGTH:, 4:], filler[:, 4:])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_frames_that_are_not_finite_stay_for_the_caller_to_report(number: float):
    affines = helix(24)
    logits = certain(affines[:, 4:])
    affines[3, 5] = number
    moved = run(affines, logits)
    torch.testing.assert_close(moved, affines, rtol=0, atol=0, equal_nan=True)


def test_a_residue_alone_stays_where_it_is():
    start = helix(3)[2:]
    moved = run(start, torch.randn(1, 1, 64))
    torch.testing.assert_close(moved, start, rtol=0, atol=1e-6)


def test_two_residues_keep_their_peptide_bond():
    start = helix(2)
    start[1, 6] += 2.0
    moved = run(start, torch.zeros(2, 2, 64))
    assert float(torch.linalg.vector_norm(moved[1, 4:] - moved[0, 4:])) == pytest.approx(3.8, abs=0.1)


def test_blocks_of_rows_on_several_ranks_move_residues_alike(monkeypatch: pytest.MonkeyPatch):
    target, start = helix(LENGTH), bent(helix(LENGTH), 30)
    logits = certain(beta(target))
    config = CONFIG.copy_and_resolve_references()
    config.steps, config.last_steps, config.backbone_steps = 12, 12, 12
    whole = run(start, logits, config=config)
    monkeypatch.setattr(distogram_potential, "_BLOCK", 100)
    assert_same_frames(run(start, logits, config=config), whole)
    parts = ((0, 25), (25, 25), (25, LENGTH))  # the second rank holds nothing
    barrier = threading.Barrier(len(parts))
    sent: list[Tensor | None] = [None] * len(parts)
    found: list[Tensor | None] = [None] * len(parts)

    def rank(number: int) -> None:
        def total(x: Tensor) -> Tensor:
            sent[number] = x
            barrier.wait()
            summed = torch.stack([each for each in sent if each is not None]).sum(0)
            barrier.wait()
            return summed

        begin, end = parts[number]
        found[number] = run(start, logits[begin:end], first_row=begin, sum_over_ranks=total, config=config)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        assert each is not None
        assert_same_frames(each, whole)


def assert_same_frames(affines: Tensor, expected: Tensor) -> None:
    """Compare rotations and positions: rounding may change the sign of a quaternion, which is the same rotation."""
    torch.testing.assert_close(affines[:, 4:], expected[:, 4:], rtol=0, atol=1e-3)
    rotations = [quaternion_to_rotation(x[:, :4]) for x in (affines, expected)]
    torch.testing.assert_close(*rotations, rtol=0, atol=1e-3)


def test_starts_descend_together_as_each_does_alone(monkeypatch: pytest.MonkeyPatch):
    start, logits = bent(helix(LENGTH), 30), certain(beta(helix(LENGTH))) + torch.randn(LENGTH, LENGTH, 64)
    config = CONFIG.copy_and_resolve_references()
    config.steps, config.last_steps, config.backbone_steps = 9, 3, 0
    together = run(start, logits, config=config)
    monkeypatch.setattr(distogram_descent, "_TOGETHER", 0)
    assert torch.equal(together, run(start, logits, config=config))


@pytest.mark.parametrize("limit", [0, 10**6])
def test_few_pairs_descend_on_one_core_to_the_same_frames(monkeypatch: pytest.MonkeyPatch, limit: int):
    native = helix(12)
    start, logits = bent(native, 6), certain(beta(native))
    before, numbers = torch.get_num_threads(), set()

    def build(end: Tensor, *_: object, **__: object) -> Tensor:
        numbers.add(torch.get_num_threads())
        return end

    monkeypatch.setattr(distogram_descent, "build_backbone", build)
    expected = run(start, logits)
    monkeypatch.setattr(distogram_descent, "_PAIRS_OF_CORE", limit)
    numbers.clear()
    torch.set_num_threads(3)
    try:
        assert torch.equal(run(start, logits), expected)
        assert numbers == {1 if limit else 3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_structures_with_gradients_are_those_of_the_structure_module():
    config = model_config("mini")
    model = AlphaFold(config).eval()
    length = 8
    features = {
        "aatype": torch.zeros(length, dtype=torch.long),
        "residue_index": torch.arange(length),
        "seq_mask": torch.ones(length),
    }
    pair = torch.randn(length, length, 64)
    with torch.no_grad():
        structure = model.structure_module(
            torch.randn(length, 128), pair, features["aatype"], torch.ones(length)
        )
        settings = model._descent(features)
        assert settings is not None
        moved = model._descended(structure, {"pair": pair}, None, features, settings)
        batch = {key: torch.stack([value] * 2) for key, value in features.items()}
        doubled = {"final_affines": torch.stack([structure["final_affines"]] * 2)}
        doubled["sidechains"] = {
            "angles_sin_cos": torch.stack([structure["sidechains"]["angles_sin_cos"]] * 2, 1)
        }
        both = model._descended(doubled, {"pair": torch.stack([pair] * 2)}, None, batch, settings)
        model.policy = replace(model.policy, heads=())
        assert model._descent(features) is None
    model.policy = ExecutionPolicy()
    assert model._descent(features) is None
    ca = rc.atom_order["CA"]
    assert not torch.equal(moved["final_atom_positions"], structure["final_atom_positions"])
    torch.testing.assert_close(moved["final_atom_positions"][:, ca], moved["final_affines"][:, 4:])
    for sample in both["final_atom_positions"]:
        torch.testing.assert_close(sample, moved["final_atom_positions"])


def test_one_sample_of_lazy_rows_is_one_sample_of_the_tensor():
    x = torch.randn(2, 5, 5, 3)
    lazy = LazyRows(lambda index: x[..., index, :, :], tuple(x.shape), ExecutionPolicy())
    found = of_sample(lazy, (1,))
    assert found.shape == (5, 5, 3)
    assert torch.equal(rows_of(found, slice(1, 4)), x[1, 1:4])
    assert torch.equal(rows_of(of_sample(x, (0,)), slice(0, 5)), x[0])


def test_the_planned_bytes_are_those_of_its_pairs():
    assert descent_bytes(1000, 1000, 64) - descent_bytes(1000, 1000, 63) == 4 * 500_000
    assert descent_bytes(256, 256, 64) > descent_bytes(257, 257, 64)  # three starts at a time
    assert descent_bytes(100, 1000, 64) == embedding_bytes(1000)


def test_pairs_sum_forces_in_their_order():
    """Bits of sums depend on the order, and those of all pairs on the number of threads otherwise."""
    torch.manual_seed(2)
    first, second = torch.randint(0, 7, (2, 200))
    points, pull = torch.randn(9, 3), torch.randn(200)
    pairs = PointPairs(first, second, 9)
    offset, distance = pairs.offsets(points)
    assert torch.equal(offset, points[first] - points[second])
    torch.testing.assert_close(distance, offset.norm(dim=-1).clamp(min=1e-3))
    assert torch.equal(pairs.offsets(points.double())[0], points[first].double() - points[second].double())
    force = pull[:, None] * offset
    expected = torch.zeros(9, 3).index_add_(0, first, force).index_add_(0, second, -force)
    assert torch.equal(pairs.forces(pull, offset), expected)
    none = PointPairs(first[:0], second[:0], 9)
    assert torch.equal(none.forces(pull[:0], none.offsets(points)[0]), torch.zeros(9, 3))


def test_points_of_other_devices_keep_their_numbers():
    """Apple GPUs lack numbers of 16 bytes."""
    points = torch.empty(5, 3, device="meta")
    first = torch.zeros(4, dtype=torch.int64, device="meta")
    assert distogram_potential._wide_rows(points) is points
    assert distogram_potential._selected(points, first).shape == (4, 3)
