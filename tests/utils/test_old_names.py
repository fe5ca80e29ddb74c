"""Old names of attributes and methods work for one release, with a warning that names the new one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import fastfold
from fastfold import kernels, parallelize
from fastfold.data.targets import Chain, Target
from fastfold.data.templates.select import ChainTemplates
from fastfold.data.training.sampling import Filtered
from fastfold.errors import ConfigError
from fastfold.parallel.data_parallel.large_batch import Lamb
from fastfold.products.design import hallucination, run_designs
from fastfold.products.ensemble.members import Member
from fastfold.protein.metrics.interface import without_scores
from fastfold.utils.lazy import old_arguments, old_attributes, old_functions, old_keywords, old_methods
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


@old_keywords({"number": "count"})
def _repeat(letter: str, *, count: int) -> str:
    return letter * count


def test_an_old_keyword_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"_repeat\(number=\) is _repeat\(count=\) now") as warned:
        assert _repeat("a", number=2) == "aa"  # type: ignore[call-arg]
    assert warned[0].filename == __file__
    assert _repeat("a", count=3) == "aaa"
    with pytest.raises(TypeError, match="count= or its old name number=, not both"):
        _repeat("a", count=2, number=2)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Parcel:
    """Request of :func:`_send`."""

    content: str
    copies: int = 1
    stamp: str = "red"


@old_arguments(Parcel, {"color": "stamp"})
def _send(request: Parcel, *, say: Callable[[str], None] = print) -> Parcel:
    say(request.content)
    return request


def test_arguments_of_old_are_fields_of_the_request() -> None:
    lines: list[str] = []
    with pytest.warns(DeprecationWarning, match="_send takes a Parcel now"):
        assert _send("book", 2, color="blue", say=lines.append) == Parcel("book", 2, "blue")  # type: ignore[call-arg,arg-type]
    with pytest.warns(DeprecationWarning, match="takes a Parcel"):
        assert _send(content="pen", copies=None, say=lines.append) == Parcel("pen")  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _send(Parcel("map"), say=lines.append) == _send(request=Parcel("map"), say=lines.append)
    assert lines == ["book", "pen", "map", "map"]
    with pytest.warns(DeprecationWarning, match="Parcel"), pytest.raises(TypeError, match="weight"):
        _send("book", weight=3)  # type: ignore[call-arg,arg-type]


def test_arguments_of_version_0_1_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(DeprecationWarning, match=r"without_scores\(scores=\) now"):
        assert without_scores(found={"pairs": {}}, reason="one chain")["reason"] == "one chain"  # type: ignore[call-arg]
    task = hallucination(12)
    with pytest.warns(DeprecationWarning, match=r"task_losses now"):
        assert "plddt" in task.losses(torch.device("cpu"), torch.float32)  # type: ignore[attr-defined]
    shown: list[object] = []
    monkeypatch.setattr(
        "fastfold.products.design.tasks.losses.check_losses", lambda *passed: shown.extend(passed)
    )
    with pytest.warns(DeprecationWarning, match="check_losses now"):
        task.check_losses({"con": 1.0})  # type: ignore[attr-defined]
    assert shown == [task, {"con": 1.0}]
    old_call = pytest.warns(DeprecationWarning, match="run_designs takes a DesignRequest now")
    with old_call, pytest.raises(ConfigError, match="unheard"):
        run_designs(task, tmp_path, config=None, where="unheard>1")  # type: ignore[call-arg,arg-type]


def test_an_old_function_is_the_new_one_of_its_package() -> None:
    get = old_functions("json", {"write": "dumps"})
    with pytest.warns(DeprecationWarning, match=r"json\.write is json\.dumps now"):
        assert get("write") is json.dumps
    with pytest.raises(AttributeError, match="module 'json' has no attribute 'read'"):
        get("read")


def test_american_spellings_are_new_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"kernels\.normalized_linear now"):
        assert kernels.normalised_linear is kernels.normalized_linear
    lamb = Lamb({"w": torch.nn.Parameter(torch.ones(2))})
    with pytest.warns(DeprecationWarning, match=r"Lamb\.initialize now"):
        lamb.initialise()  # type: ignore[attr-defined]
    assert len(lamb.state) == 1
    with pytest.warns(DeprecationWarning, match=r"parallelize\(initialize=\) now"):
        parallelize(torch.nn.Linear(2, 2), {}, initialise=None)  # type: ignore[call-arg]


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
