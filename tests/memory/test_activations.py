"""Saved activations at home: equal gradients, less memory, and no more traffic than the budget asks for."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from fastfold.memory import ActivationTier, Gemini, NvmeTier, SimulatedDevice

from .gpt_runs import Plain, adam, build, gpt, tokens


def train_step(model: torch.nn.Module, device: SimulatedDevice, tier: ActivationTier | None) -> int:
    """One forward and backward pass; returns the bytes of operators' tensors between the two."""
    model.zero_grad(set_to_none=True)
    with device.running():
        with tier.saving((8,)) if tier is not None else nullcontext():
            loss = gpt.next_token_loss(model(tokens(0)), tokens(0))
        between = device.other
        loss.backward()
    return between


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_gradients_are_bit_equal_whatever_goes_home(home, tmp_path):
    """In the first pass, when all goes home, and in later ones, when the planner chooses."""
    device = SimulatedDevice(1 << 24)
    plain, model = (build(layers=4, checkpointing="none") for _ in range(2))
    train_step(plain, device, None)
    tier = ActivationTier(model, device, 20_000, NvmeTier(tmp_path) if home == "nvme" else None, smallest=256)
    for _ in range(3):
        train_step(model, device, tier)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert tier.home.used == 0, "what was at home is given back"


def test_memory_follows_the_budget_and_traffic_what_does_not_fit():
    """With no room all goes home; with some, some; with all of it, nothing: and memory between the passes follows."""
    device = SimulatedDevice(1 << 24)
    model = build(layers=6, width=32, checkpointing="none")
    for parameter in model.parameters():
        device.hold(parameter)
    unmanaged = train_step(model, device, None)
    kept, traffic = [], []
    for budget in (1, 60_000, 1 << 24):
        tier = ActivationTier(model, device, budget, smallest=256)
        train_step(model, device, tier)
        before = tier.sent
        kept.append(train_step(model, device, tier))
        traffic.append(tier.sent - before)
    assert kept[0] < kept[1] < kept[2] == unmanaged
    assert kept[1] - kept[0] <= 60_000
    assert traffic[0] > traffic[1] > traffic[2] == 0


def test_managed_parameters_and_activations_together():
    """Without checkpointing, on a budget that the activations alone exceed: bit-equal, and within the budget."""
    plain_model, model = (build(layers=16, checkpointing="none") for _ in range(2))
    plain = Plain(plain_model, adam(plain_model))
    measured = SimulatedDevice(1 << 24)
    budget = 60_000
    optimizer = adam(model)
    manager = Gemini(model, optimizer, budget=budget)
    tier = ActivationTier(model, manager.device, 10_000, smallest=256)
    for step in range(3):
        with manager.device.running():
            with tier.saving((8,)):
                loss = gpt.next_token_loss(model(tokens(step)), tokens(step))
            loss.backward()
            manager.step()
            manager.zero_grad()
        assert loss.item() == plain.loss_step(step)
        del loss
    for parameter in plain_model.parameters():
        measured.hold(parameter)
    parameters = measured.used
    assert train_step(plain_model, measured, None) - parameters > budget
    assert manager.device.peak <= budget
