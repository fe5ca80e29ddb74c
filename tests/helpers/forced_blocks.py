"""Launch configurations for Triton's interpreter, in which a program costs the same whatever its size.

A GPU takes its own, because its memory limits them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType

import pytest

from fastfold.kernels.common.backend import interpreted
from fastfold.kernels.common.tuning import LaunchConfig, launch_config

WHOLE = 512
"""``BK`` with which rows enter a product at once, as they do on tensor cores."""
CHUNKS = 16
"""``BK`` with which they are read again in chunks, as in float32."""
USERS = 6
"""Modules that look launch configurations up: none is forgotten."""


def force_blocks(monkeypatch: pytest.MonkeyPatch, **blocks: int) -> None:
    """Let every kernel that normalises rows run with these blocks, where it has them."""
    from fastfold.kernels.common import normalized_rows

    _force(monkeypatch, [normalized_rows], blocks)


def force_all_blocks(monkeypatch: pytest.MonkeyPatch, **blocks: int) -> None:
    """Let every kernel run with these blocks, where it has them."""
    from fastfold import kernels

    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.rpartition(".")[2].startswith("triton_"):
            importlib.import_module(module.name)
    modules = [m for name, m in sys.modules.items() if name.startswith("fastfold.kernels.")]
    users = [m for m in modules if hasattr(m, "launch_config") and m.__name__ != launch_config.__module__]
    assert len(users) == USERS, [m.__name__ for m in users]
    _force(monkeypatch, users, blocks)


def _force(monkeypatch: pytest.MonkeyPatch, modules: Iterable[ModuleType], blocks: dict[str, int]) -> None:
    def forced(kernel: str, key: str, device: object) -> LaunchConfig:
        shipped = launch_config(kernel, key, device)  # type: ignore[arg-type]
        return LaunchConfig({name: blocks.get(name, size) for name, size in shipped.blocks.items()})

    for module in modules if interpreted() else ():
        monkeypatch.setattr(module, "launch_config", forced)
