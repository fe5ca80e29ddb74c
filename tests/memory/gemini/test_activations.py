"""Saved activations kept, recomputed or on the host, by one plan with the parameters: equal losses within a budget."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.memory import Access, Gemini, GeminiConfig, SimulatedDevice, Span, choose_spans, with_spans
from fastfold.memory.gemini.activations import SMALLEST
from tests.memory.gemini.gpt_runs import Managed, Plain, adam, build, gpt, plain_run, tokens

# Activations of a block are of the size of its parameters.
SIZES = {"layers": 6, "width": 32, "context": 32, "checkpointing": "none"}
LENGTH = 32


def unmanaged_peak() -> tuple[int, int]:
    """Most bytes of operators' tensors in a plain step, and bytes of the parameters."""
    device = SimulatedDevice(1 << 28)
    model = build(**SIZES)
    with device.running():
        gpt.next_token_loss(model(tokens(0, LENGTH)), tokens(0, LENGTH)).backward()
    return device.mark(), sum(p.nbytes for p in model.parameters())


def managed(budget: int, recompute: bool, policy: str = "auto") -> Managed:
    model = build(**SIZES)
    blocks = list(model.blocks) if recompute else []
    return Managed(model, adam(model), budget=budget, policy=policy, recompute=blocks)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["auto", "cpu", "nvme", "cuda"])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_are_bit_equal_whatever_happens_to_activations(policy, recompute):
    """In the first step, when all goes to the host, and in later ones, when the planner chooses; the budget is hard."""
    losses, plain = plain_run(4, length=LENGTH, **SIZES)
    budget = 1 << 22 if policy == "cuda" else 200_000 if recompute else 300_000
    run = managed(budget, recompute, policy)
    assert [run.loss_step(step, length=LENGTH) for step in range(4)] == losses
    for a, b in zip(plain.model.state_dict().values(), run.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert run.manager.device.peak <= budget
    if policy != "cuda":
        assert (run.manager.saved.recomputed > 0) == recompute
        assert run.manager.saved.sent > 0


def test_a_budget_that_the_activations_alone_exceed():
    """Without management operators' tensors alone would take several times the budget."""
    budget = 150_000
    peak, _ = unmanaged_peak()
    assert peak > 4 * budget
    run = managed(budget, recompute=True)
    assert [run.loss_step(i, length=LENGTH) for i in range(3)] == plain_run(3, length=LENGTH, **SIZES)[0]
    assert run.manager.device.peak <= budget


@pytest.mark.long
def test_the_more_room_the_less_is_sent_and_recomputed():
    """From all away to all kept; what is kept are the last blocks, whose turn comes first in the backward pass."""
    peak, parameters = unmanaged_peak()
    sent, recomputed = [], []
    for share in (0.25, 0.5, 0.75, 1.5):
        run = managed(int(share * (peak + parameters)), recompute=True)
        for step in range(3):
            run.loss_step(step, length=LENGTH)
        saved = run.manager.saved
        before = saved.sent, saved.recomputed
        run.loss_step(3, length=LENGTH)
        sent.append(saved.sent - before[0])
        recomputed.append(saved.recomputed - before[1])
    assert sent == sorted(sent, reverse=True)
    assert recomputed == sorted(recomputed, reverse=True)
    assert sent[0] > 0
    assert recomputed[0] > recomputed[-1] == 0 == sent[-1]
    assert 0 < recomputed[1] + recomputed[2] < 2 * SIZES["layers"], "some are kept, some are not"


def test_plans_are_followed_once_the_choice_is_made():
    """The first step is measured, the second is the first of its kind, from the third on nothing is unexpected."""
    run = managed(300_000, recompute=True)
    reacted = []
    for step in range(5):
        before = run.manager.residency.reacted
        run.loss_step(step, length=LENGTH)
        reacted.append(run.manager.residency.reacted - before)
    assert reacted[0] > 0
    assert reacted[2:] == [0, 0, 0]


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("budget", [200_000, 300_000])
def test_what_the_backward_pass_will_need_comes_back_beside_what_it_does(recompute, budget):
    """Where there is room; with the same numbers as without, and no chunk more that is waited for."""
    losses, waited, sent, chunks = [], [], [], []
    for lookahead in (0, 2):
        model = build(**SIZES)
        blocks = list(model.blocks) if recompute else []
        run = Managed(model, adam(model), budget=budget, recompute=blocks, lookahead=lookahead)
        losses.append([run.loss_step(step, length=LENGTH) for step in range(3)])
        saved, residency = run.manager.saved, run.manager.residency
        before = saved.waited, saved.sent, residency.waited
        losses[-1].append(run.loss_step(3, length=LENGTH))
        waited.append(saved.waited - before[0])
        sent.append(saved.sent - before[1])
        chunks.append(residency.waited - before[2])
        assert run.manager.device.peak <= budget
        assert run.manager.device.early_copy_bytes == 0
        assert run.manager.device.other == 0
    assert losses[0] == losses[1]
    assert waited[0] == sent[0]
    assert waited[1] <= 0.1 * waited[0]
    assert chunks[0] > 20
    assert chunks[1] == 0
    assert sent[1] <= sent[0] + 20_000, "what room is left free for costs no more than a tensor or two"


def test_what_is_on_its_way_is_called_off_where_the_step_goes_another_way():
    """Half a backward pass: the rest of what was begun takes no room afterwards."""
    run = managed(300_000, recompute=False)
    for step in range(3):
        run.loss_step(step, length=LENGTH)
    device, model = run.manager.device, run.model
    begin, begun = device.begin, []

    def stops(*arguments):
        begun.append(begin(*arguments))
        raise KeyboardInterrupt

    device.begin = stops
    with pytest.raises(KeyboardInterrupt), device.running():
        gpt.next_token_loss(model(tokens(3, LENGTH)), tokens(3, LENGTH)).backward()
    del device.begin
    assert device.early_copy_bytes > 0
    run.zero_grad()
    assert device.early_copy_bytes == 0
    assert device.take(begun[0]) is None
    assert run.loss_step(4, length=LENGTH) > 0
    assert device.other == 0


def test_what_is_on_the_host_is_given_back():
    """After the backward pass nothing of a step's activations is left, on the host or on the device."""
    run = managed(300_000, recompute=True)
    run.loss_step(0, length=LENGTH)
    on_host = run.manager.store.host.used
    for step in range(1, 4):
        run.loss_step(step, length=LENGTH)
        assert run.manager.store.host.used == on_host
        assert run.manager.device.other == 0
    assert on_host > SMALLEST


def test_longer_inputs_are_measured_anew():
    """What was decided for short sequences is not applied to longer ones of the same bucket."""
    model = build(**SIZES)
    plain, run = Plain(model, adam(model)), managed(200_000, recompute=True)
    for step, length in enumerate((20, 20, 20, 32, 32, 32, 24)):
        assert run.loss_step(step, length=length) == plain.loss_step(step, length=length)
    assert run.manager.device.peak <= 200_000


def test_dropout_in_recomputed_blocks():
    """Random numbers of a recomputed block are those of its first run."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(
            torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)) for _ in range(4))
            )
        )
    manager = Gemini(models[1], config=GeminiConfig(budget=70_000, recompute=list(models[1])))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for step in range(3):
        for model in models:
            torch.manual_seed(step)
            with manager.device.running() if model is models[1] else nullcontext():
                model(x).square().mean().backward()
        with manager.params_on_host():
            for a, b in zip(*(m.parameters() for m in models), strict=True):
                assert torch.equal(a.grad, b.grad)
        manager.zero_grad()
        models[0].zero_grad()
    assert manager.saved.recomputed > 0


@st.composite
def nested(draw: st.DrawFn) -> tuple[list[Access], dict[int, int], int, list[Span]]:
    """A forward and backward pass over blocks whose saved tensors may stay."""
    blocks = draw(st.integers(2, 5))
    order = [*range(blocks), *reversed(range(blocks))]
    trace = [Access(frozenset({b}), draw(st.integers(0, 5))) for b in order]
    sizes = {b: draw(st.integers(1, 9)) for b in range(blocks)}
    spans = [Span(draw(st.integers(1, 12)), b, 2 * blocks - 2 - b) for b in range(blocks)]
    least = max(sizes[b] + a.other for b, a in zip(order, trace, strict=True))
    return trace, sizes, least + draw(st.integers(0, 30)), spans


@given(nested())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_spans_and_chunks_compete_for_the_same_room(problem):
    """What stays fits, and together with the chunks it saves nearly as many bytes as the best choice of all."""
    trace, sizes, budget, spans = problem
    volatile = frozenset(sizes)

    def saved(kept: tuple[int, ...]) -> float:
        raised = with_spans(trace, [spans[i] for i in kept])
        if any(sum(sizes[c] for c in a.chunks) + a.other > budget for a in raised):
            return -1.0
        # In a forward and backward pass the shortest stays of chunks are the best, one of each chunk.
        total, room = (
            sum(spans[i].size for i in kept),
            [budget - a.other - sum(sizes[c] for c in a.chunks) for a in raised],
        )
        best = 0
        for chosen in chain.from_iterable(combinations(sizes, n) for n in range(len(sizes) + 1)):
            left = list(room)
            for c in chosen:
                for p in range(c + 1, len(trace) - 1 - c):
                    left[p] -= sizes[c]
            if min(left) >= 0:
                best = max(best, sum(sizes[c] for c in chosen))
        return total + best

    kept = tuple(sorted(choose_spans(trace, sizes, budget, spans, volatile=volatile)))
    options = chain.from_iterable(combinations(range(len(spans)), n) for n in range(len(spans) + 1))
    assert saved(kept) >= 0.9 * max(map(saved, options))
