"""Structures and small networks for designs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastfold
from fastfold.evoformer.model import AlphaFold
from tests.helpers.command_line import ORACLES, small_model
from tests.helpers.results import helix_prediction


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """Helices of 14 and 10 residues, chains A and B, numbered from 1."""
    return helix_prediction("backbone", 14, 10).save(tmp_path / "given", plots=False)["pdb"]


def _changed(model: AlphaFold) -> AlphaFold:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="session")
def monomer() -> AlphaFold:
    return _changed(small_model())


@pytest.fixture(scope="session")
def whole_monomer() -> AlphaFold:
    """A network with more blocks."""
    return _changed(fastfold.load_model(ORACLES / "synthetic_monomer" / "params.npz"))


@pytest.fixture(scope="session")
def multimer() -> AlphaFold:
    return _changed(small_model("model_1_multimer_v3"))
