"""Files of embeddings in every format, and BioEmu's names."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fastfold.errors import ConfigError
from fastfold.inference.embedding import config as embed_config
from fastfold.inference.embedding.compute import BIOEMU, Embedding
from fastfold.inference.embedding.config import check_format
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import OTHER, SEQUENCE

ARRAYS = {"single": np.arange(6, dtype=np.float32).reshape(3, 2), "pair": np.ones((3, 3, 4), np.float16)}


def embedding() -> Embedding:
    return Embedding("T1", ("MKT",), "model_1_ptm", 3, 2, None, ARRAYS)


def test_safetensors_have_names_and_origin(tmp_path: Path):
    path = embedding().save(tmp_path)
    assert path.name == "T1_model_1_ptm_seed_3.safetensors"
    with safe_open(path, framework="np") as file:
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: values.tolist() for name, values in ARRAYS.items()
        }
        about = file.metadata()
    assert (about["target"], about["sequences"], about["model"]) == ("T1", "MKT", "model_1_ptm")
    assert (about["seed"], about["num_recycles"], about["layer"]) == ("3", "2", "last")


def test_hdf5_has_the_same(tmp_path: Path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(embedding().save(tmp_path, file_format="hdf5")) as file:
        assert {name: file[name][:].tolist() for name in file} == {k: v.tolist() for k, v in ARRAYS.items()}
        assert file["pair"].dtype == np.float16
        assert file.attrs["model"] == "model_1_ptm"


def test_zarr_has_the_same(tmp_path: Path):
    zarr = pytest.importorskip("zarr")
    store = zarr.storage.ZipStore(embedding().save(tmp_path, file_format="zarr"), mode="r")
    root = zarr.open_group(store, mode="r")
    assert {name: root[name][:].tolist() for name in root} == {k: v.tolist() for k, v in ARRAYS.items()}
    assert root.attrs["model"] == "model_1_ptm"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fastfold.utils.packages.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="format='hdf5' needs the package h5py"):
        check_format("hdf5")
    check_format("safetensors")


def test_bioemu_finds_its_files(cli: CommandLine, monkeypatch: pytest.MonkeyPatch):
    fasta, weights = cli.fasta({"T1": SEQUENCE, "pair": f"{SEQUENCE}:{OTHER}"}), cli.weights()
    command = ("embed", fasta, "--out", cli.out, "--weights", weights, "--format", "bioemu")
    refused = cli.run(*command)
    assert refused.code == 2
    assert "BioEmu takes 384 and 128 channels of single and pair, model_1_ptm has 40 and 24" in refused.err
    assert embed_config.BIOEMU_CHANNELS == (384, 128)
    monkeypatch.setattr(embed_config, "BIOEMU_CHANNELS", (40, 24))
    done = cli.run(*command)
    assert done.out.startswith("1 embedded, 1 failed")
    assert "pair: BioEmu samples single chains, and this target is a complex" in done.err
    digest = hashlib.sha256(SEQUENCE.encode()).hexdigest()
    folder = cli.out / BIOEMU
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{digest}.fasta",
        f"{digest}_pair.npy",
        f"{digest}_single.npy",
    ]
    single, pair = (np.load(folder / f"{digest}_{name}.npy") for name in ("single", "pair"))
    assert (single.shape, pair.shape) == ((10, 40), (10, 10, 24))
    assert single.dtype == pair.dtype == np.float32
    with safe_open(cli.out / "T1_model_1_ptm_seed_0.safetensors", framework="np") as file:
        assert np.array_equal(file.get_tensor("single"), single)
        assert file.metadata()["num_recycles"] == "0"
