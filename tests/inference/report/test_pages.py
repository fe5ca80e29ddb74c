"""Pages of screens, mutants, ensembles and single targets: order, keys, address, widths and names of controls."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fastfold
from fastfold.inference.report import write_report
from tests.helpers.browser import Browser
from tests.helpers.results import design_results, helix_atoms, helix_prediction, many_targets, screen_results

READY = "document.body && document.body.dataset.ready"
WIDTHS = (360, 390, 768, 1280, 1920)
NAMED = (
    "button",
    "link",
    "textbox",
    "searchbox",
    "checkbox",
    "radio",
    "combobox",
    "slider",
    "tab",
    "image",
    "region",
)


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key)


def resize(browser: Browser, width: int) -> None:
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
    )


def name_is(browser: Browser, name: str) -> None:
    browser.wait(f"document.getElementById('name').textContent === {json.dumps(name)}")


def mutant_results(folder: Path) -> None:
    """Write a wild type, four mutants of two residues and a double mutant, with their table."""
    rows = {"M4A": -8.0, "M4G": 4.0, "K5A": -1.0, "K5M": 2.0, "M4A+K5A": -9.0}
    helix_prediction("T", 12).save(folder, rank=1, plots=False)
    lines = ["mutations\tdplddt\tdplddt_site\tdpae\tdpae_site\tstrain_site\tname"]
    for number, (mutation, change) in enumerate(rows.items()):
        name = f"T_{mutation.replace('+', '_')}"
        helix_prediction(name, 12, seed=number).save(folder, rank=1, plots=False)
        lines.append(f"{mutation}\t{change / 10}\t{change}\t{-change / 20}\t0.5\t0.25\t{name}")
    (folder / "mutations.tsv").write_text("\n".join(lines))


@pytest.mark.usefixtures("no_viewer")
def test_the_best_pair_of_a_screen_is_shown_and_keys_move_between_rows(
    browser: Browser, tmp_path: Path
) -> None:
    screen_results(tmp_path, baits=3, preys=10)
    page = write_report(tmp_path)
    resize(browser, 1280)
    browser.open(page)
    browser.wait(READY)
    assert text(browser, "#name") == "bait2_and_prey9"
    cells = (
        "[...document.querySelectorAll('#list tbody tr')].slice(0, 3).map((row) => row.cells[2].textContent)"
    )
    assert browser.evaluate(cells) == ["0.97", "0.93", "0.90"]
    heads = browser.evaluate("[...document.querySelectorAll('#list th')].map((one) => one.textContent)")
    assert heads == ["partner 1", "partner 2", "ipSAE ▾", "ipTM", "pDockQ2", "interface PAE (Å)", "contacts"]
    inside = (
        "[...document.querySelectorAll('#list th')].every((one) => one.getBoundingClientRect().right <= "
        "document.getElementById('list').getBoundingClientRect().right + 1)"
    )
    assert browser.evaluate(inside)
    assert browser.evaluate("document.querySelector('#list tbody tr').getBoundingClientRect().bottom < 900")
    browser.evaluate("document.querySelector('#list tbody tr').focus()")
    press(browser, "ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    name_is(browser, "bait2_and_prey8")
    assert browser.evaluate("location.hash") == "#bait2_and_prey8/model_1_multimer_v3_seed_0"
    browser.call("Page.navigate", url=page.resolve().as_uri() + "#bait1_and_prey0/model_1_multimer_v3_seed_0")
    name_is(browser, "bait1_and_prey0")
    browser.evaluate("location.hash = '#bait0_and_prey3'")
    name_is(browser, "bait0_and_prey3")
    browser.evaluate("location.hash = '#nothing'")
    browser.evaluate("document.getElementById('cells').focus()")
    press(browser, "ArrowRight", "ArrowRight", "ArrowDown")
    assert text(browser, "#cell") == f"bait1 with prey1: {11 / 30:.2f}"
    press(browser, "Enter")
    name_is(browser, "bait1_and_prey1")
    assert text(browser, "#subline").split(" partners")[0].split() == ["3", "\N{MULTIPLICATION SIGN}", "10"]
    assert text(browser, "#headline") == "0 of 30 pairs with a confident ipTM"
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_mutants_are_pointed_at_and_opened_in_their_heat_map(browser: Browser, tmp_path: Path) -> None:
    mutant_results(tmp_path)
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    assert text(browser, "#name") == "T"
    assert text(browser, "#headline") == "5 mutants and the wild type"
    assert text(browser, "#list tbody tr td:nth-child(2)") == "M4A+K5A"
    choices = browser.evaluate(
        "[...document.getElementById('scan-score').options].map((one) => one.textContent)"
    )
    assert choices[:2] == ["ΔpLDDT there", "ΔpLDDT"]
    assert {"ΔPAE (Å)", "ΔPAE there (Å)", "strain there"} <= set(choices)
    wide, tall = map(int, browser.evaluate("document.getElementById('scan-cells').dataset.cell").split())
    box = browser.box("#scan-cells")
    left, top = box["x"] + box["width"] - 4 - 2 * wide, box["y"] + box["height"] - 4 - 20 * tall
    browser.mouse("mouseMoved", left + wide / 2, top + 2.9 * tall)  # letters are in the order GPAV...
    assert text(browser, "#scan-note").startswith("M4A · ΔpLDDT there -8.0 · ΔpLDDT -0.8 · ΔPAE (Å) +0.40")
    browser.mouse("mouseMoved", left + wide / 2, top + 6.5 * tall)
    assert text(browser, "#scan-note") == "M4M: wild type"
    browser.mouse("mouseMoved", left + wide / 2, top + 1.5 * tall)
    assert text(browser, "#scan-note") == "M4P: not folded"
    column = (
        "(() => {{ const c = document.getElementById('scan-cells'), k = window.devicePixelRatio; return "
        "[...c.getContext('2d').getImageData(k * {}, 0, 1, c.height).data]; }})()"
    )
    pixels = np.reshape(browser.evaluate(column.format(left - box["x"] + wide / 4)), (-1, 4))
    scale = len(pixels) / box["height"]
    lost, gained = (pixels[int((top - box["y"] + row * tall) * scale)] for row in (2.3, 0.3))  # M4A, M4G
    assert lost[0] > lost[2] + 20
    assert gained[2] > gained[0] + 20
    picture = "document.getElementById('scan-cells').toDataURL()"
    before = browser.evaluate(picture)
    browser.evaluate(
        "const s = document.getElementById('scan-score'); s.value = 'dpae'; s.dispatchEvent(new Event('change'))"
    )
    assert browser.evaluate(picture) != before
    browser.evaluate("document.getElementById('scan-cells').focus()")
    press(browser, "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "Enter")
    name_is(browser, "K5A")
    assert "ΔpLDDT there-1.0" in text(browser, "#tiles")
    assert browser.evaluate("location.hash").startswith("#T_K5A/")
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_targets_stand_at_the_side_and_models_are_tabs(browser: Browser, tmp_path: Path) -> None:
    many_targets(tmp_path, 3, 2, 12)
    page = write_report(tmp_path)
    browser.open(page)
    browser.wait(READY)
    assert browser.evaluate("document.querySelectorAll('#side-list button').length") == 3
    assert text(browser, "#side-count") == "3 of 3"
    browser.click("#side-list li:nth-child(2) button")
    name_is(browser, "target_001")
    assert text(browser, "#side-list [aria-current=true] strong") == "target_001"
    browser.evaluate("document.querySelector('#tabs [aria-selected=true]').focus()")
    press(browser, "ArrowRight")
    browser.wait("location.hash === '#target_001/model_2_multimer_v3_seed_0'")
    selected = "document.querySelector('#tabs [aria-selected=true]').textContent"
    assert browser.evaluate(selected).startswith("Rank 2model_2_multimer_v3, seed 0")
    assert browser.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    browser.reset()
    browser.call("Page.navigate", url=page.resolve().as_uri() + "#target_001/model_2_multimer_v3_seed_0")
    browser.wait(READY)
    assert browser.evaluate(selected).startswith("Rank 2model_2_multimer_v3, seed 0")
    browser.evaluate(
        "const f = document.getElementById('side-find'); f.value = '002'; f.dispatchEvent(new Event('input'))"
    )
    assert text(browser, "#side-count") == "1 of 3"
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_many_models_are_in_a_list_next_to_the_tabs(browser: Browser, tmp_path: Path) -> None:
    """The list goes away with its target."""
    many_targets(tmp_path, 1, 11, 12)
    helix_prediction("other", 12).save(tmp_path, rank=1, plots=False)
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    name_is(browser, "other")
    assert browser.evaluate("document.getElementById('tabs').hidden")
    browser.click("#side-list li:nth-child(2) button")
    name_is(browser, "target_000")
    assert browser.evaluate("document.querySelectorAll('#tabs button').length") == 8
    assert browser.evaluate("document.querySelectorAll('.title select option').length") == 11
    browser.evaluate(
        "const s = document.querySelector('.title select'); s.value = '10'; s.dispatchEvent(new Event('change'))"
    )
    browser.wait("location.hash === '#target_000/model_11_multimer_v3_seed_0'")
    assert text(browser, "#tabs [aria-selected=true] strong") == "Rank 11"
    browser.click("#side-list li:nth-child(1) button")
    name_is(browser, "other")
    assert browser.evaluate("document.querySelector('.title select')") is None


@pytest.mark.usefixtures("no_viewer")
def test_figures_have_the_words_of_their_ranges(browser: Browser, tmp_path: Path) -> None:
    """A value at a limit belongs to the range above it."""
    fold = helix_prediction("T", 20, plddt=np.full(20, 70.0), ptm=0.5, iptm=None)
    paths = fold.save(tmp_path, rank=1, plots=False)
    scores = json.loads(paths["scores"].read_text())
    scores["geometry"] |= {"problems": [], "ramachandran_favoured": 0.98, "ramachandran_outliers": 1 / 18}
    paths["scores"].write_text(json.dumps(scores))
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    tiles = browser.evaluate(
        "[...document.querySelectorAll('.tile')].map((one) => [one.textContent, one.title])"
    )
    assert tiles[0][0].startswith("pLDDT70.0high")
    assert tiles[0][1].endswith("Limits: AlphaFold DB, Varadi et al. 2022.")
    assert tiles[1][0].startswith("pTM0.50fold may be right")
    assert tiles[2][0].startswith("Ramachandran favoured98 %at MolProbity's goal")
    assert "1 outlier" in tiles[2][0]
    assert text(browser, "#verdict strong") == "Fold may be right."
    assert browser.evaluate("document.getElementById('verdict').className") == "good"
    assert browser.evaluate("document.getElementById('verdict').title").startswith("By pTM (fold, from 0.5")
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_helices_and_strands_are_those_of_the_hydrogen_bonds(browser: Browser, tmp_path: Path) -> None:
    """An alpha helix has all its residues but the ends, and one without hydrogen bonds has none."""
    helix = helix_prediction("helix", 20)
    positions, mask = helix_atoms(helix.aatype)
    stretched = positions * np.array([1.0, 1.0, 1.6], np.float32)
    helix.save(tmp_path, rank=1, plots=False)
    replace(helix, name="stretched", atom_positions=stretched).save(tmp_path, rank=1, plots=False)
    assert mask.any()
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    letters = "[...document.querySelectorAll('#sequence span')].map((one) => one.className || '-').join('')"
    assert browser.evaluate(letters) == "-" + 18 * "H" + "-"
    browser.click("#side-list li:nth-child(2) button")
    name_is(browser, "stretched")
    assert browser.evaluate(letters) == 20 * "-"


@pytest.mark.long
@pytest.mark.usefixtures("no_viewer")
def test_strands_of_a_fold_are_those_of_the_experiment(browser: Browser, tmp_path: Path) -> None:
    """Protein G (1IGD): strands 6-13, 17-24, 47-51 and 56-60, and a helix at 28-41, by its PDB entry."""
    sequence = "MTPAVTTYKLVINGKTLKGETTTKAVDAETAEKAFKQYANDNGVDGVWTYDDATKTFTVTE"
    fastfold.predict(sequence, "mini", num_recycles=0).save(tmp_path, rank=1, plots=False)
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    letters = str(
        browser.evaluate(
            "[...document.querySelectorAll('#sequence span')].map((one) => one.className || '-').join('')"
        )
    )
    for first, last, letter in ((6, 13, "E"), (17, 24, "E"), (28, 41, "H"), (47, 51, "E"), (56, 60, "E")):
        own = letters[first - 1 : last]
        assert own.count(letter) > len(own) / 2, letters
        assert set(own) <= {letter, "-"}, letters
    assert letters[:4] == "----"


@pytest.mark.usefixtures("no_viewer")
def test_pages_fit_all_widths_and_their_controls_have_names(browser: Browser, tmp_path: Path) -> None:
    """One target, several, a screen, mutants and designs."""
    folders = [tmp_path / name for name in ("single", "targets", "screen", "mutants", "designs")]
    for folder in folders:
        folder.mkdir()
    settings = {"precision": "fp32"}
    helix_prediction("a_name_that_is_long_" * 4, 30, 20).save(
        folders[0], rank=1, plots=False, settings=settings
    )
    many_targets(folders[1], 3, 2, 30, 20)
    screen_results(folders[2], baits=3, preys=30)
    mutant_results(folders[3])
    design_results(folders[4])
    kinds = []
    for folder in folders:
        browser.open(write_report(folder))
        browser.wait(f"location.pathname.includes('/{folder.name}/') && {READY}")
        kinds.append(browser.evaluate("document.getElementById('main').dataset.kind"))
        browser.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        for width in WIDTHS:
            resize(browser, width)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, (folder.name, width)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = [one for one in tree if not one.get("ignored") and one.get("role", {}).get("value") in NAMED]
        assert len(roles) > 15
        nameless = [one["role"]["value"] for one in roles if not one.get("name", {}).get("value", "").strip()]
        assert nameless == [], folder.name
        ids = browser.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
        assert len(ids) == len(set(ids))
        levels = browser.evaluate(
            "[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))"
        )
        assert levels[0] == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert kinds == ["single", "targets", "list", "list", "list"]
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_a_button_changes_the_theme_of_text_and_pictures(browser: Browser, tmp_path: Path) -> None:
    helix_prediction("t", 12).save(tmp_path, rank=1, plots=False)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    ground = "getComputedStyle(document.body).backgroundColor"
    picture = "document.getElementById('plddt').toDataURL()"
    light, drawn = browser.evaluate(ground), browser.evaluate(picture)
    assert (light, text(browser, "#theme")) == ("rgb(244, 246, 248)", "dark theme")
    browser.click("#theme")
    assert (browser.evaluate(ground), text(browser, "#theme")) == ("rgb(16, 21, 26)", "light theme")
    browser.wait(f"{picture} !== {json.dumps(drawn)}")
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.click("#theme")
    assert browser.evaluate(ground) == light
    browser.wait(f"{picture} === {json.dumps(drawn)}")
    assert browser.messages == []


@pytest.mark.usefixtures("no_viewer")
def test_a_printed_page_is_light_and_complete(browser: Browser, tmp_path: Path) -> None:
    helix_prediction("t", 12, 10).save(tmp_path, rank=1, plots=False)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    picture = "document.getElementById('plddt').toDataURL()"
    drawn = browser.evaluate(picture)
    browser.click("#theme")
    browser.wait(f"{picture} !== {json.dumps(drawn)}")
    browser.call("Emulation.setEmulatedMedia", media="print")
    browser.wait(f"{picture} === {json.dumps(drawn)}")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.evaluate(style.format("body", "color")) == "rgb(23, 32, 42)"
    assert browser.evaluate(style.format(":root", "colorScheme")) == "light"
    assert browser.evaluate(style.format(".meter i", "printColorAdjust")) == "exact"
    assert browser.evaluate(style.format("#pairs .scroll", "overflowX")) == "visible"
    browser.call("Emulation.setEmulatedMedia", media="")
    assert browser.messages == []
