"""Files in the format of safetensors whose bytes depend on their contents alone.

The library writes the metadata of the header in random order.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import IO, Any, Final

import torch
from torch import Tensor

from fastfold.utils.foreign_text import parse_json

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by the format's names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK = 1 << 26
_METADATA = "__metadata__"


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write named tensors of any device and layout; equal contents give equal bytes.

    Tensors are copied in blocks of rows, so that none is whole in the host's memory a second time.

    Args:
        file: File open for writing, at its start.
        tensors: Tensors of types in :data:`DTYPES`.
        metadata: Texts of the header.
    """
    # Larger elements first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        rows = torch.atleast_1d(tensor.detach())
        for block in row_blocks(rows.shape, rows.element_size()):
            file.write(rows[block].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the contents of the file that :func:`write_tensors` writes."""
    file = io.BytesIO()
    write_tensors(file, tensors, metadata)
    return file.getvalue()


def row_blocks(shape: torch.Size, element_size: int) -> Iterator[slice]:
    """Yield slices of the first axis, of at most 64 MiB or one row, where elements have a size in bytes."""
    each = max(1, shape[1:].numel() * element_size)
    step = max(1, _BLOCK // each)
    for start in range(0, shape[0], step):
        yield slice(start, min(shape[0], start + step))


def sort_metadata(data: bytes) -> tuple[bytes, memoryview]:
    """Sort the metadata of a file that the library wrote; return the file's begin with the header, and its rest."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = parse_json(data[8:end], "safetensors")
    header[_METADATA] = dict(sorted(header.get(_METADATA, {}).items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, memoryview(data)[end:]
