"""The report of restraints: counts, rows of lines, trials, and what the distogram says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastfold.inference.restraints.report import Confidence, LeftOut, RestraintReport
from fastfold.inference.restraints.restraint import Restraint


def report(
    restraints: tuple[Restraint, ...], before: list[float], after: list[float], **changes: object
) -> RestraintReport:
    return RestraintReport(
        restraints,
        before=np.array(before),
        after=np.array(after),
        probabilities=np.full((len(restraints), 2), 0.5),
        plddt=60.0,
        **changes,  # type: ignore[arg-type]
    )


def test_the_report_is_plain() -> None:
    given = (Restraint(0, 1, 0.0, 8.0, line="line 2"), Restraint(0, 2, 5.0, np.inf, line="line 3"))
    made = report(given, [9.0, 4.0], [7.0, 4.0], confidence=Confidence(50.0, 47.0, 12))
    found = made.to_json()
    assert (found["satisfied_before"], found["satisfied"], found["total"]) == (0, 1, 2)
    assert [row["holds"] for row in found["restraints"]] == [True, False]
    assert found["restraints"][1]["max"] is None
    assert found["restraints"][0]["residues"] == [1, 2]
    assert (found["plddt_before"], found["plddt"], found["confidence_paid"]) == (50.0, 60.0, 3.0)
    assert (found["steps"], found["leave_one_out"], found["satisfied_left_out"]) == (12, False, None)
    trials = (LeftOut((0,), (1,), np.array([7.5, 6.0]), 4.0), LeftOut((1,), (), np.array([7.0, 3.0]), -1.0))
    tried = replace(made, left_out=trials).to_json()
    assert tried["leave_one_out"]
    assert tried["satisfied_left_out"] == 1
    assert [row["contradicts"] for row in tried["restraints"]] == [["line 3"], []]
    assert [row["plddt_gain_without"] for row in tried["restraints"]] == [4.0, -1.0]
    assert [row["distance_without"] for row in tried["restraints"]] == [7.5, 3.0]


def test_springs_have_no_steps_and_pay_no_confidence() -> None:
    found = report((Restraint(0, 1, 0.0, 8.0),), [9.0], [7.0]).to_json()
    assert (found["steps"], found["plddt_before"], found["confidence_paid"]) == (0, None, None)


def test_evidence_is_the_mean_of_the_best_of_each_group() -> None:
    given = (Restraint(0, 1, 0, 8), Restraint(0, 2, 0, 8, 1, "x"), Restraint(0, 3, 0, 8, 1, "x"))
    probabilities = np.array([[0.1, 0.4], [0.2, 0.2], [0.01, 0.1]])
    made = replace(report(given, [9.0] * 3, [7.0] * 3), probabilities=probabilities)
    assert made.evidence() == pytest.approx(np.log(0.1001 / 0.4001) / 2)
    assert made.to_json()["doubtful"]
    assert not replace(made, probabilities=probabilities[:, ::-1]).to_json()["doubtful"]
    row = made.to_json()["restraints"][0]
    assert (row["probability"], row["usual_probability"]) == (0.1, 0.4)


def test_a_line_of_several_pairs_is_one_row_of_the_report() -> None:
    """The row is that of the pair nearest to its limits, before and after."""
    ambiguous = [Restraint(0, i, 0.0, 8.0, 0.5, "line 2", "line 2", "any") for i in (1, 2, 3)]
    site = [Restraint(0, 4, 5.0, 8.0, group="site", line=f"line {i}") for i in (3, 4)]
    after = [12.0, 20.0, 7.5, 3.0, 6.0]
    trials = (LeftOut((0, 1, 2), (3, 4), np.array(after), 1.0), LeftOut((3, 4), (), np.array(after), 2.0))
    made = report((*ambiguous, *site), [20.0, 15.0, 30.0, 9.0, 9.0], after, left_out=trials).to_json()
    assert (made["satisfied_before"], made["satisfied"], made["total"]) == (0, 2, 2)
    assert [(row["line"], row["residues"], row["pairs"], row["holds"]) for row in made["restraints"]] == [
        ("line 2", [1, 4], 3, True),
        ("line 3", [1, 5], 1, False),
        ("line 4", [1, 5], 1, True),
    ]
    first = made["restraints"][0]
    assert (first["distance_before"], first["distance"], first["atoms"], first["weight"]) == (
        15.0,
        7.5,
        "any",
        0.5,
    )
    assert [row["contradicts"] for row in made["restraints"]] == [["line 3", "line 4"], [], []]
    assert [row["distance_without"] for row in made["restraints"]] == [7.5, 6.0, 6.0]


def test_a_pair_within_limits_is_nearer_to_them_than_a_closer_one() -> None:
    pairs = tuple(Restraint(0, i, 5.0, 8.0, 1.0, "line 2", "line 2") for i in (1, 2, 3))
    (row,) = report(pairs, [3.0, 9.0, 20.0], [3.0, 12.0, 6.0]).to_json()["restraints"]
    assert (row["residues"], row["distance"], row["holds"], row["distance_before"]) == (
        [1, 4],
        6.0,
        True,
        9.0,
    )
