"""Answers in the folders of jobs are read back, and damaged ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.errors import InputError
from fastfold.inference.serve.answer import ANSWER, JobAnswer, read_answer, write_answer


def test_an_answer_is_read_back(tmp_path: Path):
    assert read_answer(tmp_path) is None
    answer = JobAnswer("done", "good", {"plddt": 90.0}, ["a.pdb"])
    write_answer(tmp_path, answer)
    assert read_answer(tmp_path) == answer


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[]", "[" * 100_000, '{"state": "queued", "text": ""}', '{"state": "done", "text": 1}'),
        '{"state": "done", "text": "", "scores": []}',
        '{"state": "done", "text": "", "files": [1]}',
    ],
)
def test_a_damaged_answer_is_refused(tmp_path: Path, content: str):
    (tmp_path / ANSWER).write_text(content)
    with pytest.raises(InputError, match=ANSWER):
        read_answer(tmp_path)
