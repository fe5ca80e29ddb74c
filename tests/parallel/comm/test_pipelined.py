"""Panels that one rank after another gives to all, or gets the sum of."""

from __future__ import annotations

import torch
from torch import Tensor

from fastfold.parallel.comm.async_ops import absent, broadcasts, sums
from fastfold.parallel.comm.groups import Group
from tests.helpers.thread_ranks import on_one_line

OWNERS = [2, 0, 1, 0]


def test_every_rank_gets_every_panel_from_its_owner_and_holds_one_ahead() -> None:
    def run(group: Group) -> tuple[list[float], list[str]]:
        events: list[str] = []

        def piece(panel: int) -> Tensor:
            events.append(f"give {panel}")
            own = torch.full((2, 3), 10.0 * panel + group.rank)
            return own if OWNERS[panel] == group.rank else absent(own, 2, 3)

        found = []
        for panel, tensor in enumerate(broadcasts(piece, OWNERS, group)):
            events.append(f"use {panel}")
            found.append(tensor.unique().item())
        return found, events

    expected = [10.0 * panel + owner for panel, owner in enumerate(OWNERS)]
    for found, events in on_one_line(3, run):
        assert found == expected
        # The next is on its way when one is used, and none after that.
        assert events == ["give 0", "give 1", "use 0", "give 2", "use 1", "give 3", "use 2", "use 3"]


def test_sums_stay_with_their_owners() -> None:
    def run(group: Group) -> list[list[float]]:
        terms = (torch.tensor([1.0 + group.rank, 10.0 * panel]) for panel in range(len(OWNERS)))
        return [total.tolist() for total in sums(terms, OWNERS, group)]

    totals = [[6.0, 30.0 * panel] for panel in range(len(OWNERS))]
    for rank, found in enumerate(on_one_line(3, run)):
        assert found == [total for total, owner in zip(totals, OWNERS, strict=True) if owner == rank]


def test_a_rank_alone_sends_nothing() -> None:
    group = Group(None)
    own = [torch.full((2,), float(panel)) for panel in range(3)]
    with group.reporter.record() as log:
        assert all(a is b for a, b in zip(broadcasts(own.__getitem__, [0] * 3, group), own, strict=True))
        assert all(a is b for a, b in zip(sums(own, [0] * 3, group), own, strict=True))
    assert log.entries == []


def test_what_is_absent_has_a_shape_and_no_memory() -> None:
    found = absent(torch.ones(1, dtype=torch.float64), 1000, 1000)
    assert (found.shape, found.dtype) == ((1000, 1000), torch.float64)
    assert found.untyped_storage().nbytes() == 8
