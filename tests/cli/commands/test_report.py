"""``fastfold report``: the page of a folder, and its summary as a table."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from fastfold.cli.commands import report
from fastfold.errors import InputError
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction


@pytest.fixture
def results(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one prediction and a summary of it."""
    monkeypatch.setattr("fastfold.inference.report.write.load_molstar", lambda: None)
    helix_prediction("a", 8).save(cli.out, plots=False)
    (cli.out / "summary.tsv").write_text("target\tplddt\tiptm\tfiles\na\t90.5\t\ta_rank_001\n")
    return cli.out


def test_the_page_is_written_and_named(cli: CommandLine, results: Path) -> None:
    done = cli.run("report", results)
    assert (done.code, done.out) == (0, f"wrote {results / 'report.html'}\n"), done.err
    assert (results / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert all(line.startswith("warning: ") for line in done.err.splitlines())


def test_the_table_leaves_out_what_no_prediction_has(cli: CommandLine, results: Path) -> None:
    """No column of file names, and none that is empty."""
    done = cli.run("report", results, "--table")
    assert [line.split() for line in done.out.splitlines()[:-1]] == [["target", "plddt"], ["a", "90.5"]]
    (results / "summary.tsv").unlink()
    assert cli.run("report", results, "--table").out == f"wrote {results / 'report.html'}\n"


def test_a_folder_without_results_is_refused(cli: CommandLine) -> None:
    cli.out.mkdir()
    with pytest.raises(InputError, match=re.escape(str(cli.out))):
        report.run_report(
            argparse.Namespace(
                directory=cli.out, table=True, where=None, sort="ipsae", export=[], reference=None
            )
        )
    assert list(cli.out.iterdir()) == []
