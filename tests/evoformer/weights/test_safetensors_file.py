"""Safetensors that are not ours, or damaged, are refused, and what is wrong is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.checkpoint import (
    load_model,
)
from fastfold.evoformer.weights.mapping import WeightSource, check_parameters, own_mappings, read_parameters
from fastfold.evoformer.weights.safetensors_file import OwnFile, write_own
from tests.helpers.weights_files import OURS, write_safetensors


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_safetensors_of_other_programs_are_explained(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors", {"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"expected a FastFold .*without a configuration in its header.*convert"
    ):
        load_model(tmp_path / "a.safetensors")


def test_files_of_a_later_fastfold_are_explained(own: Path, tmp_path: Path) -> None:
    header, data = header_of(own)
    header["__metadata__"]["fastfold_format"] = "2"
    write_safetensors(tmp_path / "a.safetensors", json.dumps(header).encode(), data)
    with pytest.raises(WeightsError, match=r"expected format version 1, found 2; update"):
        load_model(tmp_path / "a.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**40, 17 << 20, 5000])
def test_a_header_larger_than_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    write_safetensors(tmp_path / "a.safetensors", b'{"a":1}', b"", length)
    with pytest.raises(WeightsError, match=rf"the header has an invalid length of {length} bytes"):
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
        WeightsError, match=rf"parameter {re.escape(OURS)}: expected floating .*, found {dtype}"
    ):
        load_model(tmp_path / "a.safetensors")


def test_what_is_written_is_read_back_as_float32(tmp_path: Path) -> None:
    """Slices and transposed tensors too, and with them the configuration and every note."""
    path, base = tmp_path / "a.safetensors", torch.arange(24.0).view(4, 6)
    state = {"part": base[1:3, ::2], "turned": base.T, "half": base[0].bfloat16()}
    state |= {"rows": base[:2], "same rows": base[:2]}
    write_own(path, state, {"depth": {"num_block": 2}}, preset="model_1", metadata={"trained_on": "nothing"})
    with path.open("rb") as opened:
        file = OwnFile(opened, path)
        assert file.config.to_dict() == {"depth": {"num_block": 2}}
        assert (file.preset, file.notes) == ("model_1", {"trained_on": "nothing"})
        assert file.dtype == "bfloat16, float32"
        assert file.shapes == {name: tuple(value.shape) for name, value in state.items()}
        found = {name: torch.from_numpy(file.read(name)) for name in file.shapes}
    assert all(torch.equal(found[name], value.float()) for name, value in state.items())
    assert all(value.dtype == torch.float32 for value in found.values())


def test_a_preset_of_no_official_network_is_not_believed(tmp_path: Path) -> None:
    write_own(tmp_path / "a", {"w": torch.ones(1)}, {}, preset="model_9", metadata={})
    with (tmp_path / "a").open("rb") as file:
        assert OwnFile(file, tmp_path / "a").preset is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    state = {"fine": torch.ones(1), "bad": torch.tensor([value])}
    write_own(tmp_path / "a", state, {}, preset=None, metadata={})
    model = torch.nn.ParameterDict(state)
    with (tmp_path / "a").open("rb") as file, pytest.raises(WeightsError, match="bad"):
        read_parameters(model, own_mappings(model), OwnFile(file, tmp_path / "a"))


def test_all_differences_from_a_network_are_named() -> None:
    model = torch.nn.Linear(3, 2)
    check_parameters(own_mappings(model), WeightSource("here", {"weight": (2, 3), "bias": (2,)}))
    with pytest.raises(WeightsError) as caught:
        check_parameters(own_mappings(model), WeightSource("here", {"weight": (3, 2), "more": (1,)}))
    for problem in (
        "parameter bias is missing",
        "parameter more is not in this network",
        "parameter weight: expected shape [2, 3], found [3, 2]",
    ):
        assert problem in str(caught.value)
