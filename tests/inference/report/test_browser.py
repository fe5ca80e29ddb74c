"""The page in a real browser: rows are clicked, blocks are dragged, and nothing in a name runs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from fastfold.inference.report import write_report
from fastfold.inference.report.molstar import load_molstar
from fastfold.protein import residue_constants as rc
from fastfold.protein.metrics.tm_score import rmsd
from tests.helpers.browser import Browser
from tests.helpers.results import (
    design_results,
    helix_prediction,
    many_targets,
    save_coverage,
    screen_results,
)

HOSTILE = '</script><img src=x onerror="window.attacked = 1">\'"\u2028&lt;b>'
READY = "document.body && document.body.dataset.ready"


def results(folder: Path) -> Path:
    """A complex with everything, and a chain with a hostile name, model and settings."""
    folder.mkdir()
    complex_ = helix_prediction("helices", 30, 20)
    complex_.save(folder, rank=1, plots=False, settings={"precision": "fp32"})
    save_coverage(folder, complex_)
    other = helix_prediction(HOSTILE, 25, seed=1, model_name=f"model<b>{HOSTILE}")
    other.save(folder, rank=1, plots=False, settings={HOSTILE: HOSTILE})
    return folder


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def open_table(browser: Browser) -> None:
    """Unfold the table of all predictions."""
    browser.evaluate("document.getElementById('table').open = true")


def pae_place(browser: Browser, row: float, column: float) -> tuple[float, float]:
    """Where the shares of the rows and columns are on the canvas of the aligned error."""
    box = browser.box("#pae")
    size = box["width"] - 52 - 12
    return box["x"] + 52 + column * size, box["y"] + 20 + row * size


@pytest.mark.long
def test_names_are_text_and_nothing_is_loaded(browser: Browser, tmp_path: Path) -> None:
    """Without the viewer, which makes a test of the rest fast."""
    folder = results(tmp_path / "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        page = write_report(folder)
    browser.open(page)
    browser.wait(READY)
    assert text(browser, "#count") == "2 targets, 2 predictions"
    assert "pip install molstar-cli" in text(browser, "#view-note")
    assert text(browser, "#name") == "helices"
    assert "chains A (30), B (20)" in text(browser, "#summary")
    assert "0.650.55" in text(browser, "#pairs")
    assert "rows." in text(browser, "#coverage-note")
    links = browser.evaluate("[...document.querySelectorAll('#files a')].map((a) => a.getAttribute('href'))")
    assert sorted(links) == sorted(path.name for path in folder.glob("helices_*"))
    open_table(browser)
    browser.click("#list tbody tr:nth-child(2)")
    browser.wait("document.getElementById('name').textContent !== 'helices'")
    assert text(browser, "#name") == HOSTILE
    assert f"model<b>{HOSTILE}, seed 1" in text(browser, "#summary")
    assert HOSTILE in text(browser, "#settings")
    assert browser.evaluate("document.getElementById('coverage-panel').hidden")
    assert browser.evaluate("document.querySelectorAll('img, b, iframe').length") == 0
    assert browser.evaluate("window.attacked === undefined")
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.messages == []
    # Even markup that got in could not run: no script without its hash, no handler, no address.
    browser.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"x\" onerror=\"window.attacked = 2\">');"
        "const s = document.createElement('script'); s.textContent = 'window.attacked = 3'; document.body.append(s);"
    )
    time.sleep(0.3)
    assert browser.evaluate("window.attacked === undefined")
    assert all("Content Security Policy" in message for message in browser.messages)
    assert browser.messages


@pytest.mark.slow
def test_a_block_is_dragged_in_the_aligned_error_and_along_the_chains(
    browser: Browser, tmp_path: Path
) -> None:
    folder = results(tmp_path / "results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        browser.open(write_report(folder))
    browser.wait(READY)
    written = json.loads(next(folder.glob("helices_*_pae.json")).read_text())[0]["predicted_aligned_error"]
    pictures = [browser.evaluate("document.getElementById('pae').toDataURL()")]
    browser.mouse("mouseMoved", *pae_place(browser, 0.11, 0.71))
    error = (
        f"aligned on A {residue(folder, 0, 5)} 6, scored B {residue(folder, 1, 5)} 6: {written[5][35]:.0f} Å"
    )
    assert text(browser, "#readout") == error
    browser.drag(pae_place(browser, 0.31, 0.91), pae_place(browser, 0.11, 0.71))  # backwards too
    mean = np.array(written)[5:16, 35:46].mean()
    said = f"block: aligned on A 6 to 16, scored B 6 to 16, mean {mean:.1f} Å"
    assert said in text(browser, "#readout")
    assert text(browser, "#legend") == "aligned onscored"
    browser.wait(f"document.getElementById('pae').toDataURL() !== {json.dumps(pictures[0])}")
    browser.click("#clear")
    box = browser.box("#plddt")
    y, width = box["y"] + box["height"] / 2, box["width"] - 64
    browser.drag((box["x"] + 52 + 0.51 * width, y), (box["x"] + 52 + 0.71 * width, y))
    assert "block: aligned on A 26 to 30, B 1 to 6, scored A 26 to 30, B 1 to 6" in text(browser, "#readout")
    assert browser.messages == []


def residue(folder: Path, chain: int, at: int) -> str:
    """Name of a residue of the complex."""
    scores = json.loads(next(folder.glob("helices_*_scores.json")).read_text())
    return rc.restype_1to3[scores["sequences"][chain][at]]


def test_rows_are_sorted_and_found(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    many_targets(folder, 3, 2, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        browser.open(write_report(folder))
    browser.wait(READY)
    open_table(browser)
    rows = (
        "[...document.querySelectorAll('#list tbody tr')]"
        ".map((r) => r.cells[0].textContent + r.cells[3].textContent)"
    )
    assert browser.evaluate(rows) == [f"target_00{t}{r}" for t in range(3) for r in (1, 2)]
    browser.click("#list th:nth-child(4) button")
    assert browser.evaluate(rows) == [f"target_00{t}{r}" for r in (1, 2) for t in range(3)]
    browser.click("#list th:nth-child(1) button")
    browser.click("#list th:nth-child(1) button")
    assert browser.evaluate(rows)[0] == "target_0021"
    browser.click("#best")
    assert browser.evaluate(rows) == ["target_0021", "target_0011", "target_0001"]
    browser.evaluate(
        "const f = document.getElementById('find'); f.value = '001'; f.dispatchEvent(new Event('input'))"
    )
    assert browser.evaluate(rows) == ["target_0011"]
    assert text(browser, "#count") == "1 target, 1 prediction"


@pytest.mark.slow
def test_a_block_is_dragged_and_seen_in_the_structure_and_back(browser: Browser, tmp_path: Path) -> None:
    if load_molstar() is None:
        pytest.skip("needs the viewer, the package molstar-cli")
    browser.open(write_report(results(tmp_path / "results")))
    browser.wait(READY)
    open_table(browser)
    browser.click("#list tbody tr:nth-child(2)")
    browser.wait("document.getElementById('name').textContent !== 'helices'")
    browser.wait("document.getElementById('view').dataset.shown === '25'", 240)
    browser.click("#list tbody tr:nth-child(1)")
    browser.wait("document.getElementById('view').dataset.shown === '50'", 240)
    pictures = [picture(browser, tmp_path)]
    assert share(pictures[0], "#0053d6") > 0.001  # residues of very high pLDDT

    browser.drag(pae_place(browser, 0.11, 0.71), pae_place(browser, 0.31, 0.91))
    said = text(browser, "#readout")
    assert "block: aligned on A 6 to 16, scored B 6 to 16" in said
    browser.wait("document.getElementById('view').dataset.painted")
    pictures.append(picture(browser, tmp_path))
    for color in ("#e08214", "#762a83"):
        assert share(pictures[0], color) < 0.0002
        assert share(pictures[1], color) > 0.001
    browser.screenshot(tmp_path / "page.png")

    # The other way: a residue that is pointed at in the structure is marked in both charts.
    browser.click("#clear")
    assert "block" not in text(browser, "#readout")
    box = browser.box("#view")
    for down in np.linspace(0.3, 0.7, 25):
        browser.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + down * box["height"])
        time.sleep(0.15)
        if "pLDDT" in text(browser, "#readout"):
            break
    assert "pLDDT" in text(browser, "#readout")
    before = browser.evaluate("document.getElementById('pae').toDataURL()")
    browser.mouse("mouseMoved", 5, 5)
    browser.wait("!document.getElementById('readout').textContent.includes('pLDDT')")
    browser.wait(f"document.getElementById('pae').toDataURL() !== {json.dumps(before)}")

    browser.click("input[value=chain]")
    browser.wait("Number(document.getElementById('view').dataset.painted) >= 3")
    pictures.append(picture(browser, tmp_path))
    assert share(pictures[2], "#1b7837") > 0.001
    assert share(pictures[2], "#762a83") > 0.001
    assert not any(request.startswith(("http", "ws")) for request in browser.requests)
    assert browser.messages == []


def picture(browser: Browser, folder: Path) -> np.ndarray:
    """The 3D view, once it has been drawn."""
    time.sleep(1.5)
    return np.asarray(matplotlib.image.imread(browser.screenshot(folder / "view.png", "#view")))[..., :3]


def share(image: np.ndarray, color: str) -> float:
    """The share of the pixels that have a hue, in whatever light."""
    wanted = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)], float)
    length = np.linalg.norm(image, axis=-1)
    cosine = image @ (wanted / np.linalg.norm(wanted)) / np.maximum(length, 1e-6)
    return float(((cosine > 0.985) & (length > 0.25) & (length < 1.6)).mean())


@pytest.mark.slow
def test_two_hundred_targets_open_in_three_seconds(browser: Browser, tmp_path: Path) -> None:
    """A thousand predictions of 300 residues, in less than 25 MB without the viewer."""
    folder = tmp_path / "results"
    folder.mkdir()
    many_targets(folder, 200, 5, 180, 120)
    page = write_report(folder)
    viewer = load_molstar()
    browser.open(page)
    took = float(browser.wait(READY)) / 1000  # since the page was asked for, in the page's own clock
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        size = write_report(folder).stat().st_size
    print(
        f"{took:.2f} s, {size / 1e6:.1f} MB without the viewer ({viewer.version if viewer else 'not installed'})"
    )
    assert text(browser, "#count") == "200 targets, 1,000 predictions"
    assert took < 3.0
    assert size < 25e6


def test_ten_thousand_pairs_are_paged_filtered_and_shown_as_a_matrix(
    browser: Browser, tmp_path: Path
) -> None:
    """Of fewer pairs here: two pages of 12 baits with 10 preys."""
    folder = tmp_path / "results"
    screen_results(folder, baits=12, preys=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        browser.open(write_report(folder))
    browser.wait(READY)
    number = "document.querySelectorAll('#list tbody tr').length"
    assert (browser.evaluate(number), text(browser, "#page")) == (100, "1 to 100 of 120")
    browser.click("#next")
    assert (browser.evaluate(number), text(browser, "#page")) == (20, "101 to 120 of 120")
    assert browser.evaluate("document.getElementById('next').disabled")
    type_where = (
        "const w = document.getElementById('where'); w.value = {}; w.dispatchEvent(new Event('input'));"
    )
    browser.evaluate(type_where.format("'ipsae>=0.9 and rank=1'").join("{}"))
    shares = {f"bait{i}_and_prey{j}": (10 * i + j) / 120 for i in range(12) for j in range(10)}
    good = [name for name, share in shares.items() if round(share, 4) >= 0.9]
    assert text(browser, "#count") == f"{len(good)} targets, {len(good)} predictions"
    browser.evaluate(type_where.format("'ipsea>1'").join("{}"))
    assert text(browser, "#where-note") == "no score ipsea"
    browser.evaluate(type_where.format("''").join("{}"))
    browser.wait("document.getElementById('cells').style.width")
    wide, tall = map(int, browser.evaluate("document.getElementById('cells').dataset.cell").split())
    box = browser.box("#cells")
    # The last row and column of cells, from the lower right corner.
    x, y = box["x"] + box["width"] - 4 - wide / 2, box["y"] + box["height"] - 4 - tall / 2
    browser.mouse("mouseMoved", x, y)
    assert text(browser, "#cell") == f"bait11 with prey9: {119 / 120:.2f}"
    browser.mouse("mousePressed", x, y, down=True)
    browser.mouse("mouseReleased", x, y)
    browser.wait("document.getElementById('name').textContent === 'bait11_and_prey9'")
    assert browser.messages == []


def test_scores_are_explained_and_everything_is_shown(browser: Browser, tmp_path: Path) -> None:
    """Explanations, failures, sequence, templates, reference, archive, scan of mutants, scores of a given structure.

    Keys in the aligned error; dark and narrow.
    """
    folder = tmp_path / "results"
    used = {"chain": "A", "used": [{"name": "1abc_A", "aligned_residues": 28}]}
    given = {"composite": 0.4321, "tm_score": 0.9}
    near = {"residues": 28, "within": 27, "rmsd": 0.812, "largest_deviation": 2.35, "threshold": 2.0}
    forced = ({"chain": "A", "name": "1abc_A"} | near,)
    prediction = replace(
        helix_prediction("helices", 30, 20), templates=(used,), forced_templates=forced, given_structure=given
    )
    paths = prediction.save(folder, rank=1, plots=False)
    stem = paths["scores"].name.removesuffix("_scores.json")
    scores = {"tm_score": 0.8123, "lddt_ca": 0.7, "gdt_ts": 66.5, "dockq": 0.61, "chain_mapping": {"B": "A"}}
    (folder / "helices_reference.json").write_text(json.dumps({"reference": "1abc.cif", stem: scores}))
    (folder / "helices.result.zip").write_bytes(b"")
    (folder / "failures.tsv").write_text("target\treason\nbad\t<b>too long</b>\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        browser.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        browser.open(write_report(folder))
    browser.wait(READY)
    assert "Above 0.23 the interface is probably right" in text(browser, "#explanations")
    assert text(browser, "#failures") == "1 failed targetbad: <b>too long</b>"
    assert browser.evaluate("document.querySelectorAll('#sequence span').length") == 50
    assert text(browser, "#templates") == (
        "Templateschaintemplatealigned residuesA1abc_A28"
        "chainforced templatekept toRMSD (Å)largest deviation (Å)A1abc_A27 of 28 residues within 2.0 Å0.812.35"
    )
    assert "1abc.cif0.8120.70066.5000.610B:A" in text(browser, "#reference")
    assert "composite0.432" in text(browser, "#tiles")
    assert "TM to given0.900" in text(browser, "#tiles")
    links = browser.evaluate("[...document.querySelectorAll('#files a')].map((a) => a.download)")
    assert "helices.result.zip" in links
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 26)"
    browser.evaluate("document.getElementById('pae').focus()")
    for key, number in (("ArrowRight", 3), ("ArrowDown", 2)):
        for _ in range(number):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    written = json.loads(paths["pae"].read_text())[0]["predicted_aligned_error"]
    assert text(browser, "#readout") == (
        f"aligned on A {residue(folder, 0, 2)} 3, scored A {residue(folder, 0, 3)} 4: {written[2][3]:.0f} Å"
    )
    browser.evaluate(
        "document.querySelectorAll('#sequence span')[31]"
        ".dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    )
    assert text(browser, "#readout").startswith(
        f"B {residue(folder, 1, 1)} 2: pLDDT {prediction.plddt[31]:.1f}"
    )
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=2, mobile=True
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.messages == []


@pytest.mark.slow
def test_models_of_a_target_are_superposed_on_the_first(browser: Browser, tmp_path: Path) -> None:
    """Their distances are those of the same superposition in Python; a target with one model has no such control."""
    folder, rng = tmp_path / "results", np.random.default_rng(0)
    first = helix_prediction("helices", 30, 20)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    rotation *= np.linalg.det(rotation)
    bent = first.atom_positions + 4.0 * np.sin(first.residue_index / 6.0)[:, None, None] * [1.0, 0.0, 0.0]
    positions = [first.atom_positions, first.atom_positions @ rotation.T + 30.0, bent @ rotation]
    for rank, xyz in enumerate(positions, 1):
        replace(first, atom_positions=xyz, seed=rank).save(folder, rank=rank, plots=False)
    helix_prediction("single", 12).save(folder, rank=1, plots=False)
    ca = [torch.from_numpy(np.float64(xyz[:, 1])) for xyz in positions]
    apart = float(rmsd(ca[2], ca[0], torch.ones(50)))
    assert apart > 1
    browser.open(write_report(folder))
    browser.wait(f"({READY}) && document.getElementById('view').dataset.shown === '50'")
    assert text(browser, "#models").strip() == "3 models together"
    browser.click("#together")
    browser.wait("document.getElementById('view').dataset.shown === '3 together'")
    assert text(browser, "#legend") == f"rank 1rank 2 (0.0 Å)rank 3 ({apart:.1f} Å)"
    browser.click("#together")
    browser.wait("document.getElementById('view').dataset.shown === '50'")
    assert "rank" not in text(browser, "#legend")
    open_table(browser)
    browser.click("#list tbody tr:nth-child(4)")
    browser.wait("document.getElementById('name').textContent === 'single'")
    assert browser.evaluate("document.getElementById('models').hidden")


@pytest.mark.slow
def test_samples_are_chosen_and_representatives_shown_together(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from fastfold.products.ensemble.write import write_ensembles
    from tests.products.ensemble.conftest import FAR, save_two_states

    folder = save_two_states(tmp_path / "results")
    write_ensembles(folder, plots=False)
    browser.open(write_report(folder))
    browser.wait(f"({READY}) && document.getElementById('view').dataset.shown")
    assert text(browser, "#ensemble-note").startswith("7 samples in 2 clusters")
    browser.click("#overlay")
    browser.wait("document.getElementById('view').dataset.shown === '2 together'")
    assert text(browser, "#legend") == "cluster 1cluster 2"
    browser.click("#single")
    browser.wait("document.getElementById('view').dataset.shown === '50'")
    browser.evaluate("document.getElementById('landscape').scrollIntoView()")
    box = browser.box("#landscape")
    points = np.array(json.loads((folder / "helices_ensemble.json").read_text())["components"])[:, :2]
    across, up = ((points - points.min(0)) / np.ptp(points, 0))[FAR[0]]
    at = (
        box["x"] + 46 + across * (box["width"] - 60),
        box["y"] + box["height"] - 46 - up * (box["height"] - 60),
    )
    browser.mouse("mousePressed", *at, down=True)
    browser.mouse("mouseReleased", *at)
    chosen = "document.querySelector('#list tr[aria-selected=true] td:nth-child(4)').textContent"
    browser.wait(f"{chosen} === 'columns {FAR[0] + 1}'")


@pytest.mark.long
def test_the_viewer_plays_the_film_of_a_design(browser: Browser, tmp_path: Path) -> None:
    if load_molstar() is None:
        pytest.skip("needs the viewer, the package molstar-cli")
    design_results(tmp_path)
    browser.open(write_report(tmp_path))
    browser.wait(READY)
    shown = "document.getElementById('design-view').dataset.shown"
    browser.wait(f"{shown} === '3'")
    assert browser.evaluate("document.getElementById('design-film').hidden")
    assert not browser.evaluate("document.getElementById('design-view').hidden")
    browser.evaluate(
        "(() => { const one = document.getElementById('design-frame'); one.value = '0'; "
        "one.dispatchEvent(new Event('input')); })()"
    )
    browser.wait(f"{shown} === '1'")
    browser.evaluate("document.getElementById('design-play').click()")
    browser.wait(f"{shown} === '3'")
    assert browser.messages == []


@pytest.mark.long
def test_a_design_plays_its_film_and_restraints_are_listed(browser: Browser, tmp_path: Path) -> None:
    folder = tmp_path / "designs"
    design_results(folder)
    row = {
        "line": f"line 2{HOSTILE}",
        "residues": [1, 13],
        "atoms": "any",
        "pairs": 4,
        "min": 4.0,
        "max": 8.0,
        "group": "",
        "distance_before": 30.0,
        "distance": 7.5,
        "holds": True,
        "contradicts": ["line 3"],
        "plddt_gain_without": 2.5,
    }
    counts = {"satisfied_before": 0, "satisfied": 1, "total": 1, "steps": 9, "confidence_paid": 3.25}
    report = {**counts, "leave_one_out": True, "restraints": [row]}
    helix_prediction("restrained", 12, 10, restraints=report).save(folder, rank=1, plots=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
        browser.open(write_report(folder))
    browser.wait(READY)
    browser.wait("!document.getElementById('design').hidden")
    steps = "d_seed_000: 3 steps, soft, hard"
    assert text(browser, "#design-note") == f"{steps} · passed all filters"
    browser.wait("document.getElementById('design-frame').value === '2'")
    picture = "document.getElementById('design-film').toDataURL()"
    last = browser.evaluate(picture)
    browser.evaluate("document.getElementById('design-play').click()")
    first = browser.evaluate(picture)
    assert first != last
    browser.wait("document.getElementById('design-frame').value === '2'")
    assert browser.evaluate(picture) == last
    browser.wait("document.getElementById('design-play').textContent === 'play'")
    browser.click("#list tbody tr:nth-child(2)")
    browser.wait("document.getElementById('design-note').textContent.includes('failed filters')")
    assert (
        text(browser, "#design-note")
        == "d_seed_000_mpnn_1: 3 steps, soft, hard · failed filters: Average_pLDDT 0.4 < 0.8 · charge +9, not 0 to 2"
    )
    assert browser.evaluate("document.getElementById('restraints').hidden")
    heads = browser.evaluate("[...document.querySelectorAll('#list th')].map((one) => one.textContent)")
    assert [one.split(" ")[0] for one in heads[:5]] == ["target", "loss", "sequence", "filters", "note"]
    browser.evaluate(
        "Object.defineProperty(navigator, 'clipboard', "
        "{ value: { writeText: async (one) => { window.copied = one; } }, configurable: true })"
    )
    browser.evaluate("document.getElementById('fasta-copy').click()")
    browser.wait("document.getElementById('fasta-note').textContent === 'copied 2 sequences'")
    first, second = browser.evaluate("window.copied").split("\n>")
    assert first.startswith(">d_seed_000 loss=1.25 mean_plddt=")
    assert first.endswith(" filters=passed\nMKVL:AC")
    assert second.startswith("d_seed_000_mpnn_1 mean_plddt=")
    assert second.endswith(" filters=Average_pLDDT_0.4_<_0.8\nMKVI:AC\n")
    counted = browser.evaluate(
        "[...document.querySelectorAll('#statistics td')].map((one) => one.textContent)"
    )
    assert counted == ["sequence", "accepted", "1", "2", "50%", "filter", "Average_pLDDT", "1", "2", "50%"]
    browser.click("#list tbody tr:nth-child(4)")
    browser.wait("document.getElementById('name').textContent === 'restrained'")
    cells = browser.evaluate("[...document.querySelectorAll('#restraints td')].map((one) => one.textContent)")
    absent = "\N{EN DASH}"
    assert cells[0] == f"line 2{HOSTILE}"
    assert cells[1].endswith(", nearest of 4 pairs")
    assert cells[2:] == [
        "4.0 to 8.0 Å of any atoms",
        "30.0",
        "7.5",
        "satisfied",
        "",
        absent,
        absent,
        "line 3",
        absent,
        "+2.5",
    ]
    assert "confidence paid: 3.3 pLDDT" in text(browser, "#restraints p")
    browser.wait("document.getElementById('design').hidden")
    assert browser.messages == []
