"""Rules of accessibility by axe-core, which ``make axe`` fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.browser import Browser

AXE = Path(__file__).resolve().parents[2] / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
_RUN = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map(
  (one) => [one.id, ...one.nodes.slice(0, 5).map((node) => `${node.target} ${node.failureSummary}`)]))"""


def set_scheme(browser: Browser, scheme: str) -> None:
    """Set the colours that the system of the browser prefers, ``light`` or ``dark``."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


def axe_program() -> str:
    """Return the program of axe-core, or skip the test."""
    if not AXE.is_file():
        pytest.skip("needs axe-core; make axe fetches it")
    return AXE.read_text("utf-8")


def violations(browser: Browser) -> list[list[str]]:
    """Return the rules that the open page violates, with the first places of each; all its parts are unfolded."""
    browser.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    browser.evaluate(f"{axe_program()}; 0")
    found: list[list[str]] = browser.evaluate(_RUN)
    return found
