"""What the tests of weights files share: a recorded file, names of one of its parameters, and files made by hand."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastfold.evoformer.weights.names import PREFIX
from tests.helpers.networks import folder

Arrays = dict[str, np.ndarray]

PARAMS = folder("synthetic_monomer") / "params.npz"
BIAS = f"{PREFIX}evoformer/single_activations//bias"
OURS = "single_projection.bias"


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def zip_of(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    """Write an archive of these members."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npy_header(shape: Any, descr: Any = "<f4") -> bytes:
    """Header of an array file of this shape, which may be nonsense."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def write_safetensors(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Write a file in the layout of safetensors, whatever its header says."""
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)
