"""The cost model gives published throughputs of language models within a factor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.published_models import PUBLISHED, SOURCES, WITHIN, PublishedModel, _workload, predict
from fastfold.parallel import ParallelPlan
from fastfold.parallel.planner.cost_model import compute_seconds
from fastfold.parallel.planner.hardware import GENERAL, rates
from fastfold.parallel.planner.recorder import Operation, Part, Recorder


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda of: f"{of.name}-{of.gpus}")
def test_published_throughputs_are_predicted_within_a_factor(published: PublishedModel) -> None:
    ratio = predict(published) / published.tokens_per_second
    assert 1 / WITHIN < ratio < WITHIN, f"{published.name}: {ratio:.2f} times the published"


def test_there_are_at_least_five_with_their_sources() -> None:
    assert len(PUBLISHED) >= 5
    assert WITHIN == 1.5
    assert {of.source for of in PUBLISHED} == set(SOURCES)


def test_most_throughputs_only_check_the_constants() -> None:
    """Fitted are MPT's on H100; another program, another GPU and networks of a tenth of the size are not."""
    checked = [of for of in PUBLISHED if not of.fitted]
    assert {(of.source, of.gpu) for of in PUBLISHED if of.fitted} == {("llm-foundry", "h100")}
    assert len(checked) >= 9
    assert {of.gpu for of in checked} == {"a100", "a100-40gb", "h100"}
    assert sum(of.width == 768 for of in checked) >= 3
    assert any(of.llama for of in checked)


def test_products_of_a_gpt_are_those_of_its_formula() -> None:
    """24 L w² + 2 w V a token, and a causal attention; twice that backward. A lost or doubled operator is noticed."""
    gpt = next(of for of in PUBLISHED if of.name == "GPT-2 124M")
    gpt = replace(gpt, micro=2, samples=16)
    workload = _workload(gpt)
    blocks = 24 * gpt.layers * gpt.width**2 + 2 * gpt.layers * gpt.context * gpt.width
    tokens, head = gpt.micro * gpt.context, 2 * gpt.width * gpt.vocabulary
    forward, backward, kept = 0.0, 0.0, 0.0
    for name, region in workload.trace(ParallelPlan()).regions.items():
        forward += workload.repeat(name).count * region.forward.flops
        backward += workload.repeat(name).count * region.backward.flops
        kept += region.kept if workload.repeat(name).layers else 0.0
    assert forward == pytest.approx(tokens * (blocks + head), rel=1e-9)
    # Fused attention computes its scores again: five products for two.
    again = 0.5 * 2 * gpt.layers * gpt.context * gpt.width
    assert backward == pytest.approx(tokens * (2 * (blocks + head) + again), rel=1e-9)
    # Bytes that a block keeps under autocast for a token and channel, in addition to its input: the stream after the
    # attention in float32; in bfloat16 two norms, queries, keys, values, the attention's result, and the hidden
    # channels before and after GELU. Two norms keep two statistics, the attention one for each head.
    of_channel = 4 + 2 * (2 + 3 + 1 + 2 * 4)
    statistics = 4 * (2 * 2 + gpt.heads)
    weights = 2 * 12 * gpt.width**2
    assert kept - weights == pytest.approx(tokens * (of_channel * gpt.width + statistics), rel=1e-3)


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
