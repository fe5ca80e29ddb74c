"""Report: made from whatever a run has written, and nothing of it is markup."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fastfold.errors import InputError, OutputError
from fastfold.training.logging.loggers import JsonLinesLogger
from fastfold.training.report.plots import smooth
from fastfold.training.report.report import curve, write_report


def write_metrics(folder: Path, steps: int = 200) -> None:
    logger = JsonLinesLogger(folder / "metrics.jsonl")
    for step in range(1, steps + 1):
        numbers = {
            "loss": 10.0 / step,
            "fape": 1.0 / step,
            "distogram": 2.0,
            "lddt_ca": step / (steps + 1),
            "gradient_norm": 0.5 if step != 7 else float("nan"),
            "lr": 1e-3,
            "residues": 100.0,
            "waited_s": 0.01,
            "samples": 2.0 * step,
            "seconds": 0.5 * step,
            "skipped": float(step >= 7),
        }
        logger.log(step, numbers)
        if step == 7:
            logger.event(7, "step 7 skipped: loss not finite in 1abc_A")
        if step % 100 == 0:
            logger.log(step, {"valid_lddt_ca": 0.9 - step / 1000, "valid_tm_score": 0.5, "valid_plddt": 0.4})


def write_validation(folder: Path) -> None:
    chains = [
        {
            "id": f"chain|{i}",
            "residues": 4,
            "lddt_ca": 0.2 * i,
            "tm_score": 0.1 * i,
            "plddt": 0.5,
            "true": [0.2 * i] * 4,
            "predicted": [0.5] * 4,
        }
        for i in (3, 1, 2)
    ]
    lines = [json.dumps({"step": step, "chains": chains}) + "\n" for step in (100, 200)]
    (folder / "validation.jsonl").write_text("".join(lines))


def make_run(folder: Path) -> Path:
    """Folder of a whole run."""
    folder.mkdir()
    write_metrics(folder)
    write_validation(folder)
    (folder / "quarantine.tsv").write_text(
        "".join(f"bad_{i}\tno ATOM | <b>record</b>\n" for i in range(25)) + "last\t\n"
    )
    (folder / "config.yaml").write_text("optim:\n  lr: 0.001\n")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run without a report."""
    return make_run(tmp_path / "mini")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Page of a run's report; not to be changed."""
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "mini"))


@pytest.fixture
def reported(report: Path, tmp_path: Path) -> Path:
    """A run with a report, to be changed."""
    return Path(shutil.copytree(report.parent.parent, tmp_path / "mini"))


def rows(page: str) -> dict[str, str]:
    """First and second cells of all tables."""
    cells = [
        [c.strip() for c in line.strip("|").split(" | ")] for line in page.splitlines() if line[:1] == "|"
    ]
    return {row[0]: row[1] for row in cells}


def test_page_has_the_runs_numbers(report):
    page = report.read_text()
    table = rows(page)
    assert table["Steps"] == "200"
    assert table["Samples seen"] == "400"
    assert table["Hours of training"] == "0.03"
    assert table["Residues per second"] == "200"
    assert table["Time spent waiting for the loader"] == "2.00%"
    assert table["Loss at the end"] == "0.05"
    assert table["lDDT-CA in validation, at the end"] == "0.700"
    assert table["lDDT-CA in validation, best"] == "0.800 at step 100"
    assert table["TM-score in validation, at the end"] == "0.500"
    assert table["Skipped steps"] == "1"
    assert table["Quarantined samples"] == "26"
    assert table["7"] == r"step 7 skipped: loss not finite in 1abc\_A"
    assert "        lr: 0.001" not in page
    assert "      lr: 0.001" in page.splitlines()


def test_every_picture_of_the_page_is_there(report):
    named = {line.split("(")[1][:-1] for line in report.read_text().splitlines() if line.startswith("![")}
    assert named == {"loss.png", "parts.png", "lddt.png", "gradient.png", "lr.png", "calibration.png"}
    assert {path.name for path in report.parent.iterdir()} == named | {"report.md", "report.html"}
    for name in named:
        Image.open(report.parent / name).verify()


def test_last_validation_is_described_from_the_worst_chain(report):
    page = report.read_text()
    assert "Validation at step 200" in page
    assert "| lDDT-CA | 0.400 | 0.400 | 0.200 | 0.600 |" in page
    assert page.index(r"chain\|1") < page.index(r"chain\|2") < page.index(r"chain\|3")
    # Predicted 0.5 everywhere, true 0.4 on average: one bin.
    assert "of 12 residues" in page
    assert "calibration error 0.100, bias +0.100" in page


def test_distograms_of_a_validation_are_summed_up_by_the_depth_of_alignments(tmp_path):
    """Over the chains that have a figure; the pictures are those of all steps."""
    plain = {"residues": 4, "tm_score": 0.5, "plddt": 0.5, "true": [0.5], "predicted": [0.5]}
    chains = [
        plain | {"id": "a", "depth": 0, "lddt_ca": 0.2, "distogram_ce_3_6": 3.0},
        plain | {"id": "b", "depth": 10, "lddt_ca": 0.3, "distogram_ce_3_6": 2.0, "precision_l5": 0.5},
        plain | {"id": "c", "depth": 200, "lddt_ca": 0.7, "distogram_ce_3_6": 1.0, "precision_l5": None},
    ]
    write_validation(tmp_path)
    with (tmp_path / "validation.jsonl").open("a") as file:
        file.write(json.dumps({"step": 300, "chains": chains}) + "\n")
    numbers = {"valid_distogram_ce_3_6": 2.0, "valid_precision_l5": 0.5}
    JsonLinesLogger(tmp_path / "metrics.jsonl").log(300, numbers)
    page = write_report(tmp_path)
    text = page.read_text()
    assert "|  | chains | lDDT-CA | 3 to 5 | 6 to 11 | 12 to 23 | 24 and more | L/5 | L/2 |" in text
    assert "| all | 3 | 0.400 | 2.000 |  |  |  | 0.500 |  |" in text
    assert "| alignments of 200 rows and more | 1 | 0.700 | 1.000 |  |  |  |  |  |" in text
    assert "| with an alignment | 2 | 0.500 | 1.500 |  |  |  | 0.500 |  |" in text
    assert "| the sequence alone | 1 | 0.200 | 3.000 |  |  |  |  |  |" in text
    for name in ("distogram.png", "contacts.png"):
        assert f"]({name})" in text
        Image.open(page.parent / name).verify()


def test_names_and_reasons_of_others_are_no_markup(report):
    page = report.read_text()
    assert r"| bad\_0 | no ATOM \| \<b\>record\</b\> |" in page
    assert "6 more are listed" in page
    assert r"bad\_20" not in page


def test_report_of_a_run_that_goes_on(tmp_path):
    """One entry, and a line that is being written."""
    JsonLinesLogger(tmp_path / "metrics.jsonl").log(1, {"loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    page = write_report(tmp_path)
    assert rows(page.read_text())["Loss at the end"] == "2"
    assert {path.name for path in page.parent.iterdir()} == {"report.md", "report.html", "loss.png"}


def test_run_without_numbers_has_a_report_that_says_so(tmp_path):
    (tmp_path / "config.yaml").write_text("logger: none\n")
    assert "nothing was logged" in write_report(tmp_path).read_text()


def test_new_report_leaves_no_picture_of_the_old_one(reported):
    assert list((reported / "report").glob("*.png"))
    for name in ("metrics.jsonl", "validation.jsonl"):
        (reported / name).unlink()
    page = write_report(reported)
    assert [path.name for path in page.parent.iterdir()] == ["report.md"]


def test_numbers_that_were_not_finite_are_gaps():
    entries: list[dict[str, Any]] = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": None},
        {"step": 3, "a": float("inf")},
    ]
    steps, values = curve([*entries, {"step": 4, "a": 2}, {"step": 5, "event": "x"}], "a")
    assert steps.tolist() == [1, 4]
    assert values.tolist() == [1.0, 2.0]


def test_same_run_same_report(run, report):
    page = write_report(run)
    for path in report.parent.iterdir():
        assert (page.parent / path.name).read_bytes() == path.read_bytes()


def test_interrupted_report_leaves_the_old_page(reported, monkeypatch):
    page = reported / "report" / "report.md"
    before = page.read_bytes()
    (reported / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')  # one picture
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if Path(target).name == "report.md":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(reported)
    assert page.read_bytes() == before
    assert not [path for path in page.parent.iterdir() if path.suffix == ".tmp"]


def test_folder_of_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected the folder of a training run"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 9}',
        '{"step": 9, "chains": []}',
        '{"step": 9, "chains": [{"lddt_ca": 1}]}',
        '{"step": 9, "chains": 3}',
    ],
)
def test_damaged_validation_names_its_line(run, line):
    with (run / "validation.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(InputError, match=r"validation\.jsonl:3"):
        write_report(run)


def test_report_that_cannot_be_written_says_where(run):
    (run / "report").write_text("a file")
    with pytest.raises(OutputError, match="report"):
        write_report(run)


def test_smoothing_keeps_straight_lines_and_the_length():
    line = np.linspace(3, 5, 1000)
    np.testing.assert_allclose(smooth(line)[10:-10], line[10:-10])
    assert len(smooth(line)) == 1000
    noisy = np.random.default_rng(0).normal(size=1000)
    assert smooth(noisy).std() < 0.4
    assert smooth(np.array([])).size == 0
    assert smooth(np.array([2.0])).tolist() == [2.0]
