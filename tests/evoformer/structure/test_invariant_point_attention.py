"""Invariant point attention against Algorithm 22, and its invariance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastfold.evoformer.structure.invariant_point_attention import InvariantPointAttention
from fastfold.protein.rigid import Rigid, quaternion_to_rotation
from tests.helpers.definitions import close, linear, random, randomized
from tests.helpers.networks import oracle_config

N, C_S, C_Z = 8, 20, 12


def _layer(multimer: bool = False) -> InvariantPointAttention:
    config = oracle_config().model.heads.structure_module
    return randomized(InvariantPointAttention(config, C_S, C_Z, multimer=multimer, zero_init=False))


def _frames(*shape: int, seed: int = 5) -> Rigid:
    quaternion = random(*shape, 4, seed=seed)
    rotation = quaternion_to_rotation(quaternion / quaternion.norm(dim=-1, keepdim=True))
    return Rigid(rotation, 0.3 * random(*shape, 3, seed=seed + 1))


def _inputs() -> tuple[Tensor, Tensor, Rigid, Tensor]:
    mask = torch.ones(N).double()
    mask[[2, 6]] = 0.0
    return random(N, C_S), random(N, N, C_Z, seed=1), _frames(N), mask


def _definition(
    layer: InvariantPointAttention, single: Tensor, pair: Tensor, frames: Rigid, mask: Tensor
) -> Tensor:
    """Algorithm 22, one residue and one head at a time."""

    def moved(i: int, points: Tensor) -> Tensor:
        return points @ frames.rotation[i].T + frames.translation[i]

    h = layer.heads
    q, k, v = (linear(part, single).unflatten(-1, (h, -1)) for part in (layer.query, layer.key, layer.value))
    q_points, k_points, v_points = (
        linear(part, single).unflatten(-1, (h, -1, 3))
        for part in (layer.query_points, layer.key_points, layer.value_points)
    )
    bias = linear(layer.pair_bias, pair)
    w_c, w_l = math.sqrt(2 / (9 * q_points.shape[2])), math.sqrt(1 / 3)
    gamma = torch.log1p(layer.point_weights.exp())
    rows = []
    for i in range(N):
        scalars, points, over_pair = [], [], []
        for head in range(h):
            logits = torch.empty(N).double()
            for j in range(N):
                distance = moved(i, q_points[i, head]) - moved(j, k_points[j, head])
                scalar = q[i, head] @ k[j, head] / math.sqrt(q.shape[-1]) + bias[i, j, head]
                logits[j] = w_l * (scalar - gamma[head] * w_c / 2 * distance.square().sum())
            weights = torch.softmax(torch.where(mask > 0, logits, -torch.inf), -1)
            scalars.append(weights @ v[:, head])
            over_pair.append(weights @ pair[i])
            target = sum(weights[j] * moved(j, v_points[j, head]) for j in range(N))
            points.append((target - frames.translation[i]) @ frames.rotation[i])
        local = torch.stack(points)
        squared = local.square().sum(-1)
        norms = squared.sqrt() if layer.multimer else (squared + 1e-8).sqrt()
        parts = [torch.stack(scalars), *local.unbind(-1), norms, torch.stack(over_pair)]
        rows.append(torch.cat([part.flatten() for part in parts]))
    return linear(layer.output, torch.stack(rows))


@pytest.mark.parametrize("multimer", [False, True])
def test_scalars_points_and_pair_of_the_algorithm(multimer: bool) -> None:
    layer, inputs = _layer(multimer), _inputs()
    seen = inputs[3] > 0
    close(layer(*inputs)[seen], _definition(layer, *inputs)[seen], 1e-9)


@pytest.mark.parametrize("multimer", [False, True])
def test_a_rigid_motion_of_all_frames_changes_nothing(multimer: bool) -> None:
    layer, (single, pair, frames, mask) = _layer(multimer), _inputs()
    expected = layer(single, pair, frames, mask)
    motion = _frames(1, seed=20)
    moved = Rigid(motion.rotation @ frames.rotation, motion.apply(frames.translation))
    close(layer(single, pair, moved, mask), expected, 1e-9)


def test_a_motion_of_one_frame_changes_the_others() -> None:
    layer, (single, pair, frames, mask) = _layer(), _inputs()
    expected = layer(single, pair, frames, mask)
    translation = frames.translation.clone()
    translation[4, 0] += 0.3
    found = layer(single, pair, Rigid(frames.rotation, translation), mask)
    assert ((found - expected).abs().amax(-1) > 1e-6)[mask > 0].all()


def test_masked_residues_are_not_seen() -> None:
    layer, (single, pair, frames, mask) = _layer(), _inputs()
    expected = layer(single, pair, frames, mask)
    hidden, seen = mask == 0, mask > 0
    single, pair = single.clone(), pair.clone()
    single[hidden] += 1.0
    pair[:, hidden] += 1.0
    translation = frames.translation + 5 * hidden[:, None]
    close(layer(single, pair, Rigid(frames.rotation, translation), mask)[seen], expected[seen])


def test_some_residues_from_their_rows_of_the_pair() -> None:
    layer, (single, pair, frames, mask) = _layer(), _inputs()
    expected = layer(single, pair, frames, mask)
    rows = slice(3, 7)
    close(layer(single, pair[rows], frames, mask, rows), expected[rows])
