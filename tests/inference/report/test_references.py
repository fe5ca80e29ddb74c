"""A reference that is given after the fold reaches the page, as one that is given with it."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.errors import InputError
from fastfold.inference.report import write_report
from fastfold.inference.report.discover import find_predictions
from fastfold.inference.report.molstar import load_molstar
from fastfold.inference.report.references import _residues, compare_results, reference_of
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.pdb_writer import to_pdb
from tests.helpers.browser import Browser
from tests.helpers.command_line import CommandLine
from tests.helpers.complexes import cut
from tests.helpers.peptides import helix
from tests.helpers.results import helix_prediction


def test_each_target_is_compared_with_its_structure(tmp_path: Path) -> None:
    results, references = tmp_path / "results", tmp_path / "references"
    for name in ("first", "second"):
        helix_prediction(name, 8).save(results, rank=1, plots=False)
    references.mkdir()
    (references / "first.pdb").write_text(helix_prediction("first", 8).to_pdb())
    lines: list[str] = []
    compare_results(results, references, lines.append)
    assert lines[0].startswith("first: against first.pdb: TM-score 1.000, lDDT-CA 1.000")
    assert lines[1] == f"warning: second: no structure of this name in {references}"
    scores = json.loads((results / "first_reference.json").read_text())
    assert scores["reference"] == "first.pdb"
    assert not (results / "second_reference.json").exists()
    helix_prediction("third", 8).save(tmp_path / "unranked", plots=False)
    compare_results(tmp_path / "unranked", references / "first.pdb", lines.append)
    assert lines[2].startswith("warning: third: no mmCIF file of a ranked prediction")
    with pytest.raises(InputError, match="no such file or folder"):
        compare_results(results, tmp_path / "none", lines.append)


def test_the_command_writes_the_page_with_the_comparison(cli: CommandLine) -> None:
    helix_prediction("t", 8).save(cli.out, rank=1, plots=False)
    reference = cli.folder / "experiment.pdb"
    reference.write_text(to_pdb(helix("GGGGGGGG")))
    done = cli.run("report", cli.out, "--reference", reference)
    assert done.code == 0
    assert (cli.out / "report.html").stat().st_mtime_ns >= (cli.out / "t_reference.json").stat().st_mtime_ns
    assert done.out.splitlines()[-1] == f"wrote {cli.out / 'report.html'}"


def turned_reference(folder: Path, method: str = "") -> np.ndarray:
    """Write a prediction of a complex, and its chains in another order, turned, moved, distorted and cut.

    Return the distances of the CA atoms in Å after the best superposition by numpy, of the residues in both.
    """
    prediction = helix_prediction("t", 20, 14)
    prediction.save(folder / "results", rank=1, plots=False)
    protein = prediction.protein
    true = protein.atom_positions.copy()
    true[20:25, :, 0] += 3.0
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    whole = dataclasses.replace(
        protein, atom_positions=(true @ turn.T + [5.0, -7.0, 11.0]).astype(np.float32)
    )
    kept = np.r_[20:34, 2:20]  # the other order of chains, and two residues less
    text = to_pdb(cut(whole, kept))
    (folder / "t.pdb").write_text((f"EXPDTA    {method}\n" if method else "") + text)
    ca = rc.atom_order["CA"]
    here, there = protein.atom_positions[2:, ca].astype(float), true[2:, ca].astype(float)
    a, b = here - here.mean(0), there - there.mean(0)
    u, _, v = np.linalg.svd(a.T @ b)
    sign = np.diag([1.0, 1.0, np.sign(np.linalg.det(u @ v))])
    return np.linalg.norm(a @ (u @ sign @ v) - b, axis=-1)


def test_the_page_gets_the_backbone_of_the_reference_at_its_residues(tmp_path: Path) -> None:
    turned_reference(tmp_path)
    compare_results(tmp_path / "results", tmp_path / "t.pdb", print)
    (prediction,) = find_predictions(tmp_path / "results")
    found = reference_of(prediction, print)
    assert found is not None
    assert (found["kind"], found["file"], found["chains"]) == ("structure", "t.pdb", "B:A A:B")
    assert found["lddt"][:2] == [None, None]
    assert min(found["lddt"][10:15]) > max(found["lddt"][20:25])
    layout = found["structure"]
    data = zlib.decompress(base64.b64decode(layout["packed"]))
    mask = np.unpackbits(np.frombuffer(data[: 5 * 34], np.uint8).reshape(34, 5), axis=1)[:, :37].astype(bool)
    assert mask.sum(1).tolist() == [0, 0, *[4] * 32]
    points = np.frombuffer(data[5 * 34 :], "<i2").reshape(-1, 4, 3) * layout["step"]
    predicted = helix_prediction("t", 20, 14).protein.atom_positions[2:20, rc.atom_order["CA"]]
    distances = [np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (points[:18, 1], predicted)]
    assert np.abs(distances[0] - distances[1]).max() < 0.05  # chain A of the prediction, not the file's first


@pytest.mark.parametrize("kind", ["rows", "backbone"])
def test_a_comparison_of_other_residues_is_left_out(tmp_path: Path, kind: str) -> None:
    turned_reference(tmp_path)
    compare_results(tmp_path / "results", tmp_path / "t.pdb", print)
    (prediction,) = find_predictions(tmp_path / "results")
    path = tmp_path / "results" / "t_reference.json"
    content = json.loads(path.read_text())
    if kind == "rows":
        content[prediction.stem]["reference_rows"][5] = 1000
    else:
        content["backbone"][3][0] = [1.0, "x", 2.0]
    path.write_text(json.dumps(content))
    said: list[str] = []
    assert reference_of(prediction, said.append) is None
    assert said == ["t_reference.json: left out of the report, its residues do not match the prediction"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kind", "title"),
    [("X-RAY DIFFRACTION", "experiment", "an experiment"), ("THEORETICAL MODEL", "model", "a model")],
)
def test_the_reference_is_superposed_and_called_by_what_it_is(
    browser: Browser, tmp_path: Path, method: str, kind: str, title: str
) -> None:
    distances = turned_reference(tmp_path, method)
    compare_results(tmp_path / "results", tmp_path / "t.pdb", print)
    browser.open(write_report(tmp_path / "results"))
    browser.wait("document.body && document.body.dataset.ready")
    assert browser.evaluate("document.querySelector('#reference h2').textContent") == f"Compared with {title}"
    rmsd = float(np.sqrt((distances**2).mean()))
    assert f"{rmsd:.2f}" in browser.evaluate("document.getElementById('reference').textContent")
    assert browser.evaluate("document.getElementById('agreement').clientHeight") > 100
    if load_molstar() is None:
        pytest.skip("needs the viewer, the package molstar-cli")
    label = browser.evaluate("document.getElementById('with-reference').textContent")
    assert label.strip() == f"with the {kind}"
    browser.wait("document.getElementById('view').dataset.shown === '34'", 240)
    browser.click("#compared")
    browser.wait("document.getElementById('view').dataset.shown === '2 together'", 240)
    legend = browser.evaluate("document.getElementById('legend').textContent")
    assert legend.startswith(f"prediction{kind} t.pdb (RMSD {rmsd:.1f} Å, TM-score ")
    browser.click("#compared")
    browser.wait("document.getElementById('view').dataset.shown === '34'", 240)
    assert browser.messages == []


@pytest.mark.parametrize(
    "rows", [[0, 1], [0, 1, 2, 3], [0, 1, True], [0, 1, -1], [0, 1, 2.0], [0, 1, "2"], [0, 1, 3], [None] * 3]
)
def test_rows_that_are_none_of_the_reference_are_refused(rows: list[Any]) -> None:
    backbone = [[[float(row), 0.0, 0.0]] * 3 + [None] for row in range(3)]
    own = {"reference_rows": [2, None, 0], "lddt_ca_per_residue": [0.5, None, "x"]}
    found = _residues({"backbone": backbone}, own, 3)
    assert found["lddt"] == [None, None, 0.5]
    assert found["structure"]["atoms"] == 6
    for name in own:
        assert _residues({"backbone": backbone}, {key: x for key, x in own.items() if key != name}, 3) == {}
    assert _residues({}, own, 3) == {}
    with pytest.raises(ValueError, match="do not match the prediction"):
        _residues({"backbone": backbone}, own | {"reference_rows": rows}, 3)
