"""Archives of arrays that are damaged or mean harm are refused before memory is taken."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ml_collections import ConfigDict
from safetensors.torch import save_file
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.alphafold_file import NpzParameters
from fastfold.evoformer.weights.checkpoint import (
    load_model,
    weights_info,
)
from fastfold.evoformer.weights.names import PREFIX
from tests.helpers.openfold_files import openfold_state
from tests.helpers.weights_files import BIAS, OURS, Arrays, npy_header, zip_of


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, allow_pickle=array.dtype.hasobject)
    return buffer.getvalue()


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
    with pytest.raises(WeightsError, match=r"expected at most 8 GiB of parameters, found 12\.0 GiB"):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is damaged"),
        (npy(np.zeros(40, np.float32))[:-4], "does not match its"),
        (npy(np.zeros(40, np.float32)) + bytes(4), "does not match its"),
        (npy(np.zeros(41, np.float32)), r"found \[41\]"),
    ],
)
def test_arrays_that_do_not_fill_their_members_are_refused(
    tmp_path: Path, arrays: Arrays, data: bytes, message: str
) -> None:
    zip_of(tmp_path / "a.npz", members_of(arrays) | {f"{BIAS}.npy": data})
    with pytest.raises(WeightsError, match=f"{re.escape(BIAS)}.*{message}"):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "shape",
    [(10**9,), (2**40, 2**40), (10**30,), (-1, -40), (0,), (0, 10**30), (1,) * 40, (40, 2), (20, 1)],
)
def test_shapes_that_contradict_the_data_are_refused_before_memory_is_taken(
    tmp_path: Path, arrays: Arrays, shape: tuple[int, ...]
) -> None:
    zip_of(tmp_path / "a.npz", members_of(arrays) | {f"{BIAS}.npy": npy_header(shape) + bytes(160)})
    message = f"{re.escape(BIAS)} .*(invalid shape|does not match)"
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
    with pytest.raises(
        WeightsError, match=rf"the data of {re.escape(key)} are damaged; download the file again"
    ):
        load_model(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("dtype", "shown"), [(np.int32, "int32"), (np.bool_, "bool"), ("<U3", "<U3"), ("V3", "V3")]
)
def test_arrays_of_other_types_are_refused(tmp_path: Path, arrays: Arrays, dtype: Any, shown: str) -> None:
    np.savez(tmp_path / "a.npz", **(arrays | {BIAS: np.zeros(40, dtype)}))
    with pytest.raises(
        WeightsError, match=rf"{re.escape(BIAS)}: expected floating point .*{re.escape(shown)}"
    ):
        load_model(tmp_path / "a.npz")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    zip_of(tmp_path / "a.npz", {"word/document.xml": b"<a/>"})
    with pytest.raises(WeightsError, match=r"expected arrays \(\.npy\), found word/document\.xml"):
        load_model(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", features=np.zeros(3))
    with pytest.raises(WeightsError, match=r"start with alphafold/.*, found features; pass a params_model"):
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


def test_a_parameter_is_read_under_its_key_as_float32(tmp_path: Path) -> None:
    """Halves of JAX, which NumPy knows as two bytes without a meaning, are the upper halves of float32."""
    whole = np.array([[1.5, -2.0, 3.0e38]], np.float32)
    halves = (whole.view(np.uint32) >> 16).astype("<u2").view("V2")
    names = {"a//double": whole.astype(np.float64), "a//half": halves, "a//whole": whole}
    np.savez(tmp_path / "a.npz", **{PREFIX + key: array for key, array in names.items()})
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        source = NpzParameters(archive, tmp_path / "a.npz")
        assert source.shapes == dict.fromkeys(names, (1, 3))
        assert source.dtype == "bfloat16, float32, float64"
        assert (source.label("a//whole"), source.show_shape("a//whole", (1, 3))) == (
            PREFIX + "a//whole",
            "[1, 3]",
        )
        for key, array in names.items():
            found = source.read(key)
            assert found.dtype == np.float32
            expected = (
                (np.array(array.view("<u2"), np.uint32) << 16).view(np.float32) if key == "a//half" else whole
            )
            np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(expected[0, :2], [1.5, -2.0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("readme.txt", r"expected arrays .*, found readme.txt"),
        ("other.npy", "expected array names .*, found other"),
    ],
)
def test_members_that_are_not_parameters_are_refused(tmp_path: Path, name: str, message: str) -> None:
    zip_of(tmp_path / "a.npz", {name: npy(np.zeros(3, np.float32))})
    with (
        zipfile.ZipFile(tmp_path / "a.npz") as archive,
        pytest.raises(WeightsError, match=rf"a\.npz: {message}"),
    ):
        NpzParameters(archive, tmp_path / "a.npz")
