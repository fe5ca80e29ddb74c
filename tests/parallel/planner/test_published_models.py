"""The cost model gives published throughputs of language models within a factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.published_models import PUBLISHED, SOURCES, WITHIN, PublishedModel, predict
from fastfold.parallel.planner.cost_model import compute_seconds
from fastfold.parallel.planner.fake_run import Operation, Part, Recorder
from fastfold.parallel.planner.hardware import GENERAL, rates


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda of: f"{of.name}-{of.gpus}")
def test_published_throughputs_are_predicted_within_a_factor(published: PublishedModel) -> None:
    ratio = predict(published) / published.tokens_per_second
    assert 1 / WITHIN < ratio < WITHIN, f"{published.name}: {ratio:.2f} times the published"


def test_there_are_at_least_five_with_their_sources() -> None:
    assert len(PUBLISHED) >= 5
    assert WITHIN == 1.5
    assert {of.source for of in PUBLISHED} == set(SOURCES)


def test_the_efficiency_of_a_product_grows_with_its_intensity() -> None:
    speeds = rates("h100", GENERAL)

    def share(size: int) -> float:
        flops, traffic = 2.0 * size**3, 3 * 2.0 * size**2
        part = Part()
        part.operations[Operation("mm", "bfloat16", flops, traffic, 1)] = 1
        return flops / compute_seconds(part, speeds) / speeds.sheet.matrix_rates["bfloat16"]

    assert share(512) < share(2048) < share(16384) < GENERAL.matrix_share
    assert share(16384) > 0.9 * GENERAL.matrix_share
    assert share(512) < 0.3 * GENERAL.matrix_share


def test_attention_takes_no_less_than_its_exponentials_and_instructions() -> None:
    """Of 32 channels a head, the exponentials take longer than the products."""
    speeds = rates("h100", GENERAL)
    assert speeds.scores == pytest.approx(3.9e12 / (10 / 8))
    few = replace(speeds, assumptions=replace(GENERAL, score_instructions=4))
    assert few.scores == 3.9e12
    part, without = Part(), Part()
    part.operations[Operation("attention", "bfloat16", 4e12 * 4, 0.0, 1, exponentials=4e12)] = 1
    without.operations[Operation("attention", "bfloat16", 4e12 * 4, 0.0, 1)] = 1
    assert compute_seconds(part, speeds) == pytest.approx(4e12 / speeds.scores + GENERAL.kernel_seconds)
    assert compute_seconds(without, speeds) < 0.1 * compute_seconds(part, speeds)


@pytest.mark.parametrize("causal", [False, True])
def test_exponentials_of_attention_are_its_scores(causal: bool) -> None:
    q = torch.zeros(2, 3, 8, 16, requires_grad=True)
    recorder = Recorder(torch.nn.Identity())
    with recorder:
        F.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().backward()
    region = recorder.result().regions[""]
    scores = 2 * 3 * 8 * 8 * (0.5 if causal else 1.0)
    for part in (region.forward, region.backward):
        assert [o.exponentials for o in part.operations if "attention" in o.name] == [scores]
    assert region.forward.flops == 4 * 16 * scores
