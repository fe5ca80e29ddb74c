"""One declaration of the settings serves the command and Python, and decides what counts as the same run."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fastfold.errors import ConfigError
from fastfold.evoformer.config import model_config
from fastfold.inference.config import InferConfig


def test_what_a_result_depends_on_is_recorded_and_nothing_else() -> None:
    """Where and in which pieces a target is folded does not make it another run."""
    recorded = InferConfig().recorded()
    assert list(recorded) == ["num_recycles", "seed", "precision", "plots", "pae"]
    moved = replace(InferConfig(), device="cpu", parallel="dap=2", memory_budget="1GiB")
    assert moved.recorded() == recorded
    assert {field.name for field in fields(InferConfig)} >= set(recorded)


def test_a_budget_is_given_in_words_or_bytes() -> None:
    assert InferConfig().budget is None
    assert InferConfig(memory_budget="2GiB").budget == InferConfig(memory_budget=2 << 30).budget == 2 << 30


def test_recycles_are_the_networks_own_unless_they_are_given() -> None:
    network = model_config("model_1")
    assert InferConfig().recycles(network) == network.model.num_recycle
    assert InferConfig(num_recycles=0).recycles(network) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_recycles": -1}, "num_recycles must not be negative"),
        ({"memory_budget": "lots"}, "'lots' is not"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferConfig(**settings)  # type: ignore[arg-type]
