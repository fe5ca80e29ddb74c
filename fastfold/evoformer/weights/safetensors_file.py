"""FastFold's weights files: safetensors with the network's configuration in the header.

Header entries: ``fastfold_format`` (version of this layout), ``config`` (the tree as JSON), ``preset`` (official name,
for official configurations), and further notes of the writer. The tensors are the network's state dict.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ml_collections import ConfigDict
from torch import Tensor

from fastfold.errors import WeightsError
from fastfold.evoformer.config import PRESETS
from fastfold.evoformer.weights.mapping import WeightSource
from fastfold.evoformer.weights.state_dict_file import is_own
from fastfold.evoformer.weights.untrusted import DAMAGED, READABLE, check_size, types_of
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.tensor_files import write_tensors

FORMAT_VERSION = "1"

# Well above the full network's header, which takes under 1 MB.
_LARGEST_HEADER = 16 << 20
_LARGEST_NUMBER = 2**20
_DEPTHS = (
    "evoformer_num_block",
    "extra_msa_stack_num_block",
    "num_block",
    "num_residual_block",
    "num_layer_in_transition",
)
_OWN_NOTES = ("format", "fastfold_format", "config", "preset")  # header entries that the program reads
_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _TensorEntry:
    """Element type, shape and first byte (from the start of the file) of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class OwnFile(WeightSource):
    """Open weights file of FastFold, under our names; it must stay open while parameters are read.

    The constructor reads only the header. ``config`` is None for a state dict that another program wrote under our
    names.

    Raises:
        WeightsError: The file is damaged, not FastFold's or of a later version, or its configuration is invalid.
    """

    def __init__(self, file: BufferedReader, path: Path) -> None:
        self._file = file
        metadata, self._entries = _read_header(file, path)
        shapes = {name: entry.shape for name, entry in self._entries.items()}
        super().__init__(str(path), shapes, types_of(entry.dtype for entry in self._entries.values()))
        check_size(path, sum(4 * prod(shape) for shape in self.shapes.values()))
        self.config = self._stored_config(metadata)
        preset = metadata.get("preset")
        self.preset = preset if preset in PRESETS else None
        self.notes = {name: text for name, text in metadata.items() if name not in _OWN_NOTES}

    def read(self, key: str) -> np.ndarray:
        """Read a parameter as a float32 array."""
        # Not mapped, because a write to a mapped file by another program changes the network or kills this process.
        entry = self._entries[key]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        self._file.seek(entry.start)
        if self._file.readinto(data.data) != data.nbytes:
            raise WeightsError(f"{self.origin}: {DAMAGED}")
        return tensor.float().numpy()

    def _stored_config(self, metadata: Mapping[str, str]) -> ConfigDict | None:
        """Return the configuration of the header, or None for a state dict under our names that lacks it."""
        version = metadata.get("fastfold_format")
        if version is None and is_own(self.shapes):
            return None
        if version is None:
            raise WeightsError(
                f"{self.origin}: expected a FastFold safetensors file, found one without a configuration in its "
                f"header. {READABLE}; create one with fastfold weights convert"
            )
        if version != FORMAT_VERSION:
            raise WeightsError(
                f"{self.origin}: expected format version {FORMAT_VERSION}, found {version[:20]}; update FastFold"
            )
        return self._parse(metadata.get("config", ""))

    def _parse(self, text: str) -> ConfigDict:
        try:
            tree = parse_json(text, self.origin)
            if not isinstance(tree, dict):
                raise ValueError("not a tree")
            self._check_numbers(tree)
            return ConfigDict(tree)
        except Exception:  # parser and tree raise many kinds of errors for an untrusted header
            raise WeightsError(
                f"{self.origin}: the configuration in its header is invalid; the file {DAMAGED}"
            ) from None

    def _check_numbers(self, tree: Mapping[str, Any]) -> None:
        """Refuse sizes of networks that are much larger than the file."""
        for name, value in tree.items():
            if isinstance(value, Mapping):
                self._check_numbers(value)
                continue
            most = len(self.shapes) if name in _DEPTHS else _LARGEST_NUMBER
            if isinstance(value, int) and abs(value) > most:
                raise ValueError(f"{name} is {value}")


def _read_header(file: BufferedReader, path: Path) -> tuple[dict[str, str], dict[str, _TensorEntry]]:
    """Read metadata and entries; by the format, tensors must fill the file without gaps or overlaps."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > min(_LARGEST_HEADER, size - 8):
        raise WeightsError(f"{path}: the header has an invalid length of {length} bytes; the file {DAMAGED}")
    try:
        header = parse_json(file.read(length), path)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata must be texts")
        entries: dict[str, _TensorEntry] = {}
        end = 8 + length
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, stop = (8 + length + offset for offset in about["data_offsets"])
            if about["dtype"] not in _TYPES:
                raise WeightsError(
                    f"{path}: parameter {name}: expected floating point numbers, found {about['dtype']}"
                )
            entries[name] = entry = _TensorEntry(_TYPES[about["dtype"]], tuple(about["shape"]), start)
            if not all(isinstance(axis, int) and axis > 0 for axis in entry.shape):
                raise ValueError("invalid shape")
            if start != end or stop - start != prod(entry.shape) * entry.dtype.itemsize:
                raise ValueError(f"{name} has a wrong offset or size")
            end = stop
        if end != size:
            raise ValueError("wrong size of the file")
    except WeightsError:
        raise
    except Exception:  # an untrusted header may raise any error
        raise WeightsError(f"{path}: {DAMAGED}") from None
    return metadata, entries


def write_own(
    path: Path,
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    preset: str | None,
    metadata: Mapping[str, str],
) -> None:
    """Write a weights file of FastFold directly to ``path``, without a temporary file.

    Raises:
        OSError: The file cannot be written.
    """
    header = dict(metadata)
    header |= {"format": "pt", "fastfold_format": FORMAT_VERSION, "config": ConfigDict(config).to_json()}
    if preset is not None:
        header["preset"] = preset
    with path.open("wb") as file:
        write_tensors(file, state, header)
