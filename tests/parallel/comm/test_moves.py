"""Moves of cut tensors between ranks, with the exchange of their pieces in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fastfold.parallel.comm.moves import BoxMove, Move, Shards

UNEVEN, EVEN = (3, 1, 2), (2, 2, 2)


def exchanged(moves: Sequence[Any], parts: Sequence[Tensor]) -> list[Tensor]:
    """Results of all ranks, each with its own move and part; shapes of messages are those that were expected."""
    sent = [list(move.pieces(x)) for move, x in zip(moves, parts, strict=True)]
    results = []
    for rank, (move, own) in enumerate(zip(moves, parts, strict=True)):
        received = [pieces[rank] for pieces in sent]
        assert [x.shape for x in received] == move.shapes(own, rank)
        results.append(move.join(received))
    return results


@pytest.mark.parametrize("sizes", [UNEVEN, EVEN])
@pytest.mark.parametrize(
    ("before", "after", "op"),
    [(0, 1, "all_to_all"), (1, 0, "all_to_all"), (0, None, "all_gather"), (None, 1, "reduce_scatter")],
)
def test_a_move_cuts_joins_and_sums(
    sizes: tuple[int, ...], before: int | None, after: int | None, op: str
) -> None:
    whole = torch.randn(6, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cuts = {dim: Shards(dim, sizes) for dim in (0, 1)}
    move = Move(None if before is None else cuts[before], None if after is None else cuts[after])
    assert move.op == op
    assert move.even == (sizes == EVEN)
    assert (move.adjoint.before, move.adjoint.after) == (move.after, move.before)
    # Ranks hold shards, or terms of a sum.
    parts = (
        [whole * share for share in (1.0, -2.0, 4.0)] if before is None else list(whole.split(sizes, before))
    )
    total = sum(parts) if before is None else whole
    assert {move.whole(x) for x in parts} == {whole.shape}
    expected = [total] * 3 if after is None else list(total.split(sizes, after))
    for found, wanted in zip(exchanged([move] * 3, parts), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    if move.even:
        stacked = [move.stacked(x) for x in parts]
        for rank, wanted in enumerate(expected):
            joined = move.join_stacked(torch.stack([pieces[rank] for pieces in stacked]))
            torch.testing.assert_close(joined, wanted)


@pytest.mark.parametrize("filled", [(6, 6), (8, 9)])
@pytest.mark.parametrize("sizes", [UNEVEN, EVEN])
def test_a_joined_matrix_is_filled_with_zeros(sizes: tuple[int, ...], filled: tuple[int, int]) -> None:
    whole = torch.randn(2, 6, 6)
    move = Move(Shards(1, sizes), None, filled)
    parts = list(whole.split(sizes, 1))
    expected = torch.zeros(2, *filled)
    expected[:, :6, :6] = whole
    assert all(torch.equal(found, expected) for found in exchanged([move] * 3, parts))
    if move.even:
        assert torch.equal(move.join_stacked(torch.stack(parts)), expected)


def test_boxes_are_exchanged_where_they_overlap() -> None:
    """Four quarters become uneven strips of rows, one of them empty."""
    whole = torch.randn(3, 5, 4)
    rows, columns = (slice(0, 2), slice(2, 5)), (slice(0, 3), slice(3, 4))
    quarters = [(row, column) for row in rows for column in columns]
    strips = [(slice(a, b), slice(0, 4)) for a, b in ((0, 1), (1, 4), (4, 4), (4, 5))]
    for source, target in ((quarters, strips), (strips, quarters)):
        moves = [BoxMove((1, 2), source, target, rank) for rank in range(4)]
        parts = [whole[:, row, column] for row, column in source]
        for found, (row, column) in zip(exchanged(moves, parts), target, strict=True):
            assert torch.equal(found, whole[:, row, column])
