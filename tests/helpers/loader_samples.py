"""Functions that make the samples of a loader's tests; light, because each worker imports this module."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from fastfold.data.loading.loader import draw_rng
from fastfold.errors import InputError


def numbered(number: int, entry: str) -> dict[str, np.ndarray]:
    """A sample that depends on its draw alone."""
    return {
        "number": np.array(number),
        "noise": draw_rng(7, number).standard_normal(3),
        "large": np.ones(50_000),
    }


class Slow:
    """Takes long for one draw: until all others that may overtake it have been begun."""

    def __init__(self, folder: Path, slow: int, others: int) -> None:
        self.folder, self.slow, self.others = folder, slow, others

    def __call__(self, number: int, entry: str) -> dict[str, np.ndarray]:
        if number == self.slow:
            end = time.monotonic() + 20
            while len(list(self.folder.iterdir())) < self.others and time.monotonic() < end:
                time.sleep(0.005)
        else:
            (self.folder / str(number)).touch()
        return {"number": np.array(number)}


class Deadly:
    """Kills its own process at certain entries: always, or only the first time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, number: int, entry: str) -> dict[str, np.ndarray]:
        marker = self.folder / entry
        if entry == "always" or (entry == "once" and not marker.exists()):
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"number": np.array(number), "pid": np.array(os.getpid())}


def fails_for(number: int, entry: str) -> dict[str, np.ndarray]:
    if entry.startswith("bad"):
        raise InputError("is truncated; download it again", path=f"{entry}.cif")
    if entry.startswith("odd"):
        raise KeyError(entry)
    return {"number": np.array(number)}


def fails_at_first(number: int, entry: str) -> dict[str, np.ndarray]:
    if number == 1:
        raise OSError("the network drive is away for a moment")
    return {"number": np.array(number)}


def all_kinds(number: int, entry: str) -> dict[str, np.ndarray]:
    grid = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
    return {
        "large": grid,
        "columns": grid[:, ::7],
        "fortran": np.asfortranarray(grid),
        "empty": grid[:0],
        "scalar": np.array(number),
        "text": np.array(["a", "bc"]),
        "mask": grid % 3 == 0,
    }


def slowly(number: int, entry: str) -> dict[str, np.ndarray]:
    time.sleep(0.1)
    return {"number": np.array(number)}


def blocked_signals(number: int, entry: str) -> dict[str, np.ndarray]:
    return {"interrupt": np.array(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))}
