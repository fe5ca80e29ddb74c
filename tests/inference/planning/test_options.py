"""Options of a plan are checked in Python too, and recycling has the default of its kind."""

from __future__ import annotations

import pytest

from fastfold.errors import ConfigError
from fastfold.inference.planning.options import PlanOptions


def test_passes_of_a_step_or_a_fold_are_three_unless_given() -> None:
    assert [PlanOptions(recycles=number).num_recycles for number in (None, 0, 7)] == [3, 0, 7]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residues": 0}, "residues must be from 1"),
        ({"gpus": 0}, "gpus must be from 1"),
        ({"extra_msa": -1}, "extra_msa must be from 0"),
        ({"precision": "fp16"}, "precision must be one of bf16, fp32"),
        ({"fold": 1}, "fold must be True or False"),
    ],
)
def test_options_out_of_range_are_refused_by_name(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PlanOptions(**settings)  # type: ignore[arg-type]
