"""The table of scores is what tables, the page and documents show."""

from __future__ import annotations

import numpy as np
import pytest

from fastfold.inference.output.summary import COLUMNS as SUMMARY_COLUMNS
from fastfold.inference.report.interfaces import COLUMNS
from fastfold.protein.metrics.interface import interface_scores
from fastfold.protein.metrics.scores import (
    LARGEST_OF_PAIRS,
    PAIR_SCORES,
    SCORES,
    SUMMARY_SCORES,
    Score,
    definitions_table,
    score,
)
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def computed() -> dict[str, object]:
    chains, present = np.array([0] * 6 + [1] * 6), np.ones((12, 37))
    positions = np.random.default_rng(0).normal(scale=4.0, size=(12, 37, 3))
    return interface_scores(chains, positions, present, np.full(12, 80.0), pae=np.full((12, 12), 5.0))


def test_names_are_unique() -> None:
    assert len({one.name for one in SCORES}) == len({one.label for one in SCORES}) == len(SCORES)
    with pytest.raises(KeyError):
        score("lis_max")


def test_each_pair_score_is_computed_and_the_other_way_round(computed: dict[str, dict[str, dict]]) -> None:
    """Keys of a pair are scores of the table, with the ends of their directions."""
    pair = dict(computed["pairs"]["A-B"])
    directions = pair.pop("directions")
    pair.pop("interface_residues")
    assert pair.keys() == {one.key for one in PAIR_SCORES}
    for one in PAIR_SCORES:
        if one.directions:
            there, back = (directions[name][one.key] for name in ("A-B", "B-A"))
            combined = max(there, back) if one.directions == "larger" else (there + back) / 2
            assert pair[one.key] == combined
    assert {name: computed[name] for name in LARGEST_OF_PAIRS} == {"ipsae_max": pair["ipsae"]}


def test_tables_have_every_score() -> None:
    assert {one.name for one in PAIR_SCORES} <= set(COLUMNS)
    assert [one.summary for one in SUMMARY_SCORES] == [
        one for one in SUMMARY_COLUMNS if one in {"plddt", "ptm", "iptm", "ipsae_max", "clashes"}
    ]


@pytest.mark.parametrize("one", [one for one in SCORES if one.shown == "list"], ids=lambda one: one.name)
def test_scores_of_the_list_are_explained(one: Score) -> None:
    assert one.meaning.endswith(".")
    assert not one.meaning.endswith("is better.")


def test_the_documentation_makes_its_table_from_the_rows() -> None:
    place = "<!-- definitions_table() -->"
    assert (REPOSITORY / "docs" / "scores.md").read_text().count(place) == 1
    assert f'replace("{place}", definitions_table())' in (REPOSITORY / "docs" / "conf.py").read_text()
    head, _, *lines = definitions_table().splitlines()
    assert head == "| key | higher is | definition | source |"
    assert [line.split("`")[1] for line in lines] == [one.key for one in PAIR_SCORES]
    assert all(
        one.definition and one.definition in line for one, line in zip(PAIR_SCORES, lines, strict=True)
    )
    assert "mean PAE of the pairs that touch, in Å" in definitions_table()
