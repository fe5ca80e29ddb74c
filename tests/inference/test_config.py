"""One declaration of the settings serves the command and Python, and decides what counts as the same run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from fastfold.errors import ConfigError
from fastfold.inference.api import _NOT_FOR_PYTHON
from fastfold.inference.config import FoldSettings, InferConfig, ManyFoldSettings
from fastfold.inference.setting_values import check_batch, parse_max_msa, parse_seeds


def test_a_budget_is_given_in_words_or_bytes() -> None:
    assert InferConfig().budget is None
    assert InferConfig(memory_budget="2GiB").budget == InferConfig(memory_budget=2 << 30).budget == 2 << 30


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("0", (0,)), ("0-4", (0, 1, 2, 3, 4)), ("7, 1,3-4 ,3", (7, 1, 3, 4)), ("2147483647", (2**31 - 1,))],
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: tuple[int, ...]) -> None:
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "-1", "4-2", "1,,2", "x", "0-200000", "2147483648", "1.5", "٣"])
def test_what_is_no_list_of_seeds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="seeds"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["512", "512:", "0:1", "1:0", "a:b", "1:2:3", "-1:2"])
def test_what_is_no_number_of_rows_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_msa"):
        parse_max_msa(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_recycles": -1}, "num_recycles must be from 0 to 1000, found -1"),
        ({"num_recycles": 1.5}, "num_recycles must be a whole number, found 1.5"),
        ({"num_recycles": True}, "num_recycles must be a whole number"),
        ({"num_recycles": "3"}, "num_recycles must be a whole number, found '3'"),
        ({"num_ensemble": 0}, "num_ensemble must be from 1"),
        ({"seeds": ()}, "seeds is empty"),
        ({"seeds": (1, -1)}, "seed must be from 0"),
        ({"seeds": ("1",)}, "seed must be a whole number"),
        ({"seeds": None}, "seeds must be"),
        ({"recycle_tolerance": "x"}, "recycle_tolerance must be a number"),
        ({"recycle_tolerance": float("nan")}, "recycle_tolerance must be from 0"),
        ({"stop_at_score": 101}, "stop_at_score must be from 0 to 100"),
        ({"rank": "best"}, "rank must be one of auto, plddt"),
        ({"precision": "fp64"}, "precision must be one of auto, fp32, bf16, bf16-products, int8"),
        ({"dropout": 1}, "dropout must be True or False"),
        ({"pae": "yes"}, "pae must be one of None, True, False"),
        ({"max_msa": (1,)}, "max_msa must be two numbers"),
        ({"max_msa": (1.0, 2)}, "max_msa must be a whole number"),
        ({"memory_budget": "lots"}, "'lots' is not"),
        ({"memory_budget": 1.5}, "memory"),
        ({"initial_guess": 3}, "initial_guess: expected a structure"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferConfig(**settings)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert InferConfig(num_recycles=np.int64(2), seeds=np.int32(3)).seeds == (3,)  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [0, 257, "many", True, 1.5])
def test_invalid_batches_are_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match="expected auto or a number from 1 to 256"):
        check_batch(batch)
    assert check_batch("4") == 4


def test_processes_are_counted_by_the_settings() -> None:
    assert [InferConfig(parallel=text).ranks for text in (None, "dap=1", "dap=4")] == [1, 1, 4]
    for text in ("dap=٣", "dap=-1", "dap=", "dap=2=2", "=1", "tp=2", 4):
        with pytest.raises(ConfigError, match="give parallel='dap=4'"):
            InferConfig(parallel=text)  # type: ignore[arg-type]


def test_typed_settings_of_python_are_the_fields() -> None:
    """Fields that Python does not take are left out, and those that its functions name themselves."""
    fields = {one.name: str(one.type) for one in dataclasses.fields(InferConfig)}
    taken = set(fields) - set(_NOT_FOR_PYTHON) - {"device", "embed"}
    typed = ManyFoldSettings.__annotations__ | FoldSettings.__annotations__
    found = {name: getattr(kind, "__forward_arg__", kind) for name, kind in typed.items()}
    assert {name: kind.replace("str | Path", "Path") for name, kind in found.items()} == {
        name: fields[name] for name in taken
    }
