"""Files that are no weights, or that would run code, are refused with a remedy."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.checkpoint import (
    load_model,
    weights_info,
)
from fastfold.evoformer.weights.untrusted import SIZE_LIMIT, check_size, file_format, read_torch, types_of
from tests.helpers.openfold_files import openfold_state
from tests.helpers.weights_files import BIAS, PARAMS, npy_header, zip_of

# --- Files that are no weights ----------------------------------------------------------------------------------


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(PARAMS, "params_model_1.npz")


def gzip(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(PARAMS, "params_model_1.npz")


NO_WEIGHTS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "missing": ("a.npz", lambda path: None, r"no such file; check the path"),
    "a folder": ("a.npz", lambda path: path.mkdir(), r"is a folder; pass a file in it.*zero_to_fp32"),
    "empty": ("a.npz", lambda path: path.write_bytes(b""), r"is empty; download it again"),
    "a pipe": ("a.npz", lambda path: os.mkfifo(path), r"is a device or pipe"),
    "text": (
        "a.npz",
        lambda path: path.write_text("hello\nworld\n" * 99),
        r"is a text file, perhaps of a refused download",
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
        r"unknown format.*FastFold reads",
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
        with pytest.raises(WeightsError, match=r"truncated or damaged; download it again") as caught:
            read(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_any_flipped_header_byte_is_survived(tmp_path: Path, own: Path, kind: str) -> None:
    """Whatever a transfer does to a file: a network or a WeightsError, and nothing else."""
    data = PARAMS.read_bytes() if kind == "npz" else own.read_bytes()
    path = tmp_path / f"a.{kind}"
    random = np.random.default_rng(0)
    interesting = [*range(0, 600, 47), *random.integers(0, len(data), 10)]
    interesting += [*range(len(data) - 3000, len(data), 601)] if kind == "npz" else []
    for i in interesting:
        damaged = bytearray(data)
        damaged[i] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        try:
            weights_info(path)
        except WeightsError as error:
            assert str(path) in str(error)  # noqa: PT017


# --- PyTorch files that mean harm -------------------------------------------------------------------------------


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
        WeightsError, match=r"a\.pt: .*found a Python object \(\S*mkdir\).*never reads"
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
        ({"epoch": 3}, r"entry 'epoch': expected a tensor, found int; save only the parameters"),
        ({7: torch.zeros(2)}, r"entry '7': expected a tensor"),
        (
            {"evoformer.linear.bias": torch.zeros(40, dtype=torch.int64)},
            r"linear\.bias: expected floating .*, found torch\.int64",
        ),
        ({"evoformer.linear.bias": torch.zeros(40, dtype=torch.complex64)}, r"floating point numbers"),
        (
            {"evoformer.linear.bias": torch.zeros(40).to_sparse()},
            r"linear\.bias is sparse, quantized or without",
        ),
        ({"evoformer.linear.bias": torch.zeros(40, device="meta")}, r"without data; save plain CPU tensors"),
        (
            {"evoformer.linear.bias": torch.zeros(1).expand(10**6)},
            r"linear\.bias has less data than its shape \[1000000\]",
        ),
        (
            {"evoformer.linear.bias": torch.empty(0)},
            r"linear\.bias: expected shape \[40\], found \[0\]",
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
        WeightsError, match=r"expected OpenFold's parameter names, found trunk\.layer\.weight"
    ):
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


def test_a_format_is_known_by_its_content_whatever_the_name(tmp_path: Path, own: Path) -> None:
    path = tmp_path / "weights"
    for write, kind in (
        (lambda: path.write_bytes(PARAMS.read_bytes()), "npz"),
        (lambda: torch.save({"a": torch.ones(2)}, path), "torch"),
        (lambda: torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False), "torch"),
        (lambda: path.write_bytes(own.read_bytes()), "safetensors"),
    ):
        write()
        assert file_format(path) == kind


def test_tensors_without_a_known_network_are_all_read(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "a.pt")
    found, place = read_torch(tmp_path / "a.pt")
    assert list(found) == ["w"]
    assert torch.equal(found["w"], torch.arange(3.0))
    assert place == ""


def test_sizes_are_compared_with_the_limit_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(10))
    check_size(path, 1000)
    with pytest.raises(WeightsError, match="more than 100 times its own size"):
        check_size(path, 1001)
    with pytest.raises(WeightsError, match=r"expected at most 8 GiB of parameters, found 8\.0 GiB"):
        check_size(path, SIZE_LIMIT + 1)


def test_types_are_listed_once_and_in_order() -> None:
    assert types_of([torch.float32, torch.bfloat16, torch.float32]) == "bfloat16, float32"
