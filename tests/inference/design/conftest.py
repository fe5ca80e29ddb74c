"""Structures and small networks for designs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastfold
from fastfold.evoformer.model import AlphaFold
from tests.helpers.command_line import ORACLES
from tests.helpers.results import helix_prediction


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """Helices of 14 and 10 residues, chains A and B, numbered from 1."""
    return helix_prediction("backbone", 14, 10).save(tmp_path / "given", plots=False)["pdb"]


def _load(kind: str, name: str, folder: Path) -> AlphaFold:
    path = folder / f"params_{name}.npz"
    path.write_bytes((ORACLES / kind / "params.npz").read_bytes())
    model = fastfold.load_model(path)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(scope="session")
def monomer(tmp_path_factory: pytest.TempPathFactory) -> AlphaFold:
    return _load("synthetic_monomer", "model_1_ptm", tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="session")
def multimer(tmp_path_factory: pytest.TempPathFactory) -> AlphaFold:
    return _load("synthetic_multimer", "model_1_multimer_v3", tmp_path_factory.mktemp("weights"))
