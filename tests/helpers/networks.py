"""Small networks and features for tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.model import AlphaFold
from tests.conftest import REPOSITORY

ORACLES = REPOSITORY / "tests" / "oracles"


def oracle_config(name: str = "synthetic_monomer") -> ConfigDict:
    """Configuration of a recorded run."""
    return ConfigDict(json.loads((ORACLES / name / "config.json").read_text()))


def shallow_config(name: str = "synthetic_monomer") -> ConfigDict:
    """Configuration of a recorded run with fewer blocks: two of the Evoformer, and one of each other stack."""
    config = oracle_config(name)
    trunk = config.model.embeddings_and_evoformer
    trunk.evoformer_num_block, trunk.extra_msa_stack_num_block = 2, 1
    trunk.template.template_pair_stack.num_block = 1
    return config


def oracle_arrays(name: str, file: str) -> dict[str, np.ndarray]:
    """Arrays of a recorded run, to be changed."""
    return {key: array.copy() for key, array in _recorded(name, file).items()}


@functools.cache
def _recorded(name: str, file: str) -> dict[str, np.ndarray]:
    with np.load(ORACLES / name / f"{file}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def oracle_features(name: str = "synthetic_monomer", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Features of a recorded monomer run, labels included."""
    features = {key: torch.from_numpy(value) for key, value in oracle_arrays(name, "features").items()}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in features.items()}


def random_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> AlphaFold:
    """A network with random parameters, none of them zero, so that every path carries signal."""
    torch.manual_seed(seed)
    model = AlphaFold(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def folder(name: str) -> Path:
    """Folder of a recorded run that the project carries."""
    return ORACLES / name
