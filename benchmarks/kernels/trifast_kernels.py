"""Kernels of trifast, compiled without its host code, which needs a GPU when it is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.kernels.launches import Launch

TRIFAST = "trifast"
VERSION = "0.1.13"
HEADS, CHANNELS = 4, 32

_MIN_SCORES, _MAX_WARPS = 1024, 4
"""Limits of blocks: smaller ones, and more warps, have more instructions per score."""


def _modules(folder: Path) -> tuple[Any, Any]:
    """Import its kernels and the configurations of its tuner, without the tuner itself."""
    found = (folder / f"trifast-{VERSION}.dist-info").is_dir()
    if not found:
        raise FileNotFoundError(
            f"expected trifast {VERSION} in {folder}: pip install --no-deps --target {folder} trifast=={VERSION}"
        )
    package = types.ModuleType(TRIFAST)
    package.__path__ = [str(folder / TRIFAST)]
    tuner = types.ModuleType("trifast.autotune")
    tuner.autotune = lambda **options: lambda kernel: kernel  # type: ignore[attr-defined]
    folders = types.ModuleType("platformdirs")
    folders.user_config_dir = lambda **options: str(folder)  # type: ignore[attr-defined]
    stand_ins = {TRIFAST: package, "trifast.autotune": tuner, "platformdirs": folders}
    with (
        mock.patch.dict(sys.modules, stand_ins),
        mock.patch.dict(
            os.environ, TRIFAST_FORCE_TUNE="1"
        ),  # includes the configurations of its longer search
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(0, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="none"),
        mock.patch.object(importlib.metadata, "version", return_value=VERSION),
    ):
        kernels = importlib.import_module("trifast.triton")
        return kernels, importlib.import_module("trifast.autotune_helpers")


def trifast_launches(folder: Path, dtype: torch.dtype, n: int) -> Iterator[Launch]:
    """Yield launches of its four kernels with configurations of large blocks, as its host code makes them.

    Args:
        folder: Folder that trifast is installed in.
        dtype: Dtype of all tensors except the mask.
        n: Residues; 4 heads of 32 channels.
    """
    kernels, configurations = _modules(folder)

    def new(*shape: int, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
        x = torch.empty(HEADS, n, n, *shape, dtype=dtype, device="meta")
        return x, *x.stride()

    x, lse, delta = new(CHANNELS), new(dtype=torch.float32), new()
    bias = torch.empty(HEADS, n, n, dtype=dtype, device="meta")
    b = (bias, *bias.stride())
    hidden = torch.empty(1, n, n, dtype=torch.bool, device="meta")
    mask = (hidden, *hidden.stride())
    operands = (*x, *x, *x, *b)
    arguments = {
        "_fwd": (*x, *lse, *operands, *mask),
        "_bwd_q": (*delta, *operands, *lse, *mask, *x, *x, *x),
        "_bwd_kv": (*delta, *operands, *lse, *mask, *x, *x, *x),
        "_bwd_b": (*delta, *operands, *lse, *mask, *x, *b),
    }
    numbers: dict[str, Any] = {
        "sm_scale": CHANNELS**-0.5,
        "neg_inf": torch.finfo(dtype).min,
        "N": n,
        "H": HEADS,
    }
    numbers |= {"DIM": CHANNELS, "CLOSEST_N": 1 << (n - 1).bit_length()}
    for name, given in arguments.items():
        known = []
        for config in getattr(configurations, f"{name}_configs"):
            how = config.kwargs | {"num_warps": config.num_warps, "num_stages": config.num_stages}
            small = how["BLOCK_J"] * how["BLOCK_K"] < _MIN_SCORES or config.num_warps > _MAX_WARPS
            if small or how in known:
                continue
            known.append(how)
            yield Launch(TRIFAST, getattr(kernels, name), given, numbers | how, 1)
