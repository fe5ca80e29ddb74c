"""Weights files: every format is read, written and converted exactly, and no file can do harm."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_collections import ConfigDict
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastfold.errors import OutputError, WeightsError
from fastfold.evoformer.config import model_config
from fastfold.evoformer.model import AlphaFold
from fastfold.evoformer.weights import checkpoint
from fastfold.evoformer.weights.alphafold_names import PREFIX
from fastfold.evoformer.weights.checkpoint import (
    convert,
    load_model,
    read_weights,
    save_weights,
    weights_info,
)
from tests.evoformer.openfold_files import openfold_state
from tests.evoformer.small import folder, oracle_arrays, oracle_config

Arrays = dict[str, np.ndarray]

PARAMS = folder("synthetic_monomer") / "params.npz"
BIAS = f"{PREFIX}evoformer/single_activations//bias"
OURS = "single_projection.bias"


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


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# --- What is read ----------------------------------------------------------------------------------------------


def test_an_official_file_is_described() -> None:
    info = weights_info(PARAMS)
    assert (info.kind, info.preset, info.dtype) == ("alphafold", None, "float32")
    assert (info.multimer, info.has_templates, info.has_ptm) == (False, True, True)
    assert info.parameters == sum(a.size for a in oracle_arrays("synthetic_monomer", "params").values())
    text = info.describe()
    for part in (
        "params.npz",
        "AlphaFold",
        "monomer, templates",
        "3 Evoformer blocks",
        f"{info.parameters:,}",
    ):
        assert part in text


def test_a_multimer_file_is_described() -> None:
    info = weights_info(folder("synthetic_multimer") / "params.npz")
    assert (info.multimer, info.has_templates, info.has_ptm) == (True, True, True)
    assert "multimer" in info.describe()


def test_the_official_name_is_told_where_the_shapes_are_official(tmp_path: Path) -> None:
    """In a file of the full size, which is neither read nor allocated."""
    with torch.device("meta"):
        shapes = {
            key: value.shape for key, value in AlphaFold(model_config("model_2_ptm")).state_dict().items()
        }
    # Sparse on disk: as large as the official file and nothing in it.
    header: dict[str, Any] = {
        "__metadata__": {"fastfold_format": "1", "config": model_config("model_2_ptm").to_json()}
    }
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    path = tmp_path / "params_model_2_ptm.safetensors"
    write_safetensors(path, json.dumps(header).encode(), b"")
    os.truncate(path, path.stat().st_size + end)
    info = weights_info(path)
    assert (info.preset, info.parameters) == ("model_2_ptm", end // 4)
    assert "model_2_ptm" in info.describe()


def test_information_is_had_without_reading_data(tmp_path: Path, arrays: Arrays) -> None:
    """A file of any size is described at once: damage within the data is not even seen."""
    arrays[BIAS][0] = np.nan
    np.savez(tmp_path / "a.npz", **arrays)
    assert weights_info(tmp_path / "a.npz").kind == "alphafold"


def test_a_loaded_network_is_ready(config: ConfigDict) -> None:
    """On the CPU in float32, in evaluation mode, trainable; and no random number was drawn for it."""
    before = torch.get_rng_state()
    model = load_model(PARAMS, config=config)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert not list(model.buffers())
    for parameter in model.parameters():
        assert parameter.device.type == "cpu"
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad


def test_the_given_configuration_is_used(config: ConfigDict) -> None:
    """Four iterations of the structure module are not in the shapes; a plain dict will do too."""
    assert weights_info(PARAMS).config.model.heads.structure_module.num_layer == 8
    assert load_model(PARAMS, config=config).structure_module.layers == 4
    info, _ = read_weights(PARAMS, config=config.to_dict())
    assert info.config == config


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "module", "ema"])
def test_training_checkpoints_of_openfold_are_opened(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict, wrapper: str
) -> None:
    """The moving average is preferred to the last step's parameters."""
    weights = openfold_state("synthetic_monomer", "v1")
    content: dict[str, Any] = {"epoch": 3, wrapper: {f"model.{key}": value for key, value in weights.items()}}
    if wrapper == "ema":
        worse = {f"model.{key}": value + 1 for key, value in weights.items()}
        content = {"state_dict": worse, "ema": {"params": weights, "decay": 0.999}}
    torch.save(content, tmp_path / "a.ckpt")
    info, found = read_weights(tmp_path / "a.ckpt", config=config)
    assert info.kind == "openfold"
    assert same(found, state)


def test_checkpoints_of_old_pytorch_are_read(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    torch.save(
        openfold_state("synthetic_monomer", "v1"), tmp_path / "a.pt", _use_new_zipfile_serialization=False
    )
    assert same(read_weights(tmp_path / "a.pt", config=config)[1], state)


def test_the_content_decides_and_not_the_ending(tmp_path: Path, own: Path, state: dict[str, Tensor]) -> None:
    (tmp_path / "a.pt").write_bytes(PARAMS.read_bytes())
    (tmp_path / "b.npz").write_bytes(own.read_bytes())
    torch.save(openfold_state("synthetic_monomer", "v2"), tmp_path / "c.safetensors")
    for name, kind in (("a.pt", "alphafold"), ("b.npz", "fastfold"), ("c.safetensors", "openfold")):
        info, found = read_weights(tmp_path / name)
        assert info.kind == kind
        assert same(found, state)


def rounded(state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {key: value.to(dtype).float() for key, value in state.items()}


def test_half_precision_arrays_are_widened(
    tmp_path: Path, arrays: Arrays, state: dict[str, Tensor], config: ConfigDict
) -> None:
    np.savez(tmp_path / "a.npz", **{key: value.astype(np.float16) for key, value in arrays.items()})
    info, found = read_weights(tmp_path / "a.npz", config=config)
    assert info.dtype == "float16"
    assert same(found, rounded(state, torch.float16))


def test_bfloat16_arrays_of_jax_are_widened(
    tmp_path: Path, arrays: Arrays, state: dict[str, Tensor], config: ConfigDict
) -> None:
    """NumPy stores them as two bytes without a type."""
    halves = {
        key: torch.from_numpy(value).bfloat16().view(torch.int16).numpy().view("V2")
        for key, value in arrays.items()
    }
    np.savez(tmp_path / "a.npz", **halves)
    info, found = read_weights(tmp_path / "a.npz", config=config)
    assert info.dtype == "bfloat16"
    assert same(found, rounded(state, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_other_precision_become_float32(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict, dtype: torch.dtype
) -> None:
    """In OpenFold's files and in ours, which keep the precision they are given."""
    weights = {key: value.to(dtype) for key, value in openfold_state("synthetic_monomer", "v1").items()}
    torch.save(weights, tmp_path / "a.pt")
    save_weights(tmp_path / "b.safetensors", {key: value.to(dtype) for key, value in state.items()}, config)
    for name in ("a.pt", "b.safetensors"):
        info, found = read_weights(tmp_path / name, config=config)
        assert info.dtype == str(dtype).removeprefix("torch.")
        assert same(found, rounded(state, dtype))


def test_compressed_and_fortran_ordered_and_big_endian_arrays_are_read(
    tmp_path: Path, arrays: Arrays, state: dict[str, Tensor], config: ConfigDict
) -> None:
    odd = {key: np.asfortranarray(value).astype(">f8", order="F") for key, value in arrays.items()}
    np.savez_compressed(tmp_path / "a.npz", **odd)
    info, found = read_weights(tmp_path / "a.npz", config=config)
    assert info.dtype == "float64"
    assert same(found, state)


# --- What is written -------------------------------------------------------------------------------------------


def test_our_files_hold_network_and_configuration(
    own: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    info, found = read_weights(own)
    assert (info.kind, info.preset) == ("fastfold", None)
    assert info.config == config
    assert same(found, state)
    assert load_model(own).structure_module.layers == 4


def test_our_files_are_safetensors(own: Path, state: dict[str, Tensor]) -> None:
    """Other programs read them with the format's own library."""
    assert same(load_file(own), state)


def test_name_and_notes_are_kept(tmp_path: Path, state: dict[str, Tensor], config: ConfigDict) -> None:
    path = tmp_path / "a.safetensors"
    save_weights(path, state, config, preset="model_1_ptm", metadata={"license": "CC BY 4.0"})
    info = weights_info(path)
    assert (info.preset, info.notes) == ("model_1_ptm", {"license": "CC BY 4.0"})
    convert(path, tmp_path / "b.safetensors")
    assert weights_info(tmp_path / "b.safetensors").notes == info.notes


def test_notes_from_a_file_cannot_write_to_the_terminal(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    path = tmp_path / "a.safetensors"
    save_weights(
        path, state, config, metadata={"from\x1b[2J": "\x1b]0;title\x07 somebody\nelse" + "x" * 1000}
    )
    shown = weights_info(path).describe()
    assert "somebody else" in shown
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert len(shown) < 2000


def test_a_network_is_saved_as_its_state(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    """Views into one buffer, as sharded training has them, are no obstacle."""
    model = load_model(PARAMS, config=config)
    flat = torch.cat([value.reshape(-1) for value in model.state_dict().values()])
    begin = 0
    for parameter in model.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
        begin += parameter.numel()
    save_weights(tmp_path / "a.safetensors", model, config)
    assert same(read_weights(tmp_path / "a.safetensors")[1], state)


def test_conversions_lose_nothing(tmp_path: Path, arrays: Arrays, state: dict[str, Tensor]) -> None:
    """Official to ours and back gives the official arrays bit by bit; OpenFold's become the same."""
    ours, back = tmp_path / "a.safetensors", tmp_path / "b.npz"
    info = convert(PARAMS, ours)
    assert (info.kind, info.path) == ("fastfold", ours)
    assert same(read_weights(ours)[1], state)
    assert convert(ours, back).kind == "alphafold"
    with np.load(back) as archive:
        assert set(archive.files) == set(arrays)
        assert [key for key in arrays if not np.array_equal(archive[key], arrays[key])] == []
    torch.save(openfold_state("synthetic_monomer", "v1"), tmp_path / "c.pt")
    convert(tmp_path / "c.pt", tmp_path / "c.npz")
    assert (tmp_path / "c.npz").read_bytes() == back.read_bytes()


def test_conversion_of_a_multimer_network_loses_nothing(tmp_path: Path) -> None:
    convert(folder("synthetic_multimer") / "params.npz", tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.npz")
    theirs = oracle_arrays("synthetic_multimer", "params")
    with np.load(tmp_path / "a.npz") as archive:
        assert set(archive.files) == set(theirs)
        assert [key for key in theirs if not np.array_equal(archive[key], theirs[key])] == []


def test_a_given_configuration_is_converted_too(tmp_path: Path, config: ConfigDict) -> None:
    assert convert(PARAMS, tmp_path / "a.safetensors", config=config).config == config


def test_conversion_does_not_overwrite_its_input(own: Path, tmp_path: Path) -> None:
    """Neither by its name nor by another way to it."""
    before = own.read_bytes()
    link = tmp_path / "link.safetensors"
    link.symlink_to(own)
    for out in (own, own.parent / "." / own.name, link):
        with pytest.raises(WeightsError, match=r"is the input itself; choose another name"):
            convert(own, out)
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["a.pt", "a", "a.npz.gz", "a.pkl"])
def test_other_endings_are_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=r"\.safetensors or \.npz; give the file such an ending"):
        convert(tmp_path / "does not exist", tmp_path / name)


def test_weights_that_could_not_be_read_are_not_written(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(WeightsError, match=f"not written.*{re.escape(OURS)} holds NaN"):
        save_weights(path, state | {OURS: torch.full_like(state[OURS], torch.nan)}, config)
    with pytest.raises(WeightsError, match=f"{re.escape(OURS)} has shape"):
        save_weights(path, state | {OURS: torch.zeros(3)}, config)
    with pytest.raises(WeightsError, match=f"{re.escape(OURS)} is missing"):
        save_weights(path, {key: value for key, value in state.items() if key != OURS}, config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("ending", [".safetensors", ".npz"])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, ending: str
) -> None:
    """And no temporary one."""

    def half(path: Path, *_: Any, **__: Any) -> None:
        path.write_bytes(b"half")
        raise error

    old = tmp_path / f"a{ending}"
    old.write_bytes(b"old")
    monkeypatch.setattr(checkpoint, "write_own" if ending == ".safetensors" else "_write_npz", half)
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        convert(PARAMS, old)
    if isinstance(error, OSError):
        assert str(old) in str(caught.value)
        assert "the disk is full; free some space" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("ending", [".safetensors", ".npz"])
def test_a_folder_that_is_not_there_is_named(tmp_path: Path, ending: str) -> None:
    with pytest.raises(OutputError, match=r"nowhere.*the folder does not exist; create it"):
        convert(PARAMS, tmp_path / "nowhere" / f"a{ending}")


def test_written_files_follow_the_umask(own: Path, tmp_path: Path) -> None:
    """Others may read them where that is the user's habit."""
    expected = stat.S_IMODE(own.stat().st_mode)
    for path in (tmp_path / "a.safetensors", tmp_path / "a.npz"):
        convert(own, path)
        assert stat.S_IMODE(path.stat().st_mode) == expected


# --- Files that are no weights ---------------------------------------------------------------------------------


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(PARAMS, "params_model_1.npz")


def gzip(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(PARAMS, "params_model_1.npz")


NO_WEIGHTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("a.npz", lambda path: None, r"no such file; check the path"),
    "a folder": ("a.npz", lambda path: path.mkdir(), r"is a folder; give a file in it.*zero_to_fp32"),
    "empty": ("a.npz", lambda path: path.write_bytes(b""), r"is empty: get it again"),
    "a pipe": ("a.npz", lambda path: os.mkfifo(path), r"is a device or pipe"),
    "text": (
        "a.npz",
        lambda path: path.write_text("hello\nworld\n" * 99),
        r"is a text file \(was the download",
    ),
    "JSON": ("a.safetensors", lambda path: path.write_text('{"name": {"a": 1}}'), r"is a text file"),
    "web page": ("a.pt", lambda path: path.write_text("<!DOCTYPE html><html>no</html>"), r"is a text file"),
    "LFS": (
        "a.pt",
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        r"git lfs pull",
    ),
    "pickle": ("a.pkl", lambda path: path.write_bytes(pickle.dumps({})), r"is a pickle.*never reads pickles"),
    "text pickle": ("a.pkl", lambda path: path.write_bytes(pickle.dumps([1], 0)), r"is a pickle"),
    "pickle named npz": ("a.npz", lambda path: path.write_bytes(pickle.dumps({}, 2)), r"is a pickle"),
    "one array": ("a.npy", lambda path: np.save(path, np.zeros(3)), r"is a single NumPy array"),
    "tar": ("a.tar", tar, r"unpack it first \(tar -xf a\.tar\)"),
    "gzip": ("a.tar.gz", gzip, r"is compressed; unpack it first"),
    "noise": (
        "a.pt",
        lambda path: path.write_bytes(bytes(range(256)) * 9),
        r"of no known format.*FastFold reads",
    ),
    "empty archive": ("a.npz", lambda path: np.savez(path), r"the archive is empty"),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
def test_files_that_are_no_weights_are_refused_with_a_remedy(tmp_path: Path, case: str) -> None:
    name, make, message = NO_WEIGHTS[case]
    make(tmp_path / name)
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_path_with_a_nul_character_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"check the path"):
        load_model("a\0.npz")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["npz", "pt", "legacy.pt", "safetensors"])
def test_truncated_files_are_recognised(tmp_path: Path, own: Path, kind: str, share: float) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        data = PARAMS.read_bytes()
    elif kind == "safetensors":
        data = own.read_bytes()
    else:
        buffer = io.BytesIO()
        torch.save(
            openfold_state("synthetic_monomer", "v1"), buffer, _use_new_zipfile_serialization=kind == "pt"
        )
        data = buffer.getvalue()
    path.write_bytes(data[: int(len(data) * share)])
    for read in (weights_info, load_model):
        with pytest.raises(WeightsError, match=r"truncated or damaged: get it again") as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_any_flipped_header_byte_is_survived(tmp_path: Path, own: Path, kind: str) -> None:
    """Whatever a transfer does to a file: a network or a WeightsError, and nothing else."""
    data = PARAMS.read_bytes() if kind == "npz" else own.read_bytes()
    path = tmp_path / f"a.{kind}"
    random = np.random.default_rng(0)
    interesting = [*range(0, 600, 23), *random.integers(0, len(data), 10)]
    interesting += [*range(len(data) - 3000, len(data), 301)] if kind == "npz" else []
    for i in interesting:
        damaged = bytearray(data)
        damaged[i] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            weights_info(path)
        except WeightsError as error:
            assert str(path) in str(error)  # noqa: PT017


# --- Archives that mean harm -----------------------------------------------------------------------------------


def zip_of(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=array.dtype.hasobject)
    return buffer.getvalue()


def npy_header(shape: Any, descr: Any = "<f4") -> bytes:
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def members_of(arrays: Arrays) -> dict[str, bytes]:
    return {f"{key}.npy": npy(value) for key, value in arrays.items()}


def test_arrays_of_objects_are_refused(tmp_path: Path, arrays: Arrays) -> None:
    np.savez(tmp_path / "a.npz", **(arrays | {BIAS: np.array([{}, []], dtype=object)}))
    with pytest.raises(
        WeightsError, match=rf"{re.escape(BIAS)} holds Python objects; it is a pickle"
    ) as caught:
        load_model(tmp_path / "a.npz")
    assert "a.npz" in str(caught.value)


def test_a_zip_bomb_is_refused_unopened(tmp_path: Path) -> None:
    zip_of(tmp_path / "a.npz", {f"{BIAS}.npy": npy(np.zeros(8 << 20, np.float32))})
    assert (tmp_path / "a.npz").stat().st_size < 100_000
    with pytest.raises(
        WeightsError, match=r"a\.npz: unpacks to 32 MiB, more than 100 times its own size.*do not"
    ):
        load_model(tmp_path / "a.npz")


def patched_sizes(path: Path, size: int) -> None:
    """Let the table of contents claim ``size`` unpacked bytes for every member."""
    data = bytearray(path.read_bytes())
    for match in re.finditer(rb"PK\x01\x02", bytes(data)):
        data[match.start() + 24 : match.start() + 28] = size.to_bytes(4, "little")
    path.write_bytes(data)


def test_a_claim_of_many_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random(100).astype(np.float32)
    zip_of(tmp_path / "a.npz", {f"{PREFIX}{i}//w.npy": npy(noise) for i in range(3)})
    patched_sizes(tmp_path / "a.npz", 0xFFFFFFF0)
    with pytest.raises(WeightsError, match=r"would take 12\.0 GiB in memory; weights take at most 8 GiB"):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is damaged"),
        (npy(np.zeros(40, np.float32))[:-4], "would not fill"),
        (npy(np.zeros(40, np.float32)) + bytes(4), "would not fill"),
        (npy(np.zeros(41, np.float32)), r"has shape \[41\]"),
    ],
)
def test_arrays_that_do_not_fill_their_members_are_refused(
    tmp_path: Path, arrays: Arrays, data: bytes, message: str
) -> None:
    zip_of(tmp_path / "a.npz", members_of(arrays) | {f"{BIAS}.npy": data})
    with pytest.raises(WeightsError, match=f"{re.escape(BIAS)} .*{message}"):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "shape",
    [(10**9,), (2**40, 2**40), (10**30,), (-1, -40), (0,), (0, 10**30), (1,) * 40, (40, 2), (20, 1)],
)
def test_shapes_that_contradict_the_data_are_refused_before_memory_is_taken(
    tmp_path: Path, arrays: Arrays, shape: tuple[int, ...]
) -> None:
    zip_of(tmp_path / "a.npz", members_of(arrays) | {f"{BIAS}.npy": npy_header(shape) + bytes(160)})
    message = f"{re.escape(BIAS)} .*(impossible shape|would not fill)"
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(tmp_path / "a.npz")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "header",
    [
        b"\x93NUMPY\x09\x00" + bytes(64),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535,
        b"\x93NUMPY\x01\x00\x20\x00" + b"__import__('os').system('true')\n",
        b"\x93NUMPY\x01\x00\x04\x00{\n\x00 ",
        npy_header((40,), descr=[("a", "<f4")]) + bytes(160),
        npy_header((40,), descr="<q9") + bytes(160),
        npy_header("nonsense") + bytes(160),
    ],
)
def test_nonsense_headers_are_refused(tmp_path: Path, arrays: Arrays, header: bytes) -> None:
    zip_of(tmp_path / "a.npz", members_of(arrays) | {f"{BIAS}.npy": header})
    with pytest.raises(WeightsError, match=re.escape(BIAS)):
        load_model(tmp_path / "a.npz")


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    """Of which one program would read the first and another the last."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", npy(np.zeros(3)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("a.npy", npy(np.ones(3)))
    with pytest.raises(WeightsError, match=r"two members named 'a\.npy'"):
        load_model(tmp_path / "a.npz")


def test_encrypted_archives_are_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "a.npz", {"a.npy": npy(np.zeros(3))})
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(WeightsError, match=r"is encrypted; unpack it with its password"):
        load_model(tmp_path / "a.npz")


def test_data_that_changed_on_the_way_are_recognised(tmp_path: Path, arrays: Arrays) -> None:
    """By the archive's checksums."""
    np.savez(tmp_path / "a.npz", **arrays)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    key = f"{PREFIX}evoformer/evoformer_iteration/msa_transition/transition1//weights"
    at = bytes(data).index(arrays[key].tobytes()) + arrays[key].nbytes // 2
    data[at] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    assert weights_info(tmp_path / "a.npz")
    with pytest.raises(WeightsError, match=rf"the data of {re.escape(key)} are damaged: get it again"):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("dtype", "shown"), [(np.int32, "int32"), (np.bool_, "bool"), ("<U3", "<U3"), ("V3", "V3")]
)
def test_arrays_of_other_types_are_refused(tmp_path: Path, arrays: Arrays, dtype: Any, shown: str) -> None:
    np.savez(tmp_path / "a.npz", **(arrays | {BIAS: np.zeros(40, dtype)}))
    with pytest.raises(
        WeightsError, match=rf"{re.escape(BIAS)} is of type .*{re.escape(shown)}.*floating point"
    ):
        load_model(tmp_path / "a.npz")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "a.npz", {"word/document.xml": b"<a/>"})
    with pytest.raises(WeightsError, match=r"word/document\.xml is not an array, so this is not a parameter file"):
        load_model(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", features=np.zeros(3))
    with pytest.raises(WeightsError, match=r"array features is not a parameter of AlphaFold 2.*params_model"):
        load_model(tmp_path / "b.npz")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["npz", "pt", "safetensors"])
def test_parameters_that_are_no_numbers_are_named(
    tmp_path: Path, arrays: Arrays, state: dict[str, Tensor], config: ConfigDict, kind: str, value: float
) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        arrays[BIAS][3], name = value, BIAS
        np.savez(path, **arrays)
    elif kind == "pt":
        weights, name = openfold_state("synthetic_monomer", "v1"), "evoformer.linear.bias"
        weights[name][3] = value
        torch.save(weights, path)
    else:
        name, changed = OURS, dict(state)
        changed[name] = changed[name].clone()
        changed[name][3] = value
        save_file(changed, path, {"fastfold_format": "1", "config": config.to_json()})
    with pytest.raises(WeightsError, match=rf"a\.{kind}: parameter {re.escape(name)} holds NaN or infinite"):
        load_model(path, config=config)


def test_numbers_too_large_for_float32_are_named(tmp_path: Path, arrays: Arrays) -> None:
    np.savez(tmp_path / "a.npz", **(arrays | {BIAS: np.full(40, 1e300)}))
    with pytest.raises(WeightsError, match=rf"{re.escape(BIAS)} holds NaN or infinite"):
        load_model(tmp_path / "a.npz")


# --- Files of another network ----------------------------------------------------------------------------------


def test_missing_superfluous_and_misshapen_parameters_are_named(tmp_path: Path, arrays: Arrays) -> None:
    """By the names in the file, with the remedy."""
    changed = {key: value for key, value in arrays.items() if key != BIAS}
    changed[f"{PREFIX}evoformer/surprise//weights"] = np.zeros(3, np.float32)
    key = f"{PREFIX}distogram_head/half_logits//weights"
    changed[key] = np.zeros((25, 64), np.float32)
    np.savez(tmp_path / "a.npz", **changed)
    with pytest.raises(WeightsError) as caught:
        load_model(tmp_path / "a.npz")
    message = str(caught.value)
    assert f"a.npz: parameter {BIAS} is missing" in message
    assert f"parameter {PREFIX}evoformer/surprise//weights has no place in this network" in message
    assert f"parameter {key} has shape [25, 64], the network needs [24, 64]" in message
    assert "get it again, or give the configuration" in message


def test_many_problems_are_counted(arrays: Arrays, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{key: value for key, value in arrays.items() if "structure" not in key})
    with pytest.raises(WeightsError, match=r"; and \d\d more\. The file is incomplete") as caught:
        load_model(tmp_path / "a.npz")
    assert str(caught.value).count("is missing") == 5


def test_our_own_files_are_compared_with_their_configuration(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    changed = {key: value for key, value in state.items() if key != OURS} | {"surprise": torch.zeros(2)}
    save_file(changed, tmp_path / "a.safetensors", {"fastfold_format": "1", "config": config.to_json()})
    with pytest.raises(WeightsError) as caught:
        load_model(tmp_path / "a.safetensors")
    assert f"parameter {OURS} is missing" in str(caught.value)
    assert "parameter surprise has no place" in str(caught.value)


def test_a_given_configuration_of_another_network_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"params\.npz: parameter .*the network needs"):
        load_model(PARAMS, config=model_config("model_1_ptm"))


@pytest.mark.parametrize("given", [{}, {"model": {}}, {"model": 3}, ConfigDict({"model": {"heads": None}})])
def test_a_given_configuration_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(WeightsError, match=r"no network can be built.*give a complete tree"):
        load_model(PARAMS, config=given)


# --- PyTorch files that mean harm ------------------------------------------------------------------------------


class Harm:
    """An object that would leave a trace if it were unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("zipped", [True, False])
def test_objects_in_pytorch_files_are_not_run(tmp_path: Path, zipped: bool) -> None:
    content = openfold_state("synthetic_monomer", "v1") | {"surprise": Harm(tmp_path / "trace")}
    torch.save(content, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        WeightsError, match=r"a\.pt: holds a Python object \(\S*mkdir\).*never reads"
    ) as caught:
        load_model(tmp_path / "a.pt")
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "trace").exists()


def test_a_pickle_in_any_disguise_is_not_run(tmp_path: Path) -> None:
    data = pickle.dumps(Harm(tmp_path / "trace"))
    for name in ("a.pt", "a.npz", "a.pkl", "a.safetensors"):
        (tmp_path / name).write_bytes(data)
    zip_of(tmp_path / "b.npz", {f"{BIAS}.npy": npy_header((), "|O") + data})
    zip_of(tmp_path / "b.pt", {"archive/data.pkl": data, "archive/version": b"3\n"}, zipfile.ZIP_STORED)
    for name in ("a.pt", "a.npz", "a.pkl", "a.safetensors", "b.npz", "b.pt"):
        with pytest.raises(WeightsError):
            load_model(tmp_path / name)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": 3}, r"entry 'epoch' is of type int, not a tensor; save the parameters alone"),
        ({7: torch.zeros(2)}, r"entry '7' is of type Tensor"),
        (
            {"evoformer.linear.bias": torch.zeros(40, dtype=torch.int64)},
            r"linear\.bias is of type torch\.int64",
        ),
        ({"evoformer.linear.bias": torch.zeros(40, dtype=torch.complex64)}, r"floating point numbers"),
        (
            {"evoformer.linear.bias": torch.zeros(40).to_sparse()},
            r"linear\.bias is sparse, quantized or without",
        ),
        ({"evoformer.linear.bias": torch.zeros(40, device="meta")}, r"without data; save plain tensors"),
        (
            {"evoformer.linear.bias": torch.zeros(1).expand(10**6)},
            r"linear\.bias of shape \[1000000\] has fewer",
        ),
        (
            {"evoformer.linear.bias": torch.empty(0)},
            r"linear\.bias has shape \[0\], the network needs \[40\]",
        ),
    ],
)
def test_entries_that_are_no_parameters_are_named(
    tmp_path: Path, change: dict[Any, Any], message: str
) -> None:
    torch.save(openfold_state("synthetic_monomer", "v1") | change, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=message) as caught:
        load_model(tmp_path / "a.pt")
    assert "a.pt" in str(caught.value)


@pytest.mark.parametrize("content", [[1, 2], torch.zeros(3), {}, {"state_dict": {}}, "text", None])
def test_pytorch_files_without_a_state_dict_are_refused(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=r"a\.pt: .*(state dict|tensor)"):
        load_model(tmp_path / "a.pt")


def test_a_network_of_another_family_is_refused(tmp_path: Path) -> None:
    torch.save({"trunk.layer.weight": torch.zeros(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(
        WeightsError, match=r"is not an AlphaFold 2 of OpenFold \(it holds trunk\.layer\.weight\)"
    ):
        load_model(tmp_path / "a.pt")


def test_our_own_state_dict_without_configuration_is_explained(
    tmp_path: Path, state: dict[str, Tensor]
) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(WeightsError, match=r"without its configuration; write it with .*save_weights"):
        load_model(tmp_path / "a.pt")


def test_compressed_pytorch_files_are_refused(tmp_path: Path) -> None:
    """PyTorch stores without compression; a bomb could not."""
    torch.save(openfold_state("synthetic_monomer", "v1"), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        zip_of(tmp_path / "b.pt", {name: archive.read(name) for name in archive.namelist()})
    with pytest.raises(WeightsError, match=r"has compressed members, which PyTorch never writes"):
        load_model(tmp_path / "b.pt")


def test_a_tensor_that_claims_more_than_its_record_is_refused(tmp_path: Path) -> None:
    """Ten million numbers announced, none stored."""
    torch.save({"input_embedder.linear_tf_m.weight": torch.zeros(10_000_000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in members if name.endswith("data/0"))
    zip_of(tmp_path / "b.pt", members | {record: bytes(64)}, zipfile.ZIP_STORED)
    with pytest.raises(WeightsError, match=r"b\.pt"):
        load_model(tmp_path / "b.pt")


# --- Safetensors that are not ours, or damaged -----------------------------------------------------------------


def write_safetensors(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_safetensors_of_other_programs_are_explained(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors", {"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"none that FastFold wrote: its header holds no configuration.*convert"
    ):
        load_model(tmp_path / "a.safetensors")


def test_files_of_a_later_fastfold_are_explained(own: Path, tmp_path: Path) -> None:
    header, data = header_of(own)
    header["__metadata__"]["fastfold_format"] = "2"
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=r"format version 2, this FastFold reads version 1; update"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**40, 17 << 20, 5000])
def test_a_header_larger_than_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    write_safetensors(tmp_path / "a.safetensors", b'{"a":1}', b"", length)
    with pytest.raises(WeightsError, match=rf"its header claims {length} bytes; the file is truncated"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"a": 1}',
        '{"model": {"heads": {}}}',
        '{"model": []}',
        '{"a.b": {"c": 1}}',
        "[" * 9999,
    ],
)
def test_a_header_without_a_sound_configuration_is_refused(own: Path, tmp_path: Path, text: str) -> None:
    header, data = header_of(own)
    header["__metadata__"]["config"] = text
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=r"a\.safetensors: .*(configuration)"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.embeddings_and_evoformer.evoformer_num_block", 10**9),
        ("model.embeddings_and_evoformer.template.template_pair_stack.num_block", 10**5),
        ("model.heads.structure_module.sidechain.num_residual_block", 10**7),
        ("model.heads.structure_module.num_layer_in_transition", 10**7),
        ("model.embeddings_and_evoformer.msa_channel", 10**18),
        ("model.embeddings_and_evoformer.pair_channel", -3),
        ("model.embeddings_and_evoformer.pair_channel", "many"),
        ("model.embeddings_and_evoformer.evoformer.msa_row_attention_with_pair_bias.num_head", 0),
        ("model.heads", None),
    ],
)
def test_a_configuration_of_no_possible_network_is_refused_at_once(
    own: Path, tmp_path: Path, key: str, value: Any
) -> None:
    header, data = header_of(own)
    tree = json.loads(header["__metadata__"]["config"])
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        node = node[parent]
    node[leaf] = value
    header["__metadata__"]["config"] = json.dumps(tree)
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=r"a\.safetensors: "):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 10**12]},
        {"data_offsets": [-4, 156]},
        {"data_offsets": [4, 164]},
        {"data_offsets": [0]},
        {"data_offsets": "no"},
        {"shape": [10**9]},
        {"shape": [-40]},
        {"shape": [0]},
        {"shape": 40},
        {"shape": [True] * 40},
        {"dtype": None},
    ],
)
def test_entries_that_contradict_the_data_are_refused(
    own: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    header, data = header_of(own)
    header[OURS].update(change)
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=r"a\.safetensors: "):
        load_model(tmp_path / "a.safetensors")


def test_bytes_after_the_last_parameter_are_refused(own: Path) -> None:
    """Nothing is smuggled in behind the data."""
    own.write_bytes(own.read_bytes() + b"more")
    with pytest.raises(WeightsError, match=r"truncated or damaged"):
        load_model(own)


def test_a_name_that_comes_twice_in_a_header_is_refused(own: Path, tmp_path: Path) -> None:
    header, data = header_of(own)
    entry = json.dumps({OURS: header[OURS]})[1:-1]
    text = json.dumps(header)[:-1] + f", {entry}}}"
    write_safetensors(tmp_path / "a.safetensors", text.encode(), data)
    with pytest.raises(WeightsError, match=r"truncated or damaged"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F8_E4M3", "C64"])
def test_entries_of_other_types_are_named(own: Path, tmp_path: Path, dtype: str) -> None:
    header, data = header_of(own)
    header[OURS]["dtype"] = dtype
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(
        WeightsError, match=rf"parameter {re.escape(OURS)} is of type {dtype}; parameters are"
    ):
        load_model(tmp_path / "a.safetensors")


# --- Full size -------------------------------------------------------------------------------------------------

_MEASURE = """
import sys, time
from fastfold.evoformer.weights.checkpoint import load_model
def memory(): return int(next(line for line in open("/proc/self/status") if "VmHWM" in line).split()[1]) << 10
before, began = memory(), time.perf_counter()
load_model(sys.argv[1])
print(time.perf_counter() - began, memory() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_full_size_files_load_in_seconds_and_in_little_more_than_their_own_size(
    tmp_path: Path, ending: str
) -> None:
    """93 million parameters."""
    config = model_config("model_1_ptm")
    model = AlphaFold(config)
    save_weights(tmp_path / "params_model_1_ptm.safetensors", model, config)
    path = tmp_path / f"params_model_1_ptm{ending}"
    if ending == ".npz":
        convert(tmp_path / "params_model_1_ptm.safetensors", path)
    found = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    seconds, peak = (float(number) for number in found.stdout.split())
    assert seconds < 10
    assert peak < 1.25 * path.stat().st_size
