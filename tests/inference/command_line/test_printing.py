"""Lines of commands: settings are spelled, quiet commands are, and a run ends in one line and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import as_option, settings_spelled
from fastfold.inference.command_line.printing import print_summary
from fastfold.inference.progress import print_line
from fastfold.inference.runner import Summary


def test_a_line_spells_settings_unless_it_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with settings_spelled(as_option):
        print_line("add `msa_dir=DIR`")
        print_line("nothing", quiet=True)
    assert capsys.readouterr().err == "add --msa-dir DIR\n"


@pytest.mark.parametrize("failed", [(), (("b", "too long"),)])
def test_a_run_ends_in_one_line(
    failed: tuple[tuple[str, str], ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = Summary(("a",), (), failed, {"a": ("x",)})
    assert print_summary(summary, tmp_path, done="scored", table="scores.tsv") == len(failed)
    more = ", 1 failed" if failed else ""
    assert (
        capsys.readouterr().out
        == f"1 scored{more}; results in {tmp_path}\nTable: {tmp_path / 'scores.tsv'}\n"
    )


def test_other_processes_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert print_summary(Summary((), (), (("b", "x"),)), tmp_path) == 0
    assert capsys.readouterr().out == ""
