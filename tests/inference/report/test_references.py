"""A reference that is given after the fold reaches the page, as one that is given with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.inference.report.references import compare_results
from fastfold.protein.io.pdb_writer import to_pdb
from tests.helpers.command_line import CommandLine
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
