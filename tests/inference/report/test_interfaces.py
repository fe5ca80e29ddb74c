"""One table has the scores of all pairs of chains, can be filtered, and is written for other programs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fastfold.cli.commands import report
from fastfold.errors import ConfigError
from fastfold.inference.report import write_report
from fastfold.inference.report.interfaces import (
    COLUMNS,
    check_export,
    find_rows,
    parse_condition,
    sort_rows,
    write_rows,
)
from tests.helpers.command_line import CommandLine
from tests.helpers.results import helix_prediction

ROW: dict[str, Any] = {"ipsae": 0.6, "rank": 1, "partner_1": "P04637", "pdockq": None}

pytestmark = pytest.mark.usefixtures("no_viewer")


def save(folder: Path, name: str, *lengths: int, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Save a prediction; return its scores."""
    paths = helix_prediction(name, *lengths).save(folder, rank=1, plots=False)
    stem = paths["scores"].name.removesuffix("_scores.json")
    if config is not None:
        (folder / f"{stem}_config.json").write_text(json.dumps(config))
    found: dict[str, Any] = json.loads(paths["scores"].read_text())
    return found


def test_each_pair_of_chains_is_a_line_with_its_partners(tmp_path: Path) -> None:
    config = {
        "chain_names": {"A": "P", "B": "P", "C": "Q"},
        "residue_ranges": {"A": [[1, 30]], "B": [], "C": []},
    }
    scores = save(tmp_path, "trimer", 30, 25, 20, config=config)
    save(tmp_path, "X1_and_Y2", 12, 10)
    save(tmp_path, "other", 12, 10)
    save(tmp_path, "alone", 12)
    rows = find_rows(tmp_path)
    partners = [(row["target"], row["partner_1"], row["partner_2"]) for row in rows]
    assert partners == [
        ("X1_and_Y2", "X1", "Y2"),
        ("other", "other_A", "other_B"),
        ("trimer", "P_1-30", "P"),
        ("trimer", "P_1-30", "Q"),
        ("trimer", "P", "Q"),
    ]
    pair = scores["interfaces"]["pairs"]["B-C"]
    last = rows[-1]
    assert (last["chain_1"], last["chain_2"]) == ("B", "C")
    for column, name in (
        ("ipsae", "ipsae"),
        ("pair_iptm", "iptm"),
        ("pair_clashes", "clashes"),
        ("lis", "lis"),
    ):
        assert last[column] == pair[name]
    assert last["ipsae_max"] == scores["interfaces"]["ipsae_max"]
    assert last["iptm"] == scores["iptm"]
    assert tuple(last) == COLUMNS


def test_lines_are_sorted_with_missing_values_last() -> None:
    base = dict.fromkeys(COLUMNS) | {"target": "t", "chain_1": "A", "chain_2": "B"}
    rows = [base | {"ipsae": value, "rank": k} for k, value in enumerate((0.1, None, 0.9))]
    assert [row["ipsae"] for row in sort_rows(rows, "ipsae")] == [0.9, 0.1, None]
    assert [row["rank"] for row in sort_rows(rows, "target")] == [0, 1, 2]
    with pytest.raises(ConfigError, match="sort=: no column 'ipsea'"):
        sort_rows(rows, "ipsea")


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("ipsae>0.5", True),
        ("ipsae > 0.5 and rank == 1", True),
        ("ipsae > 0.5 and rank != 1", False),
        ("not ipsae < 0.5 or rank == 2", True),
        ("0.5 < ipsae <= 0.6", True),
        ("'046' in partner_1", True),
        ("'047' in partner_1", False),
        ("'0' in ipsae", False),
        ("partner_1 == 'P04637'", True),
        ("pdockq > -1", False),
        ("not pdockq > -1", True),
        ("partner_1 > 3", False),
    ],
)
def test_conditions_choose_lines(condition: str, expected: bool) -> None:
    assert parse_condition(condition, COLUMNS)(ROW) is expected


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("ipsae_mx>0.5", "no column 'ipsae_mx'; did you mean ipsae_max?"),
        ("ipsae >", "expected a condition such as"),
        ("ipsae + 1 > 2", "found 'ipsae \\+ 1'"),
        ("__import__('os').system('x') == 0", "expected a condition"),
        ("ipsae", "found 'ipsae'"),
        ("ipsae is None", "expected a condition"),
        ("(" * 999 + "1", "expected a condition"),
    ],
)
def test_text_that_is_no_condition_is_refused(condition: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_condition(condition, COLUMNS)


def test_the_command_filters_sorts_and_writes(cli: CommandLine) -> None:
    scores = {
        name: save(cli.out, name, *lengths) for name, lengths in (("A_and_B", (30, 28)), ("A_and_C", (9, 8)))
    }
    best = {name: one["interfaces"]["ipsae_max"] for name, one in scores.items()}
    limit = sum(best.values()) / 2
    done = cli.run("report", cli.out, "--where", f"ipsae_max>{limit}", "--export", cli.folder / "hits.tsv")
    assert done.code == 0, done.err
    good = max(best, key=lambda name: best[name])
    assert f"1 of 2 pairs of chains meet the condition\nwrote {cli.folder}/hits.tsv\nwrote" in done.out
    assert good[-1] in done.out.splitlines()[1].split()
    with (cli.folder / "hits.tsv").open() as file:
        (line,) = csv.DictReader(file, delimiter="\t")
    assert (line["target"], float(line["ipsae_max"])) == (good, best[good])
    with (cli.out / "interfaces.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [one["target"] for one in lines] == sorted(best, key=lambda name: -best[name])
    other = min(best, key=lambda name: best[name])
    page = (cli.out / "report.html").read_text()
    assert (good in page, f'"{other}"' in page) == (True, False)
    none = cli.run("report", cli.out, "--where", "ipsae>2")
    assert (none.code, none.out) == (0, "0 of 2 pairs of chains meet the condition\n")
    wrong = cli.run("report", cli.out, "--export", "hits.xlsx")
    assert (wrong.code, "expected a name that ends in .csv, .tsv or .parquet" in wrong.err) == (2, True)


def test_help_lists_all_columns() -> None:
    listed = report._EPILOG.partition(":\n")[2].partition("\n\n")[0].split()
    assert listed == list(dict.fromkeys(COLUMNS))


def test_parquet_has_numbers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    save(tmp_path, "A_and_B", 20, 18)
    rows = find_rows(tmp_path)
    write_rows(rows, tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == rows


def test_parquet_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastfold.utils.packages.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match="Parquet file needs the package pyarrow, which is not installed"):
        check_export(Path("t.parquet"))


def test_single_chains_have_no_table(tmp_path: Path) -> None:
    save(tmp_path, "alone", 12)
    write_report(tmp_path)
    assert not (tmp_path / "interfaces.csv").exists()
