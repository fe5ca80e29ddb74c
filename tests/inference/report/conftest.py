"""Pages without the viewer, whose files are large."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
