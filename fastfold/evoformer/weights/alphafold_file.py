"""Official parameter files (``params_model_*.npz``), read as untrusted data."""

from __future__ import annotations

import zipfile
from math import prod
from pathlib import Path

import numpy as np

from fastfold.errors import WeightsError
from fastfold.evoformer.weights.mapping import WeightSource
from fastfold.evoformer.weights.names import PREFIX
from fastfold.evoformer.weights.untrusted import DAMAGED, NO_PICKLES, READABLE

_MAX_DIMENSIONS = 8


class NpzParameters(WeightSource):
    """Official parameter file; the constructor reads only the headers of the arrays.

    The archive is from :func:`open_archive`, and stays open while parameters are read.

    Raises:
        WeightsError: A member is not an array of floating point numbers under an official name, or an array's header
            contradicts its size.
    """

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self.origin = str(path)
        self._archive = archive
        self._members: dict[str, zipfile.ZipInfo] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        types: set[str] = set()
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise WeightsError(f"{path}: expected arrays (.npy), found {member.filename}: {READABLE}")
            if not name.startswith(PREFIX):
                raise WeightsError(
                    f"{path}: expected array names that start with {PREFIX}, found {name}; "
                    "pass a params_model_*.npz file of AlphaFold 2"
                )
            key = name.removeprefix(PREFIX)
            shapes[key], array_type = self._header(name, member)
            self._members[key] = member
            types.add(array_type)
        super().__init__(self.origin, shapes, ", ".join(sorted(types)))

    def label(self, key: str) -> str:
        """Return the parameter's name in the file."""
        return PREFIX + key

    def read(self, key: str) -> np.ndarray:
        """Read a parameter as a float32 array."""
        try:
            with self._archive.open(self._members[key]) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
        except Exception:  # zlib, zipfile and numpy raise different errors for damaged data
            raise WeightsError(
                f"{self.origin}: the data of {self.label(key)} are damaged; download the file again"
            ) from None
        if array.dtype.kind == "V":
            return (array.view("<u2").astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):  # Infinite values are reported with the parameter's name.
            return array.astype(np.float32, copy=False)

    def _header(self, name: str, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], str]:
        """Read shape and type of an array; they must account for every byte of its member."""
        try:
            with self._archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                if version == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                elif version == (2, 0):
                    shape, _, dtype = np.lib.format.read_array_header_2_0(file)
                else:
                    raise ValueError("no such version")
                start = file.tell()
        except Exception:  # the header is a Python literal, whose parser raises many kinds of errors
            raise WeightsError(f"{self.origin}: array {name} is damaged; download the file again") from None
        if dtype.hasobject:
            raise WeightsError(f"{self.origin}: array {name} holds Python objects; it {NO_PICKLES}")
        # NumPy lacks bfloat16: JAX saves such arrays as two raw bytes.
        is_bfloat16 = dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and not dtype.subdtype
        if dtype.kind != "f" and not is_bfloat16:
            raise WeightsError(f"{self.origin}: array {name}: expected floating point numbers, found {dtype}")
        if len(shape) > _MAX_DIMENSIONS or any(size <= 0 for size in shape):
            raise WeightsError(f"{self.origin}: array {name} has the invalid shape {list(shape)[:20]}")
        if start + prod(shape) * dtype.itemsize != member.file_size:
            raise WeightsError(
                f"{self.origin}: array {name} of shape {list(shape)} does not match its {member.file_size} bytes; "
                f"the file {DAMAGED}"
            )
        return tuple(int(size) for size in shape), "bfloat16" if is_bfloat16 else dtype.name
