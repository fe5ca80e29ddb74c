"""Old names of attributes and methods work for one release, with a warning that names the new one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import fastfold
from fastfold.data.targets import Chain, Target
from fastfold.data.templates.select import ChainTemplates
from fastfold.data.training.sampling import Filtered
from fastfold.products.design import hallucination
from fastfold.products.ensemble.members import Member
from fastfold.utils.lazy import old_attributes, old_methods
from tests.helpers.results import helix_prediction


@old_attributes({"number": "count"})
@old_methods({"show": "json:dumps"})
@dataclass(frozen=True)
class Box(dict):  # type: ignore[type-arg]
    """Class with an old attribute and an old method."""

    count: int = 3


def test_an_old_attribute_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"Box\.number is Box\.count now"):
        assert Box(5).number == 5  # type: ignore[attr-defined]


def test_an_old_method_calls_the_function_with_the_object() -> None:
    with pytest.warns(DeprecationWarning, match=r"Box\.show is the function json\.dumps now"):
        assert Box().show(indent=1) == "{}"  # type: ignore[attr-defined]


def test_attributes_of_version_0_1_have_their_values() -> None:
    target = Target("t", (Chain("A", "MK"),), "", "t", ())
    filtered = Filtered((), {"short": 2}, ())
    olds = {
        "scored_structure": (target, "given", None),
        "examined": (ChainTemplates(examined=4), "found", 4),
        "removed": (filtered, "taken", {"short": 2}),
        "bound_ca": (hallucination(12), "given", None),
        "prediction": (Member("p", None, np.zeros(1), np.zeros(2)), "found", "p"),  # type: ignore[arg-type]
    }
    for new, (thing, old, value) in olds.items():
        with pytest.warns(DeprecationWarning, match=f"{type(thing).__name__}.{old} is .*{new} now"):
            assert getattr(thing, old) == value == getattr(thing, new)


def test_methods_of_a_prediction_are_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    prediction = helix_prediction("one", 6)
    monkeypatch.setattr(fastfold, "relax_prediction", lambda one, config=None: (one, config))
    with pytest.warns(DeprecationWarning, match=r"fastfold\.relax_prediction now"):
        assert prediction.relax("config") == (prediction, "config")  # type: ignore[attr-defined]
    monkeypatch.setattr(fastfold, "view", lambda one, *, height: (one, height))
    with pytest.warns(DeprecationWarning, match=r"fastfold\.view now"):
        assert prediction.view(height=3) == (prediction, 3)  # type: ignore[attr-defined]
