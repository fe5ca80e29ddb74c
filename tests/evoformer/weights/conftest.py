"""A network's parameters, as recorded and in a file of our own format."""

from __future__ import annotations

from pathlib import Path

import pytest
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.evoformer.weights.checkpoint import (
    read_weights,
    save_weights,
)
from tests.helpers.networks import oracle_arrays, oracle_config
from tests.helpers.weights_files import PARAMS, Arrays


@pytest.fixture(scope="module")
def config() -> ConfigDict:
    return oracle_config()


@pytest.fixture(scope="module")
def state(config: ConfigDict) -> dict[str, Tensor]:
    return read_weights(PARAMS, config=config)[1]


@pytest.fixture
def arrays() -> Arrays:
    return oracle_arrays("synthetic_monomer", "params")


@pytest.fixture(scope="module")
def own_bytes(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Tensor], config: ConfigDict
) -> bytes:
    path = tmp_path_factory.mktemp("own") / "own.safetensors"
    save_weights(path, state, config)
    return path.read_bytes()


@pytest.fixture
def own(tmp_path: Path, own_bytes: bytes) -> Path:
    path = tmp_path / "own.safetensors"
    path.write_bytes(own_bytes)
    return path
