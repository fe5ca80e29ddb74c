"""Pages without the viewer, whose files are large, and a browser to open pages in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.browser import Browser


@pytest.fixture
def no_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)


@pytest.fixture(scope="package")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests, because its start takes longer than a page."""
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def browser(opened: Browser) -> Browser:
    opened.reset()
    return opened
