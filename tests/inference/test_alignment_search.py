"""Searching on behalf of a command: what a fold does not need is left out, and a person sees how it goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from fastfold.data.targets import Chain, Target
from fastfold.inference import alignment_search
from fastfold.inference.alignment_search import AlignmentSearch

SINGLE = Target("single", (Chain("A", "MKV"),), "", "single", ())
TWINS = Target("twins", (Chain("A", "MKV"), Chain("B", "MKV")), "", "twins", ())
PAIR = Target("pair", (Chain("A", "MKV"), Chain("B", "GGS")), "", "pair", ())
ALIGNED = Target("aligned", (Chain("A", "MKV"), Chain("B", "GGS")), "", "aligned", (), (([], []), ([], [])))
TARGETS = (SINGLE, TWINS, PAIR, ALIGNED)
ENGINES: tuple[Any, ...] = (SimpleNamespace(name="uniref90"), SimpleNamespace(name="uniprot"))


class _Plan:
    """A search of two pieces of work, which notes what is left out."""

    cost = 10.0
    made: ClassVar[list[Any]] = []

    def __init__(self, targets: Any, engines: Any, out: Path, *, skip: Any) -> None:
        self.made.append(({(e.name, t.name) for e in engines for t in targets if skip(e, t)}, out))

    def run(self, *, say: Any, on_step: Any, interval_s: float) -> None:
        assert interval_s > 0
        on_step("work", "status", 4.0)
        say("uniref90: done")


@pytest.mark.parametrize(
    ("needed_alone", "left_out"),
    [
        (False, set()),
        (
            True,
            {
                ("uniprot", "single"),  # nothing to pair
                ("uniprot", "twins"),
                ("uniref90", "aligned"),  # it has what it needs
                ("uniprot", "aligned"),
            },
        ),
    ],
)
def test_what_a_fold_does_not_use_is_left_out_on_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    needed_alone: bool,
    left_out: set[tuple[str, str]],
) -> None:
    monkeypatch.setattr(alignment_search, "SearchPlan", _Plan)
    found, errors = AlignmentSearch(ENGINES, tmp_path).run(TARGETS, needed_alone=needed_alone)
    assert (found, errors) == (list(TARGETS), [])
    assert _Plan.made[-1] == (left_out, tmp_path)
    assert "uniref90: done" in capsys.readouterr().err
    AlignmentSearch(ENGINES, tmp_path, quiet=True).run(TARGETS)
    assert capsys.readouterr().err == ""


def test_an_unusable_alignment_leaves_out_its_target_by_the_targets_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error has the name of the alignment's row, which is no target."""
    monkeypatch.setattr(alignment_search, "SearchPlan", _Plan)
    (tmp_path / "single.a3m").write_text(">q\nMKV\n>r1\nMKVA\n")
    found, (error,) = AlignmentSearch(ENGINES, tmp_path, quiet=True).run([SINGLE, TWINS])
    assert found == [TWINS]
    assert (error.record, error.path, error.line) == ("single", tmp_path / "single.a3m", 3)
    assert str(error).startswith(f"single: {tmp_path}/single.a3m:3 (record 'r1'): expected 3 columns")
