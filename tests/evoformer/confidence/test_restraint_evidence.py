"""Probabilities of restraints by the distogram, against sums that are written out."""

from __future__ import annotations

import torch

from fastfold.evoformer.confidence.restraint_evidence import LimitedPairs, limit_probabilities
from fastfold.evoformer.execution import ExecutionPolicy, LazyRows

EDGES = torch.linspace(2.3125, 21.6875, 63)
MIDDLES = 2.15625 + 0.3125 * torch.arange(64)


def pairs(*limits: tuple[int, int, float, float]) -> LimitedPairs:
    first, second, low, high = zip(*limits, strict=True)
    return LimitedPairs(torch.tensor(first), torch.tensor(second), torch.tensor(low), torch.tensor(high))


def test_probabilities_are_sums_over_bins_and_pairs() -> None:
    torch.manual_seed(0)
    length = 9
    logits = torch.randn(length, length, 64)
    index = torch.tensor([0, 1, 2, 3, 4, 205, 206, 207, 208])  # two chains
    present = torch.arange(length) < 8
    given = pairs((1, 4, 0.0, 8.0), (6, 2, 10.0, float("inf")), (5, 7, 4.0, 4.01))
    found = limit_probabilities(logits, EDGES, given, residue_index=index, present=present)
    share = logits.softmax(-1)
    chosen = [MIDDLES <= 8.0, MIDDLES >= 10.0, (MIDDLES - 4.005).abs() == (MIDDLES - 4.005).abs().min()]
    apart = (index[:, None] - index).abs().clamp(max=40)
    both = present[:, None] & present
    for number, inside in enumerate(chosen):
        i, j = int(given.first[number]), int(given.second[number])
        usual = share[(apart == apart[i, j]) & both][:, inside].sum(-1).mean()
        expected = torch.stack([share[i, j][inside].sum(), usual])
        torch.testing.assert_close(found[number], expected)
    assert int(chosen[2].sum()) == 1


def test_rows_of_ranks_and_blocks_add_up() -> None:
    torch.manual_seed(1)
    logits, index = torch.randn(7, 7, 64), torch.arange(7)
    given = pairs((0, 6, 0.0, 8.0), (6, 1, 0.0, 12.0))
    places = {"residue_index": index, "present": torch.ones(7, dtype=torch.bool)}
    whole = limit_probabilities(logits, EDGES, given, **places)
    sent: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        sent.append(x)
        return x

    limit_probabilities(logits[:3], EDGES, given, sum_over_ranks=keep, **places)
    found = limit_probabilities(
        logits[3:], EDGES, given, first_row=3, sum_over_ranks=lambda x: x + sent[0], **places
    )
    torch.testing.assert_close(found, whole)
    lazy = LazyRows(
        lambda rows: logits[rows], tuple(logits.shape), ExecutionPolicy(block_elements=7 * 64 * 2)
    )
    torch.testing.assert_close(limit_probabilities(lazy, EDGES, given, **places), whole)
