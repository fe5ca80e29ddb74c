"""The cost model gives what others have published within a factor, and says where each of its constants is from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import resources

import pytest

from benchmarks.published_steps import (
    LEFT_OUT,
    PUBLISHED,
    Published,
    PublishedSteps,
    published_rows,
    published_table,
)
from fastfold.parallel.planner.hardware import ACCELERATORS, FOLDING, GENERAL, TRAINING, WITHIN, Assumptions


@cache
def _steps() -> PublishedSteps:
    """Traced once."""
    return PublishedSteps()


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda x: x.name)
def test_what_is_published_is_predicted_within_a_factor(published: Published) -> None:
    ratio = _steps().predict(published) / published.value
    assert 1 / WITHIN < ratio < WITHIN, f"{published.name}: {ratio:.2f} times the published"


@pytest.mark.slow
def test_constants_that_nothing_was_fitted_to_are_noticed() -> None:
    """Half of the matrix rate and three quarters of the bandwidth, as of folds: four times too fast."""
    ratios = [_steps().predict(p, FOLDING) / p.value for p in PUBLISHED if p.what == "step"]
    assert all(ratio < 1 / WITHIN for ratio in ratios)


@pytest.mark.slow
def test_the_table_has_every_published_value_and_source() -> None:
    rows = published_rows()
    text = published_table(rows)
    assert len(rows) == len(PUBLISHED)
    assert all(row["source"] in text and f"| {row['name']} |" in text for row in rows)
    assert all(why in text for _, why in LEFT_OUT)
    assert "| 6.02 PFLOP/s |" in text
    assert "| 10.0 h |" in text
    assert "| 2.49 s |" in text


@pytest.mark.parametrize("constants", [TRAINING, GENERAL, FOLDING], ids=["training", "general", "folding"])
def test_every_constant_says_where_it_is_from(constants: Assumptions) -> None:
    wanted = {f.name for f in fields(Assumptions)} - {"graphed", "sources"}
    assert set(constants.sources) == wanted
    known: tuple[Callable[[str], bool], ...] = (
        lambda source: source.startswith("fitted to "),
        lambda source: source.startswith("assumed"),
        lambda source: source.startswith("Shah et al. 2024"),
        lambda source: source.startswith("the planner of folds counts"),
    )
    assert all(any(is_known(source) for is_known in known) for source in constants.sources.values())
    assert 0 < constants.matrix_share <= 1
    assert 0 < constants.bandwidth_share <= 1
    assert constants.imbalance >= 1


def test_published_values_name_their_source_and_a_known_gpu() -> None:
    assert len({p.name for p in PUBLISHED}) == len(PUBLISHED) >= 9
    assert {p.gpu for p in PUBLISHED} <= set(ACCELERATORS)
    assert all(p.value > 0 and len(p.source) > 20 for p in PUBLISHED)
    assert WITHIN == 1.5
    path = resources.files("fastfold.parallel.planner") / "calibration.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    assert set(table) == {"within", "training", "general", "folding", "published", "left_out"}
