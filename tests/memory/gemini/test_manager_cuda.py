"""The same on a GPU: side streams, pinned memory and storages that come and go."""

from __future__ import annotations

import pytest
import torch

from fastfold.memory import Gemini, GeminiConfig, Tier
from fastfold.memory.devices.device import CudaDevice
from tests.memory.gemini.gpt_runs import build, gpt, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = {"layers": 8, "width": 256, "context": 64, "heads": 4, "checkpointing": "none"}
ROOM = 24 << 20
"""Bytes for chunks and activations, a fraction of the parameters."""


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with an epsilon above the gradients of biases of keys, which are rounding errors alone."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def small_budget() -> int:
    """``ROOM`` on top of what PyTorch has allocated, with the workspaces of its products."""
    x = torch.ones(256, 256, device="cuda", requires_grad=True)
    torch.nn.functional.linear(x, x, x[0]).sum().backward()
    del x
    return torch.cuda.memory_allocated() + ROOM


def train(policy: str | None, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor], Gemini | None]:
    """Losses, final parameters, and the manager."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model = build(**SIZES)
    manager = None
    if policy is None:
        model.cuda()
    optimizer = adam(model)
    if policy is not None:
        budget = 1 << 30 if policy == "cuda" else small_budget()
        manager = Gemini(
            model, optimizer, GeminiConfig(budget, policy, device="cuda", recompute=list(model.blocks))
        )
    losses = []
    for step in range(steps):
        batch = tokens(step, 64).cuda()
        loss = gpt.next_token_loss(model(batch), batch)
        loss.backward()
        (manager or optimizer).step()
        (manager or optimizer).zero_grad()
        losses.append(loss.item())
    state = {name: x.cpu().clone() for name, x in model.state_dict().items()}
    return losses, state, manager


@pytest.mark.parametrize("policy", ["auto", "cpu", "nvme", "cuda"])
def test_losses_and_parameters_are_those_of_the_unmanaged_run(policy):
    """The optimizer works on the host, whose roundings are its own: all but that is bit-equal."""
    losses, state, manager = train(policy)
    expected, plain, _ = train(None)
    assert losses[0] == expected[0], "the first forward pass is the same to the bit"
    assert losses == pytest.approx(expected, rel=1e-4)
    for name, x in plain.items():
        torch.testing.assert_close(state[name], x, rtol=1e-3, atol=1e-4)
    assert manager is not None
    if policy != "cuda":
        assert manager.store.loads > 0
        assert all(copy.is_pinned() for copy in manager.store._host_copies) or policy == "nvme"


def test_the_budget_is_kept_by_what_pytorch_has_allocated():
    """The allocator's own peak, chunks and activations together."""
    train("auto", steps=2)
    torch.cuda.empty_cache()
    budget = small_budget()
    torch.cuda.reset_peak_memory_stats()
    peaks = []
    model = build(**SIZES)
    optimizer = adam(model)
    manager = Gemini(model, optimizer, GeminiConfig(budget, device="cuda", recompute=list(model.blocks)))
    original = manager.device.mark

    def mark() -> int:
        # `mark` resets PyTorch's own peak, so it is read before.
        peaks.append(torch.cuda.max_memory_allocated())
        return original()

    manager.device.mark = mark  # type: ignore[method-assign]
    for step in range(4):
        batch = tokens(step, 64).cuda()
        gpt.next_token_loss(model(batch), batch).backward()
        manager.step()
        manager.zero_grad()
    assert max(peaks) <= budget


def test_loads_run_beside_the_work_and_arrive_before_their_use():
    """A long kernel on the main stream, and a load behind it on the side stream: its use waits for it."""
    device = CudaDevice(1 << 30, torch.device("cuda"))
    source = torch.arange(1 << 22, dtype=torch.float32).pin_memory()
    for _ in range(5):
        buffer = device.reserve(1 << 22, torch.float32)
        torch.cuda._sleep(50_000_000)
        device.fill(buffer, source)
        device.wait(buffer)
        assert torch.equal((buffer + 0).cpu(), source)
        device.drop(buffer)
        assert buffer.untyped_storage().nbytes() == 0


def test_what_is_sent_home_comes_back_although_its_memory_is_used_again():
    """The copy to the host is not overtaken by the next owner of the memory, nor the way back by that copy."""
    device = CudaDevice(1 << 30, torch.device("cuda"))
    host = Tier(pinned=True)
    for value in range(5):
        x = torch.full((1 << 22,), float(value), device="cuda")
        torch.cuda._sleep(20_000_000)
        shape, stride = x.shape, x.stride()
        waiting = device.send(x, host)
        del x
        overwritten = torch.full((1 << 22,), -1.0, device="cuda")
        back = device.bring(waiting, shape, stride)
        assert bool((back == value).all())
        assert bool((overwritten == -1).all())
