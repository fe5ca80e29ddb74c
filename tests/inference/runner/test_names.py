"""Names beyond ASCII: files have their spelling, and tables, scores and the page the names themselves."""

from __future__ import annotations

import json

import pytest

import fastfold
from fastfold.inference.output.summary import read_table
from tests.helpers.command_line import CommandLine
from tests.inference.runner.inputs import SEQUENCE, a3m

TNF, COMPOSED, DECOMPOSED = "TNF\u03b1", "prot\xe9ine", "prote\u0301ine"
NAMES = (TNF, "TNFalpha", COMPOSED, DECOMPOSED, "proteine")


@pytest.mark.long
def test_results_keep_the_names_of_records_and_stay_apart(cli: CommandLine) -> None:
    msas = cli.folder / "msas"
    msas.mkdir()
    for rows, name in enumerate(NAMES, 2):
        (msas / f"{name}.a3m").write_text(a3m(SEQUENCE, rows=rows))
    done = cli.infer(cli.fasta(dict.fromkeys(NAMES, SEQUENCE)), "--msa-dir", msas)
    assert done.code == 0, done.err
    assert all(name.isascii() for name in cli.names())
    lines = {line["name"]: line for line in read_table(cli.out / "summary.tsv")}
    assert set(lines) == set(NAMES)
    assert len({line["target"].casefold() for line in lines.values()}) == len(NAMES)
    assert [lines[name]["target"] for name in ("TNFalpha", "proteine")] == ["TNFalpha", "proteine"]
    for rows, name in enumerate(NAMES, 2):
        stem = lines[name]["target"]
        assert cli.scores(stem)["name"] == name
        config = cli.config(stem)
        assert (config["record"], config["alignment_rows"]) == (name, [[rows, 0]])
        assert json.dumps(name) in (cli.out / "report.html").read_text()
        assert fastfold.Prediction.load(cli.out, name).name == name
    title = next(cli.out.glob(f"{lines[TNF]['target']}_rank*.pdb")).read_text().splitlines()[0]
    assert "Predicted structure of TNFalpha by" in title


def test_a_failure_prints_letters(cli: CommandLine) -> None:
    done = cli.infer(cli.fasta({TNF: "MK1"}))
    assert done.code == 1
    assert f"(record '{TNF}'): digit '1'" in done.err
