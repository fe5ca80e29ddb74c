"""Shared helpers of the test suite."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def shared_dir() -> Path | None:
    """Folder with oracles and experimental data beside the checkout; None where there is none."""
    path = REPOSITORY.parent / "shared"
    return path if path.is_dir() else None


def require_shared(*parts: str) -> Path:
    """Path below the shared folder; skips the test with the reason where it does not exist."""
    base = shared_dir()
    if base is None or not base.joinpath(*parts).exists():
        pytest.skip(f"needs shared data {'/'.join(parts)}, which is not part of the project")
    return base.joinpath(*parts)
