"""The table of targets that failed, to which several runs add and which those leave that are folded later."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.inference.output.results_folder import ResultsFolder
from fastfold.inference.output.summary import FAILURES, FailuresFile, read_table, tab_separated


def lines(folder: ResultsFolder) -> list[str]:
    return (folder.path / FAILURES).read_text().splitlines()


def test_a_failure_is_written_down_at_once_with_its_reason_in_one_line(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    FailuresFile(folder).add("T1", "too long:\n\tfold shorter pieces")
    assert lines(folder) == ["target\treason", "T1\ttoo long: fold shorter pieces"]


def test_runs_add_to_each_other_and_the_last_reason_counts(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    one, other = FailuresFile(folder), FailuresFile(folder)
    one.add("T1", "a")
    other.add("T2", "b")
    one.add("T1", "c")
    one.flush()
    assert lines(folder)[1:] == ["T2\tb", "T1\tc"]


def test_a_target_that_is_folded_leaves_and_an_empty_table_is_removed(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    table = FailuresFile(folder)
    table.add("T1", "a")
    table.add("T2", "b")
    table.remove("T1")
    table.remove("T3")
    table.flush()
    assert lines(folder)[1:] == ["T2\tb"]
    table.remove("T2")
    table.flush()
    assert not (tmp_path / FAILURES).exists()


@pytest.mark.parametrize("name", ['"half', '"whole" name', 'an "inner" one', '""', '"', "it's 5\" long"])
def test_other_programs_read_names_with_quotation_marks(name: str, tmp_path: Path):
    """A cell that begins with one would take the following lines into it."""
    text = tab_separated([["target", "name", "plddt"], ["a", name, 1.5], ["b", "plain", None]])
    rows = list(csv.reader(io.StringIO(text), dialect="excel-tab"))
    assert rows == [["target", "name", "plddt"], ["a", name, "1.5"], ["b", "plain", ""]]
    path = tmp_path / "table.tsv"
    path.write_text(text)
    assert [line["name"] for line in read_table(path)] == [name, "plain"]


def test_without_a_failure_there_is_no_table(tmp_path: Path):
    table = FailuresFile(ResultsFolder(tmp_path))
    table.remove("T1")
    table.flush()
    assert not (tmp_path / FAILURES).exists()


def test_an_unreadable_record_stays_beside_a_target_of_its_name(tmp_path: Path):
    """A target that is folded or fails does not hide that another record of its name was left out."""
    folder = ResultsFolder(tmp_path)
    table = FailuresFile(folder)
    table.add_records([InputError("used before", record="T1"), InputError("no sequence", record="T1")])
    table.remove("T1")
    table.flush()
    left_out = ["T1\trecord 'T1': used before", "T1\trecord 'T1': no sequence"]
    assert lines(folder)[1:] == left_out
    table.add("T1", "too long")
    table.flush()
    assert lines(folder)[1:] == ["T1\ttoo long", *left_out]
    later = FailuresFile(folder)
    later.remove("T1")
    later.flush()
    assert not (tmp_path / FAILURES).exists()


def test_lines_and_files_without_a_record_are_listed_until_a_run_reads_them(tmp_path: Path):
    folder = ResultsFolder(tmp_path)
    table = FailuresFile(folder)
    table.add_records(
        [InputError("lacks 'Q'", path="names.txt", line=2), InputError("is empty", path="a.fasta")]
    )
    table.add("T1", "too long")
    table.flush()
    assert lines(folder)[1:] == ["\tnames.txt:2: lacks 'Q'", "\ta.fasta: is empty", "T1\ttoo long"]
    later = FailuresFile(folder)
    later.add_records([])
    later.flush()
    assert lines(folder)[1:] == ["T1\ttoo long"]
