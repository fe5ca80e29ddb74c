"""The transition against Algorithms 9 and 15."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fastfold.evoformer.transition import Transition
from tests.helpers.definitions import close, linear, norm, random, randomized


def test_every_position_runs_through_two_layers() -> None:
    layer = randomized(Transition(SimpleNamespace(num_intermediate_factor=3), 10, zero_init=False))
    x = random(5, 7, 10)
    assert layer.hidden.out_features == 30
    expected = x + linear(layer.output, torch.relu(linear(layer.hidden, norm(layer.norm, x))))
    close(layer(x), expected)
    close(layer(x[2:3, 4:6]), expected[2:3, 4:6])
