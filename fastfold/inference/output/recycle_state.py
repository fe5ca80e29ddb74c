"""What a fold has after a finished pass, kept in a file, so that a fold that was killed goes on and not again.

The file is whole or not there, it is read only by the fold that wrote it (the same inputs, settings, programs and
device), and it is removed when the prediction is made. Tensors are written and read in blocks: the pair of a long
target is never in the host's memory as a whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastfold.errors import WriteError
from fastfold.evoformer.model import Features
from fastfold.inference.output.prediction import Recycle
from fastfold.utils.atomic_files import replacing
from fastfold.utils.hashing import input_hash

_BLOCK = 1 << 26
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float64: "F64", torch.float16: "F16"}


class RecycleState:
    """The state of one prediction.

    Args:
        path: Its file.
        key: What the numbers depend on; a file with another key is left alone until it is overwritten.
        after: Seconds that a pass has to take for its state to be written.
        say: Told what goes on from where, and what cannot be written.
        clock: Seconds.

    Attributes:
        recycles: Structures of the passes that were made, which belong to the state.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        *,
        after: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._after, self._say, self._clock = path, after, say, clock
        self._key = input_hash(key, torch.__version__)
        self._started = clock()
        self.recycles: list[Recycle] = []

    def load(self, device: torch.device) -> tuple[int, int, Features] | None:
        """The pass to go on with, the last one to be made, and what the passes before left; None if nothing is kept.

        Args:
            device: Where the tensors are wanted.
        """
        self._started = self._clock()
        try:
            with safe_open(self._path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("key") != self._key:
                    return None
                found = {name: _read(file, name, device) for name in file.keys()}  # noqa: SIM118
                cycle, limit = int(about["cycle"]), int(about["limit"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None  # there is none, or a file that is damaged: the fold begins at its beginning
        structures = [found.pop("recycled_positions", None), found.pop("recycled_plddt", None)]
        if structures[0] is not None and structures[1] is not None:
            arrays = (x.cpu().numpy() for x in structures if x is not None)
            self.recycles[:] = [Recycle(*pair) for pair in zip(*arrays, strict=True)]
        self._say(f"going on after pass {cycle} of a fold that was interrupted")
        return cycle, limit, found

    def save(self, cycle: int, limit: int, previous: Features) -> None:
        """Keep what a pass has left, if it took long enough; a file that cannot be written is no reason to stop.

        Args:
            cycle: Number of the next pass.
            limit: Number of the last one.
            previous: What the next pass starts from.
        """
        took, self._started = self._clock() - self._started, self._clock()
        if took < self._after:
            return
        tensors = dict(previous)
        if self.recycles:
            for name, arrays in (
                ("positions", [one.atom_positions for one in self.recycles]),
                ("plddt", [one.plddt for one in self.recycles]),
            ):
                tensors[f"recycled_{name}"] = torch.from_numpy(np.stack(arrays))
        about = {"key": self._key, "cycle": str(cycle), "limit": str(limit)}
        try:
            with replacing(self._path) as temporary, temporary.open("wb") as file:
                _write(file, tensors, about)
        except WriteError as error:
            self._say(f"warning: the state of the fold is not kept: {error}")
            self._after = float("inf")
        self._started = self._clock()  # writing is no part of the next pass

    def remove(self) -> None:
        """Forget the state: the prediction is made."""
        self._path.unlink(missing_ok=True)


def _write(file: IO[bytes], tensors: Features, about: dict[str, str]) -> None:
    """A safetensors file, written in blocks of rows."""
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.numel() * tensor.element_size()
        kind = _DTYPES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        for rows in _rows(tensor.shape, tensor.element_size()):
            block = tensor[rows].detach().cpu().contiguous()
            file.write(block.view(-1).view(torch.uint8).numpy().data)


def _read(file: Any, name: str, device: torch.device) -> Tensor:
    """A tensor of a safetensors file in memory of its own, read in blocks of rows."""
    part = file.get_slice(name)
    dtypes = {kind: dtype for dtype, kind in _DTYPES.items()}
    tensor = torch.empty(part.get_shape(), dtype=dtypes[part.get_dtype()], device=device)
    for rows in _rows(tensor.shape, tensor.element_size()):
        tensor[rows] = part[rows]
    return tensor


def _rows(shape: torch.Size, element_size: int) -> Iterator[slice]:
    """Blocks of the first axis."""
    each = max(1, shape[1:].numel() * element_size)
    step = max(1, _BLOCK // each)
    for start in range(0, shape[0], step):
        yield slice(start, min(shape[0], start + step))
