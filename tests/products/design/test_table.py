"""Rows of the table of designs, from folds of chosen figures."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fastfold.products.design.limits import Limits, Share
from fastfold.products.design.results import table
from fastfold.products.design.results.filters import Filter
from fastfold.products.design.results.table import PASSED, open_ring

LOG = [{"loss": 9.0}, {"loss": 2.5}]


def design(**changes: Any) -> Any:
    """Return a binder that folds with a target, alone, with two further targets and with an off-target."""
    names = ("d", "d_alone", "d_target_2", "d_target_3", "d_off_1")
    tasks = {name: SimpleNamespace(target=name, in_designed=np.arange(3) > 0) for name in names}
    state = SimpleNamespace(
        step=7,
        best_loss=1.5,
        log=LOG,
        plddt=np.array([70.0, 81.0]),
        positions=np.arange(27.0).reshape(3, 3, 3),
    )
    values = {
        "name": "d", "sequences": ("MKV", "AAK"), "designed": "AAK", "complexes": tasks, "state": state,
        "is_external": False, "is_given_up": False, "score": None,
        "task": SimpleNamespace(residue_columns={"chains": "A1-3", "hotspots": "", "kept": ""}),
    }  # fmt: skip
    return SimpleNamespace(**(values | changes))


def fold(model: str, plddt: float = 80.0) -> Any:
    return SimpleNamespace(scores={"model": model, "plddt": [plddt, plddt + 10.0]})


FIGURES: dict[tuple[str, str], dict[str, float]] = {
    ("d", "m1"): {
        "pTM": 0.5,
        "i_pTM": 0.75,
        "i_pAE": 0.25,
        "RMSD": 1.25,
        "dSASA": 812.4,
        "n_InterfaceHbonds": 3.0,
    },
    ("d", "m2"): {"pTM": 0.25, "i_pTM": 0.5},
    ("d_alone", "m1"): {"Binder_RMSD": 1.0, "Binder_pLDDT": 0.9},
    ("d_alone", "m2"): {"Binder_RMSD": 2.0, "Binder_pLDDT": 0.8},
    ("d_target_2", "m1"): {"i_pTM": 0.6},
    ("d_target_3", "m1"): {"i_pTM": 0.4},
    ("d_off_1", "m1"): {"i_pTM": 0.3},
}


@pytest.fixture
def folds(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {}
    for name, model in FIGURES:
        made.setdefault(name, []).append(fold(model))
    monkeypatch.setattr(table, "_figures", lambda one, name, found: FIGURES[name, found.scores["model"]])
    monkeypatch.setattr(table, "suitable", lambda networks, target: networks)
    return made


def row(
    one: Any, folds: dict[str, list[Any]], *filters: Filter, limits: Limits | None = None
) -> dict[str, Any]:
    networks: Any = [SimpleNamespace(name=name) for name in ("m1", "m2")]
    return table._row(one, folds, networks, filters, limits)


def test_a_row_has_the_best_fold_and_the_worst_of_others(folds: dict[str, list[Any]]) -> None:
    """Means over networks: the lowest interface of further targets, and the highest of off-targets."""
    assert row(design(), folds) == {
        "name": "d", "sequence": "MKV:AAK", "steps": 7, "charge": "+1", "filters": "", "folds": 2, "chains": "A1-3",
        "hotspots": "", "kept": "", "loss": "1.5000", "design_plddt": "75.50", "plddt": "85.00", "ptm": "0.500",
        "iptm": "0.750", "i_pae": "0.250", "rmsd": "1.25", "dsasa": "812", "hbonds": "3", "binder_rmsd": "1.50",
        "binder_plddt": "0.850", "target_iptm": "0.400", "off_iptm": "0.300", "note": "",
    }  # fmt: skip
    bare = row(design(), {})
    assert (bare["folds"], "plddt" in bare, "binder_rmsd" in bare, "off_iptm" in bare) == (
        0,
        False,
        False,
        False,
    )
    unsteady = design(state=SimpleNamespace(**{**vars(design().state), "best_loss": math.inf}))
    assert row(unsteady, folds)["loss"] == "2.5000"


@pytest.mark.parametrize(("score", "text"), [(1.25, "1.2500"), (0.0, "0.0000"), (None, "")])
def test_sequences_of_a_program_have_its_score(
    folds: dict[str, list[Any]], score: float | None, text: str
) -> None:
    found = row(design(is_external=True, score=score), folds)
    assert (found["program_score"], "loss" in found, "design_plddt" in found) == (text, False, False)


def test_notes_tell_of_limits_and_of_designs_that_were_given_up(folds: dict[str, list[Any]]) -> None:
    limits = Limits((Share("A", 0.0, 0.5),))
    (broken,) = limits.broken("AAK")
    assert row(design(), folds, limits=limits)["note"] == broken
    given_up = design(is_given_up=True)
    assert row(given_up, folds, limits=limits)["note"] == f"{broken}; given up after step 7"
    given_up.state.log = [*LOG, {"loss": 2.0, "reason": "no helix"}]
    assert row(given_up, folds)["note"] == "given up after step 7: no helix"


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (
            Filter("pTM", None, 0.375, higher=True),
            "target 2: Average_pTM is missing; target 3: Average_pTM is missing",
        ),
        (Filter("i_pTM", 1, 0.5, higher=True), "target 3: 1_i_pTM 0.4 < 0.5"),
        (Filter("i_pTM", None, 0.4, higher=True), PASSED),
        (Filter("i_pTM", None, 0.25, higher=False, is_off=True), "off 1: Average_Off_i_pTM 0.3 > 0.25"),
        (Filter("Binder_RMSD", None, 1.4, higher=False), "Average_Binder_RMSD 1.5 > 1.4"),
        (Filter("Binder_RMSD", 1, 1.4, higher=False), PASSED),
        (Filter("RMSD", 1, 1.0, higher=False), "1_RMSD 1.25 > 1"),
    ],
)
def test_filters_apply_to_their_folds(folds: dict[str, list[Any]], one: Filter, verdict: str) -> None:
    """Figures of the design itself are those of its own fold alone, and of a binder those of its fold alone."""
    assert row(design(), folds, one)["filters"] == verdict


def test_all_failed_filters_are_named(folds: dict[str, list[Any]]) -> None:
    filters = (Filter("i_pTM", 1, 0.8, higher=True), Filter("Binder_RMSD", 2, 1.9, higher=False))
    assert row(design(), folds, *filters)["filters"] == (
        "1_i_pTM 0.75 < 0.8; 2_Binder_RMSD 2 > 1.9; target 2: 1_i_pTM 0.6 < 0.8; target 3: 1_i_pTM 0.4 < 0.8"
    )


@pytest.mark.parametrize(
    ("gap", "is_open"), [(None, False), ("1.30", False), (table.MAX_PEPTIDE_BOND, False), ("4.10", True)]
)
def test_a_ring_is_closed_by_a_bond(gap: Any, is_open: bool) -> None:
    text = f"the ring is not closed: {gap} Å from C of its last residue to N of its first"
    assert open_ring({} if gap is None else {"ring_gap": gap}) == (text if is_open else None)


@pytest.mark.parametrize(
    ("cell", "value"),
    [("0.25", 0.25), ("-3", -3.0), (4, 4.0), ("passed", "passed"), ("", None), (None, None)],
)
def test_cells_of_a_condition_are_numbers_texts_or_empty(cell: Any, value: Any) -> None:
    assert table._value(cell) == value
