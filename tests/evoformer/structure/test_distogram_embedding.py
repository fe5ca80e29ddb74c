"""Structures from a distogram alone: their distances, their mirror image, and the handedness of local poses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure import distogram_descent
from fastfold.evoformer.structure.distogram_descent import _Fall
from fastfold.evoformer.structure.distogram_embedding import embedding_bytes, mirror_images, turned
from fastfold.evoformer.structure.distogram_potential import Distances
from fastfold.protein.rigid import quaternion_to_rotation
from tests.evoformer.structure.test_distogram_descent import CONFIG, EDGES, bent, beta, certain, helix, run

LENGTH = 48


def bundle() -> Tensor:
    """Return frames ``[48, 7]`` of three helices."""
    return bent(bent(helix(LENGTH), 32, 1.9), 16, 2.2)


def distances(affines: Tensor) -> Tensor:
    return torch.cdist(affines[:, 4:], affines[:, 4:])


def handedness(points: Tensor) -> Tensor:
    """Return the triple products of steps along a chain ``[N, 3]``, in Å³; positive for a right-handed helix."""
    first, second, third = (points[i : len(points) - 3 + i + 1] for i in range(3))
    steps = points[1:] - points[:-1]
    first, second, third = steps[:-2], steps[1:-1], steps[2:]
    return (torch.linalg.cross(first, second) * third).sum(-1)


def test_both_images_have_the_distances_of_the_distogram():
    target = bundle()
    logits = certain(target[:, 4:])
    # The start is a straight helix: only its local poses are used.
    images = mirror_images(
        helix(LENGTH), logits, EDGES, residue_index=torch.arange(LENGTH), present=torch.ones(LENGTH).bool()
    )
    wanted = distances(target)
    for image in images:
        error = (distances(image) - wanted).abs()[wanted < 18]
        assert error.mean() < 1.0
    torch.testing.assert_close(distances(images[1]), distances(images[0]), rtol=0, atol=0.02)
    hands = [handedness(image[:, 4:]) for image in images]
    torch.testing.assert_close(hands[0], -hands[1], rtol=0, atol=1e-2)


def test_images_lie_on_the_structure_whose_poses_they_have():
    target = bundle()
    logits = certain(target[:, 4:])
    where = {"residue_index": torch.arange(LENGTH), "present": torch.ones(LENGTH).bool()}
    images = mirror_images(target, logits, EDGES, **where)
    nearest = min(float((image[:, 4:] - target[:, 4:]).norm(dim=-1).mean()) for image in images)
    assert nearest < 2.0
    moved = target.clone()
    moved[:, 4:] += torch.tensor([30.0, -5.0, 8.0])
    for image, far in zip(images, mirror_images(moved, logits, EDGES, **where), strict=True):
        torch.testing.assert_close(far[:, 4:] - moved[0, 4:], image[:, 4:] - target[0, 4:], rtol=0, atol=1e-3)


def test_frames_turn_with_their_surroundings_and_stay_right_handed():
    start = helix(20)
    angle = torch.tensor(0.7)
    spin = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0], [0, 0, 1]])
    moved = turned(start, start[:, 4:] @ spin.T + 3.0)
    before, after = (quaternion_to_rotation(x[:, :4]) for x in (start, moved))
    torch.testing.assert_close(after, spin @ before, rtol=0, atol=1e-5)
    mirrored = turned(start, start[:, 4:] * torch.tensor([1.0, 1.0, -1.0]))
    torch.testing.assert_close(torch.linalg.det(quaternion_to_rotation(mirrored[:, :4])), torch.ones(20))


def test_rows_on_two_processes_and_padding_give_the_same_images():
    target = bundle()
    padded = torch.randn(LENGTH + 4, LENGTH + 4, 64)
    padded[:LENGTH, :LENGTH] = certain(target[:, 4:])
    start = torch.cat([helix(LENGTH), torch.ones(4, 7)])
    present = torch.arange(LENGTH + 4) < LENGTH
    whole = mirror_images(
        start[:LENGTH],
        padded[:LENGTH, :LENGTH],
        EDGES,
        residue_index=torch.arange(LENGTH),
        present=present[:LENGTH],
    )
    half = torch.zeros(LENGTH + 4, LENGTH + 4)

    def first_half(x: Tensor) -> Tensor:
        half.copy_(x)
        return x

    index = torch.arange(LENGTH + 4)
    mirror_images(start, padded[:20], EDGES, residue_index=index, present=present, sum_over_ranks=first_half)
    parts = mirror_images(
        start,
        padded[20:],
        EDGES,
        residue_index=index,
        present=present,
        first_row=20,
        sum_over_ranks=lambda x: x + half,
    )
    for own, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(own[:LENGTH], other, rtol=0, atol=1e-4)
        assert torch.equal(own[LENGTH:], start[LENGTH:])


def test_the_descent_ends_from_the_start_with_the_lowest_energy(monkeypatch: pytest.MonkeyPatch):
    target = bundle()
    logits = certain(beta(target))
    config = CONFIG.copy_and_resolve_references()
    config.steps, config.last_steps, config.backbone_steps = 30, 0, 0
    starts = helix(LENGTH), turned(target, target[:, 4:] * torch.tensor([1.0, 1.0, -1.0])), target
    index, present = torch.arange(LENGTH), torch.ones(LENGTH).bool()
    potential = Distances.from_logits(logits, EDGES, index, present, 0, lambda x: x)
    fall = _Fall(starts[0], potential, torch.zeros(LENGTH).long(), index, present, config, lambda x: x)
    ends = [fall.descend(start, 30, config.local_start) for start in starts]
    energies = [float(fall.energy(end)) for end in ends]
    for order in ((0, 1, 2), (0, 2, 1), (0, 1)):
        monkeypatch.setattr(
            distogram_descent, "mirror_images", lambda *_, o=order, **__: [starts[i] for i in o[1:]]
        )
        best = min(order, key=energies.__getitem__)
        assert torch.equal(run(starts[0], logits, config=config), ends[best])
    assert energies[2] < energies[0]


def test_the_planned_bytes_are_those_of_square_matrices():
    assert embedding_bytes(2000) == 4 * embedding_bytes(1000)
