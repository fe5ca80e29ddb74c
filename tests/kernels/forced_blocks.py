"""Launch configurations for Triton's interpreter, in which a program costs the same whatever its size."""

from __future__ import annotations

import pytest

from fastfold.kernels.tuning import LaunchConfig

WHOLE = 512
"""``BK`` with which rows enter a product at once, as they do on tensor cores."""
CHUNKS = 16
"""``BK`` with which they are read again in chunks, as in float32."""


def force_blocks(monkeypatch: pytest.MonkeyPatch, **blocks: int) -> None:
    """Let every kernel that normalises rows run with these blocks, where it has them."""
    from fastfold.kernels import normalised_rows
    from fastfold.kernels.tuning import launch_config

    def forced(kernel: str, key: str, device: object) -> LaunchConfig:
        shipped = launch_config(kernel, key, device)  # type: ignore[arg-type]
        return LaunchConfig({name: blocks.get(name, size) for name, size in shipped.blocks.items()})

    monkeypatch.setattr(normalised_rows, "launch_config", forced)
