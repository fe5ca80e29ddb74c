"""Contents of files of scores: those that are complete are taken, and each damage is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastfold.inference.output.score_files import check_pae, check_scores, residue_numbers, scored_names

SCORES: dict[str, Any] = {
    "name": "t",
    "model": "mini",
    "seed": 0,
    "sequences": ["MKV", "AL"],
    "plddt": [50.0, 60, 70.0, 80.0, 90.0],
}


def test_names_and_numbers_count_from_one_where_a_file_has_none() -> None:
    assert check_scores(SCORES) is SCORES
    names = scored_names(SCORES)
    assert (names.chain_ids, names.numbers) == (("A", "B"), ("1", "2", "3", "1", "2"))
    ranges = {**SCORES, "residue_ranges": [[[5, 6], [9, 9]], [[1, 2]]]}
    assert residue_numbers(ranges).tolist() == [5, 6, 9, 1, 2]
    named = {**SCORES, "chain_ids": ["H", "LIGHT"], "residue_labels": [["-1", "52A", "53"], ["7", "8!"]]}
    found = scored_names(named)
    assert (found.chain_ids, found.numbers) == (("H", "LIGHT"), ("-1", "52A", "53", "7", "8!"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({key: None}, f"{key} is missing or has another type") for key in SCORES),
        ({"seed": "0"}, "seed is missing or has another type"),
        ({"sequences": []}, "sequences are not text"),
        ({"sequences": ["MKV", ""]}, "sequences are not text"),
        ({"sequences": ["MKV", 5]}, "sequences are not text"),
        ({"plddt": [1.0] * 4}, "plddt is not a number for each residue"),
        ({"plddt": [1.0] * 4 + ["x"]}, "plddt is not a number for each residue"),
        ({"plddt": [True] + [1.0] * 4}, "plddt is not a number for each residue"),
        ({"plddt": [float("inf")] + [1.0] * 4}, "plddt is not a number for each residue"),
        ({"chain_ids": ["A"]}, "chain_ids are not given for each chain"),
        ({"chain_ids": ["A", ""]}, "chain_ids are not given for each chain"),
        ({"chain_ids": ["A", 5]}, "chain_ids are not given for each chain"),
        ({"chain_ids": "AB"}, "chain_ids are not given for each chain"),
        ({"residue_labels": [["1", "2", "3"]]}, "residue_labels are not given for each residue"),
        ({"residue_labels": [["1", "2", "3"], ["1"]]}, "residue_labels are not given for each residue"),
        ({"residue_labels": [["1", "2"], ["1", "2"]]}, "residue_labels are not given for each residue"),
        ({"residue_labels": [["1", "2", 3], ["1", "2"]]}, "residue_labels are not given for each residue"),
        ({"residue_labels": [["1", "2", "x"], ["1", "2"]]}, "residue_labels: expected a number, found 'x'"),
        (
            {"residue_labels": [["1", "2", "3"], ["1", "2AB"]]},
            "residue_labels: expected a number, found '2AB'",
        ),
        ({"residue_ranges": [[[1, 3]]]}, "residue_ranges are not given for each chain"),
        ({"residue_ranges": {}}, "residue_ranges are not given for each chain"),
    ],
)
def test_each_damage_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scores({**SCORES, **changes})


def test_aligned_errors_are_a_square_of_numbers_within_their_limit() -> None:
    def content(pae: Any, largest: Any = 31.75, **more: Any) -> list[dict[str, Any]]:
        return [{"predicted_aligned_error": pae, "max_predicted_aligned_error": largest, **more}]

    pae, largest = check_pae(content([[0.0, 31.75], [1.0, 2.0]]), 2)
    assert (pae.dtype, largest) == (np.float32, 31.75)
    assert pae.tolist() == [[0.0, 31.75], [1.0, 2.0]]
    good = [[0.0, 1.0], [2.0, 3.0]]
    for damaged in (
        {},
        [],
        [{}, {}],
        content([[0.0, 1.0]]),
        content(5.0),
        content("x"),
        content([[0.0, float("nan")], [1.0, 2.0]]),
        content(good, "x"),
        content(good, None),
        content(good, float("inf")),
    ):
        with pytest.raises(ValueError, match="aligned error"):
            check_pae(damaged, 2)
    with pytest.raises(ValueError, match="aligned error"):
        check_pae(content(good), 3)
