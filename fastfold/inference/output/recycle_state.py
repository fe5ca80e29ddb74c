"""State of a fold after a finished pass, saved to a file, from which an interrupted fold continues.

The file is written atomically, read only by the same fold (same inputs, settings, version and device), and removed when
the prediction is finished. Tensors are written and read in blocks, so the pair of a long target is never whole in the
host's memory.

Processes that fold together have one file each, with their shards. A new file replaces the old one when all processes
have written theirs. The fold continues after the last pass that all of them have.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fastfold.errors import WriteError
from fastfold.evoformer.execution import random_state, set_random_state
from fastfold.evoformer.model import Features
from fastfold.inference.output.prediction import Recycle
from fastfold.utils.atomic_files import replacing
from fastfold.utils.hashing import input_hash
from fastfold.utils.tensor_files import DTYPES, row_blocks, write_tensors

Gather = Callable[[Any], list[Any]]
"""Function that gathers one small object of every process in rank order; all processes call it."""

_RECYCLED = ("recycled_positions", "recycled_plddt")  #: Names of the tensors of :class:`Recycle`'s fields
_RANDOM = "random"  #: Name of the state of the random numbers


class RecycleState:
    """Saved state of one prediction, or of one process's shard; ``recycles`` are the structures of finished passes.

    ``key`` is a hash of everything that the results depend on; a file with another key is ignored until it is
    overwritten. The state is written if a pass takes ``after`` seconds by the first process's ``clock``. ``say`` is
    told when a fold continues, and when a state cannot be written. ``gather`` is of the processes that fold together,
    and ``random`` saves the state of the call's random numbers, which a fold with dropout needs.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        *,
        after: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        gather: Gather = lambda own: [own],
        random: bool = False,
    ) -> None:
        self._path, self._after, self._say, self._clock, self.gather = path, after, say, clock, gather
        self._next = path.with_name(f"{path.name}.next")
        self._given, self._random = key, random
        self._key = input_hash(key, torch.__version__)
        self._started = clock()
        self.recycles: list[Recycle] = []

    def of_rank(self) -> Callable[[int, Gather], RecycleState]:
        """Return a picklable function that makes the state of another process from its rank."""
        return partial(_of_rank, self._path, self._given, self._after, self._random)

    def load(self, device: torch.device) -> tuple[int, int, Features] | None:
        """Load the next pass, the last pass, and the recycled tensors; None if nothing is saved."""
        self._started = self._clock()
        kept = self._passes(self._path) | self._passes(self._next)
        everywhere = set.intersection(*(set(cycles) for cycles in self.gather(list(kept))))
        if not everywhere:
            return None
        cycle = max(everywhere)
        path, limit = kept[cycle]
        tensors = _read_all(path, device)
        if not all(self.gather(tensors is not None)) or tensors is None:
            return None
        if self._random:
            set_random_state(tensors.pop(_RANDOM).cpu(), device)
        if all(name in tensors for name in _RECYCLED):
            arrays = (tensors.pop(name).cpu().numpy() for name in _RECYCLED)
            self.recycles[:] = [Recycle(*pair) for pair in zip(*arrays, strict=True)]
        self._say(f"continuing after pass {cycle} of an interrupted fold")
        return cycle, limit, tensors

    def save(self, cycle: int, limit: int, previous: Features) -> None:
        """Save the state for the next pass (``cycle`` of ``limit``) after one that took long, or log a warning."""
        took, self._started = self._clock() - self._started, self._clock()
        if not self.gather(took >= self._after)[0]:
            return
        tensors = dict(previous)
        if self._random:
            tensors[_RANDOM] = random_state(previous["prev_pos"].device)
        if self.recycles:
            for name, arrays in zip(_RECYCLED, zip(*self.recycles, strict=True), strict=True):
                tensors[name] = torch.from_numpy(np.stack(arrays))
        about = {"key": self._key, "cycle": str(cycle), "limit": str(limit)}
        failed = None
        try:
            with replacing(self._next) as temporary, temporary.open("wb") as file:
                write_tensors(file, tensors, about)
        except WriteError as error:
            failed = str(error)
        errors = [error for error in self.gather(failed) if error is not None]
        with suppress(OSError):  # the new file is also found under its own name
            if not errors:
                os.replace(self._next, self._path)
            elif failed is None:
                self._next.unlink()
        if errors:
            self._say(f"warning: the state of the fold is not saved: {errors[0]}")
            self._after = float("inf")
        self._started = self._clock()  # the time of writing does not belong to the next pass

    def remove(self) -> None:
        """Remove the files of all processes after the prediction is finished."""
        others = self._path.parent.glob(f"{glob.escape(self._path.stem)}.rank_*")
        for path in (self._path, self._next, *others):
            path.unlink(missing_ok=True)

    def _passes(self, path: Path) -> dict[int, tuple[Path, int]]:
        """Return the file and the last pass by the pass to continue with; empty if it is damaged."""
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
            return {int(about["cycle"]): (path, int(about["limit"]))} if about.get("key") == self._key else {}
        except (OSError, SafetensorError, KeyError, ValueError):
            return {}


def _of_rank(path: Path, key: str, after: float, random: bool, rank: int, gather: Gather) -> RecycleState:
    own = path.with_name(f"{path.stem}.rank_{rank}{path.suffix}")
    return RecycleState(own, key, after=after, say=lambda line: None, gather=gather, random=random)


def _read_all(path: Path, device: torch.device) -> Features | None:
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                dtype = DTYPES[part.get_dtype()]
                tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device=device)
                for rows in row_blocks(tensors[name].shape, dtype.itemsize):
                    tensors[name][rows] = part[rows]
    except (OSError, SafetensorError):
        return None
    return tensors
