"""Features of the next pass are those of a call of its own, drawn while a GPU is busy."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastfold.inference.folding.drawn_ahead import DrawnAhead
from fastfold.inference.folding.network import NetworkPasses
from fastfold.inference.folding.prediction import TargetFold

Place = tuple[int, int]


class _Draws:
    """Function that remembers its calls, and who made them."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.threads: list[bool] = []
        self.broken: Place | None = None
        self.begun = {(c, m): threading.Event() for c in range(4) for m in range(3)}

    def __call__(self, cycle: int, member: int) -> Place:
        place = cycle, member
        self.places.append(place)
        self.threads.append(threading.current_thread() is threading.main_thread())
        self.begun[place].set()
        if place == self.broken:
            raise ValueError(f"broken {place}")
        return place


@pytest.mark.parametrize("members", [1, 2, 3])
def test_each_place_is_drawn_once_and_only_the_first_here(members: int) -> None:
    draws = _Draws()
    draw = DrawnAhead(draws, cycles=4, members=members)
    order = [(cycle, member) for cycle in range(4) for member in range(members)]
    assert [draw(*place) for place in order] == order
    assert draws.places == order
    assert draws.threads == [True] + [False] * (len(order) - 1)


def test_the_next_place_is_begun_before_it_is_asked_for() -> None:
    draws = _Draws()
    DrawnAhead(draws, cycles=3, members=1)(0, 0)
    assert draws.begun[1, 0].wait(10)


def test_passes_may_end_early_begin_again_and_continue() -> None:
    draws = _Draws()
    draw = DrawnAhead(draws, cycles=4, members=1)
    asked = [(0, 0), (1, 0), (0, 0), (2, 0), (3, 0), (0, 0)]
    assert [draw(*place) for place in asked] == asked


def test_an_error_belongs_to_its_place() -> None:
    draws = _Draws()
    draws.broken = (2, 0)
    draw = DrawnAhead(draws, cycles=3, members=1)
    assert [draw(0, 0), draw(1, 0)] == [(0, 0), (1, 0)]
    with pytest.raises(ValueError, match=r"broken \(2, 0\)"):
        draw(2, 0)


@pytest.mark.parametrize(("device", "is_ahead"), [("cpu", False), ("meta", True)])
def test_only_folds_on_another_device_draw_ahead(device: str, is_ahead: bool) -> None:
    """On a CPU, the pass has all cores."""
    draws = _Draws()
    fold: Any = SimpleNamespace(
        model=torch.nn.Linear(1, 1, device=device),
        features=draws,
        passes=NetworkPasses(num_recycles=1, num_ensemble=2),
    )
    source: Any = TargetFold.source(fold)
    order = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [source(*place) for place in order] == order
    assert draws.places == order
    assert draws.threads == [True] + [not is_ahead] * 3
