"""Pages of all products keep the rules of axe-core in both themes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fastfold.inference.report import write_report
from fastfold.inference.report.molstar import load_molstar
from tests.helpers.axe import axe_program, set_scheme, violations
from tests.helpers.browser import Browser
from tests.helpers.results import (
    design_results,
    helix_prediction,
    many_targets,
    relaxed_results,
    save_coverage,
    screen_results,
)
from tests.inference.report.test_pages import READY, mutant_results, resize

SCHEMES = ("light", "dark")


def fold_results(folder: Path) -> None:
    """Write a complex with its coverage, a failed target, and scores that are poor."""
    complex_ = helix_prediction("helices", 30, 20)
    complex_.save(folder, rank=1, plots=False, settings={"precision": "fp32"})
    save_coverage(folder, complex_)
    helix_prediction("poor", 25, plddt=[30.0] * 25, ptm=0.2).save(folder, rank=1, plots=False)
    (folder / "failures.tsv").write_text("name\treason\nlost\tits sequence is too long\n")


def ensemble_results(folder: Path) -> None:
    """Write two states with their landscape."""
    from fastfold.products.ensemble.write import write_ensembles
    from tests.products.ensemble.conftest import save_two_states

    save_two_states(folder)
    write_ensembles(folder, plots=False)


KINDS: dict[str, Callable[[Path], object]] = {
    "fold": fold_results,
    "targets": lambda folder: many_targets(folder, 3, 2, 30, 20),
    "screen": lambda folder: screen_results(folder, baits=3, preys=10),
    "design": design_results,
    "mutants": mutant_results,
    "ensemble": ensemble_results,
}


def test_a_page_that_cannot_be_read_is_noticed(browser: Browser, tmp_path: Path) -> None:
    axe_program()
    page = tmp_path / "page.html"
    page.write_text(
        "<html><body><p style='color: #aaa; background: #fff'>pale</p><button></button></body></html>"
    )
    browser.open(page)
    browser.wait("document.querySelector('button') !== null")
    found = {rule for rule, *_ in violations(browser)}
    assert {"color-contrast", "button-name", "html-has-lang", "document-title"} <= found


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_viewer")
def test_pages_of_results(browser: Browser, tmp_path: Path, kind: str) -> None:
    axe_program()
    folder = tmp_path / kind
    folder.mkdir()
    KINDS[kind](folder)
    page = write_report(folder)
    for scheme in SCHEMES:
        set_scheme(browser, scheme)
        browser.open(page)
        browser.wait(READY)
        for width in (360, 1400):
            resize(browser, width)
            assert violations(browser) == [], (scheme, width)
    assert browser.messages == []


@pytest.mark.long
def test_page_of_relaxations(browser: Browser, tmp_path: Path) -> None:
    axe_program()
    relaxed_results(tmp_path)
    page = write_report(tmp_path)
    for scheme in SCHEMES:
        set_scheme(browser, scheme)
        browser.open(page)
        browser.wait("document.querySelector('tbody tr') !== null")
        assert violations(browser) == [], scheme


@pytest.mark.slow
def test_page_with_the_viewer(browser: Browser, tmp_path: Path) -> None:
    axe_program()
    if load_molstar() is None:
        pytest.skip("needs the viewer")
    fold_results(tmp_path)
    page = write_report(tmp_path)
    for scheme in SCHEMES:
        set_scheme(browser, scheme)
        browser.open(page)
        browser.wait(f"({READY}) && document.getElementById('view').dataset.shown")
        assert violations(browser) == [], scheme
    assert browser.messages == []
