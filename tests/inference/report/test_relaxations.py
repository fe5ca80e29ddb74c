"""Page of a folder of relaxations: figures before and after, and nothing of a record is markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.inference.report import write_report
from fastfold.inference.report.relaxations import relaxations_page
from tests.helpers.results import helix_prediction, relaxed_results


def rows(page: str) -> list[list[str]]:
    """Return the text of the cells of each row, without markup."""
    found = re.findall(r"<tr><th scope=\"row\".*?</tr>", page, re.DOTALL)
    return [
        [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in found
    ]


def test_a_row_has_the_figures_before_and_after(tmp_path: Path) -> None:
    relaxed_results(tmp_path)
    page = write_report(tmp_path).read_text()
    bad, failed, good = rows(page)
    changes = ["4,858 → -4,267", "0.19", "3 → 0", "90.0 → 95.0", "1.2 → 1.2", "4 → 0"]
    assert good == ["good cif", "relaxed", *changes]
    assert bad == ["bad", "not relaxed its energy &lt;b&gt;stays&lt;/b&gt; positive", *changes]
    assert failed[2:] == ["4,858 → -", "-", "3 → 0", "90.0 → -", "1.2 → -", "4 → -"]
    assert '<a href="good_relaxed.cif">cif</a>' in page
    assert "1 of 3 relaxed" in page
    assert "<script" not in page


def test_columns_of_texts_are_aligned_as_texts(tmp_path: Path) -> None:
    relaxed_results(tmp_path)
    heads = re.findall(r'<th scope="col"( class="text")?>', relaxations_page(tmp_path, print))
    assert [bool(one) for one in heads] == [True, True] + [False] * 6


def test_other_files_are_left_out_with_a_reason(tmp_path: Path) -> None:
    said: list[str] = []
    for name, text in {"a": "{", "b": "[]", "c": '{"relaxed": 1}'}.items():
        (tmp_path / f"{name}_relax.json").write_text(text)
    assert relaxations_page(tmp_path, said.append) == ""
    assert [line.partition(":")[0] for line in said] == [f"{name}_relax.json" for name in "abc"]
    with pytest.raises(InputError, match="found none; give a folder of results"):
        write_report(tmp_path)
    name = "<img src=x>"
    (tmp_path / f"{name}_relax.json").write_text(json.dumps({"relaxed": False, "geometry": [], "reason": 5}))
    (tmp_path / f"{name}_relaxed.pdb").write_text("END\n")
    page = relaxations_page(tmp_path, said.append)
    assert rows(page)[0][:2] == ["&lt;img src=x&gt; pdb", "not relaxed 5"]
    assert 'href="%3Cimg%20src%3Dx%3E_relaxed.pdb"' in page


def test_a_folder_with_predictions_keeps_their_page(tmp_path: Path) -> None:
    relaxed_results(tmp_path)
    helix_prediction("good", 12).save(tmp_path, plots=False)
    assert 'id="meta"' in write_report(tmp_path).read_text()
