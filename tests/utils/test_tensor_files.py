"""Files of tensors have the same bytes for the same contents, and safetensors reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, save

from fastfold.utils import tensor_files
from fastfold.utils.tensor_files import DTYPES, sort_metadata, tensor_bytes

ABOUT = {"zeta": 'ü\x7f\x01\t"\\/é\u2028', "alpha": "1", "mean": json.dumps({"a": [1, 2]})}


def samples() -> dict[str, torch.Tensor]:
    """Tensors of all types, a scalar, an empty one, and a transposed one that shares its memory."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 5, generator=generator)
    tensors = {name: (whole * 3).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0),
        "turned": whole.T,
        "part": whole[1:],
    }


@pytest.mark.parametrize("block", [1, 24, 1 << 26])
def test_safetensors_reads_them(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_BLOCK", block)
    (tmp_path / "a.safetensors").write_bytes(tensor_bytes(samples(), ABOUT))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == ABOUT
        assert set(file.keys()) == set(samples())
        for name, tensor in samples().items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read, tensor), name


def test_equal_contents_give_equal_bytes() -> None:
    tensors, about = samples(), ABOUT
    turned = dict(reversed(tensors.items())), dict(reversed(about.items()))
    assert tensor_bytes(*turned) == tensor_bytes(tensors, about)
    assert tensor_bytes(tensors, about | {"alpha": "2"}) != tensor_bytes(tensors, about)


def test_metadata_of_the_library_are_sorted() -> None:
    tensors = {name: tensor.contiguous().clone() for name, tensor in samples().items()}
    files = {b"".join(sort_metadata(save(tensors, dict(ABOUT)))) for _ in range(20)}
    assert len(files) == 1
    (data,) = files
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header["__metadata__"].items()) == sorted(ABOUT.items())
    read = load(data)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_file_without_metadata_stays_readable() -> None:
    assert torch.equal(load(b"".join(sort_metadata(save({"a": torch.ones(3)}))))["a"], torch.ones(3))
