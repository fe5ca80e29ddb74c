"""Boxes on ranks to other boxes: what a rank gets is that part of the whole, and gradients go the way back."""

from __future__ import annotations

import pytest
import torch

from fastfold.parallel.comm.collectives import redistribute_async
from fastfold.parallel.comm.groups import Group
from fastfold.parallel.comm.moves import Box
from tests.helpers.thread_ranks import on_one_line

ROWS = [(slice(0, 3), slice(0, 6)), (slice(3, 3), slice(0, 6)), (slice(3, 7), slice(0, 6))]
BLOCKS = [(slice(0, 5), slice(0, 2)), (slice(5, 7), slice(0, 6)), (slice(0, 5), slice(2, 6))]
WHOLE = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(2, 7, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _part(x: torch.Tensor, box: Box) -> torch.Tensor:
    rows, columns = box
    return x[:, rows, :, columns]


@pytest.mark.parametrize(("source", "target"), [(ROWS, BLOCKS), (BLOCKS, ROWS)], ids=["to blocks", "to rows"])
def test_boxes_are_those_of_the_whole(source: list[Box], target: list[Box]) -> None:
    """Of uneven sizes, and one of them empty; the second and the last dimension are cut."""

    def run(group: Group) -> tuple[bool, bool]:
        own = _part(WHOLE, source[group.rank]).clone().requires_grad_()
        out = redistribute_async(own, (1, -1), source, target, group).wait()
        (out * _part(WEIGHT, target[group.rank])).sum().backward()
        return torch.equal(out, _part(WHOLE, target[group.rank])), torch.equal(
            own.grad, _part(WEIGHT, source[group.rank])
        )

    assert on_one_line(3, run) == [(True, True)] * 3


def test_a_layout_that_is_there_already_sends_nothing() -> None:
    def run(group: Group) -> int:
        own = _part(WHOLE, ROWS[group.rank])
        with group.reporter.record() as log:
            assert torch.equal(redistribute_async(own, (1, 3), ROWS, list(ROWS), group).wait(), own)
        return len(log.entries)

    assert on_one_line(3, run) == [0] * 3


def test_boxes_that_are_not_what_a_rank_holds_are_refused() -> None:
    def run(group: Group) -> None:
        for x, source in (
            (_part(WHOLE, ROWS[group.rank])[:, :1], [ROWS[2]] * 3),
            (_part(WHOLE, ROWS[group.rank]), ROWS[:2]),
        ):
            with pytest.raises(ValueError, match="in dimensions"):
                redistribute_async(x, (1, 3), [*source][: len(source)], BLOCKS, group)

    on_one_line(2, run)
