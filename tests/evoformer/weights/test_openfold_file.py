"""Weights go back to OpenFold: under its names, with its axes, and bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from fastfold.errors import OutputError, WeightsError
from fastfold.evoformer.config import MINI, model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights.checkpoint import convert, load_model, read_weights
from fastfold.evoformer.weights.names import network_names
from fastfold.evoformer.weights.openfold_file import openfold_parameters
from tests.helpers.networks import folder, oracle_config
from tests.helpers.openfold_files import openfold_state
from tests.helpers.weights_files import PARAMS, same

# Recorded from state_dict() of openfold.model.model.AlphaFold (commit ce0029e) for model_1_ptm and
# model_1_multimer_v3, with * for the number of a block. There, files of such random networks that FastFold wrote were
# loaded, and all 5,046 and 4,630 tensors were equal bit by bit to those of OpenFold's own import of the .npz.
RECORDED: dict[str, list[str]] = json.loads(
    (Path(__file__).parents[2] / "oracles/openfold_names.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("kind", ["monomer", "multimer"])
def test_names_are_those_of_openfolds_own_network(kind: str) -> None:
    name = f"synthetic_{kind}"
    model = load_model(folder(name) / "params.npz", config=oracle_config(name))
    written = {
        re.sub(r"\.blocks\.\d+\.", ".blocks.*.", key, count=1) for key, _ in openfold_parameters(model)
    }
    assert written == set(RECORDED[kind])


@pytest.mark.parametrize("kind", ["monomer", "multimer"])
def test_arrays_are_the_official_ones_in_openfolds_axes(kind: str) -> None:
    """Turned by the tests' own code, which knows layers with one channel and exchanged halves."""
    name = f"synthetic_{kind}"
    model = load_model(folder(name) / "params.npz", config=oracle_config(name))
    written = {key: torch.from_numpy(array) for key, array in openfold_parameters(model)}
    assert same(written, openfold_state(name, "v2"))


@pytest.mark.parametrize("kind", ["monomer", "multimer"])
def test_weights_return_from_openfolds_file_bit_by_bit(tmp_path: Path, kind: str) -> None:
    name = f"synthetic_{kind}"
    source = folder(name) / "params.npz"
    info = convert(source, tmp_path / "a.pt", config=oracle_config(name))
    assert (info.kind, info.dtype) == ("openfold", "float32")
    found, expected = (
        read_weights(path, config=oracle_config(name))[1] for path in (tmp_path / "a.pt", source)
    )
    assert same(found, expected)


def test_equal_weights_give_equal_files_of_any_name(tmp_path: Path) -> None:
    convert(PARAMS, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "another.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "another.pt").read_bytes()


def test_a_network_that_openfold_lacks_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        mini = AlphaFold(model_config(MINI))
    with pytest.raises(WeightsError, match=r"\.pt files hold AlphaFold's networks only.*\.safetensors"):
        network_names(mini)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without space")
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object) -> None:
        with Path("/dev/full").open("wb") as file:
            torch.save({"x": torch.zeros(1 << 20)}, file)

    monkeypatch.setattr("fastfold.evoformer.weights.checkpoint._write_openfold", full)
    with pytest.raises(OutputError, match="free some space"):
        convert(PARAMS, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
