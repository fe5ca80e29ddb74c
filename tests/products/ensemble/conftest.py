"""A folder with an ensemble of two states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.results import helix_prediction

NUMBER, FAR = 7, (1, 4)
"""Samples, and those of them in the second state, in which the helices are 30 Å further apart."""


def save_two_states(folder: Path, name: str = "helices") -> Path:
    """Write the samples, each turned and moved at random."""
    rng = np.random.default_rng(0)
    for k in range(NUMBER):
        one = helix_prediction(name, 30, 20)
        positions = one.atom_positions.astype(np.float64)
        positions[30:, :, 0] += 30.0 * (k in FAR)
        positions += rng.normal(0, 0.05, positions.shape)
        rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        rotation *= np.linalg.det(rotation)
        turned = positions @ rotation.T + rng.normal(0, 20, 3)
        sample = {"method": "columns", "number": k + 1, "fraction": 0.15}
        helix_prediction(name, 30, 20, atom_positions=turned.astype(np.float32), sample=sample).save(
            folder, rank=k + 1, plots=False
        )
    return folder


@pytest.fixture(scope="session")
def two_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_states(tmp_path_factory.mktemp("ensemble"))
