"""Weights files of every format are read, written and converted exactly."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
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
from fastfold.evoformer.weights.checkpoint import (
    convert,
    load_model,
    read_weights,
    save_weights,
    weights_info,
)
from fastfold.evoformer.weights.names import PREFIX
from tests.helpers.networks import folder, oracle_arrays
from tests.helpers.openfold_files import openfold_state
from tests.helpers.weights_files import BIAS, OURS, PARAMS, Arrays, same, write_safetensors

# --- What is read -----------------------------------------------------------------------------------------------


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


# --- What is written --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("ending", "dtype"),
    [
        (".safetensors", torch.float16),
        (".safetensors", torch.bfloat16),
        (".npz", torch.float16),
        (".pt", torch.float16),
        (".pt", torch.bfloat16),
    ],
)
def test_half_precision_halves_the_file_and_rounds_each_parameter_once(
    tmp_path: Path, state: dict[str, Tensor], ending: str, dtype: torch.dtype
) -> None:
    whole, half = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    convert(PARAMS, whole)
    info = convert(whole, half, dtype=dtype)
    assert info.dtype == str(dtype).removeprefix("torch.")
    elements = sum(value.numel() for value in state.values())
    aligned = 0.02 if ending == ".pt" else 0.01  # PyTorch's tensors begin at multiples of 64 bytes
    assert whole.stat().st_size - half.stat().st_size == pytest.approx(2 * elements, rel=aligned)
    assert same(read_weights(half)[1], {name: value.to(dtype).float() for name, value in state.items()})


def test_parameters_too_large_for_half_precision_are_refused(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    name = next(iter(state))
    save_weights(tmp_path / "a.safetensors", {**state, name: state[name] + 1e5}, config)
    with pytest.raises(WeightsError, match=r"b\.safetensors.*infinite"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", dtype=torch.float16)
    assert not (tmp_path / "b.safetensors").exists()
    for ending in (".npz", ".pt"):
        with pytest.raises(WeightsError, match=rf"b\{ending} \(not written\): parameter {name} .*infinite"):
            convert(tmp_path / "a.safetensors", tmp_path / f"b{ending}", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_bfloat16_is_refused_where_numpy_lacks_it(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"a\.npz: \.npz files hold float32 or float16, not bfloat16"):
        convert(tmp_path / "does not exist", tmp_path / "a.npz", dtype=torch.bfloat16)


@pytest.mark.long
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
        with pytest.raises(
            WeightsError, match=r"the output is the same file as the input; choose another name"
        ):
            convert(own, out)
    assert own.read_bytes() == before


@pytest.mark.parametrize("name", ["a.ckpt", "a", "a.npz.gz", "a.pkl"])
def test_other_endings_are_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsError, match=r"ends in \.safetensors or \.npz or \.pt"):
        convert(tmp_path / "does not exist", tmp_path / name)


def test_weights_that_could_not_be_read_are_not_written(
    tmp_path: Path, state: dict[str, Tensor], config: ConfigDict
) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(WeightsError, match=f"not written.*{re.escape(OURS)} holds NaN"):
        save_weights(path, state | {OURS: torch.full_like(state[OURS], torch.nan)}, config)
    with pytest.raises(WeightsError, match=f"{re.escape(OURS)}: expected shape"):
        save_weights(path, state | {OURS: torch.zeros(3)}, config)
    with pytest.raises(WeightsError, match=f"{re.escape(OURS)} is missing"):
        save_weights(path, {key: value for key, value in state.items() if key != OURS}, config)
    assert list(tmp_path.iterdir()) == []


_WRITERS = {".safetensors": "write_own", ".npz": "_write_npz", ".pt": "_write_openfold"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, ending: str
) -> None:
    """And no temporary one."""

    def half(path: Path, *_: Any, **__: Any) -> None:
        path.write_bytes(b"half")
        raise error

    old = tmp_path / f"a{ending}"
    old.write_bytes(b"old")
    monkeypatch.setattr(checkpoint, _WRITERS[ending], half)
    with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        convert(PARAMS, old)
    if isinstance(error, OSError):
        assert str(old) in str(caught.value)
        assert "the disk is full; free some space" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    assert old.read_bytes() == b"old"


@pytest.mark.parametrize("ending", [".safetensors", ".npz", ".pt"])
def test_a_folder_that_is_not_there_is_named(tmp_path: Path, ending: str) -> None:
    with pytest.raises(OutputError, match=r"nowhere.*the folder does not exist; create it"):
        convert(PARAMS, tmp_path / "nowhere" / f"a{ending}")


def test_written_files_follow_the_umask(own: Path, tmp_path: Path) -> None:
    """Others may read them where that is the user's habit."""
    expected = stat.S_IMODE(own.stat().st_mode)
    for path in (tmp_path / "a.safetensors", tmp_path / "a.npz"):
        convert(own, path)
        assert stat.S_IMODE(path.stat().st_mode) == expected


# --- Files of another network -----------------------------------------------------------------------------------


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
    assert f"parameter {PREFIX}evoformer/surprise//weights is not in this network" in message
    assert f"parameter {key}: expected shape [24, 64], found [25, 64]" in message
    assert "download it again, or pass its configuration" in message


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
    assert "parameter surprise is not in this network" in str(caught.value)


def test_a_given_configuration_of_another_network_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"params\.npz: parameter .*: expected shape"):
        load_model(PARAMS, config=model_config("model_1_ptm"))


@pytest.mark.parametrize("given", [{}, {"model": {}}, {"model": 3}, ConfigDict({"model": {"heads": None}})])
def test_a_given_configuration_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(WeightsError, match=r"cannot build a network.*pass a complete tree"):
        load_model(PARAMS, config=given)


# --- Full size --------------------------------------------------------------------------------------------------


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
