"""Page of curves in a real browser: integer steps, values under the pointer, and nothing in a name runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fastfold.training.report.curves import MAX_POINTS, Chart, curves_page
from tests.helpers.axe import axe_program, set_scheme, violations
from tests.helpers.browser import Browser

HOSTILE = '</script><img src=x onerror="window.attacked = 1">'


@pytest.mark.long
def test_curves_are_read_by_keys_and_hidden_by_hand(tmp_path: Path) -> None:
    steps = np.arange(1, 13)
    loss = Chart(
        "Loss", "loss", True, {"loss": (steps, 0.9 + 0.01 * steps), HOSTILE: (steps[:6], steps[:6] / 2.0)}
    )
    one = Chart("One", "x", True, {"one": (steps[-1:], steps[-1:]), "zeros": (steps, steps % 3.0)})
    long = Chart("Long", "x", False, {"long": (np.arange(9000), np.arange(9000.0))})
    page = tmp_path / "report.html"
    page.write_text(curves_page(f"Run {HOSTILE}", [loss, long, one], [3, 3]))
    with Browser(tmp_path) as browser:
        browser.open(page)
        browser.wait("document.querySelectorAll('svg path').length === 5")
        dots = "[...document.querySelectorAll('section')].map((one) => one.querySelectorAll('circle').length)"
        assert browser.evaluate(dots) == [18, 0, 1 + 8]
        browser.click("section:last-child label:last-child input")
        assert browser.evaluate(dots) == [18, 0, 1 + 12]
        assert browser.evaluate("document.querySelector('h1').textContent") == f"Run {HOSTILE}"
        ticks = "[...document.querySelector('svg').querySelectorAll('.step')].map((one) => one.textContent)"
        assert browser.evaluate(ticks) == ["2", "4", "6", "8", "10", "12"]
        browser.evaluate("document.querySelector('svg').focus()")
        for _ in range(2):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        said = "document.querySelector('output').textContent"
        assert browser.evaluate(said) == f"step 2: loss 0.92, {HOSTILE} 1"
        browser.click("section:first-child label:nth-child(2) input")
        assert browser.evaluate("document.querySelectorAll('svg path').length") == 4
        x, y = browser.place("section:first-child svg", 0.98, 0.5)
        browser.mouse("mouseMoved", x, y)
        assert browser.evaluate(said) == "step 12: loss 1.02"
        points = browser.evaluate(
            "document.querySelectorAll('svg path')[1].getAttribute('d').split('L').length"
        )
        assert points == MAX_POINTS
        browser.call(
            "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True
        )
        assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert browser.evaluate("window.attacked === undefined")
        assert browser.requests == [page.resolve().as_uri()]
        assert browser.messages == []


@pytest.mark.long
def test_the_page_keeps_the_rules_of_accessibility(browser: Browser, tmp_path: Path) -> None:
    axe_program()
    steps = np.arange(1, 13)
    curves = {f"loss {number}": (steps, 0.9 + number * steps) for number in range(12)}
    charts = [
        Chart("Losses", "loss", True, curves),
        Chart("Rate", "rate", False, {"rate": (steps, steps / 2.0)}),
    ]
    page = tmp_path / "report.html"
    page.write_text(curves_page("Run", charts, [3]))
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        browser.open(page)
        browser.wait("document.querySelectorAll('svg path').length === 13")
        assert violations(browser) == [], scheme
    assert browser.messages == []
