"""Traces in between two recorded ones are those that recording gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.gpt.gpt import GPT, GPTConfig, next_token_loss
from fastfold.parallel.planner.batch_traces import BatchTraces
from fastfold.parallel.planner.recorder import Recorder, Trace


def gpt_trace(rows: int) -> Trace:
    torch.manual_seed(0)
    tokens = torch.zeros(rows, 16, dtype=torch.int64)
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=2, heads=2, width=8))
    return Recorder(model).record(lambda m: next_token_loss(m(tokens), tokens), ["blocks.0", "blocks.1"])


def totals(trace: Trace) -> dict[tuple[str, str], tuple[float, float, float, int]]:
    return {
        (name, direction): (
            sum(o.flops * n for o, n in part.operations.items()),
            sum(o.traffic * n for o, n in part.operations.items()),
            sum(o.exponentials * n for o, n in part.operations.items()),
            sum(o.launches * n for o, n in part.operations.items()),
        )
        for name, region in trace.regions.items()
        for direction, part in (("forward", region.forward), ("backward", region.backward))
    }


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_traces_in_between_are_those_of_a_recording(rows: int) -> None:
    """Work, kept bytes and the peak of a GPT, to rounding; two recordings serve all numbers."""
    recorded = list[int]()

    def record(n: int) -> Trace:
        recorded.append(n)
        return gpt_trace(n)

    traces = BatchTraces(record)
    traces.at(8)
    found, expected = traces.at(rows), gpt_trace(rows)
    traces.at(4)
    assert recorded == [8, 2]
    assert totals(found).keys() == totals(expected).keys()
    for key, values in totals(expected).items():
        assert totals(found)[key] == pytest.approx(values, rel=1e-9)
    for name, region in expected.regions.items():
        assert found.regions[name].kept == pytest.approx(region.kept, abs=2)
        assert found.regions[name].entering == pytest.approx(region.entering, abs=2)
        assert found.regions[name].parameters == region.parameters
    assert expected.peak <= found.peak * (1 + 1e-9)
    assert found.peak < 1.2 * expected.peak


class Routed(nn.Module):
    """Layer with another operator for three samples and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[rows, 4]``."""
        return self.layer(x) if len(x) < 3 else self.layer(x).sigmoid()


def test_a_model_with_other_operators_is_recorded_again() -> None:
    recorded = list[int]()

    def record(n: int) -> Trace:
        recorded.append(n)
        return Recorder(model).record(lambda m: m(torch.zeros(n, 4)).sum(), [])

    model = Routed()
    traces = BatchTraces(record)
    for rows in (8, 4, 2):
        traces.at(rows)
    assert recorded == [8, 2, 4]
